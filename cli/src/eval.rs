//! `kvsluice eval`: the decision core, one JSON object per line.

use std::io::{stdin, stdout};

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use kvsluice_cpu_worker::eval::{Domain, Evaluator};

use crate::exit::Exit;

const DOMAINS: [(&str, Domain); 5] = [
    ("validate", Domain::Validate),
    ("select", Domain::Select),
    ("plan", Domain::Plan),
    ("retain", Domain::Retain),
    ("ledger", Domain::Ledger),
];

/// Options of `eval`.
#[derive(Args, Debug)]
#[command(after_help = "Examples:\n  \
    echo '{\"ids\":[0,1,2,3],\"block_size\":2}' | kvsluice eval validate\n  \
    kvsluice eval ledger < operations.jsonl\n\n\
    Every line is answered and flushed before the next one is read. A malformed line is answered with\n\
    {\"error\":\"bad_input\",\"detail\":\"...\"} and changes nothing.")]
pub(crate) struct EvalArgs {
    /// Which part of the decision core answers
    #[arg(value_parser = domain())]
    domain: Domain,
}

fn domain() -> impl TypedValueParser<Value = Domain> {
    PossibleValuesParser::new(DOMAINS.map(|(name, _)| name)).try_map(|name| {
        let found = DOMAINS.iter().find(|(known, _)| *known == name);
        found.map(|(_, domain)| *domain).ok_or("no such domain")
    })
}

/// Answers standard input on standard output.
pub(crate) fn eval(args: &EvalArgs) -> anyhow::Result<Exit> {
    Evaluator::new(args.domain).serve(stdin().lock(), stdout().lock())?;
    Ok(Exit::Good)
}
