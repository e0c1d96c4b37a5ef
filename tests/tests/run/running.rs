//! The binary under test: started in a runtime folder of the test's own, followed by what it says, ended in any way.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde_json::Value;
use tempfile::TempDir;

/// Far beyond what any run takes on a busy machine: who waits longer hangs.
const HANG: Duration = Duration::from_secs(120);

/// A program that goes on.
pub(crate) struct Program {
    child: Child,
    folder: Arc<TempDir>,
    lines: Receiver<String>,
    seen: Vec<String>,
    pids: BTreeMap<String, u32>,
    /// Handles on the same processes, which outlive a pid.
    handles: BTreeMap<u32, OwnedFd>,
}

/// A program that has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    /// Its exit code; `None` if a signal killed it.
    pub(crate) code: Option<i32>,
    /// The last line that is a JSON object.
    pub(crate) report: Option<Value>,
    /// Everything that it said on its standard output and standard error.
    pub(crate) log: String,
    /// What lies in its runtime folder, and its files in /dev/shm.
    pub(crate) left: Vec<PathBuf>,
    /// Its processes that still live.
    pub(crate) alive: Vec<u32>,
    /// How long it was waited for.
    pub(crate) took: Duration,
}

/// A runtime folder of a test's own.
pub(crate) fn folder() -> Arc<TempDir> {
    Arc::new(tempfile::tempdir().expect("a temporary folder"))
}

impl Program {
    /// Starts `kvsluice run --json` with `args` in a folder of its own. `planted` names the faults to switch on.
    pub(crate) fn run(args: &[&str], planted: &str) -> Self {
        Self::start(&folder(), &[&["run", "--json"], args].concat(), planted)
    }

    /// Starts `kvsluice` with `args` in a runtime folder.
    pub(crate) fn start(folder: &Arc<TempDir>, args: &[&str], planted: &str) -> Self {
        Self::spawn(Command::new(crate::BINARY), folder, args, planted)
    }

    /// As [`Self::start`], in a pid namespace of its own (X28). `None`, with a message, where that is not allowed. `itself`
    /// is then the program that made the namespace, and ends with it.
    pub(crate) fn start_in_pid_namespace(folder: &Arc<TempDir>, args: &[&str]) -> Option<Self> {
        let namespace = || {
            let mut command = Command::new("unshare");
            command.args(["--map-root-user", "--pid", "--fork", "--kill-child"]);
            command
        };
        if !namespace().arg("true").status().is_ok_and(|status| status.success()) {
            eprintln!("skipped: a pid namespace cannot be made here");
            return None;
        }
        let mut command = namespace();
        command.arg(crate::BINARY);
        Some(Self::spawn(command, folder, args, ""))
    }

    /// As [`Self::start`], as the user `uid`. `None`, with a message, where that is not allowed.
    pub(crate) fn start_as(uid: u32, folder: &Arc<TempDir>, args: &[&str]) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: only root can start a process of another user");
            return None;
        }
        // Where that user can execute it.
        let binary = folder.path().join("kvsluice");
        if !binary.exists() {
            std::fs::copy(crate::BINARY, &binary).expect("the binary is copied");
        }
        let mut command = Command::new(binary);
        command.uid(uid).gid(uid).current_dir("/");
        Some(Self::spawn(command, folder, args, ""))
    }

    /// The process that this one has started, as seen from here.
    pub(crate) fn inner(&self) -> Pid {
        let path = format!("/proc/{0}/task/{0}/children", self.id());
        let children = std::fs::read_to_string(path).expect("it lives");
        let child = children.split_whitespace().next().and_then(|pid| pid.parse().ok());
        child.and_then(Pid::from_raw).expect("it has a child")
    }

    fn spawn(mut command: Command, folder: &Arc<TempDir>, args: &[&str], planted: &str) -> Self {
        command.args(args).arg("--runtime-dir").arg(folder.path());
        command.env("KVSLUICE_PLANTED", planted);
        command.env("RUST_LOG", "warn,kvsluice_cli=debug");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().expect("the binary starts");
        let (sender, lines) = channel();
        listen(child.stdout.take().expect("piped"), sender.clone());
        listen(child.stderr.take().expect("piped"), sender);
        Self {
            child,
            folder: Arc::clone(folder),
            lines,
            seen: Vec::new(),
            pids: BTreeMap::new(),
            handles: BTreeMap::new(),
        }
    }

    /// Waits until it says `text`. Panics if it ends or hangs before.
    pub(crate) fn until_it_says(&mut self, text: &str) {
        let deadline = Instant::now() + HANG;
        loop {
            match self
                .lines
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                Ok(line) => {
                    let found = line.contains(text);
                    self.note(line);
                    if found {
                        return;
                    }
                }
                Err(RecvTimeoutError::Timeout) => panic!("no {text:?} in {HANG:?}:\n{}", self.seen.join("\n")),
                Err(RecvTimeoutError::Disconnected) => panic!("ended without {text:?}:\n{}", self.seen.join("\n")),
            }
        }
    }

    /// Waits until a file of its runtime folder is there.
    pub(crate) fn until_it_exists(&mut self, path: &str) {
        let (path, deadline) = (self.folder.path().join(path), Instant::now() + HANG);
        while !path.exists() {
            let lives = self.child.try_wait().expect("a child").is_none();
            assert!(lives && Instant::now() < deadline, "{} does not come", path.display());
            thread::yield_now();
        }
    }

    /// The process of a role, `producer` or `rank-R`, which must have been started by now.
    pub(crate) fn pid(&self, role: &str) -> u32 {
        self.pids[role]
    }

    /// Its own pid.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal to the process of a role, or to the program itself (`itself`).
    pub(crate) fn signal(&self, role: &str, signal: Signal) {
        let pid = if role == "itself" { self.id() } else { self.pid(role) };
        kill_process(Pid::from_raw(pid as i32).expect("a pid"), signal).expect("the process lives");
    }

    /// Waits for the end, and looks at what is left. Panics if it hangs.
    pub(crate) fn end(mut self) -> Ended {
        let began = Instant::now();
        loop {
            match self
                .lines
                .recv_timeout((began + HANG).saturating_duration_since(Instant::now()))
            {
                Ok(line) => self.note(line),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => panic!("hangs for {HANG:?}:\n{}", self.seen.join("\n")),
            }
        }
        let status = self.child.wait().expect("our child");
        let took = began.elapsed();
        let mut left = files_in(self.folder.path(), |_| true);
        let channel = format!("run-{}", self.child.id());
        left.extend(files_in(Path::new("/dev/shm"), |name| name.contains(&channel)));
        Ended {
            code: status.code(),
            report: self
                .seen
                .iter()
                .rev()
                .find_map(|line| line.starts_with('{').then(|| serde_json::from_str(line).ok()).flatten()),
            log: self.seen.join("\n"),
            left,
            alive: self
                .handles
                .iter()
                .filter(|(_, handle)| lives(handle))
                .map(|(pid, _)| *pid)
                .collect(),
            took,
        }
    }

    fn note(&mut self, line: String) {
        if let Some((_, started)) = line.split_once("started role=") {
            let mut words = started.split(" pid=");
            if let (Some(role), Some(Ok(pid))) = (words.next(), words.next().map(str::parse)) {
                self.pids.insert(role.to_owned(), pid);
                let known = Pid::from_raw(pid as i32).expect("a pid");
                // One that has ended already needs no handle.
                if let Ok(handle) = pidfd_open(known, PidfdFlags::empty()) {
                    self.handles.insert(pid, handle);
                }
            }
        }
        self.seen.push(line);
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // A test that failed leaves no process behind: the kernel ends the children with their parent.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Ended {
    /// Panics unless nothing was left behind: no file, no process.
    pub(crate) fn left_nothing(&self) -> &Self {
        assert!(self.left.is_empty(), "left {:?}\n{}", self.left, self.log);
        assert!(self.alive.is_empty(), "still alive: {:?}\n{}", self.alive, self.log);
        self
    }

    /// The report's number at `pointer`, as in `/completions/done`. Panics if there is none.
    pub(crate) fn number(&self, pointer: &str) -> u64 {
        let report = self
            .report
            .as_ref()
            .unwrap_or_else(|| panic!("no report:\n{}", self.log));
        report
            .pointer(pointer)
            .and_then(Value::as_u64)
            .unwrap_or_else(|| panic!("no {pointer} in {report}"))
    }
}

fn listen(stream: impl Read + Send + 'static, sender: Sender<String>) {
    let lines = BufReader::new(stream).lines().map_while(Result::ok);
    // Nobody listens to a program whose test has failed.
    thread::spawn(move || lines.into_iter().try_for_each(|line| sender.send(line)));
}

/// True if the process does not end: the kernel says so at once where it has ended, and soon where it is about to.
fn lives(handle: &OwnedFd) -> bool {
    let patience = Timespec { tv_sec: 10, tv_nsec: 0 };
    let ended = poll(&mut [PollFd::new(handle, PollFlags::IN)], Some(&patience));
    ended.expect("a process can be polled") == 0
}

fn files_in(folder: &Path, which: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_name().to_str().is_some_and(&which))
        .map(|entry| entry.path())
        .collect()
}
