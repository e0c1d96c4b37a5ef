//! Which test proves which rule and which planted fault breaks it, read from the sources, and the status board that is
//! made from what a run recorded (R73).
//!
//! A test names the rules that it proves at the beginning of its name, as in `r29_r30_random_plans_equal_…`; so does a
//! planted fault with the rules that it breaks. A model (`loom_…`) proves X34 besides.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use kvsluice_layout::planted::planted;

/// The folders of the workspace's crates.
const CRATES: [&str; 6] = ["layout", "transport", "cpu_worker", "gpu_worker", "cli", "tests"];

/// Rules of compaction that no planted fault can break, and why.
const WITHOUT_FAULT: [(Rule, &str); 1] = [(
    Rule('R', 18, false),
    "a type for each space: what mixes two does not compile, as layout/src/ids.rs shows",
)];

/// A rule: its letter (R compaction, X transport, F fixture, I invariant), its number, and `a` for one that was put in
/// between.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Rule(pub char, pub u32, pub bool);

impl std::fmt::Display for Rule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{}{}", self.0, self.1, if self.2 { "a" } else { "" })
    }
}

/// Every rule, by letter and number. R5, R41, R71 and R72 are numbers without a rule.
pub fn all() -> BTreeSet<Rule> {
    let numbers = |letter, last| (1..=last).map(move |number| Rule(letter, number, false));
    let between = [2, 3, 24, 25].map(|number| Rule('X', number, true));
    let used = |rule: &Rule| rule.0 != 'R' || ![5, 41, 71, 72].contains(&rule.1);
    let plain = numbers('R', 73).filter(used).chain(numbers('X', 35));
    plain
        .chain(numbers('F', 16))
        .chain(numbers('I', 9))
        .chain(between)
        .collect()
}

/// The rules at the beginning of a test's name.
pub fn of_name(name: &str) -> BTreeSet<Rule> {
    let mut rules = BTreeSet::new();
    for word in name.split('_') {
        match (rule_of(word), word) {
            (Some(rule), _) => _ = rules.insert(rule),
            (None, "loom") => _ = rules.insert(Rule('X', 34, false)),
            (None, "and") => {}
            _ => break,
        }
    }
    rules
}

fn rule_of(word: &str) -> Option<Rule> {
    let letter = word.chars().next().filter(|letter| "rxfi".contains(*letter))?;
    let number = word.get(1..)?;
    let plain = number.strip_suffix('a');
    let between = plain.is_some();
    let number = plain.unwrap_or(number).parse().ok()?;
    Some(Rule(letter.to_ascii_uppercase(), number, between))
}

/// The names of the tests in a source file.
pub fn tests_in(source: &str) -> Vec<&str> {
    let mut names = Vec::new();
    let mut is_test = false;
    for line in source.lines().map(str::trim_start) {
        if line.starts_with("#[test]") {
            is_test = true;
        } else if let Some(signature) = line.strip_prefix("fn ") {
            if std::mem::take(&mut is_test) {
                names.extend(signature.split('(').next());
            }
        } else if !line.starts_with("#[") && !line.starts_with("//") {
            is_test = false;
        }
    }
    names
}

/// Every rule with the tests that are named after it: `crate name`, from the sources below `root`.
///
/// # Errors
/// Where a source cannot be read.
pub fn proofs(root: &Path) -> io::Result<BTreeMap<Rule, BTreeSet<String>>> {
    let mut proofs: BTreeMap<Rule, BTreeSet<String>> = all().into_iter().map(|rule| (rule, BTreeSet::new())).collect();
    for (of, _, source) in sources(root)? {
        for name in tests_in(&source) {
            for rule in of_name(name) {
                proofs.entry(rule).or_default().insert(format!("{of} {name}"));
            }
        }
    }
    Ok(proofs)
}

/// Every source file: its crate, its path in the crate, its text.
fn sources(root: &Path) -> io::Result<Vec<(&'static str, PathBuf, String)>> {
    let mut sources = Vec::new();
    for of in CRATES {
        let mut folders = vec![root.join(of)];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder)? {
                let path = entry?.path();
                if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let source = fs::read_to_string(&path)?;
                    let of_crate = path.strip_prefix(root.join(of)).unwrap_or(&path);
                    sources.push((of, of_crate.to_owned(), source));
                }
            }
        }
    }
    Ok(sources)
}

/// Where a planted fault is met.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Fault {
    /// Code that is no test has it.
    pub planted: bool,
    /// A test names it.
    pub named: bool,
}

/// Every name of a planted fault that says what rule it breaks, from the sources below `root`.
///
/// # Errors
/// Where a source cannot be read.
pub fn faults(root: &Path) -> io::Result<BTreeMap<String, Fault>> {
    let mut faults = BTreeMap::new();
    for (_, path, source) in sources(root)? {
        faults_in(&path, &source, &mut faults);
    }
    Ok(faults)
}

/// Adds what a source says of faults: `planted("…")` in code, and the same word in quotes in a test.
fn faults_in(path: &Path, source: &str, faults: &mut BTreeMap<String, Fault>) {
    let of_tests = |part: &str| part == "tests" || part.ends_with("_tests");
    let mut is_test = path
        .with_extension("")
        .iter()
        .any(|part| part.to_str().is_some_and(of_tests));
    for line in source.lines().filter(|line| !line.trim_start().starts_with("//")) {
        is_test |= line.starts_with("mod tests {");
        let parts: Vec<&str> = line.split('"').collect();
        for quoted in parts.chunks_exact(2) {
            // Names in an environment variable are separated by commas.
            for name in quoted[1].split(',').filter(|name| !of_name(name).is_empty()) {
                let fault: &mut Fault = faults.entry(name.to_owned()).or_default();
                fault.planted |= !is_test && quoted[0].ends_with("planted(");
                fault.named |= is_test;
            }
        }
    }
}

/// The rules of compaction that no fault breaks which is planted and named in a test, and those among
/// `WITHOUT_FAULT` that one does break.
pub fn unbroken(faults: &BTreeMap<String, Fault>) -> Vec<Rule> {
    let seen = faults.iter().filter(|(_, fault)| fault.planted && fault.named);
    let broken: BTreeSet<Rule> = seen.flat_map(|(name, _)| of_name(name)).collect();
    let argued = |rule: &Rule| WITHOUT_FAULT.iter().any(|(without, _)| without == rule);
    let rules = all().into_iter().filter(|rule| rule.0 == 'R');
    rules.filter(|rule| broken.contains(rule) == argued(rule)).collect()
}

/// The rules that no test is named after.
pub fn unproven(proofs: &BTreeMap<Rule, BTreeSet<String>>) -> Vec<Rule> {
    let without = proofs.iter().filter(|(_, tests)| tests.is_empty());
    without.map(|(rule, _)| *rule).collect()
}

/// The status board: every rule with what `recorded`, the output of `cargo test`, says of its tests. Nothing on it comes
/// from anywhere else (R73).
pub fn board(proofs: &BTreeMap<Rule, BTreeSet<String>>, recorded: &str) -> String {
    let mut outcomes: BTreeMap<&str, &str> = BTreeMap::new();
    for line in recorded.lines() {
        let Some((path, outcome)) = line.strip_prefix("test ").and_then(|line| line.split_once(" ... ")) else {
            continue;
        };
        let name = path.rsplit("::").next().unwrap_or(path);
        // Of two tests of one name the worse counts.
        if outcomes.get(name).is_none_or(|known| *known == "ok") {
            outcomes.insert(name, outcome);
        }
    }
    let mut board = String::from("| rule | status | passed | failed | not run |\n| --- | --- | --- | --- | --- |\n");
    for (rule, tests) in proofs {
        let outcome = |test: &String| test.split(' ').next_back().and_then(|name| outcomes.get(name).copied());
        let count = |wanted: fn(&str) -> bool| tests.iter().filter(|test| outcome(test).is_some_and(wanted)).count();
        let (passed, failed) = (count(|found| found == "ok"), count(|found| found.starts_with("FAILED")));
        let status = match (passed, failed) {
            (_, 1..) => "broken",
            (1.., 0) => "proven",
            (0, 0) if planted("r73_not_run_is_proven") => "proven",
            (0, 0) => "not run",
        };
        let rest = tests.len() - passed - failed;
        // Writing to a string does not fail.
        _ = writeln!(board, "| {rule} | {status} | {passed} | {failed} | {rest} |");
    }
    board
}

#[cfg(test)]
mod tests {
    use kvsluice_layout::planted::with_planted;

    use super::*;

    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
    }

    fn workspace() -> BTreeMap<Rule, BTreeSet<String>> {
        proofs(&root()).unwrap()
    }

    #[test]
    fn every_rule_of_compaction_has_a_planted_fault_that_a_test_names() {
        let found = faults(&root()).unwrap();
        assert_eq!(
            unbroken(&found),
            [],
            "rules without a planted fault, or excepted for nothing"
        );
        let idle = found
            .iter()
            .filter(|(name, fault)| name.starts_with('r') && fault.planted && !fault.named);
        assert_eq!(
            idle.map(|(name, _)| name).collect::<Vec<_>>(),
            [""; 0],
            "planted faults that no test names"
        );
    }

    #[test]
    fn a_rule_whose_fault_is_renamed_or_no_longer_planted_or_named_is_missed() {
        let code = "if planted(\"r29_x\") || // no\n // planted(\"r30_x\")\nmod tests {\n    planted(\"r31_x\") }";
        let test = "for fault in [\"r29_x\", \"r7_r8_y,x9_z\"] {\n with_planted(\"r31_x\", f)";
        let mut found = BTreeMap::new();
        faults_in(Path::new("src/a.rs"), code, &mut found);
        for path in ["src/a/tests.rs", "src/a_tests.rs", "tests/a.rs"] {
            faults_in(Path::new(path), test, &mut found);
        }
        let of = |planted, named| Fault { planted, named };
        let expected = [
            ("r29_x", of(true, true)),
            ("r31_x", of(false, true)),
            ("r7_r8_y", of(false, true)),
            ("x9_z", of(false, true)),
        ];
        assert_eq!(found, expected.map(|(name, fault)| (name.to_owned(), fault)).into());

        let found = faults(&root()).unwrap();
        let rules = |change: fn(&mut BTreeMap<String, Fault>)| {
            let mut changed = found.clone();
            change(&mut changed);
            unbroken(&changed)
        };
        let r29 = [Rule('R', 29, false)];
        assert_eq!(rules(|found| _ = found.remove("r29_drop_rank_order")), r29);
        assert_eq!(
            rules(|found| found.get_mut("r29_drop_rank_order").unwrap().named = false),
            r29
        );
        assert_eq!(
            rules(|found| found.get_mut("r29_drop_rank_order").unwrap().planted = false),
            r29
        );
        let excepted = rules(|found| {
            let fault = Fault {
                planted: true,
                named: true,
            };
            found.insert("r18_mixes_spaces".into(), fault);
        });
        assert_eq!(excepted, [WITHOUT_FAULT[0].0]);
    }

    #[test]
    fn every_rule_has_a_test_that_is_named_after_it() {
        let found = workspace();
        assert_eq!(all().len(), 69 + 39 + 16 + 9);
        assert_eq!(unproven(&found), [], "rules without a test");
        let unknown = found.keys().filter(|rule| !all().contains(rule));
        assert_eq!(
            unknown.collect::<Vec<_>>(),
            [&Rule('X', 0, false); 0],
            "tests of rules that do not exist"
        );
    }

    #[test]
    fn a_rule_whose_tests_are_renamed_is_missed() {
        let source = "#[test]\n#[cfg(unix)]\n    fn r29_r30_plans() {\n}\nfn r31_no_test() {}\n#[test]\nfn loom_x3a_and_x4_x() {}";
        assert_eq!(tests_in(source), ["r29_r30_plans", "loom_x3a_and_x4_x"]);
        let rules = |name| of_name(name).iter().map(Rule::to_string).collect::<Vec<_>>();
        assert_eq!(rules("r29_r30_plans_of_r31"), ["R29", "R30"]);
        assert_eq!(rules("loom_x3a_and_x4_x"), ["X3a", "X4", "X34"]);
        assert_eq!(rules("field_2_r1"), [""; 0]);
        let mut found = workspace();
        found.insert(Rule('R', 29, false), BTreeSet::new());
        assert_eq!(unproven(&found), [Rule('R', 29, false)]);
    }

    #[test]
    fn r73_the_status_board_says_what_was_recorded_and_nothing_else() {
        let found = workspace();
        let line = |recorded: &str, rule: &str| {
            let board = board(&found, recorded);
            let line = board
                .lines()
                .find(|line| line.starts_with(&format!("| {rule} |")))
                .unwrap();
            line.to_owned()
        };
        // What was not recorded is not known.
        let tests = found[&Rule('R', 9, false)].len();
        assert_eq!(line("", "R9"), format!("| R9 | not run | 0 | 0 | {tests} |"));
        assert_ne!(
            with_planted("r73_not_run_is_proven", || line("", "R9")),
            line("", "R9"),
            "the planted fault is not seen"
        );
        assert_eq!(board(&found, "").matches("| not run |").count(), 1 + all().len());
        let name = "r9_every_plan_attends_what_its_layer_keeps_and_no_union";
        let recorded =
            |outcome| format!("running 2 tests\ntest retain::tests::{name} ... {outcome}\ntest other ... ok\n");
        let rest = tests - 1;
        assert_eq!(line(&recorded("ok"), "R9"), format!("| R9 | proven | 1 | 0 | {rest} |"));
        assert_eq!(
            line(&recorded("FAILED"), "R9"),
            format!("| R9 | broken | 0 | 1 | {rest} |")
        );
        assert_eq!(line(&recorded("ignored, needs a GPU"), "R9"), line("", "R9"));
        assert_eq!(
            line(&(recorded("ok") + &recorded("FAILED")), "R9"),
            line(&recorded("FAILED"), "R9")
        );
        assert_eq!(
            line(&recorded("FAILED"), "R10"),
            line("", "R10"),
            "a failure is of its rule alone"
        );
        // No copy is kept by hand.
        for entry in fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs")).unwrap() {
            let path = entry.unwrap().path();
            let text = fs::read_to_string(&path).unwrap_or_default();
            assert!(
                !text.contains("| rule | status |"),
                "{}: a board kept by hand",
                path.display()
            );
        }
    }
}
