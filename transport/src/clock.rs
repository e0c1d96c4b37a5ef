//! The one source of time (X35): real in production, settable in tests and in the simulator.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Nanoseconds that only grow. Deadlines are compared with it; nothing is ever concluded from it alone (X23).
pub trait Clock: Send + Sync {
    /// Nanoseconds since some fixed moment of this process.
    fn now_ns(&self) -> u64;
}

/// The kernel's monotonic clock, which no change of the wall clock moves (X28).
#[derive(Clone, Copy, Debug)]
pub struct Monotonic {
    start: Instant,
}

impl Default for Monotonic {
    fn default() -> Self {
        Self { start: Instant::now() }
    }
}

impl Clock for Monotonic {
    fn now_ns(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// A clock that stands still until it is moved. Clones share one time.
#[derive(Clone, Debug, Default)]
pub struct Simulated {
    now_ns: Arc<AtomicU64>,
}

impl Simulated {
    /// Moves the clock forward.
    pub fn advance_ns(&self, by_ns: u64) {
        // Relaxed: the time orders nothing.
        self.now_ns.fetch_add(by_ns, Ordering::Relaxed);
    }
}

impl Clock for Simulated {
    fn now_ns(&self) -> u64 {
        self.now_ns.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn x35_the_clock_is_a_seam() {
        let simulated = Simulated::default();
        let clock: Box<dyn Clock> = Box::new(simulated.clone());
        assert_eq!(clock.now_ns(), 0);
        simulated.advance_ns(5);
        assert_eq!(clock.now_ns(), 5);
        let real = Monotonic::default();
        let first = real.now_ns();
        assert!(real.now_ns() >= first);
    }
}
