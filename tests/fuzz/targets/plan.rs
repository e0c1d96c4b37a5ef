//! `Plan::parse` and `LeaseTable::check` over any bytes: as they are, and sealed by somebody who means it.
#![no_main]

use std::cell::RefCell;

use kvsluice_fuzz::{assert_sound, geometry, words};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::plan::{Plan, seal};
use kvsluice_layout::planes::GeometryMap;
use libfuzzer_sys::fuzz_target;

thread_local! {
    static TABLE: RefCell<(GeometryMap, LeaseTable)> = RefCell::new({
        let map = geometry();
        let leases = LeaseTable::new(&map);
        (map, leases)
    });
}

fuzz_target!(|data: &[u8]| {
    let mut record = words(data);
    let _ = Plan::parse(&record);
    // With the right length and checksum, which no fuzzer guesses.
    if record.len() >= 16 {
        record[2] = record[2] & !0xFFFF_FFFF | (record.len() * 8) as u64;
    }
    seal(&mut record);
    let Ok(plan) = Plan::parse(&record) else { return };
    TABLE.with_borrow_mut(|(map, leases)| {
        let rows = plan.lease_rows();
        if leases.check(&rows).is_ok() {
            assert_sound(map, &plan);
            leases.take(&rows);
            leases.release(&rows);
        }
        assert_eq!(leases.leased_blocks(), 0);
    });
});
