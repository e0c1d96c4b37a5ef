//! `kvsluice compare`: one selection, brought and kept in every way, must put the same bytes before attention (R11).
//!
//! Two ways to bring blocks (gathered first, or read in place) times three ways to keep them (bytes moved, one table per
//! group, one table per layer) run on the production producer and workers, with host devices in this process. What is
//! compared is what a kernel finds through the device tables: byte for byte (R67, R68), then as logits under a forced
//! prefix with the tolerance that was declared for the dtype (R12–R14, R69). See `docs/compare.md`.

mod channel;
mod forced;
mod kv;
mod play;
mod report;
mod selection;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use clap::Args;
use kvsluice_cpu_worker::compare::bytes::{HeadKv, KvDump, compare_bytes};
use kvsluice_cpu_worker::compare::logits::{Dtype, Tolerance, Tolerances, compare_logits};
use kvsluice_cpu_worker::selection::BlockSelection;
use kvsluice_layout::geometry;
use kvsluice_layout::ids::BlockCount;
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::presets::{Sizing, preset};

use crate::exit::{Exit, usage};
use channel::{Channel, sized};
use forced::Forced;
use kv::{LayerKv, Source};
use play::{Played, Retaining, Sources, Way, play};
use report::{Bytes, Case, Compared, Outcome, Report, Run};
use selection::{Agreement, Wish, selections};

/// The six ways. The first is the one that the others are compared with.
const WAYS: [Way; 6] = {
    use Retaining::{ByteMove, LayerRemap, SharedRemap};
    const fn way(sources: Sources, retaining: Retaining) -> Way {
        Way { sources, retaining }
    }
    [
        way(Sources::Copy, LayerRemap),
        way(Sources::Copy, ByteMove),
        way(Sources::Copy, SharedRemap),
        way(Sources::SourceOnly, ByteMove),
        way(Sources::SourceOnly, SharedRemap),
        way(Sources::SourceOnly, LayerRemap),
    ]
};

/// The way in which `--flip-byte` flips one.
const FLIPPED: Way = Way {
    sources: Sources::SourceOnly,
    retaining: Retaining::LayerRemap,
};

/// Arguments of `kvsluice compare`.
#[derive(Args)]
pub(crate) struct CompareArgs {
    /// Preset whose layers, groups and shapes are played; the dtype is that of the comparison
    #[arg(long, default_value = "sample", value_name = "NAME")]
    preset: String,
    /// Ranks, by default those of the preset
    #[arg(long)]
    ranks: Option<u32>,
    /// Seed of selection, KV, weights and forced tokens
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Selections one after the other
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=64))]
    rounds: u32,
    /// Whole blocks of the sequence
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u32).range(1..=4096))]
    blocks: u32,
    /// Blocks that a full-attention layer selects
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    budget: u32,
    /// Positions that are forced in each round
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    positions: u32,
    /// Which layers select alike [default: both, one after the other]
    #[arg(long)]
    agreement: Option<Agreement>,
    /// Dtypes of the KV and of the arithmetic on it
    #[arg(long, default_values = ["f32", "bf16"], value_delimiter = ',', value_parser = dtype)]
    dtype: Vec<Dtype>,
    /// Largest error of logits, log-probabilities and probability mass; a dtype without one is refused
    #[arg(long, default_values = ["f32=1e-5", "bf16=0.05"], value_parser = tolerance, value_name = "DTYPE=X[:Y:Z]")]
    tolerance: Vec<(Dtype, Tolerance)>,
    /// Flip one byte on one device before it is compared: the comparison must fail
    #[arg(long)]
    flip_byte: bool,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// Compares and prints the report. Good where everything that is applicable was equal.
///
/// # Errors
/// What kept it from comparing: an unknown preset, sizes that do not fit, a dtype without a tolerance (R13).
pub(crate) fn run(args: &CompareArgs) -> Result<Exit> {
    let report = compare(args)?;
    report.print(args.json).context("cannot print the report")?;
    Ok(if report.passed { Exit::Good } else { Exit::Wrong })
}

fn compare(args: &CompareArgs) -> Result<Report> {
    // R13: before anything is measured.
    for dtype in &args.dtype {
        tolerance_of(args, *dtype).map_err(usage)?;
    }
    let sizing = Sizing {
        ranks: args.ranks,
        ..Sizing::default()
    };
    let geometry = sizing.apply(preset(&args.preset).map_err(usage)?).map_err(usage)?;
    let mut cases = Vec::new();
    for &dtype in &args.dtype {
        for agreement in [Agreement::PerGroup, Agreement::PerLayer] {
            if args.agreement.is_none_or(|asked| asked == agreement) {
                cases.push(case(args, geometry.clone(), dtype, agreement)?);
            }
        }
    }
    let passed = cases.iter().flat_map(|case| &case.runs).all(|run| run.outcome.passes());
    Ok(Report {
        preset: args.preset.clone(),
        ranks: geometry.ranks,
        seed: args.seed,
        rounds: args.rounds,
        cases,
        passed,
    })
}

fn case(args: &CompareArgs, mut geometry: geometry::Geometry, dtype: Dtype, agreement: Agreement) -> Result<Case> {
    geometry.dtype = match dtype {
        Dtype::F32 => geometry::Dtype::F32,
        Dtype::Bf16 => geometry::Dtype::Bf16,
    };
    let map = Arc::new(GeometryMap::new(&sized(geometry, args.blocks))?);
    let wish = Wish {
        seed: args.seed,
        rounds: args.rounds,
        blocks: BlockCount(args.blocks),
        budget: BlockCount(args.budget),
        agreement,
    };
    let selections = selections(&map, &wish)?; // R11: one for all ways
    let source = Source { seed: args.seed, dtype };
    let mut runs = Vec::new();
    let mut first: Option<Played> = None;
    for way in WAYS {
        let mut channel = Channel::new(map.clone(), source)?;
        let outcome = match play(&mut channel, source, &selections, way, args.flip_byte && way == FLIPPED)? {
            Err(why) => Outcome::NotApplicable(why),
            Ok(played) => {
                let first = first.get_or_insert_with(|| played.clone());
                Outcome::Compared(Box::new(judge(args, &map, dtype, &selections, first, &played)?))
            }
        };
        runs.push(Run { way, outcome });
    }
    Ok(Case {
        dtype: name(dtype).to_owned(),
        agreement,
        tolerance: tolerance_of(args, dtype)?.into(),
        runs,
    })
}

/// Compares one way with the first and with what the host made.
fn judge(
    args: &CompareArgs,
    map: &GeometryMap,
    dtype: Dtype,
    selections: &[BlockSelection],
    first: &Played,
    played: &Played,
) -> Result<Compared> {
    let mut bytes = Bytes::default();
    for ((selection, first), held) in selections.iter().zip(&first.rounds).zip(&played.rounds) {
        match equal_bytes(selection, &held.expected, &held.found) {
            Ok(equal) => bytes.equal += equal,
            Err(why) => bytes.differs = bytes.differs.or(Some(why)),
        }
        let from_first = equal_bytes(selection, &first.found, &held.found).err();
        bytes.differs_from_first = bytes.differs_from_first.or(from_first);
    }
    let held = played.rounds.first().context("no round was played")?;
    let forced = Forced::new(map, dtype, args.seed, args.positions, held)?;
    let tolerances = Tolerances::declare(args.tolerance.iter().copied());
    let found = forced.found(&played.rounds)?;
    let logits = compare_logits(&forced.found(&first.rounds)?, &found, &tolerances)?;
    let in_order = compare_logits(&forced.in_order(&played.rounds)?, &found, &tolerances)?;
    Ok(Compared::new(played, bytes, &logits, &in_order))
}

/// How many bytes are equal, or the first difference.
fn equal_bytes(selection: &BlockSelection, expected: &[LayerKv], found: &[LayerKv]) -> Result<u64, String> {
    let [expected, found]: [Vec<HeadKv<'_>>; 2] =
        [expected, found].map(|kv| kv.iter().flat_map(LayerKv::head_kv).collect());
    let dump = |heads| KvDump { selection, heads };
    compare_bytes(&dump(&expected), &dump(&found)).map_err(|error| error.to_string())
}

fn tolerance_of(args: &CompareArgs, dtype: Dtype) -> Result<Tolerance> {
    let declared = args.tolerance.iter().find(|(of, _)| *of == dtype);
    let name = name(dtype);
    let declared =
        declared.with_context(|| format!("no tolerance is declared for {name}: add --tolerance {name}=…"))?;
    Ok(declared.1)
}

fn name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::F32 => "f32",
        Dtype::Bf16 => "bf16",
    }
}

fn dtype(text: &str) -> Result<Dtype> {
    match text {
        "f32" => Ok(Dtype::F32),
        "bf16" => Ok(Dtype::Bf16),
        _ => bail!("{text:?} is no dtype of the comparison: f32 or bf16"),
    }
}

fn tolerance(text: &str) -> Result<(Dtype, Tolerance)> {
    let (of, limits) = text
        .split_once('=')
        .context("expected DTYPE=LIMIT, or DTYPE=LOGIT:LOGPROB:MASS")?;
    let limit = |text: &str| {
        let limit: f64 = text.parse()?;
        anyhow::ensure!(limit >= 0.0 && limit.is_finite(), "a limit is a number from 0");
        Ok(limit)
    };
    let limits: Vec<f64> = limits.split(':').map(limit).collect::<Result<_>>()?;
    let (logit, logprob, mass) = match limits[..] {
        [all] => (all, all, all),
        [logit, logprob, mass] => (logit, logprob, mass),
        _ => bail!("expected one limit, or three with colons between them"),
    };
    Ok((dtype(of)?, Tolerance { logit, logprob, mass }))
}
