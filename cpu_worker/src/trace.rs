//! The request trace that a workload plays: one JSON object a line, read as it is needed.
//!
//! The format is that of the Mooncake traces (FAST'25): lengths in tokens, and one hash per prefix block of
//! [`TRACE_BLOCK_TOKENS`] tokens; equal hashes are equal prefixes.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Cursor};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use thiserror::Error;

/// Tokens of one prefix block of a trace.
pub const TRACE_BLOCK_TOKENS: u32 = 512;

/// A few hundred conversations, so that a first run needs no file. Made by the generator in this file's tests.
const SAMPLE: &str = include_str!("../data/sample_trace.jsonl");

/// One request.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub struct TraceRequest {
    /// Arrival, in milliseconds from the start of the trace.
    #[serde(default)]
    pub timestamp: u64,
    /// Tokens of the prompt.
    pub input_length: u32,
    /// Tokens of the answer.
    pub output_length: u32,
    /// Hash of each prefix block of the prompt, the last of which may be partial.
    pub hash_ids: Vec<u64>,
}

impl TraceRequest {
    /// Whole prefix blocks: a partial last one is not among them (R35).
    pub fn whole_blocks(&self) -> u32 {
        let named = u32::try_from(self.hash_ids.len()).unwrap_or(u32::MAX);
        named.min(self.input_length / TRACE_BLOCK_TOKENS)
    }
}

/// Why a trace cannot be read on.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The file cannot be opened.
    #[error("cannot open trace {path}: {source}; leave the option away to play the built-in sample")]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file cannot be read.
    #[error("{trace}, line {line}: {source}")]
    Read {
        /// The trace.
        trace: String,
        /// The line, from 1.
        line: u64,
        /// The system's error.
        source: io::Error,
    },
    /// A line is not a request.
    #[error(
        "{trace}, line {line}: {source}; expected one object a line, like {{\"timestamp\": 0, \"input_length\": 1024, \
         \"output_length\": 10, \"hash_ids\": [1, 2]}}"
    )]
    Line {
        /// The trace.
        trace: String,
        /// The line, from 1.
        line: u64,
        /// What is wrong with it.
        source: serde_json::Error,
    },
}

/// The requests of a trace, in order. Holds one line at a time. After an error there are no more.
pub struct Trace {
    name: String,
    lines: Box<dyn BufRead + Send>,
    line: u64,
    text: String,
    over: bool,
}

impl Trace {
    /// The built-in sample.
    pub fn sample() -> Self {
        Self::read("built-in sample", Cursor::new(SAMPLE))
    }

    /// The trace in a file.
    ///
    /// # Errors
    /// [`TraceError::Open`].
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        let file = File::open(path).map_err(|source| TraceError::Open {
            path: path.to_owned(),
            source,
        })?;
        Ok(Self::read(path.display().to_string(), BufReader::new(file)))
    }

    /// The trace in `lines`, called `name` in messages.
    pub fn read(name: impl Into<String>, lines: impl BufRead + Send + 'static) -> Self {
        Self {
            name: name.into(),
            lines: Box::new(lines),
            line: 0,
            text: String::new(),
            over: false,
        }
    }

    /// What the trace is called in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    fn next_request(&mut self) -> Result<Option<TraceRequest>, TraceError> {
        loop {
            self.text.clear();
            self.line += 1;
            let (trace, line) = (|| self.name.clone(), self.line);
            let read = self.lines.read_line(&mut self.text);
            if read.map_err(|source| TraceError::Read {
                trace: trace(),
                line,
                source,
            })? == 0
            {
                return Ok(None);
            }
            if !self.text.trim().is_empty() {
                let request = serde_json::from_str(&self.text);
                return request.map(Some).map_err(|source| TraceError::Line {
                    trace: trace(),
                    line,
                    source,
                });
            }
        }
    }
}

impl Iterator for Trace {
    type Item = Result<TraceRequest, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.over {
            return None;
        }
        let next = self.next_request().transpose();
        self.over = !matches!(next, Some(Ok(_)));
        next
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use super::*;

    /// SplitMix64: the sample must come out the same whatever a random-number crate changes.
    struct Draw(u64);

    impl Draw {
        fn below(&mut self, end: u64) -> u64 {
            self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            (z ^ (z >> 31)) % end
        }
    }

    /// Conversations that start with one system prompt and grow by a few blocks a turn; every tenth request is too short
    /// for a whole block.
    fn generate() -> String {
        let mut draw = Draw(20_261_130);
        let mut next_hash = 4;
        let mut open: Vec<Vec<u64>> = Vec::new();
        let mut out = String::new();
        for request in 0..400_u64 {
            let short = draw.below(10) == 0;
            let mut blocks = match draw.below(3) {
                _ if short => Vec::new(),
                0 | 1 if !open.is_empty() => open.swap_remove(draw.below(open.len() as u64) as usize),
                _ => (0..4).collect(),
            };
            let grown = if short { 1 } else { 1 + draw.below(8) };
            blocks.extend(next_hash..next_hash + grown);
            next_hash += grown;
            let partial = draw.below(512);
            let tokens = if partial == 0 {
                blocks.len() as u64 * 512
            } else {
                (blocks.len() as u64 - 1) * 512 + partial
            };
            let ids = blocks.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
            let (timestamp, output) = (request * 50, 1 + draw.below(600));
            writeln!(
                out,
                "{{\"timestamp\": {timestamp}, \"input_length\": {tokens}, \"output_length\": {output}, \"hash_ids\": [{ids}]}}"
            )
            .unwrap();
            if !short && blocks.len() < 40 {
                open.push(blocks);
            }
        }
        out
    }

    #[test]
    fn the_sample_is_what_its_generator_makes_and_is_small() {
        if SAMPLE != generate() {
            let path = std::env::temp_dir().join("sample_trace.jsonl");
            std::fs::write(&path, generate()).unwrap();
            panic!("cpu_worker/data/sample_trace.jsonl differs from {}", path.display());
        }
        assert!(SAMPLE.len() < 100 << 10, "{} bytes", SAMPLE.len());
    }

    #[test]
    fn r35_the_sample_has_shared_prefixes_partial_blocks_and_requests_without_a_whole_block() {
        let requests: Vec<_> = Trace::sample().map(Result::unwrap).collect();
        assert_eq!(requests.len(), 400);
        assert!(requests.iter().any(|request| request.whole_blocks() == 0));
        assert!(
            requests
                .iter()
                .any(|request| request.whole_blocks() as usize == request.hash_ids.len())
        );
        let named: usize = requests.iter().map(|request| request.hash_ids.len()).sum();
        let distinct: std::collections::HashSet<_> = requests.iter().flat_map(|request| &request.hash_ids).collect();
        assert!(
            distinct.len() * 2 < named && distinct.len() > 1000,
            "{} of {named}",
            distinct.len()
        );
    }

    #[test]
    fn a_line_that_is_no_request_is_named_with_what_was_expected_and_ends_the_trace() {
        let text = "{\"input_length\":600,\"output_length\":1,\"hash_ids\":[7,8]}\n\n{\"timestamp\":1}\n";
        let mut trace = Trace::read("t.jsonl", Cursor::new(text));
        assert_eq!(trace.next().unwrap().unwrap().whole_blocks(), 1);
        let error = trace.next().unwrap().unwrap_err().to_string();
        assert!(
            error.starts_with("t.jsonl, line 3: missing field `input_length`"),
            "{error}"
        );
        assert!(error.contains("expected one object a line"), "{error}");
        assert!(trace.next().is_none());
    }

    #[test]
    fn a_file_that_is_not_there_is_named_with_the_way_round_it() {
        let error = Trace::open(Path::new("/nowhere/trace.jsonl"))
            .err()
            .unwrap()
            .to_string();
        assert!(
            error.starts_with("cannot open trace /nowhere/trace.jsonl:") && error.contains("sample"),
            "{error}"
        );
    }
}
