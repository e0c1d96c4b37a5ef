//! The names of a channel and of the roles in it (X21).

use std::fmt;

use kvsluice_layout::ids::{MAX_RANKS, Rank};

/// A channel's name: 1 to 64 letters, digits, `.`, `_` and `-`, beginning with a letter or a digit.
///
/// So it is a safe file name on every file system, never hidden, never an option and never a path.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChannelName(String);

/// A channel name that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "channel name {name:?}: {wrong}; a name has 1 to 64 letters, digits, '.', '_', '-' and begins with a letter or digit"
)]
pub struct ChannelNameError {
    name: String,
    wrong: String,
}

impl ChannelName {
    /// Checks a name.
    ///
    /// # Errors
    /// [`ChannelNameError`] says what is wrong with it.
    pub fn new(name: &str) -> Result<Self, ChannelNameError> {
        let refuse = |wrong| {
            Err(ChannelNameError {
                name: name.chars().take(80).collect(),
                wrong,
            })
        };
        if let Some(stray) = name
            .chars()
            .find(|c| !c.is_ascii_alphanumeric() && !matches!(c, '.' | '_' | '-'))
        {
            return refuse(format!("{stray:?} is not allowed"));
        }
        match name.chars().next() {
            None => refuse("it is empty".into()),
            Some(first) if !first.is_ascii_alphanumeric() => refuse(format!("it begins with {first:?}")),
            Some(_) if name.len() > 64 => refuse(format!("it has {} characters", name.len())),
            Some(_) => Ok(Self(name.to_owned())),
        }
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ChannelName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One of the processes of a channel, by what it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// The one producer.
    Producer,
    /// The worker of a rank.
    Rank(Rank),
}

impl Role {
    /// Name of the role's lock file in the channel's folder.
    pub fn lock_file(self) -> String {
        format!("{self}.lock")
    }

    /// Name of the role's socket in the channel's folder.
    pub fn socket_file(self) -> String {
        format!("{self}.sock")
    }

    /// The role that a file of a channel's folder belongs to, with the file's ending.
    pub(crate) fn of_file(name: &str) -> Option<(Self, &str)> {
        let (stem, ending) = name.rsplit_once('.')?;
        let role = match stem.strip_prefix("rank-") {
            Some(rank) => Self::Rank(Rank(rank.parse().ok().filter(|rank| *rank < MAX_RANKS)?)),
            None if stem == "producer" => Self::Producer,
            None => return None,
        };
        // Only the one spelling: "rank-07" is nobody's.
        (role.to_string() == stem).then_some((role, ending))
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Producer => f.write_str("producer"),
            Self::Rank(rank) => write!(f, "rank-{rank}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn x21_channel_names_are_validated() {
        for name in ["engine", "tp8.engine_0-a", "7", &"x".repeat(64)] {
            assert_eq!(ChannelName::new(name).unwrap().as_str(), name);
        }
        for (name, wrong) in [
            ("", "it is empty"),
            ("..", "it begins with '.'"),
            ("-rf", "it begins with '-'"),
            ("a/b", "'/' is not allowed"),
            ("a\0b", "'\\0' is not allowed"),
            ("é", "'é' is not allowed"),
            (&"x".repeat(65), "it has 65 characters"),
        ] {
            let said = ChannelName::new(name).unwrap_err().to_string();
            assert!(said.contains(wrong), "{said}");
        }
    }

    #[test]
    fn x21_only_the_files_of_a_role_are_taken_for_its_files() {
        assert_eq!(Role::of_file("producer.sock"), Some((Role::Producer, "sock")));
        assert_eq!(Role::of_file("rank-63.lock"), Some((Role::Rank(Rank(63)), "lock")));
        for stray in [
            "rank-64.lock",
            "rank-07.lock",
            "rank-+7.lock",
            "rank-.lock",
            "other.lock",
            "producer",
        ] {
            assert_eq!(Role::of_file(stray), None, "{stray}");
        }
    }
}
