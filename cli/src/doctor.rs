//! `kvsluice doctor`: what on this host would stand in the way of a run, and what to change (X32).

use std::path::Path;

use clap::Args;
use kvsluice_layout::planes::GeometryMap;
use kvsluice_transport::doctor::{Health, Plans, examine};
use kvsluice_transport::limits::Kernel;
use kvsluice_transport::runtime_dir::RuntimeDir;
use serde_json::json;

use crate::exit::{Exit, usage};
use crate::options::{ChannelArgs, DeviceArgs, DeviceKind, GeometryArgs, SegmentArgs};
use crate::print::print;

/// Options of `doctor`: those of the run that is planned.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    kvsluice doctor\n  \
    kvsluice doctor --preset llama-3.1-8b --source-blocks 65536 --persist /dev/shm/kv\n\n\
    Exit codes: 0 a run would work, 1 it would not.")]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    place: ChannelArgs,
    #[command(flatten)]
    geometry: GeometryArgs,
    #[command(flatten)]
    segments: SegmentArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Looks at the host.
pub(crate) fn doctor(args: &DoctorArgs) -> anyhow::Result<Exit> {
    let geometry = args.geometry.geometry()?;
    let map = GeometryMap::new(&geometry).map_err(usage)?;
    let ring_bytes = args.segments.ring(&geometry)?;
    let findings = examine(
        &Kernel::default(),
        &Plans {
            segment_bytes: map.pool_bytes() + ring_bytes as u64 * (1 + u64::from(map.geometry().ranks)),
            huge_page_bytes: None,
            numa_node: None,
            persist: args.segments.persist.clone(),
            runtime_dir: RuntimeDir::choose(args.place.runtime_dir.as_deref()),
            cuda: args.device.device == DeviceKind::Auto && Path::new("/dev/nvidiactl").exists(),
        },
    );
    if args.json {
        let findings: Vec<_> = findings
            .iter()
            .map(|found| {
                json!({
                    "subject": found.subject,
                    "health": found.health.to_string(),
                    "found": found.found,
                    "remedy": found.remedy,
                })
            })
            .collect();
        print(json!({ "findings": findings }))?;
    } else {
        for found in &findings {
            print(format_args!(
                "{:8} {}: {}",
                found.health.to_string(),
                found.subject,
                found.found
            ))?;
            if !found.remedy.is_empty() {
                print(format_args!("         {}", found.remedy))?;
            }
        }
    }
    let broken = findings.iter().any(|found| found.health == Health::Broken);
    Ok(if broken { Exit::Wrong } else { Exit::Good })
}
