//! The lines of `kvsluice eval`: each is answered with one JSON object, and a malformed one changes nothing.

use kvsluice_cpu_worker::eval::{Domain, Evaluator};

const DOMAINS: [Domain; 5] = [
    Domain::Validate,
    Domain::Select,
    Domain::Plan,
    Domain::Retain,
    Domain::Ledger,
];
const MALFORMED: &str = r#""error":"bad_input""#;

/// The first byte names the domain.
pub fn lines(data: &[u8]) {
    let [domain, text @ ..] = data else { return };
    let domain = DOMAINS[usize::from(*domain) % DOMAINS.len()];
    let (mut all, mut good) = (Evaluator::new(domain), Evaluator::new(domain));
    for line in text.split(|byte| *byte == b'\n').take(16) {
        let answer = all.answer_line(line);
        assert!(
            answer.starts_with('{') && answer.ends_with('}') && !answer.contains('\n'),
            "{answer}"
        );
        if !answer.contains(MALFORMED) {
            assert_eq!(answer, good.answer_line(line));
        }
    }
}
