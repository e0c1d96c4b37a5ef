//! Who takes part: workers that attach, and workers that die (X20, X23, X24).

use kvsluice_layout::ids::Rank;
use kvsluice_transport::attach::{Admission, Admitted, Arrival, Hello, Mismatch};
use kvsluice_transport::death;
use kvsluice_transport::link::Peer;
use kvsluice_transport::liveness::Life;

use super::host::Host;
use super::{Event, OnRankLost, Process, ProcessError, Seat};

impl Process<'_> {
    pub(super) fn look_at_rank(&mut self, rank: Rank, tell: &mut dyn FnMut(Event)) -> Result<(), ProcessError> {
        let Some(seat) = self.seats.get_mut(rank.index()) else {
            return Ok(());
        };
        let dead = seat.take_if(|seat| seat.watch.life() == Life::Dead);
        match dead {
            Some(Seat { pid, .. }) => self.lost_rank(rank, pid, tell),
            None => Ok(()),
        }
    }

    /// X24: after the proof, what the rank still owes is lost, and its segment is never used again.
    fn lost_rank(&mut self, rank: Rank, pid: u32, tell: &mut dyn FnMut(Event)) -> Result<(), ProcessError> {
        self.host.vacate(rank, None);
        self.lose(rank, pid, tell)
    }

    /// The same, where the rank's place is given to another worker already.
    fn lose(&mut self, rank: Rank, pid: u32, tell: &mut dyn FnMut(Event)) -> Result<(), ProcessError> {
        self.rounds.producer_mut().lose(rank);
        tell(Event::RankLost { rank: rank.get(), pid });
        match self.options.on_rank_lost {
            OnRankLost::Fail => Err(ProcessError::RankLost { rank, pid }),
            OnRankLost::Wait => Ok(()),
        }
    }

    pub(super) fn open_door(&mut self, now_ns: u64, tell: &mut dyn FnMut(Event)) -> Result<(), ProcessError> {
        self.host.note_state(
            self.rounds.producer().incarnation(),
            self.rounds.producer().generation(),
        );
        let mut doorkeeper = Doorkeeper {
            host: &mut self.host,
            seats: &mut self.seats,
            replaced: Vec::new(),
        };
        let arrivals = self.reception.poll(now_ns, &mut doorkeeper)?;
        for (rank, pid) in doorkeeper.replaced {
            self.lose(rank, pid, tell)?;
        }
        for arrival in arrivals {
            match arrival {
                Arrival::Attached(newcomer) => {
                    let rank = newcomer.hello.rank;
                    let Some(segment) = self.host.take_admitted(rank) else {
                        continue;
                    };
                    let (pid, epoch) = (newcomer.hello.pid, newcomer.hello.worker_epoch);
                    let pid = newcomer.proof.holder().shown_pid().unwrap_or(pid);
                    // X24: the first position is stored before the Reset at that position is published.
                    self.rounds.producer_mut().join(rank, segment.clone(), epoch, pid);
                    death::point("joined");
                    self.seat(rank, pid, segment, newcomer.link, newcomer.proof)?;
                    tell(Event::Attached { rank: rank.get(), pid });
                }
                Arrival::Failed {
                    hello,
                    mismatch,
                    was_admitted,
                } => {
                    tracing::warn!(rank = %hello.rank, pid = hello.pid, %mismatch, "a worker does not fit");
                    if was_admitted {
                        self.host.vacate(hello.rank, Some(hello.worker_epoch));
                    }
                    tell(Event::Refused {
                        rank: hello.rank.get(),
                        pid: hello.pid,
                        reason: mismatch.to_string(),
                    });
                }
                Arrival::Left { hello, why } => {
                    tracing::warn!(rank = %hello.rank, pid = hello.pid, %why, "a worker left while it attached");
                    self.host.vacate(hello.rank, Some(hello.worker_epoch));
                }
            }
        }
        Ok(())
    }
}

/// Who opens the door: a rank whose worker is proven dead is free, whoever notices it first (X23).
struct Doorkeeper<'a> {
    host: &'a mut Host,
    seats: &'a mut [Option<Seat>],
    /// Ranks that were found free so, and the processes that had them.
    replaced: Vec<(Rank, u32)>,
}

impl Admission for Doorkeeper<'_> {
    fn admit(&mut self, hello: &Hello, peer: &Peer) -> Result<Admitted, Mismatch> {
        let seat = self.seats.get_mut(hello.rank.index());
        if let Some(dead) = seat.and_then(|seat| seat.take_if(|seat| seat.watch.proof().is_dead())) {
            self.replaced.push((hello.rank, dead.pid));
            self.host.vacate(hello.rank, None);
        }
        self.host.admit(hello, peer)
    }
}
