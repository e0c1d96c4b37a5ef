//! Texts: the messages of attaching and takeover, capability, geometry, residency, trace, names.

use kvsluice_cpu_worker::adoption::agree;
use kvsluice_cpu_worker::trace::{TRACE_BLOCK_TOKENS, Trace};
use kvsluice_layout::capability::{Capability, GeometryHash, SelectionUnit, SourceKinds, negotiate};
use kvsluice_layout::export::ResidencyExport;
use kvsluice_layout::geometry::Geometry;
use kvsluice_layout::ids::ProcessEpoch;
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::presets::preset;
use kvsluice_transport::attach::{ProducerSays, WorkerSays};
use kvsluice_transport::link::Received;
use kvsluice_transport::names::ChannelName;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::io::Cursor;

thread_local! {
    static OURS: Capability = {
        let kinds = SourceKinds { source_only: true, copy: false };
        let geometry = preset("sample-hybrid").expect("a preset");
        Capability {
            // Known to the seeds.
            geometry_hash: Some(GeometryHash(7)),
            ..Capability::of(&geometry, SelectionUnit::Block, kinds, ProcessEpoch(1))
        }
    };
}

/// The first byte says what the rest is.
pub fn texts(data: &[u8]) {
    let [what, text @ ..] = data else { return };
    match what % 8 {
        0 => {
            let Some(said) = message::<WorkerSays>(text) else {
                return;
            };
            match said {
                WorkerSays::Hello(hello) => {
                    if let Ok(capability) = serde_json::from_value(hello.capability) {
                        assert_both_sides_agree(&capability);
                    }
                }
                WorkerSays::Failed(mismatch) | WorkerSays::Refused(mismatch) => {
                    // A log line stays one.
                    assert!(!mismatch.to_string().chars().any(char::is_control));
                }
                WorkerSays::Attached | WorkerSays::NothingHeld | WorkerSays::Residency | WorkerSays::Surviving(_) => {}
            }
        }
        1 => {
            let Some(said) = message::<ProducerSays>(text) else {
                return;
            };
            if let ProducerSays::Welcome(welcome) = said
                && let Ok(capability) = serde_json::from_value(welcome.capability)
            {
                assert_both_sides_agree(&capability);
            }
        }
        2 => {
            if let Some(capability) = message(text) {
                assert_both_sides_agree(&capability);
            }
        }
        3 => {
            if let Some(report) = message::<ResidencyExport>(text) {
                // What two ranks say alike is what both say.
                let both = agree(vec![report.clone(), report.clone()], 2);
                assert!(both.is_err() || both.is_ok_and(|both| both == report));
            }
        }
        4 => {
            let Ok(text) = str::from_utf8(text) else { return };
            let Ok(geometry) = Geometry::from_toml(text) else {
                return;
            };
            let _ = GeometryMap::new(&geometry);
            let again = toml::to_string(&geometry).expect("a geometry is TOML");
            assert_eq!(Geometry::from_toml(&again).expect("its own text"), geometry);
        }
        5 | 6 => {
            let trace = Trace::read("fuzz", Cursor::new(text.to_vec()));
            for request in trace.flatten() {
                let whole = request.whole_blocks();
                assert!(whole as usize <= request.hash_ids.len());
                assert!(u64::from(whole) * u64::from(TRACE_BLOCK_TOKENS) <= u64::from(request.input_length));
            }
        }
        _ => {
            let Ok(text) = str::from_utf8(text) else { return };
            if let Ok(name) = ChannelName::new(text) {
                let name = name.as_str();
                assert!((1..=64).contains(&name.len()) && !name.starts_with('.') && !name.contains('/'));
            }
        }
    }
}

/// What a peer's text means, which is the same after it was said again.
fn message<M: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(text: &[u8]) -> Option<M> {
    let received = Received {
        text: text.to_vec(),
        descriptors: Vec::new(),
    };
    let meant = received.read::<M>().ok()?;
    let again = serde_json::to_value(&meant).expect("JSON");
    let said = serde_json::from_slice::<M>(again.to_string().as_bytes()).expect("its own text");
    // A fraction in what is opaque to the transport is read to the last digit or the one before; the field has none.
    assert!(said == meant || has_fraction(&again), "{said:?} is not {meant:?}");
    Some(meant)
}

fn has_fraction(value: &Value) -> bool {
    match value {
        Value::Number(number) => number.is_f64(),
        Value::Array(values) => values.iter().any(has_fraction),
        Value::Object(values) => values.values().any(has_fraction),
        _ => false,
    }
}

/// X20: a mismatch is an error on both sides, and what is agreed on is the same.
fn assert_both_sides_agree(theirs: &Capability) {
    OURS.with(|ours| match (negotiate(ours, theirs), negotiate(theirs, ours)) {
        (Ok(here), Ok(there)) => {
            assert_eq!((here.minor, here.selection_unit), (there.minor, there.selection_unit));
            assert_eq!(
                (here.source_kinds, here.copy_fallback),
                (there.source_kinds, there.copy_fallback)
            );
            assert_eq!(here.peer_epoch, theirs.process_epoch.expect("X22"));
            // R20, R27
            assert_eq!((theirs.row_contract, theirs.dtype), (Some(true), ours.dtype));
        }
        (Err(here), Err(there)) => {
            assert_eq!(
                (here.field, &here.ours, &here.theirs),
                (there.field, &there.theirs, &there.ours)
            );
        }
        (here, there) => panic!("{here:?}, but {there:?}"),
    });
}
