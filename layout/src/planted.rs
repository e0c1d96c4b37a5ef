//! Planted faults: deliberate mistakes that a test switches on to see itself go red.
//!
//! Each fault is a name at the place where a rule is enforced: `if !planted("r26_early_release") { wait() }`. The name
//! begins with the rules that the fault breaks, where a rule of the contract is broken; `tests/src/rules.rs` reads them.
//! Without the feature `planted`, which only test builds set, [`planted`] is the constant `false` and the code is gone.

/// True where the fault `name` is switched on. The constant `false` unless built with the feature `planted`.
#[cfg(not(feature = "planted"))]
#[inline(always)]
pub const fn planted(_name: &str) -> bool {
    false
}

#[cfg(feature = "planted")]
mod switch {
    use std::cell::RefCell;
    use std::sync::OnceLock;

    /// The environment variable that switches faults on for a whole process, names separated by commas.
    pub const PLANTED_ENV: &str = "KVSLUICE_PLANTED";

    static PROCESS: OnceLock<Vec<String>> = OnceLock::new();
    thread_local! {
        static THREAD: RefCell<Vec<&'static str>> = const { RefCell::new(Vec::new()) };
    }

    /// True where the fault `name` is switched on for this thread or this process.
    pub fn planted(name: &str) -> bool {
        let process = PROCESS.get_or_init(|| {
            std::env::var(PLANTED_ENV)
                .map(|names| names.split(',').map(str::to_owned).collect())
                .unwrap_or_default()
        });
        (!process.is_empty() && process.iter().any(|on| on == name))
            || THREAD.with_borrow(|on| !on.is_empty() && on.contains(&name))
    }

    /// Runs `body` with the fault `name` switched on for this thread.
    pub fn with_planted<T>(name: &'static str, body: impl FnOnce() -> T) -> T {
        struct Off;
        impl Drop for Off {
            fn drop(&mut self) {
                THREAD.with_borrow_mut(|on| on.pop());
            }
        }
        THREAD.with_borrow_mut(|on| on.push(name));
        let _off = Off;
        body()
    }
}

#[cfg(feature = "planted")]
pub use switch::{PLANTED_ENV, planted, with_planted};
