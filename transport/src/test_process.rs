//! Tests that need a second process: the test binary runs itself again, as one test that finds its part to play in the
//! environment.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

const PART: &str = "KVSLUICE_TEST_PART";

/// The argument of the part that this process is to play, in the test that calls it; `None` in the test proper.
pub(crate) fn part() -> Option<String> {
    std::env::var(PART).ok()
}

/// A second process, running the same test as the caller. Killed when dropped.
pub(crate) struct Second {
    child: Child,
    /// `None` once closed.
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Second {
    /// Starts the calling test once more, with `part` to play.
    pub(crate) fn start(part: &str) -> Self {
        Self::start_planted(part, "")
    }

    /// As `start`, with a planted fault switched on over there.
    pub(crate) fn start_planted(part: &str, fault: &str) -> Self {
        Self::spawn_self(part, |command| {
            command.env(kvsluice_layout::planted::PLANTED_ENV, fault)
        })
    }

    /// As `start`, as another user: for root only.
    pub(crate) fn start_as(part: &str, uid: u32) -> Self {
        Self::spawn_self(part, |command| std::os::unix::process::CommandExt::uid(command, uid))
    }

    /// As `start`, in a pid namespace of its own, where this process has no pid. `None` where that is not allowed.
    pub(crate) fn start_in_pid_namespace(part: &str) -> Option<Self> {
        let mut command = Command::new("unshare");
        command.args(["--map-root-user", "--pid", "--fork", "--kill-child"]);
        let allowed = Command::new(command.get_program())
            .args(command.get_args())
            .arg("true")
            .status();
        allowed.is_ok_and(|status| status.success()).then(|| {
            command.arg(std::env::current_exe().expect("the test binary"));
            Self::spawn(command, part)
        })
    }

    fn spawn_self(part: &str, with: impl FnOnce(&mut Command) -> &mut Command) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("the test binary"));
        with(&mut command);
        Self::spawn(command, part)
    }

    fn spawn(mut command: Command, part: &str) -> Self {
        let name = std::thread::current().name().expect("a test has a name").to_owned();
        command
            .args(["--exact", &name, "--nocapture", "--quiet"])
            .env(PART, part);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a second process");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let input = child.stdin.take();
        Self { child, input, output }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits for a line that begins with `say ` and returns the rest.
    pub(crate) fn hear(&mut self) -> String {
        let mut line = String::new();
        while self.output.read_line(&mut line).expect("the second process's output") > 0 {
            if let Some(said) = line.trim_end().strip_prefix("say ") {
                return said.to_owned();
            }
            line.clear();
        }
        panic!("the second process ended without a word");
    }

    /// Sends a line.
    pub(crate) fn tell(&mut self, line: &str) {
        let input = self.input.as_mut().expect("an open input");
        writeln!(input, "{line}").expect("the second process's input");
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
    }
}

impl Drop for Second {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// In the second process: says a line to the first.
pub(crate) fn say(line: &str) {
    println!("say {line}");
    std::io::stdout().flush().expect("the first process's input");
}

/// In the second process: waits for a line of the first; ends the process where the first is gone.
pub(crate) fn listen() -> String {
    let mut line = String::new();
    if std::io::stdin()
        .read_line(&mut line)
        .expect("the first process's output")
        == 0
    {
        std::process::exit(0);
    }
    line.trim_end().to_owned()
}
