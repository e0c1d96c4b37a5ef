//! A second process: the test binary runs itself again, as one test that finds its part to play in the environment.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

const PART: &str = "KVSLUICE_TEST_PART";
/// Far beyond what anything here takes on a busy machine: who waits longer hangs.
const HANG: Duration = Duration::from_secs(120);

/// The part that this process is to play in the test that calls it; `None` in the test proper.
pub(crate) fn part() -> Option<Vec<String>> {
    let part = std::env::var(PART).ok()?;
    Some(part.split(' ').map(str::to_owned).collect())
}

/// A second process, running the same test as the caller. Killed when dropped.
pub(crate) struct Second {
    child: Child,
    said: Receiver<String>,
}

impl Second {
    /// Starts the calling test once more, with `part` to play; as another user, for root.
    pub(crate) fn start(part: &str, uid: Option<u32>) -> Self {
        let mut command = Command::new(std::env::current_exe().expect("the test binary"));
        let test = std::thread::current().name().expect("a test has a name").to_owned();
        command
            .args(["--exact", &test, "--nocapture", "--quiet"])
            .env(PART, part);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some(uid) = uid {
            std::os::unix::process::CommandExt::uid(&mut command, uid);
        }
        let mut child = command.spawn().expect("a second process");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let (sender, said) = channel();
        std::thread::spawn(move || {
            let lines = output.lines().map_while(Result::ok);
            for line in lines.filter_map(|line| Some(line.strip_prefix("say ")?.to_owned())) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Self { child, said }
    }

    /// What the process says next. Fails the test where it ends without a word, or hangs.
    pub(crate) fn hear(&mut self) -> String {
        self.said
            .recv_timeout(HANG)
            .unwrap_or_else(|error| panic!("the second process says nothing: {error}"))
    }

    /// What the process has said, without waiting.
    pub(crate) fn overhear(&mut self) -> Option<String> {
        self.said.try_recv().ok()
    }

    /// Sends a line, which ends [`listen`] over there. It may be gone already.
    pub(crate) fn tell(&mut self, line: &str) {
        if let Some(input) = &mut self.child.stdin {
            let _ = writeln!(input, "{line}");
        }
    }

    pub(crate) fn kill(mut self) {
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
    std::io::stdout().flush().expect("the first process");
}

/// In the second process: waits for a line, or for the end, of the first.
pub(crate) fn listen() -> String {
    let mut line = String::new();
    // The end of the first process reads as an empty line.
    let _ = std::io::stdin().read_line(&mut line);
    line.trim_end().to_owned()
}

/// The seed of this run: of the environment, so that a failure can be replayed, else always the same.
pub(crate) fn seed(default: u64) -> u64 {
    let asked = std::env::var("KVSLUICE_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = asked.unwrap_or(default);
    println!("KVSLUICE_SEED={seed}");
    seed
}
