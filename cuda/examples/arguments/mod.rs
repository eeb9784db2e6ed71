//! What the examples are told, and how they say what is wrong.

use std::process::ExitCode;

use multirail_spi::{Error, ErrorKind, Result};

/// The numbers of the command line in their order, each `(name, usual, least)`; the usual ones for those not given.
pub fn numbers<const N: usize>(wanted: [(&str, usize, usize); N]) -> Result<[usize; N]> {
    let mut given = std::env::args().skip(1);
    let refuse = |given: &str, what: &str| {
        let names = wanted.map(|(name, ..)| format!("[{name}]")).join(" ");
        Error::new(ErrorKind::InvalidRequest, "read arguments", format!("{given:?} {what}: give {names}"))
    };
    let mut numbers = wanted.map(|(_, usual, _)| usual);
    for (number, (_, _, least)) in numbers.iter_mut().zip(wanted) {
        let Some(text) = given.next() else { break };
        let parsed = text.parse().ok().filter(|parsed| *parsed >= least);
        *number = parsed.ok_or_else(|| refuse(&text, &format!("is no number from {least} on")))?;
    }
    given.next().map_or(Ok(numbers), |more| Err(refuse(&more, "is one too many")))
}

/// Pages `0..count` in an order of odd steps, so that each has its turn where they are a power of two.
pub fn shuffled(count: usize, step: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |at| at.wrapping_mul(step) % count)
}

/// Says what went wrong.
pub fn end(outcome: Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}
