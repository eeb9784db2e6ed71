//! The command line of the examples, and how they report errors.

use std::process::ExitCode;

use multirail_spi::{Error, ErrorKind, Result};

/// Reads the numbers of the command line. Each of `wanted` is a name, the default and the least value.
pub fn numbers<const N: usize>(wanted: [(&str, usize, usize); N]) -> Result<[usize; N]> {
    let mut given = std::env::args().skip(1);
    let refuse = |given: &str, what: &str| {
        let names = wanted.map(|(name, ..)| format!("[{name}]")).join(" ");
        Error::new(
            ErrorKind::InvalidRequest,
            "read arguments",
            format!("{given:?} {what}: the arguments are {names}"),
        )
    };
    let mut numbers = wanted.map(|(_, default, _)| default);
    for (number, (_, _, least)) in numbers.iter_mut().zip(wanted) {
        let Some(text) = given.next() else { break };
        let parsed = text.parse().ok().filter(|parsed| *parsed >= least);
        *number = parsed.ok_or_else(|| refuse(&text, &format!("is not a number of at least {least}")))?;
    }
    given.next().map_or(Ok(numbers), |more| Err(refuse(&more, "is one argument too many")))
}

/// The pages `0..count`, in steps of `step`. An odd step reaches every page if `count` is a power of two.
pub fn shuffled(count: usize, step: usize) -> impl Iterator<Item = usize> {
    (0..count).map(move |at| at.wrapping_mul(step) % count)
}

/// Prints the error, if there is one.
pub fn end(outcome: Result<()>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}
