//! One behaviour suite of named trials, run against every backend.
//!
//! A [`BackendUnderTest`] says how to open a backend. [`main`] runs all trials
//! against it and is the whole of a test without harness:
//!
//! ```ignore
//! fn main() -> std::process::ExitCode {
//!     multirail_conformance::main(vec![std::sync::Arc::new(MyBackend)])
//! }
//! ```
//!
//! Read the modules in this order: `backend_under_test` is what a backend states, and `trial` is
//! what a trial states, with its fabrics, whose memory depends on their side of a transfer. `check` has
//! the assertions. `checked_region` is a region with its expected bytes, and `sim_harness` drives
//! fabrics and moves their virtual clock. `trials` has the trials, one file per
//! noun. `process` has the helper processes. `run` runs one trial over its seeds, `statistics` counts
//! the runs, and `runner` runs the whole suite, with several backends at once.
//! `soak` is a separate program: random work between two processes for hours, and what both
//! processes hold meanwhile.
//!
//! Trials are tagged. A `virtual` trial runs in one thread, on a clock that the trial moves itself, and
//! does the same in every run of one seed. A `process` trial takes real time and real processes, and
//! runs alone.
//!
//! `MULTIRAIL_SEED` chooses the first seed, and `MULTIRAIL_SEEDS` the number of seeds for
//! each virtual trial. A failure prints the command that runs the failed seed again.
//! `MULTIRAIL_TIMES=1` prints the time of each trial.
//! [`run_or_skip`] is the `main` of other tests that need something a machine may lack.
//!
//! The suite skips what a backend cannot do and prints the reason. Known failures are listed in
//! [`BackendUnderTest::known_failures`]; a listed trial that passes fails the suite.

mod backend_under_test;
mod check;
mod checked_region;
mod process;
mod run;
mod runner;
mod sim_harness;
mod soak;
mod statistics;
mod trial;
mod trials;

pub use backend_under_test::{
    BackendUnderTest, KnownFailure, TransferSide, TransportShape, TrialTag, Variant, devices,
};
pub use check::TrialFailure;
pub use process::is_helper;
pub use runner::{main, run_or_skip};
pub use soak::{SoakConfig, soak};
pub use trial::{Trial, TrialContext};
pub use trials::trials;
