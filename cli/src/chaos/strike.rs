//! What is done to whom, and when: drawn from a seed.

use std::time::Duration;

use kvsluice_layout::ids::Rank;
use kvsluice_transport::names::Role;

use super::Target;

/// Events at which a strike may be due, as the processes name them.
const POINTS: [&str; 8] = [
    "ready", // of the producer: it has taken the channel over or made it
    "recovered",
    "attached",
    "rank-lost",
    "resumed",
    "joined", // ready, of a worker
    "producer-lost",
    "adopted",
];

/// When a strike is due.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum When {
    /// So long after the last one, or after everything has recovered from it.
    After(Duration),
    /// When a process says this, and a moment later.
    Event(&'static str, Duration),
}

/// How a process is struck.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum How {
    /// SIGKILL.
    Kill,
    /// SIGSTOP, and SIGCONT so much later.
    Stop(Duration),
    /// SIGSTOP, and SIGKILL so much later.
    StopAndKill(Duration),
}

/// One strike.
#[derive(Clone, Debug)]
pub(super) struct Strike {
    pub(super) roles: Vec<Role>,
    pub(super) how: How,
    pub(super) when: When,
    /// Not before everything has recovered from the last one.
    pub(super) calm: bool,
}

impl Strike {
    /// Its name in `kills_by_point`, but for the side; `at_event`: the event that it waited for has come.
    pub(super) fn point(&self, at_event: bool) -> &'static str {
        match (self.how, self.when) {
            (How::StopAndKill(_), _) => "stopped",
            (_, When::Event(event, _)) if at_event => event,
            _ if !self.calm => "recovering",
            _ => "random",
        }
    }

    /// The next one.
    pub(super) fn draw(rng: &mut fastrand::Rng, target: Target, ranks: u32, always_calm: bool) -> Self {
        let rank = |rng: &mut fastrand::Rng| Role::Rank(Rank(rng.u32(0..ranks.max(1))));
        let roles = match target {
            Target::Producer => vec![Role::Producer],
            Target::Worker => vec![rank(rng)],
            Target::Both => match rng.u32(0..100) {
                0..45 => vec![Role::Producer],
                45..88 => vec![rank(rng)],
                88..97 => vec![Role::Producer, rank(rng)],
                _ => std::iter::once(Role::Producer)
                    .chain((0..ranks).map(|rank| Role::Rank(Rank(rank))))
                    .collect(),
            },
        };
        let millis = |rng: &mut fastrand::Rng, most: u64| Duration::from_micros(rng.u64(0..most * 1000));
        let how = match rng.u32(0..100) {
            _ if always_calm => How::Kill,
            0..6 => How::Stop(millis(rng, 120)),
            6..10 => How::StopAndKill(millis(rng, 60)),
            _ => How::Kill,
        };
        let when = match rng.u32(0..100) {
            0..35 if !always_calm => When::Event(POINTS[rng.usize(0..POINTS.len())], millis(rng, 2)),
            _ => When::After(millis(rng, 25)),
        };
        // Most events come only while something recovers.
        let calm = always_calm || (matches!(when, When::After(_)) && rng.f32() < 0.85);
        Self { roles, how, when, calm }
    }
}
