//! The configuration file: every option as a line of TOML, named like its flag. A flag on the command line wins.
//!
//! The file becomes flags in front of those of the command line, so there is one parser, one set of checks and one
//! wording for both. One file can serve `run` and both workers: a command takes the lines that it has an option for.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Command;

/// A configuration file that cannot be used. Who wrote it causes it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ConfigError {
    /// It cannot be read.
    #[error("cannot read configuration file {path}: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// It is not TOML.
    #[error("configuration file {path}: {source}")]
    NotToml {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: Box<toml::de::Error>,
    },
    /// A line that no command has an option for.
    #[error(
        "configuration file {path}: there is no option {name:?}; a line is named like a flag without its dashes, for \
         example `ranks = 4`: see kvsluice run --help"
    )]
    UnknownOption {
        /// The file.
        path: PathBuf,
        /// The name of the line.
        name: String,
    },
    /// A value of a kind that no option takes.
    #[error("configuration file {path}: {name} is {found}, expected text, a number, true or false")]
    WrongKind {
        /// The file.
        path: PathBuf,
        /// The name of the line.
        name: String,
        /// What was found.
        found: &'static str,
    },
}

/// The command line `args` with the lines of the file that its `--config` names, if it names one.
pub(crate) fn with_config(args: Vec<OsString>, command: &Command) -> Result<Vec<OsString>, ConfigError> {
    let Some(path) = config_path(&args) else {
        return Ok(args);
    };
    let (head, rest) = args.split_at(args.len().min(2));
    let named = head.last().and_then(|name| command.find_subcommand(name));
    let Some(subcommand) = named else {
        return Ok(args);
    };
    let text = std::fs::read_to_string(&path).map_err(|source| ConfigError::Unreadable {
        path: path.clone(),
        source,
    })?;
    let table: toml::Table = toml::from_str(&text).map_err(|source| ConfigError::NotToml {
        path: path.clone(),
        source: Box::new(source),
    })?;
    let mut expanded = head.to_vec();
    for (name, value) in table {
        if !command.get_subcommands().any(|any| has_option(any, &name)) {
            return Err(ConfigError::UnknownOption { path, name });
        }
        if !has_option(subcommand, &name) {
            continue;
        }
        let value = match value {
            toml::Value::String(text) => Some(text),
            toml::Value::Integer(number) => Some(number.to_string()),
            toml::Value::Float(number) => Some(number.to_string()),
            toml::Value::Boolean(true) => None,
            toml::Value::Boolean(false) => continue,
            other => {
                let found = other.type_str();
                return Err(ConfigError::WrongKind { path, name, found });
            }
        };
        expanded.push(match value {
            Some(value) => format!("--{name}={value}").into(),
            None => format!("--{name}").into(),
        });
    }
    expanded.extend_from_slice(rest);
    Ok(expanded)
}

fn has_option(command: &Command, name: &str) -> bool {
    command.get_arguments().any(|option| option.get_long() == Some(name))
}

fn config_path(args: &[OsString]) -> Option<PathBuf> {
    let mut args = args.iter().take_while(|arg| *arg != "--");
    while let Some(arg) = args.next() {
        if arg == "--config" {
            return args.next().map(PathBuf::from);
        }
        if let Some(path) = arg.to_str().and_then(|arg| arg.strip_prefix("--config=")) {
            return Some(path.into());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use clap::Arg;

    use super::*;

    fn command() -> Command {
        let run = Command::new("run").args(["ranks", "trace", "json", "config"].map(|name| Arg::new(name).long(name)));
        let worker = Command::new("gpu-worker").args(["rank", "config"].map(|name| Arg::new(name).long(name)));
        Command::new("kvsluice").subcommand(run).subcommand(worker)
    }

    fn expand(text: &str, args: &[&str]) -> Result<Vec<String>, ConfigError> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        let path = file.path().to_str().unwrap();
        let args = args.iter().map(|arg| arg.replace("FILE", path).into()).collect();
        let expanded = with_config(args, &command())?;
        Ok(expanded
            .into_iter()
            .map(|arg| arg.into_string().unwrap().replace(path, "FILE"))
            .collect())
    }

    #[test]
    fn lines_of_the_file_come_before_the_flags_so_that_flags_win() {
        let expanded = expand(
            "ranks = 4\njson = true\ntrace = \"a b\"\n",
            &["k", "run", "--config", "FILE", "--ranks", "2"],
        );
        let expected = [
            "k",
            "run",
            "--ranks=4",
            "--json",
            "--trace=a b",
            "--config",
            "FILE",
            "--ranks",
            "2",
        ];
        let mut expanded = expanded.unwrap();
        expanded[2..5].sort();
        let mut sorted = expected.map(str::to_owned);
        sorted[2..5].sort();
        assert_eq!(expanded, sorted);
    }

    #[test]
    fn a_file_serves_several_commands_and_each_takes_its_own_lines() {
        let expanded = expand("ranks = 4\njson = false\n", &["k", "gpu-worker", "--config=FILE"]).unwrap();
        assert_eq!(expanded, ["k", "gpu-worker", "--config=FILE"]);
    }

    #[test]
    fn a_line_that_is_no_option_is_refused_with_its_name() {
        let error = expand("rankss = 4\n", &["k", "run", "--config=FILE"])
            .unwrap_err()
            .to_string();
        assert!(error.contains("no option \"rankss\""), "{error}");
        let error = expand("ranks = [1]\n", &["k", "run", "--config=FILE"])
            .unwrap_err()
            .to_string();
        assert!(error.contains("ranks is array, expected text, a number"), "{error}");
    }

    #[test]
    fn a_file_that_is_missing_or_no_toml_is_refused_with_its_path() {
        let error = expand("ranks", &["k", "run", "--config=FILE"]).unwrap_err().to_string();
        assert!(error.contains("TOML parse error at line 1"), "{error}");
        let args = ["k", "run", "--config=/nowhere/x.toml"].map(OsString::from).to_vec();
        let error = with_config(args, &command()).unwrap_err().to_string();
        assert!(
            error.contains("cannot read configuration file /nowhere/x.toml"),
            "{error}"
        );
    }
}
