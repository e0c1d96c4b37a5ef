//! What follows from the end of an operation: commit on every rank's Done, abort else (R50, R57, R59, X15).

use kvsluice_layout::planted::planted;
use kvsluice_layout::record::{Kind, Terminal};
use kvsluice_transport::producer::Completion;
use kvsluice_transport::shared::{Shared, SharedMut};

use super::error::RoundsError;
use super::hands::Hands;
use super::options::Sources;
use super::request::{Ending, Request, Retaining, Step, Transfer};
use super::retention::add_us;
use super::upload::planned_bytes;

impl<C: SharedMut, R: Shared, P: SharedMut> Hands<C, R, P> {
    /// An upload, its Keep or its Abort ended. The outcome counts once both have.
    pub(super) fn upload_ended(
        &mut self,
        request: &mut Request,
        mut transfer: Box<Transfer>,
        completion: &Completion,
    ) -> Result<(), RoundsError> {
        if completion.kind == Kind::Abort {
            transfer.aborting = false;
        } else {
            transfer.terminal = Some(completion.terminal);
            let planned = planned_bytes(&self.layers, request);
            let costs = &mut request.record.costs;
            costs.h2d_bytes = costs.h2d_bytes.saturating_add(completion.bytes_moved.min(planned)); // X33: a rank's word
            let scattered = completion.bytes_moved.saturating_sub(planned);
            costs.gpu_scatter_bytes = costs.gpu_scatter_bytes.saturating_add(scattered);
        }
        let terminal = match transfer.terminal {
            Some(terminal) if !transfer.aborting => terminal,
            // X15: destinations are not used before the Abort has ended too.
            _ => {
                request.step = Step::Uploading(transfer);
                return Ok(());
            }
        };
        if terminal == Terminal::Done {
            return self.commit_upload(request, &transfer);
        }
        // R59: tables and revisions are as they were; the destinations go back, since every rank has ended.
        let key = transfer.operation.key();
        if let Some(aborted) = self.ledger.abort(&request.id, key.request_epoch, key.operation) {
            request.residency.abort(&aborted)?.settle(&mut self.owners)?;
        }
        request.failures += u32::from(terminal > Terminal::Superseded);
        request.step = match request.failures >= self.options.attempts {
            true => Step::End(Ending::Failed),
            false => Step::Upload, // the same selection again (R47)
        };
        Ok(())
    }

    fn commit_upload(&mut self, request: &mut Request, transfer: &Transfer) -> Result<(), RoundsError> {
        let committed = self.acknowledge(request, &transfer.operation)?;
        request
            .residency
            .commit(&committed, &mut self.owners, &mut Vec::new())?;
        if transfer.replaces {
            request.device_slots.fill(0);
        }
        request.step = Step::Retain;
        Ok(())
    }

    /// A retention ended. False where the ranks may hold different tables: only a Reset makes them equal again.
    pub(super) fn retain_ended(
        &mut self,
        request: &mut Request,
        retaining: Retaining,
        completion: &Completion,
        published_ns: u64,
    ) -> Result<bool, RoundsError> {
        // I9: every rank is Done, and all hold the same.
        let equal = completion.digest.is_some();
        if completion.terminal != Terminal::Done || !equal {
            if completion.terminal == Terminal::Done {
                tracing::error!(request = request.number, position = %completion.position, "ranks hold different tables");
            }
            request.step = Step::Retaining(Box::new(retaining));
            return Ok(false);
        }
        let ended_ns = self.clock.now_ns();
        let committed = self.acknowledge(request, &retaining.operation)?;
        let acknowledged_ns = self.clock.now_ns();
        let retention = retaining.retention.apply(&retaining.affected).map_err(|(_, why)| why)?;
        let retired = retention.commit(&committed, &mut request.residency, &mut self.owners);
        let retired = retired.map_err(|(_, why)| why)?;
        for (slots, table) in request.device_slots.iter_mut().zip(request.residency.tables()) {
            *slots = table.valid().get();
        }
        let costs = &mut request.record.costs;
        // R1: what moved is what the ranks report, also where the CPU gathers nothing.
        let moved = match self.options.sources {
            Sources::SourceOnly if planted("r1_source_only_moves_nothing") => 0,
            _ => completion.bytes_moved,
        };
        costs.gpu_compaction_bytes = costs.gpu_compaction_bytes.saturating_add(moved); // X33
        if moved > 0 || !planted("r66_released_where_bytes_moved") {
            costs.blocks_released += retired.released().len() as u64; // R66: apart from the bytes that moved
        }
        let retain_us = &mut costs.retain_us;
        let device_ns = completion.device_ns;
        if device_ns > 0 {
            let moved = retaining.operation.bytes() > 0;
            add_us(
                if moved {
                    &mut retain_us.kv_move
                } else {
                    &mut retain_us.table_update
                },
                device_ns,
            );
        }
        add_us(
            &mut retain_us.wait,
            ended_ns.saturating_sub(published_ns).saturating_sub(device_ns),
        );
        add_us(&mut retain_us.metadata, acknowledged_ns.saturating_sub(ended_ns));
        add_us(
            &mut retain_us.allocator,
            self.clock.now_ns().saturating_sub(acknowledged_ns),
        );
        Ok(true)
    }
}
