//! Tests that need what a machine may lack, as a GPU or a library.

use std::process::ExitCode;

use libtest_mimic::{Arguments, Completion, Trial};

/// Functions as tests for [`run_or_skip`], each by its name: `tests![one, another]`.
#[macro_export]
macro_rules! tests {
    ($($test:ident),+ $(,)?) => { &[$((stringify!($test), $test as fn())),+] };
}

/// Runs `tests`, of which one that panics has failed: the `main` of a test without harness.
///
/// Where something that they need is `missing`, none runs: each says `skipped: why`, and counts as ignored.
pub fn run_or_skip(missing: Option<String>, tests: &[(&'static str, fn())]) -> ExitCode {
    let trial = |(name, run): &(&'static str, fn())| {
        let (run, missing) = (*run, missing.clone());
        Trial::ignorable_test(*name, move || match missing {
            Some(why) => Ok(Completion::ignored_with(format!("skipped: {why}"))),
            None => {
                run();
                Ok(Completion::Completed)
            }
        })
    };
    libtest_mimic::run(&Arguments::from_args(), tests.iter().map(trial).collect()).exit_code()
}
