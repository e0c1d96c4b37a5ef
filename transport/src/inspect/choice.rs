//! Which of the segments that were found are the channel's: a process may hold those of others, and of earlier
//! incarnations.

use std::collections::BTreeSet;

use kvsluice_layout::charter::Charter;
use kvsluice_layout::ids::Rank;
use kvsluice_layout::region::{INCARNATION_AT, PRODUCER_EPOCH_AT, RegionMap, SLOTS_AT, WORKER_EPOCH_AT};
use kvsluice_layout::segment::SegmentKind;

use super::found::Found;
use super::hex;
use super::picture::{Picture, read_words};
use crate::charter::read_charter;
use crate::members::{Member, read_member};
use crate::shared::Shared;

/// Most bytes before the plan ring: words, membership and the longest charter.
const HEAD_BYTES: u64 = 1 << 18;

/// The control segment of the channel: the latest one whose producer or members hold the channel's locks.
pub(super) fn control<'a>(
    all: &'a [Found],
    epochs: &[&str],
    notes: &mut Vec<String>,
) -> Option<(&'a Found, Picture, Charter, RegionMap)> {
    let mut best: Option<(u64, &Found, Picture, Charter, RegionMap)> = None;
    let mut channels = BTreeSet::new();
    for found in all
        .iter()
        .filter(|found| found.kind == SegmentKind::Control && found.is_whole())
    {
        let at = found.path.display();
        let head = match Picture::take(&found.file, found.bytes.min(HEAD_BYTES) as usize & !7) {
            Ok(head) => head,
            Err(error) => {
                notes.push(format!("{at} cannot be read: {error}"));
                continue;
            }
        };
        let read = read_charter(&head).and_then(|charter| Ok((charter.map()?, charter)));
        let (map, charter) = match read {
            Ok(read) => read,
            Err(error) => {
                notes.push(format!("{at}: {error}"));
                continue;
            }
        };
        if map.control_bytes() as u64 > found.bytes {
            let (needed, bytes) = (map.control_bytes(), found.bytes);
            notes.push(format!("{at}: its charter asks for {needed} bytes, it has {bytes}"));
            continue;
        }
        let members = (0..map.ranks()).map(|rank| read_member(&head, &map, Rank(rank)).epoch.0);
        let named = |epoch: u64| epochs.contains(&hex(epoch).as_str());
        let belongs = epochs.is_empty() || named(head.load(PRODUCER_EPOCH_AT)) || members.into_iter().any(named);
        if !belongs {
            continue;
        }
        channels.insert(found.header.channel.get());
        let incarnation = head.load(INCARNATION_AT);
        if best.as_ref().is_none_or(|(latest, ..)| incarnation > *latest) {
            best = Some((incarnation, found, head, charter, map));
        }
    }
    if channels.len() > 1 {
        let count = channels.len();
        notes.push(format!(
            "{count} channels of these processes have the same epochs: this may be another one"
        ));
    }
    if best.is_none() && !all.is_empty() {
        notes.push("no control segment was found that belongs to the processes of this channel".into());
    }
    best.map(|(_, found, head, charter, map)| (found, head, charter, map))
}

/// Whether a segment is the one of the worker that answers for its rank.
pub(super) fn of_member(found: &Found, member: &Member, map: &RegionMap) -> Result<(), String> {
    if let Some(refused) = &found.refused {
        return Err(refused.clone());
    }
    let needed = SLOTS_AT + map.ring_bytes();
    if found.bytes < needed as u64 {
        return Err(format!("has {} bytes, expected at least {needed}", found.bytes));
    }
    let words = read_words(&found.file, WORKER_EPOCH_AT as u64, 1).map_err(|error| error.to_string())?;
    let epoch = words.first().copied().unwrap_or(0);
    if member.epoch.0 != 0 && epoch != member.epoch.0 {
        let (found, expected) = (hex(epoch), hex(member.epoch.0));
        return Err(format!(
            "is of worker {found}, but worker {expected} answers for the rank"
        ));
    }
    Ok(())
}
