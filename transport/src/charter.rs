//! The charter in the control segment: what the producer writes there at the start, and how everybody reads it.

use kvsluice_layout::charter::{CHARTER_HEAD_BYTES, Charter, CharterError, checksum};
use kvsluice_layout::region::{CHARTER_AT, RegionMap};

use crate::shared::{Shared, SharedMut};

/// Writes the charter of a new channel. The producer calls it once, before it stores the control segment's ready word,
/// which publishes it: a takeover leaves it as it is.
///
/// # Errors
/// [`CharterError::Room`].
pub fn write_charter(control: &impl SharedMut, map: &RegionMap, charter: &Charter) -> Result<(), CharterError> {
    let text = charter.to_text(map.charter_room())?;
    control.store(CHARTER_AT, text.len() as u64);
    control.store(CHARTER_AT + 8, checksum(&text));
    let words: Vec<u64> = text.chunks(8).map(word).collect();
    control.copy_in(CHARTER_AT + CHARTER_HEAD_BYTES, &words);
    Ok(())
}

/// Reads and checks the charter of a control segment whose ready word was seen.
///
/// # Errors
/// [`CharterError`] for one that no producer of this version writes.
pub fn read_charter(control: &impl Shared) -> Result<Charter, CharterError> {
    let behind = control.size().saturating_sub(CHARTER_AT + CHARTER_HEAD_BYTES) as u64 & !7;
    let found = match behind {
        0 => 0, // a segment that ends before the word
        _ => control.load(CHARTER_AT),
    };
    if behind == 0 || found > behind {
        // X33: the word is the producer's.
        return Err(CharterError::Length { found, room: behind });
    }
    let mut words = vec![0; (found as usize).div_ceil(8)];
    control.copy_out(CHARTER_AT + CHARTER_HEAD_BYTES, &mut words);
    let mut text: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    text.truncate(found as usize);
    Charter::from_text(&text, control.load(CHARTER_AT + 8))
}

fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word.iter_mut().zip(bytes).for_each(|(to, from)| *to = *from);
    u64::from_le_bytes(word)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use kvsluice_layout::capability::{Capability, SelectionUnit, SourceKinds};
    use kvsluice_layout::ids::ProcessEpoch;
    use kvsluice_layout::presets::preset;
    use kvsluice_layout::region::MIN_RING_BYTES;

    use super::*;
    use crate::shared::Heap;

    #[test]
    fn x26_a_charter_is_read_back_from_the_control_segment_and_a_hostile_one_is_refused() {
        let geometry = preset("sample-hybrid").expect("preset");
        let map = RegionMap::new(&geometry, MIN_RING_BYTES, 4, 256).expect("regions");
        let kinds = SourceKinds {
            source_only: true,
            copy: false,
        };
        let capability = Capability::of(&geometry, SelectionUnit::Block, kinds, ProcessEpoch(7));
        let charter = Charter::new(&geometry, &map, &capability);
        let control = Heap::new(map.control_bytes());
        write_charter(&control, &map, &charter).expect("room");
        assert_eq!(read_charter(&control).expect("charter"), charter);

        let mut random = fastrand::Rng::with_seed(0xc4a7);
        for _ in 0..500 {
            let at = CHARTER_AT + 8 * random.usize(..600);
            let was = control.load(at);
            control.store(at, was ^ random.u64(..) >> random.u32(..64));
            let changed = control.load(at) != was && at < CHARTER_AT + 16 + control.load(CHARTER_AT) as usize / 8 * 8;
            assert!(!changed || read_charter(&control).is_err(), "word {at} of seed 0xc4a7");
            control.store(at, was);
        }
        control.store(CHARTER_AT, u64::MAX);
        let said = read_charter(&control).expect_err("refused").to_string();
        assert!(said.contains("charter of 18446744073709551615 bytes"), "{said}");
        assert!(read_charter(&Heap::new(4096)).is_err());
    }
}
