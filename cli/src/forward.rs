//! What `run` passes on to the two sides: every option that was given and that the side has as well.

use std::ffi::OsString;

use clap::parser::ValueSource;
use clap::{ArgAction, ArgMatches, Command, CommandFactory};

use crate::Cli;

/// The options given in `matches` that `command` knows too, as flags. The side reads the configuration file no second
/// time: its lines are among the options given.
pub(crate) fn forward(matches: &ArgMatches, command: &str) -> Vec<OsString> {
    let cli = Cli::command();
    cli.find_subcommand(command)
        .map(|side| flags(matches, side))
        .unwrap_or_default()
}

fn flags(matches: &ArgMatches, side: &Command) -> Vec<OsString> {
    let mut flags = Vec::new();
    for option in side.get_arguments() {
        let (id, Some(name)) = (option.get_id().as_str(), option.get_long()) else {
            continue;
        };
        let ours = matches.ids().any(|known| known == id) && !["channel", "config"].contains(&name);
        if !ours || matches.value_source(id) != Some(ValueSource::CommandLine) {
            continue;
        }
        if matches!(option.get_action(), ArgAction::SetTrue) {
            flags.push(format!("--{name}").into());
            continue;
        }
        for value in matches.get_raw(id).into_iter().flatten() {
            // One word, so that a value may begin with a dash.
            let mut flag = OsString::from(format!("--{name}="));
            flag.push(value);
            flags.push(flag);
        }
    }
    flags
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forwarded(args: &[&str], side: &str) -> Vec<String> {
        let args = ["kvsluice", "run"].iter().chain(args);
        let matches = Cli::command().try_get_matches_from(args).unwrap();
        let (_, options) = matches.subcommand().unwrap();
        let flags = forward(options, side)
            .into_iter()
            .map(|flag| flag.into_string().unwrap());
        let mut flags: Vec<_> = flags.collect();
        flags.sort();
        flags
    }

    #[test]
    fn a_side_gets_the_options_that_it_has_and_that_were_given() {
        let args = [
            "--ranks",
            "3",
            "--hardened",
            "--trace=a b",
            "--verify=off",
            "--adversary=7",
            "--json",
            "--channel=c",
        ];
        let producer = ["--hardened", "--ranks=3", "--trace=a b", "--verify=off"];
        assert_eq!(forwarded(&args, "cpu-worker"), producer);
        assert_eq!(
            forwarded(&args, "gpu-worker"),
            ["--adversary=7", "--ranks=3", "--verify=off"]
        );
        assert_eq!(forwarded(&[], "cpu-worker"), [""; 0]);
    }

    #[test]
    fn every_option_of_run_is_one_of_a_side_or_the_supervisors_own() {
        let cli = Cli::command();
        let has = |side: &str, name: &str| {
            let side = cli.find_subcommand(side).unwrap();
            side.get_arguments().any(|option| option.get_long() == Some(name))
        };
        for option in cli.find_subcommand("run").unwrap().get_arguments() {
            let name = option.get_long().unwrap();
            let known = has("cpu-worker", name) || has("gpu-worker", name) || ["json", "help"].contains(&name);
            assert!(known, "--{name} reaches nobody");
        }
    }
}
