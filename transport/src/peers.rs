//! Which users may stand on the other side of a channel (X20).

use std::fmt;

/// The users whose processes, files and descriptors are accepted: this process's own, and those it was told to allow.
///
/// The default allows nobody else.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Peers {
    others: Vec<u32>,
}

impl Peers {
    /// This process's user and the users `others`.
    pub fn with(others: impl IntoIterator<Item = u32>) -> Self {
        let own = own_uid();
        let mut others: Vec<u32> = others.into_iter().filter(|uid| *uid != own).collect();
        others.sort_unstable();
        others.dedup();
        Self { others }
    }

    /// True where processes of the user `uid` are accepted.
    pub fn allows(&self, uid: u32) -> bool {
        uid == own_uid() || self.others.contains(&uid)
    }

    /// True where another user than this process's own is accepted.
    pub fn shared(&self) -> bool {
        !self.others.is_empty()
    }
}

impl fmt::Display for Peers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "uid {}", own_uid())?;
        self.others.iter().try_for_each(|uid| write!(f, " or {uid}"))
    }
}

/// Effective user of this process.
pub fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn x20_only_the_own_user_is_a_peer_by_default() {
        let own = own_uid();
        assert!(Peers::default().allows(own) && !Peers::default().allows(own + 1));
        assert!(!Peers::default().shared() && !Peers::with([own]).shared());
        let peers = Peers::with([own + 7, own + 1, own + 7]);
        assert!(peers.allows(own + 7) && !peers.allows(own + 2));
        assert_eq!(peers.to_string(), format!("uid {own} or {} or {}", own + 1, own + 7));
    }
}
