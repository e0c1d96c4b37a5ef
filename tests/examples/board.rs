//! Prints the status board of all rules from what a test run recorded (R73):
//!
//!     cargo test --workspace --no-fail-fast | cargo run -p kvsluice-tests --example board

use std::io::{self, Read};
use std::path::Path;

use kvsluice_tests::rules;

fn main() -> io::Result<()> {
    let mut recorded = String::new();
    io::stdin().read_to_string(&mut recorded)?;
    let proofs = rules::proofs(&Path::new(env!("CARGO_MANIFEST_DIR")).join(".."))?;
    print!("{}", rules::board(&proofs, &recorded));
    Ok(())
}
