//! Compute on a host device: what stands for attention in tests and in the simulator.

use std::sync::Arc;

use thiserror::Error;

use super::Shared;
use super::memory::Piece;
use crate::device::{PlaceFault, SubmitError, TableSlot};

/// Whether a kernel wants another turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelState {
    /// Call it again: other queues may work in between, as beside a real kernel.
    Again,
    /// It is finished.
    Finished,
}

/// Work for the compute queue. Each turn is short; what lies between two turns is up to the scheduler.
pub trait Kernel: Send {
    /// One turn.
    fn run(&mut self, memory: &KernelMemory<'_>) -> KernelState;
}

impl<F: FnMut(&KernelMemory<'_>) -> KernelState + Send> Kernel for F {
    fn run(&mut self, memory: &KernelMemory<'_>) -> KernelState {
        self(memory)
    }
}

/// A kernel named memory that it may not touch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("kernel: {0}")]
pub struct KernelFault(#[from] PlaceFault);

/// Which of a slot's two buffers a reader uses: looked up once, kept for the whole replay (D10).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableView {
    slot: TableSlot,
    buffer: usize,
}

/// Device memory as a kernel sees it.
pub struct KernelMemory<'a> {
    shared: &'a Shared,
}

impl<'a> KernelMemory<'a> {
    pub(super) const fn new(shared: &'a Shared) -> Self {
        Self { shared }
    }

    /// Reads pool bytes from `offset` into `out`.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), KernelFault> {
        let from = self.shared.pool.resolve(offset, out.len() as u64)?;
        // SAFETY: `resolve` checked the source; `out` is private to the caller, so the ranges are apart.
        unsafe {
            Piece {
                from,
                to: out.as_mut_ptr(),
                bytes: out.len(),
            }
            .run()
        };
        Ok(())
    }

    /// Writes `bytes` into the pool from `offset`.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), KernelFault> {
        let to = self.shared.pool.resolve(offset, bytes.len() as u64)?;
        // SAFETY: as in `read`, the other way round.
        unsafe {
            Piece {
                from: bytes.as_ptr(),
                to,
                bytes: bytes.len(),
            }
            .run()
        };
        Ok(())
    }

    /// Looks up the buffer of `slot` that counts now.
    pub fn table(&self, slot: TableSlot) -> Option<TableView> {
        self.shared
            .tables
            .current(slot.0)
            .map(|buffer| TableView { slot, buffer })
    }

    /// Word `index` of a table.
    pub fn word(&self, view: TableView, index: u32) -> Option<u32> {
        self.shared.tables.word(view.slot.0, view.buffer, index)
    }
}

/// The engine's hold on a host device: it launches compute, as an inference engine would on its own stream.
#[derive(Clone)]
pub struct HostEngine {
    pub(super) shared: Arc<Shared>,
}

impl HostEngine {
    /// Enqueues a kernel on the compute queue.
    pub fn launch(&self, kernel: impl Kernel + 'static) -> Result<(), SubmitError> {
        let mut state = self.shared.state.lock();
        state.launch(Box::new(kernel))?;
        self.shared.wake(&state);
        Ok(())
    }
}
