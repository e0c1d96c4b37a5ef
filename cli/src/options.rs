//! The options that `run` shares with the two sides. A line of `--config` is named like its flag (see [`crate::config`]).

use std::path::PathBuf;

use anyhow::Context;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use kvsluice_cpu_worker::process::Residence;
use kvsluice_cpu_worker::rounds::{Agreement, Keeping, Sources, Tables, WorkloadOptions};
use kvsluice_cpu_worker::trace::Trace;
use kvsluice_layout::geometry::Geometry;
use kvsluice_layout::ids::BlockCount;
use kvsluice_layout::presets::{self, Sizing};
use kvsluice_layout::region::RegionMap;
use kvsluice_transport::names::ChannelName;
use serde::de::DeserializeOwned;

use crate::exit::usage;

/// Where the channel is.
#[derive(Args, Debug)]
#[command(next_help_heading = "Channel")]
pub(crate) struct ChannelArgs {
    /// Folder for sockets and locks [default: $XDG_RUNTIME_DIR/kvsluice, else one of yours below the temporary folder]
    #[arg(long, value_name = "DIR")]
    pub(crate) runtime_dir: Option<PathBuf>,
    /// TOML file with any of these options, named like the flags; flags win
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

/// What a block is.
#[derive(Args, Debug)]
#[command(next_help_heading = "Geometry")]
pub(crate) struct GeometryArgs {
    /// Geometry of a known model
    #[arg(long, value_name = "NAME", help = preset_help())]
    preset: Option<String>,
    /// Geometry from a TOML file, instead of a preset
    #[arg(long, value_name = "FILE", conflicts_with = "preset")]
    geometry: Option<PathBuf>,
    /// Tensor-parallel size: number of workers [default: that of the geometry]
    #[arg(long, value_name = "R")]
    ranks: Option<u32>,
    /// Blocks of every group's host pool [default: that of the geometry]
    #[arg(long, value_name = "N")]
    source_blocks: Option<u32>,
    /// Blocks of every group's gather region, which `--source-mode copy` needs [default: that of the geometry]
    #[arg(long, value_name = "N")]
    gather_blocks: Option<u32>,
    /// Blocks of every group's device pools [default: that of the geometry]
    #[arg(long, value_name = "N")]
    device_blocks: Option<u32>,
}

fn preset_help() -> String {
    let names: Vec<_> = presets::names().collect();
    format!(
        "Geometry of a known model: {} [default: sample, with 2 ranks]",
        names.join(", ")
    )
}

impl GeometryArgs {
    /// The geometry that the options describe, validated.
    pub(crate) fn geometry(&self) -> anyhow::Result<Geometry> {
        let geometry = match &self.geometry {
            Some(path) => {
                let text = std::fs::read_to_string(path)
                    .with_context(|| format!("cannot read geometry file {}", path.display()))
                    .map_err(usage)?;
                Geometry::from_toml(&text)
                    .with_context(|| format!("geometry file {}", path.display()))
                    .map_err(usage)?
            }
            None => presets::preset(self.preset.as_deref().unwrap_or("sample")).map_err(usage)?,
        };
        // A first run shows a pair with more than one worker.
        let nothing_said = self.preset.is_none() && self.geometry.is_none();
        let sizing = Sizing {
            source_blocks: self.source_blocks,
            gather_blocks: self.gather_blocks,
            device_blocks: self.device_blocks,
            ranks: self.ranks.or(nothing_said.then_some(2)),
        };
        sizing.apply(geometry).map_err(usage)
    }
}

/// Where the segments live (X21).
#[derive(Args, Debug)]
#[command(next_help_heading = "Segments")]
pub(crate) struct SegmentArgs {
    /// Named segments in DIR (a tmpfs or hugetlbfs), which survive both sides
    #[arg(long, value_name = "DIR", conflicts_with = "hardened")]
    pub(crate) persist: Option<PathBuf>,
    /// Seal plans and pool against writing by workers, by any means
    #[arg(long)]
    hardened: bool,
    /// Size of the plan ring
    #[arg(long, value_name = "BYTES", default_value = "4MiB", value_parser = bytes::<usize>)]
    ring_bytes: usize,
}

impl SegmentArgs {
    /// Where the segments live.
    pub(crate) fn residence(&self) -> Residence {
        match &self.persist {
            Some(folder) => Residence::Persistent(folder.clone()),
            None if self.hardened => Residence::Hardened,
            None => Residence::Memfd,
        }
    }

    /// The ring's size, which a channel of `geometry` can have.
    pub(crate) fn ring(&self, geometry: &Geometry) -> anyhow::Result<usize> {
        RegionMap::new(geometry, self.ring_bytes, 0, 0)
            .context("--ring-bytes")
            .map_err(usage)?;
        Ok(self.ring_bytes)
    }
}

/// What is played, and how.
#[derive(Args, Debug)]
#[command(next_help_heading = "Workload")]
pub(crate) struct WorkloadArgs {
    /// Request trace, one JSON object a line with input_length, output_length and hash_ids [default: a built-in sample]
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Most requests to play [default: the whole trace]
    #[arg(long, value_name = "N")]
    pub(crate) requests: Option<u64>,
    /// Seed of scores and of everything that happens at a rate
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) seed: u64,
    /// Most requests at a time
    #[arg(long, value_name = "N", default_value_t = 16)]
    concurrency: u32,
    /// Selections of one request
    #[arg(long, value_name = "N", default_value_t = 4)]
    rounds: u32,
    /// Blocks that a full-attention layer wants
    #[arg(long, value_name = "N", default_value_t = 16)]
    budget: u32,
    /// First blocks that are always wanted
    #[arg(long, value_name = "N", default_value_t = 1)]
    sink: u32,
    /// Last whole blocks that are always wanted
    #[arg(long, value_name = "N", default_value_t = 2)]
    recent: u32,
    /// How far scores move from one selection to the next: 0 not at all, 1 as far as blocks differ
    #[arg(long, value_name = "0..1", default_value_t = 0.5)]
    drift: f64,
    /// Which layers of a group rank their blocks alike
    #[arg(long, value_name = "WHICH", default_value = "mixed", value_parser = words::<Agreement>(&["mixed", "per-layer", "per-group"]))]
    agreement: Agreement,
    /// One block table for all layers of a group, or one per layer
    #[arg(long, value_name = "MODE", default_value = "common", value_parser = words::<Tables>(&["common", "per-layer"]))]
    table_mode: Tables,
    /// How kept blocks stay: by table remap where that is exact, or always by moving bytes
    #[arg(long, value_name = "HOW", default_value = "auto", value_parser = words::<Keeping>(&["auto", "byte-move"]))]
    retain: Keeping,
    /// How plans name their sources: pool blocks in place, or blocks gathered by the CPU first
    #[arg(long, value_name = "MODE", default_value = "source-only", value_parser = words::<Sources>(&["source-only", "copy"]))]
    source_mode: Sources,
    /// Uploads that are aborted behind their publication and tried again
    #[arg(long, value_name = "0..0.9", default_value_t = 0.0)]
    abort_rate: f64,
    /// Uploads during which their request finishes
    #[arg(long, value_name = "0..0.9", default_value_t = 0.0)]
    finish_rate: f64,
    /// Uploads that are submitted twice
    #[arg(long, value_name = "0..0.9", default_value_t = 0.0)]
    retry_rate: f64,
    /// Times that an upload is tried before its request is given up
    #[arg(long, value_name = "N", default_value_t = 3)]
    attempts: u32,
    /// Write the costs of every round to FILE, one JSON object a line
    #[arg(long, value_name = "FILE")]
    pub(crate) rounds_log: Option<PathBuf>,
}

impl WorkloadArgs {
    /// The workload that the options describe, which a producer of `geometry` can play.
    pub(crate) fn options(&self, verify: Verify, geometry: &Geometry) -> anyhow::Result<WorkloadOptions> {
        let options = WorkloadOptions {
            seed: self.seed,
            requests: self.requests,
            concurrency: self.concurrency,
            rounds: self.rounds,
            budget: BlockCount(self.budget),
            sink: BlockCount(self.sink),
            recent: BlockCount(self.recent),
            drift: self.drift,
            agreement: self.agreement,
            tables: self.table_mode,
            keeping: self.retain,
            sources: self.source_mode,
            abort_rate: self.abort_rate,
            finish_rate: self.finish_rate,
            retry_rate: self.retry_rate,
            attempts: self.attempts,
            tags: verify != Verify::Off,
        };
        options.check(geometry).map_err(usage)?;
        Ok(options)
    }

    /// The trace's file, which begins with a request. A pipe can be read once: by the producer, which says what is wrong.
    pub(crate) fn trace(&self) -> anyhow::Result<Option<PathBuf>> {
        let Some(path) = &self.trace else {
            return Ok(None);
        };
        if path.metadata().is_ok_and(|found| !found.is_file() && !found.is_dir()) {
            return Ok(Some(path.clone()));
        }
        let first = Trace::open(path).map_err(usage)?.next().with_context(|| {
            format!(
                "trace {}: found no request, expected one a line; leave --trace away to play the built-in sample",
                path.display()
            )
        });
        first.map_err(usage)?.map_err(usage)?;
        Ok(Some(path.clone()))
    }
}

/// When a worker that lives but does nothing is given up.
#[derive(Args, Debug)]
#[command(next_help_heading = "Channel")]
pub(crate) struct PatienceArgs {
    /// Kill a worker that holds the oldest record for so many milliseconds [default: never]
    #[arg(long, value_name = "MS")]
    pub(crate) expel_after_ms: Option<u64>,
}

/// How the bytes are checked where they land.
#[derive(Args, Debug)]
pub(crate) struct VerifyArgs {
    /// Which of the bytes on the devices are compared with what they must be
    #[arg(long, value_enum, default_value_t = Verify::Full)]
    pub(crate) verify: Verify,
}

/// What the bytes land on.
#[derive(Args, Debug)]
#[command(next_help_heading = "Device")]
pub(crate) struct DeviceArgs {
    /// The device: the best one present, or memory of the host
    #[arg(long, value_enum, default_value_t = DeviceKind::Auto)]
    pub(crate) device: DeviceKind,
    /// Make the host device as hostile as the contract allows, with this seed
    #[arg(long, value_name = "SEED")]
    pub(crate) adversary: Option<u64>,
    /// Copy threads of the host device
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub(crate) copy_threads: usize,
    /// Most bytes to pin in one call
    #[arg(long, value_name = "BYTES", default_value = "64GiB", value_parser = bytes::<u64>)]
    pub(crate) pin_chunk_bytes: u64,
    /// Seconds after which an operation that still runs means that the device is lost; 0 for never
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub(crate) watchdog_s: u64,
    /// Most requests that have blocks on the device at a time
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub(crate) requests_max: u32,
}

/// What `--device` takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum DeviceKind {
    /// The best device present.
    Auto,
    /// Memory of the host.
    Host,
}

/// What `--verify` takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Verify {
    /// Every block.
    Full,
    /// A seeded sample of them.
    Sample,
    /// None.
    Off,
}

impl From<Verify> for kvsluice_gpu_worker::worker::Verify {
    fn from(verify: Verify) -> Self {
        match verify {
            Verify::Full => Self::Full,
            Verify::Sample => Self::Sample,
            Verify::Off => Self::Off,
        }
    }
}

/// Reads one of `words`, which are the names that `T` has in files.
fn words<T>(words: &'static [&'static str]) -> impl TypedValueParser<Value = T>
where
    T: DeserializeOwned + Clone + Send + Sync + 'static,
{
    PossibleValuesParser::new(words).try_map(|word| serde_json::from_value(word.into()))
}

/// Reads a channel's name.
pub(crate) fn channel_name(text: &str) -> Result<ChannelName, String> {
    ChannelName::new(text).map_err(|error| error.to_string())
}

/// Reads a number of bytes: `65536`, `64KiB`, `4MiB`, `1GiB`.
pub(crate) fn bytes<N: TryFrom<u64>>(text: &str) -> Result<N, String> {
    let units = [("KiB", 1u64 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];
    let suffixed = units
        .iter()
        .find_map(|(unit, size)| Some((text.strip_suffix(unit)?, *size)));
    let (digits, unit) = suffixed.unwrap_or((text, 1));
    let number: u64 = digits.trim_end().parse().map_err(|error| {
        format!("{error}; give a whole number of bytes, or of KiB, MiB or GiB with that ending, for example 4MiB")
    })?;
    let total = number.checked_mul(unit).and_then(|total| N::try_from(total).ok());
    total.ok_or_else(|| "more than a machine can have".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, FromArgMatches};

    use super::*;

    #[test]
    fn bytes_are_read_with_and_without_a_unit() {
        assert_eq!(bytes("65536"), Ok(65536u64));
        assert_eq!(bytes("64KiB"), Ok(65536usize));
        assert_eq!(bytes("4 MiB"), Ok(4u64 << 20));
        assert!(bytes::<u64>("4MB").unwrap_err().contains("for example 4MiB"));
        assert!(
            bytes::<u64>("99999999999GiB")
                .unwrap_err()
                .contains("more than a machine")
        );
    }

    #[test]
    fn the_command_line_has_no_contradiction_and_every_default_can_be_read() {
        let mut cli = crate::Cli::command();
        cli.clone().debug_assert();
        let matches = cli.try_get_matches_from_mut(["kvsluice", "run"]).unwrap();
        let run = matches.subcommand_matches("run").unwrap();
        let workload = WorkloadArgs::from_arg_matches(run).unwrap();
        let geometry = presets::preset("sample").unwrap();
        assert_eq!(
            workload.options(Verify::Full, &geometry).unwrap(),
            WorkloadOptions::default()
        );
    }
}
