//! Messages between two processes of a channel, with descriptors: for attaching and for takeover, never for plans (X20).
//!
//! A sequenced-packet socket keeps messages apart, so a peer cannot send half of one. Each is JSON of at most 64 KiB with
//! at most [`DESCRIPTORS_MAX`] descriptors. Nothing here blocks, unless a deadline says for how long.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::socket::{getsockopt, sockopt};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, CWD, Mode, chmodat};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, recv,
    recvmsg, sendmsg, socket_with,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::lock::RoleLock;
use crate::names::Role;
use crate::runtime_dir::ChannelDir;
use crate::segment::Identity;

/// Most bytes of one message.
pub const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// Most descriptors that come with one message.
pub const DESCRIPTORS_MAX: usize = 4;

/// Most descriptors that the kernel delivers with one message; a peer may send as many.
const KERNEL_DESCRIPTORS_MAX: usize = 253;

/// Connections that the kernel keeps for a listener which has not looked yet.
const BACKLOG: i32 = 128;

/// What can go wrong with a message. All but the system's own errors are the peer's doing.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// Nobody listens there.
    #[error("nobody listens on {path}")]
    Nobody {
        /// The socket.
        path: PathBuf,
    },
    /// The listener's queue is full: try again.
    #[error("{path} is busy")]
    Busy {
        /// The socket.
        path: PathBuf,
    },
    /// The peer closed its end or died.
    #[error("the peer hung up")]
    HungUp,
    /// The peer does not take what it is sent.
    #[error("the peer does not read its messages")]
    NotReading,
    /// The peer said nothing for so long.
    #[error("the peer said nothing for {waited_ms} ms")]
    Silent {
        /// How long it was waited for.
        waited_ms: u128,
    },
    /// A message is longer than allowed.
    #[error("a message has {found}, at most {MESSAGE_BYTES_MAX} bytes are allowed")]
    TooLong {
        /// Its length.
        found: String,
    },
    /// A message brings more descriptors than allowed, or some were lost on the way.
    #[error("a message brings {found} descriptors, expected at most {DESCRIPTORS_MAX}")]
    Descriptors {
        /// How many it brought.
        found: String,
    },
    /// A message is not what was expected.
    #[error("a message cannot be read: {0}")]
    Unreadable(#[from] serde_json::Error),
    /// The system refused.
    #[error("cannot {step}: {source}")]
    System {
        /// What was tried.
        step: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

fn system(step: &'static str) -> impl Fn(Errno) -> LinkError {
    move |source| LinkError::System {
        step,
        source: source.into(),
    }
}

/// A message as it arrived.
#[derive(Debug)]
pub struct Received {
    /// The JSON.
    pub text: Vec<u8>,
    /// What came with it, at most [`DESCRIPTORS_MAX`].
    pub descriptors: Vec<OwnedFd>,
}

impl Received {
    /// The message as a value.
    ///
    /// # Errors
    /// [`LinkError::Unreadable`].
    pub fn read<M: DeserializeOwned>(&self) -> Result<M, LinkError> {
        Ok(serde_json::from_slice(&self.text)?)
    }
}

/// One end of a connection between two processes.
#[derive(Debug)]
pub struct Link {
    socket: OwnedFd,
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Link {
    /// Connects to the socket of a role.
    ///
    /// # Errors
    /// [`LinkError::Nobody`] where the role is not filled, [`LinkError::Busy`] where too many wait there already.
    pub fn connect(dir: &ChannelDir, role: Role) -> Result<Self, LinkError> {
        let file = role.socket_file();
        let socket = socket()?;
        let address = SocketAddrUnix::new(dir.short_path(&file)).map_err(system("name the socket"))?;
        match connect(&socket, &address) {
            Ok(()) => Ok(Self { socket }),
            Err(Errno::NOENT | Errno::CONNREFUSED) => Err(LinkError::Nobody {
                path: dir.path_of(&file),
            }),
            Err(Errno::AGAIN) => Err(LinkError::Busy {
                path: dir.path_of(&file),
            }),
            Err(error) => Err(system("connect")(error)),
        }
    }

    /// Sends one message with descriptors, whole or not at all.
    ///
    /// # Errors
    /// [`LinkError::NotReading`] where the peer lets its messages pile up, [`LinkError::HungUp`] where it is gone.
    pub fn send(&self, message: &impl Serialize, descriptors: &[BorrowedFd<'_>]) -> Result<(), LinkError> {
        let text = serde_json::to_vec(message)?;
        if text.len() > MESSAGE_BYTES_MAX {
            return Err(LinkError::TooLong {
                found: format!("{} bytes", text.len()),
            });
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let fits = descriptors.len() <= DESCRIPTORS_MAX;
        if !fits || (!descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors))) {
            return Err(LinkError::Descriptors {
                found: descriptors.len().to_string(),
            });
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        loop {
            return match sendmsg(&self.socket, &[IoSlice::new(&text)], &mut control, flags) {
                Ok(_) => Ok(()),
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => Err(LinkError::NotReading),
                Err(Errno::PIPE | Errno::CONNRESET | Errno::NOTCONN) => Err(LinkError::HungUp),
                Err(error) => Err(system("send")(error)),
            };
        }
    }

    /// Takes the next message, or `None` where none has arrived. What is wrong with it is an error; descriptors that
    /// came with a refused message are closed.
    ///
    /// # Errors
    /// [`LinkError`]; after one, the connection is of no more use.
    pub fn try_receive(&self) -> Result<Option<Received>, LinkError> {
        // Most looks find nothing: no room is made before there is a message, and then as much as it needs.
        let flags = RecvFlags::DONTWAIT | RecvFlags::PEEK | RecvFlags::TRUNC;
        let length = loop {
            match recv(&self.socket, &mut [0; 0][..], flags) {
                Ok((_, length)) => break length,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::CONNRESET) => return Err(LinkError::HungUp),
                Err(error) => return Err(system("receive")(error)),
            }
        };
        let mut text = vec![0; length.min(MESSAGE_BYTES_MAX)];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(KERNEL_DESCRIPTORS_MAX))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let got = loop {
            match recvmsg(&self.socket, &mut [IoSliceMut::new(&mut text)], &mut control, flags) {
                Ok(got) => break got,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::CONNRESET) => return Err(LinkError::HungUp),
                Err(error) => return Err(system("receive")(error)),
            }
        };
        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(passed) = message {
                descriptors.extend(passed);
            }
        }
        if got.flags.contains(ReturnFlags::TRUNC) {
            return Err(LinkError::TooLong {
                found: format!("{length} bytes"),
            });
        }
        if got.flags.contains(ReturnFlags::CTRUNC) {
            // This process has no room for them; see RLIMIT_NOFILE.
            return Err(LinkError::Descriptors {
                found: format!("more than {}", descriptors.len()),
            });
        }
        if descriptors.len() > DESCRIPTORS_MAX {
            return Err(LinkError::Descriptors {
                found: descriptors.len().to_string(),
            });
        }
        if got.bytes == 0 {
            return Err(LinkError::HungUp);
        }
        text.truncate(got.bytes);
        Ok(Some(Received { text, descriptors }))
    }

    /// Waits for the next message, for at most `patience`.
    ///
    /// # Errors
    /// [`LinkError::Silent`] when the time is over, else as [`Self::try_receive`].
    pub fn receive(&self, patience: Duration) -> Result<Received, LinkError> {
        let until = Instant::now() + patience;
        loop {
            if let Some(received) = self.try_receive()? {
                return Ok(received);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(LinkError::Silent {
                    waited_ms: patience.as_millis(),
                });
            }
            let mut watched = [PollFd::new(&self.socket, PollFlags::IN)];
            match poll(&mut watched, Timespec::try_from(left).ok().as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(system("wait for a message")(error)),
            }
        }
    }

    /// Who is on the other end, by the kernel's word.
    ///
    /// # Errors
    /// [`LinkError::HungUp`] where the peer is gone already, else the system's error.
    pub fn peer(&self) -> Result<Peer, LinkError> {
        // nix, because rustix cannot hold the pid 0 of a peer in another pid namespace.
        let credentials = getsockopt(&self.socket, sockopt::PeerCredentials).map_err(|e| LinkError::System {
            step: "ask for the peer",
            source: e.into(),
        })?;
        let pid = u32::try_from(credentials.pid()).ok().filter(|pid| *pid != 0);
        let (pidfd, reliable) = match getsockopt(&self.socket, sockopt::PeerPidfd) {
            Ok(pidfd) => (Some(pidfd), true),
            Err(nix::Error::ESRCH) => return Err(LinkError::HungUp),
            // Linux before 6.5. The pid may have been given to another process since: see `Peer::reliable`.
            Err(_) => (pid.and_then(open_pidfd), false),
        };
        Ok(Peer {
            uid: credentials.uid(),
            pid,
            pidfd,
            reliable,
        })
    }
}

fn open_pidfd(pid: u32) -> Option<OwnedFd> {
    let pid = Pid::from_raw(i32::try_from(pid).ok()?)?;
    pidfd_open(pid, PidfdFlags::empty()).ok()
}

/// The process on the other end of a connection.
#[derive(Debug)]
pub struct Peer {
    /// Its effective user when it connected or listened.
    pub uid: u32,
    /// Its pid as this process sees it; `None` where it lives in a pid namespace that this process cannot see (X28).
    pub pid: Option<u32>,
    /// A descriptor of the process, readable once it has ended.
    pub pidfd: Option<OwnedFd>,
    /// True where the kernel says that `pidfd` is the peer; false where it was opened by pid and must first be confirmed
    /// by the peer's role lock.
    pub reliable: bool,
}

/// A socket where the others find this process.
///
/// # Drop behaviour
/// Removes the socket's name if it still means this socket. A forked child's copy does not.
#[derive(Debug)]
pub struct Listener {
    socket: OwnedFd,
    dir: ChannelDir,
    file: String,
    identity: Identity,
    owner_pid: u32,
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Listener {
    /// Listens for the role that `lock` proves. A socket that a dead predecessor left is removed.
    ///
    /// # Errors
    /// The system's error.
    pub fn bind(lock: &RoleLock) -> Result<Self, LinkError> {
        let (dir, file) = (lock.dir().clone(), lock.role().socket_file());
        let failed = |step| move |source: io::Error| LinkError::System { step, source };
        if let Some(left) = dir.identity_of(&file).map_err(failed("look for a socket"))? {
            dir.remove_file(&file, left)
                .map_err(failed("remove a dead process's socket"))?;
        }
        let socket = socket()?;
        let path = dir.short_path(&file);
        let address = SocketAddrUnix::new(&path).map_err(system("name the socket"))?;
        bind(&socket, &address).map_err(system("bind the socket"))?;
        // Whoever may connect is checked by its credentials; other users need the bits to come that far.
        let mode = if dir.peers().shared() { 0o666 } else { 0o600 };
        chmodat(CWD, &path, Mode::from_raw_mode(mode), AtFlags::empty()).map_err(system("open the socket to peers"))?;
        let identity = dir.identity_of(&file).map_err(failed("look for the socket"))?;
        let identity = identity.ok_or_else(|| system("find the socket")(Errno::NOENT))?;
        listen(&socket, BACKLOG).map_err(system("listen"))?;
        Ok(Self {
            socket,
            dir,
            file,
            identity,
            owner_pid: std::process::id(),
        })
    }

    /// Takes the next connection, or `None` where nobody knocks.
    ///
    /// # Errors
    /// The system's error: this process is out of descriptors or memory.
    pub fn accept(&self) -> Result<Option<Link>, LinkError> {
        loop {
            return match accept_with(&self.socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => Ok(Some(Link { socket })),
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(Errno::AGAIN) => Ok(None),
                Err(error) => Err(system("accept a connection")(error)),
            };
        }
    }

    /// The channel's folder.
    pub fn dir(&self) -> &ChannelDir {
        &self.dir
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if std::process::id() != self.owner_pid {
            return;
        }
        if let Err(error) = self.dir.remove_file(&self.file, self.identity) {
            tracing::warn!(file = self.file, channel = %self.dir.name(), %error, "the socket's name stays behind");
        }
    }
}

fn socket() -> Result<OwnedFd, LinkError> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).map_err(system("make a socket"))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use kvsluice_layout::ids::{ProcessEpoch, Rank};
    use rustix::fs::{MemfdFlags, fstat, memfd_create};

    use super::*;
    use crate::names::ChannelName;
    use crate::peers::{Peers, own_uid};
    use crate::runtime_dir::RuntimeDir;

    fn pair(folder: &std::path::Path) -> (RoleLock, Listener, Link, Link) {
        let runtime = RuntimeDir::open(folder, &Peers::default()).unwrap();
        let dir = runtime.channel(&ChannelName::new("engine").unwrap()).unwrap();
        let lock = RoleLock::acquire(&dir, Role::Producer, ProcessEpoch(1), Duration::ZERO).unwrap();
        let listener = Listener::bind(&lock).unwrap();
        assert!(listener.accept().unwrap().is_none());
        let client = Link::connect(&dir, Role::Producer).unwrap();
        let server = listener.accept().unwrap().unwrap();
        (lock, listener, client, server)
    }

    fn raw_send(link: &Link, text: &[u8]) {
        rustix::net::send(&link.socket, text, SendFlags::NOSIGNAL).unwrap();
    }

    #[test]
    fn x20_messages_cross_with_their_descriptors_and_the_kernel_names_the_peer() {
        let temp = tempfile::tempdir().unwrap();
        let (_lock, _listener, client, server) = pair(temp.path());
        assert!(server.try_receive().unwrap().is_none());
        let memory = memfd_create("memory", MemfdFlags::CLOEXEC).unwrap();
        client.send(&("hello", 7), &[memory.as_fd(), client.as_fd()]).unwrap();
        let received = server.receive(Duration::from_secs(60)).unwrap();
        assert_eq!(received.read::<(String, u32)>().unwrap(), ("hello".into(), 7));
        assert_eq!(received.descriptors.len(), 2);
        assert_eq!(
            fstat(&received.descriptors[0]).unwrap().st_ino,
            fstat(&memory).unwrap().st_ino
        );
        let flags = rustix::io::fcntl_getfd(&received.descriptors[0]).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
        for end in [&client, &server] {
            let peer = end.peer().unwrap();
            assert_eq!((peer.uid, peer.pid), (own_uid(), Some(std::process::id())));
            assert!(peer.pidfd.is_some());
        }
        assert!(matches!(received.read::<u32>(), Err(LinkError::Unreadable(_))));
        drop(client);
        drop(received);
        // Waited for: another test's process may hold a copy of the descriptor until its exec.
        assert!(matches!(
            server.receive(Duration::from_secs(60)),
            Err(LinkError::HungUp)
        ));
        assert!(matches!(server.send(&1, &[]), Err(LinkError::HungUp)));
    }

    #[test]
    fn x20_a_read_has_a_deadline() {
        let temp = tempfile::tempdir().unwrap();
        let (_lock, _listener, _client, server) = pair(temp.path());
        let said = server.receive(Duration::from_millis(1)).unwrap_err().to_string();
        assert_eq!(said, "the peer said nothing for 1 ms");
    }

    #[test]
    fn x33_messages_that_are_too_long_or_bring_too_much_are_refused_and_leak_nothing() {
        let temp = tempfile::tempdir().unwrap();
        let (_lock, listener, client, server) = pair(temp.path());
        let said = client
            .send(&"x".repeat(MESSAGE_BYTES_MAX), &[])
            .unwrap_err()
            .to_string();
        assert_eq!(said, "a message has 65538 bytes, at most 65536 bytes are allowed");
        raw_send(&client, &vec![b' '; MESSAGE_BYTES_MAX + 1]);
        let said = server.try_receive().unwrap_err().to_string();
        assert_eq!(said, "a message has 65537 bytes, at most 65536 bytes are allowed");
        let five = [client.as_fd(); DESCRIPTORS_MAX + 1];
        let said = client.send(&1, &five).unwrap_err().to_string();
        assert_eq!(said, "a message brings 5 descriptors, expected at most 4");

        // A peer that does not keep to it, with as many as the kernel takes.
        let pipes: Vec<_> = (0..KERNEL_DESCRIPTORS_MAX)
            .map(|_| rustix::pipe::pipe().unwrap())
            .collect();
        let writers: Vec<_> = pipes.iter().map(|(_, writer)| writer.as_fd()).collect();
        let mut space = vec![MaybeUninit::uninit(); SendAncillaryMessage::ScmRights(&writers).size()];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&writers)));
        sendmsg(&client, &[IoSlice::new(b"1")], &mut control, SendFlags::NOSIGNAL).unwrap();
        let said = server.try_receive().unwrap_err().to_string();
        assert_eq!(said, "a message brings 253 descriptors, expected at most 4");
        for (reader, writer) in pipes {
            drop(writer);
            // End of file: no copy of the writing end is open any more.
            assert_eq!(rustix::io::read(&reader, &mut [0; 1]).unwrap(), 0);
        }

        raw_send(&client, b"{\"half\":");
        let received = server.try_receive().unwrap().unwrap();
        assert!(matches!(
            received.read::<serde_json::Value>(),
            Err(LinkError::Unreadable(_))
        ));
        raw_send(&client, &[b'['; 60_000]);
        let received = server.try_receive().unwrap().unwrap();
        assert!(
            received
                .read::<serde_json::Value>()
                .unwrap_err()
                .to_string()
                .contains("recursion limit")
        );
        // A peer that never reads does not block its correspondent.
        let piled = (0..10_000)
            .map(|_| server.send(&"x".repeat(60_000), &[]))
            .find_map(Result::err);
        assert!(matches!(piled, Some(LinkError::NotReading)), "{piled:?}");
        assert!(listener.as_fd().as_raw_fd() >= 0);
    }

    #[test]
    fn x21_a_socket_in_a_folder_with_a_long_name_can_be_bound() {
        let temp = tempfile::tempdir().unwrap();
        let long = temp.path().join("a".repeat(120));
        let (lock, listener, _client, _server) = pair(&long);
        assert_eq!(lock.dir().roles("sock").unwrap(), [Role::Producer]);
        let said = Link::connect(lock.dir(), Role::Rank(Rank(0))).unwrap_err().to_string();
        assert!(
            said.starts_with("nobody listens on ") && said.ends_with("engine/rank-0.sock"),
            "{said}"
        );
        drop(listener);
        assert_eq!(lock.dir().roles("sock").unwrap(), []);
    }

    #[test]
    fn x27_the_socket_of_a_dead_process_is_replaced_and_only_the_own_one_is_removed() {
        let temp = tempfile::tempdir().unwrap();
        let (lock, mut old, _client, _server) = pair(temp.path());
        // As after SIGKILL: the name stays.
        old.owner_pid = 0;
        drop(old);
        assert_eq!(lock.dir().roles("sock").unwrap(), [Role::Producer]);
        assert!(matches!(
            Link::connect(lock.dir(), Role::Producer),
            Err(LinkError::Nobody { .. })
        ));
        let new = Listener::bind(&lock).unwrap();
        let newer = Listener::bind(&lock).unwrap();
        drop(new);
        Link::connect(lock.dir(), Role::Producer).unwrap();
        drop(newer);
        assert_eq!(lock.dir().roles("sock").unwrap(), []);
    }
}
