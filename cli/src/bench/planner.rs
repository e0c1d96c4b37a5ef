//! P9: the planner, and what a selection costs, on one core. The measuring is the decision core's own, on made-up
//! sequences: see [`kvsluice_cpu_worker::bench_planner`].

use anyhow::Result;
use kvsluice_cpu_worker::bench_planner::{BLOCKS, LAYERS, TARGET_US, bench_planner};

use super::report::Figure;
use super::{Setup, machine};

pub(super) fn run(setup: &Setup) -> Result<Vec<Figure>> {
    machine::pin(&setup.cores[..1])?;
    let measured = bench_planner();
    let what = format!(
        "a plan for {LAYERS} layers, {} wanted of {BLOCKS} blocks each",
        BLOCKS / 8
    );
    let figure = Figure::new("P9", what, measured.cold_p50_us, "us")
        .at_most(TARGET_US)
        .with("seven eighths held, us", measured.warm_p50_us)
        .with("half of the layers padded, us", measured.padded_p50_us)
        .with("selection, ns per block", measured.select_ns_per_block);
    let scale = measured.scale.iter();
    Ok(vec![scale.fold(figure, |figure, (blocks, p50_us)| {
        figure.with(&format!("{blocks} blocks per layer, us"), *p50_us)
    })])
}
