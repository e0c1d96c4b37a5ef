//! What the ranks of a channel that is taken over hold, once the journal has drained (X25).

use std::time::Duration;

use kvsluice_layout::export::ResidencyExport;
use kvsluice_transport::attach::Survived;
use kvsluice_transport::clock::Clock;
use kvsluice_transport::producer::Producer;
use kvsluice_transport::segment::{Mapping, MappingMut};

use super::ProducerOptions;
use super::channel::Survivor;
use crate::adoption::agree;

/// Between two looks at the slots or the connections.
const LOOK: Duration = Duration::from_micros(100);
/// Longest wait for the journal to drain: afterwards the pools are reset, which waits for as long as it takes.
const DRAIN_NS: u64 = 1_000_000_000;

/// What all ranks report alike. `None`, with a message, where they do not, or one is missing or late: then the pools are
/// reset.
pub(super) fn agreed(
    producer: &mut Producer<MappingMut, Mapping>,
    survivors: &[Survivor],
    options: &ProducerOptions,
    clock: &dyn Clock,
) -> Option<ResidencyExport> {
    let ranks = options.geometry.ranks as usize;
    let reports = match survivors.len() == ranks && drains(producer, survivors, clock) {
        true => reports(survivors, options.takeover_patience_ms, clock),
        false => Vec::new(),
    };
    match agree(reports, ranks) {
        Ok(report) => Some(report),
        Err(why) => {
            tracing::info!(%why, "the devices' residency is not adopted: the pools are reset");
            None
        }
    }
}

/// Waits for the terminals of what is in flight, while every worker lives.
fn drains(producer: &mut Producer<MappingMut, Mapping>, survivors: &[Survivor], clock: &dyn Clock) -> bool {
    let until_ns = clock.now_ns().saturating_add(DRAIN_NS);
    loop {
        producer.poll_thorough();
        if producer.in_flight() == 0 {
            return true;
        }
        let died = survivors.iter().any(|survivor| survivor.survived.proof.is_dead());
        if died || clock.now_ns() >= until_ns {
            return false;
        }
        std::thread::sleep(LOOK);
    }
}

/// Asks every worker at once and awaits the answers, in the order of the ranks; ends early with fewer.
fn reports(survivors: &[Survivor], patience_ms: u64, clock: &dyn Clock) -> Vec<ResidencyExport> {
    let mut workers: Vec<&Survived> = survivors.iter().map(|survivor| &survivor.survived).collect();
    workers.sort_unstable_by_key(|worker| worker.surviving.rank);
    if let Some(error) = workers.iter().find_map(|worker| worker.ask_report().err()) {
        tracing::debug!(%error, "a worker is gone again");
        return Vec::new();
    }
    let until_ns = clock.now_ns().saturating_add(patience_ms.saturating_mul(1_000_000));
    let mut reports = Vec::with_capacity(workers.len());
    for worker in workers {
        let rank = worker.surviving.rank;
        let bytes = loop {
            match worker.reported() {
                Ok(Some(bytes)) => break bytes,
                Ok(None) if clock.now_ns() < until_ns => std::thread::sleep(LOOK),
                Ok(None) => {
                    tracing::warn!(%rank, patience_ms, "a worker does not report what it holds in time");
                    return reports;
                }
                Err(mismatch) => {
                    tracing::warn!(%rank, %mismatch, "a worker does not report what it holds");
                    return reports;
                }
            }
        };
        match serde_json::from_slice(&bytes) {
            Ok(report) => reports.push(report),
            Err(error) => {
                tracing::warn!(%rank, %error, "a worker's report cannot be read");
                return reports;
            }
        }
    }
    reports
}
