//! A real process that ends itself by SIGKILL at its k-th store to shared memory, or at a named point (X35).
//!
//! [`counting`](crate::counting) ends a pretended process at every store; this is the sample of it on real ones, whose
//! segments are mapped. It is there only with the feature `planted`, which test builds set. What `KVSLUICE_DIE_AT` says:
//!
//! - `1200`: the process ends before its store 1,200; a copy of bytes is cut in several places, each counted as a store;
//! - `fill-bytes:2`: it ends when it comes to that point for the third time;
//! - `producer@1200 rank-0@fill-bytes:2`, to a supervisor: so ends the next process of a role, then the next.

use std::ops::Range;

use crate::names::Role;

/// Where the next processes of some roles are to end, in the order in which they are started.
pub type Orders = Vec<(Role, String)>;

#[cfg(not(feature = "planted"))]
mod switch {
    use super::{Orders, Range};

    /// Comes to a store. Nothing unless built with the feature `planted`.
    #[inline(always)]
    pub(crate) const fn store() {}

    /// Comes to a named point. Nothing unless built with the feature `planted`.
    #[inline(always)]
    pub const fn point(_name: &'static str) {}

    /// How a copy of `bytes` bytes is cut: not at all unless built with the feature `planted`.
    #[inline(always)]
    pub(crate) fn pieces(bytes: usize) -> impl Iterator<Item = Range<usize>> {
        std::iter::once(0..bytes)
    }

    /// What the environment orders a supervisor's processes: nothing unless built with the feature `planted`.
    pub const fn orders() -> Orders {
        Orders::new()
    }
}

#[cfg(feature = "planted")]
mod switch {
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicU64, Ordering};

    use rustix::process::{Signal, getpid, kill_process};

    use super::{DIE_AT_ENV, Orders, Range, Role};

    /// Pieces of a copy.
    const PIECES: usize = 4;

    struct Death {
        /// `None`: at a store.
        point: Option<String>,
        /// Times that the process passes the place before it ends there.
        left: AtomicU64,
    }

    static DEATH: OnceLock<Option<Death>> = OnceLock::new();

    fn ordered() -> Option<Death> {
        let order = std::env::var(DIE_AT_ENV).ok()?;
        let (point, left) = match order.split_once(':') {
            Some((point, left)) => (Some(point.to_owned()), left),
            None => (None, order.as_str()),
        };
        let left = AtomicU64::new(left.parse().ok()?);
        Some(Death { point, left })
    }

    fn pass(place: Option<&str>) {
        let death = DEATH.get_or_init(ordered);
        if let Some(death) = death
            && death.point.as_deref() == place
            && death.left.fetch_sub(1, Ordering::Relaxed) == 0
        {
            // As the system does it: nothing is flushed, unwound or handed over. The signal comes before the call returns.
            let _ = kill_process(getpid(), Signal::KILL);
        }
    }

    /// Comes to a store.
    #[inline]
    pub(crate) fn store() {
        pass(None);
    }

    /// Comes to a named point.
    #[inline]
    pub fn point(name: &'static str) {
        pass(Some(name));
    }

    /// How a copy of `bytes` bytes is cut.
    pub(crate) fn pieces(bytes: usize) -> impl Iterator<Item = Range<usize>> {
        (0..PIECES).map(move |piece| bytes * piece / PIECES..bytes * (piece + 1) / PIECES)
    }

    /// What the environment orders a supervisor's processes.
    pub fn orders() -> Orders {
        let orders = std::env::var(DIE_AT_ENV).unwrap_or_default();
        let order = |order: &str| {
            let (role, at) = order.split_once('@')?;
            Some((Role::of_file(&format!("{role}.lock"))?.0, at.to_owned()))
        };
        orders.split_whitespace().filter_map(order).collect()
    }
}

/// The environment variable that orders a process's end.
pub const DIE_AT_ENV: &str = "KVSLUICE_DIE_AT";

pub use switch::{orders, point};
pub(crate) use switch::{pieces, store};
