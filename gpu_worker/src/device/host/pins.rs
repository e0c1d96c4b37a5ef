//! Pinning on a host device: nothing to do, and a driver's habits to imitate.

use crate::device::region::{Access, Pin};
use crate::device::{DeviceLost, RegisterFault};

/// The code that a refused pin reports and leaves behind: `CUDA_ERROR_OUT_OF_MEMORY`.
const REFUSED_CODE: u32 = 2;

/// The driver's part of registration, as a host device plays it.
#[derive(Default)]
pub(super) struct HostPins {
    /// The next pin is refused.
    pub(super) refuse_next: bool,
    /// Chunks pinned now.
    pub(super) chunks: u32,
    sticky: bool,
}

impl HostPins {
    /// The error of a refused pin that nobody cleared: it surfaces in the next, innocent call (field bug 9).
    pub(super) fn surface_sticky(&self) -> Option<DeviceLost> {
        self.sticky.then_some(DeviceLost::Driver { code: REFUSED_CODE })
    }
}

impl Pin for HostPins {
    fn pin(&mut self, _base: *mut u8, _bytes: u64, _access: Access) -> Result<(), RegisterFault> {
        if std::mem::take(&mut self.refuse_next) {
            self.sticky = true;
            return Err(RegisterFault::DriverMemory { code: REFUSED_CODE });
        }
        self.chunks += 1;
        Ok(())
    }

    fn unpin(&mut self, _base: *mut u8) {
        self.chunks -= 1;
    }

    fn clear_sticky(&mut self) {
        self.sticky = false;
    }
}
