//! One behaviour suite of named trials, run against every backend.
//!
//! A [`Subject`] says how to open the backend under test; [`main`] runs all trials
//! against it and is the whole of a test without harness:
//!
//! ```ignore
//! fn main() -> std::process::ExitCode {
//!     multirail_conformance::main(vec![std::sync::Arc::new(MyBackend)])
//! }
//! ```
//!
//! Read in this order: `subject` is what a backend states, `trial` what a
//! trial states; `check` turns assertions into sentences, `end` is a fabric with the kind of
//! memory that its end of a transfer has, `ground` is such memory
//! that knows what it should contain, `lab` holds caller-driven fabrics and their
//! clock. The trials are in `trials`, one file per noun; `process` has the helper
//! processes. `run` runs one trial over its seeds, `replay` names the command that does so
//! again, `tally` counts, `runner` runs it all. `soak` is another program: random work between two
//! processes for hours, and what they hold meanwhile.
//!
//! Trials are tagged: `virtual` ones run in one thread, on a clock that they move
//! themselves, and do the same at every run of one seed; `process` ones take real
//! time and real processes, and run alone.
//!
//! `MULTIRAIL_SEED` chooses the seed, `MULTIRAIL_SEEDS` over how many from that one on
//! virtual trials run; a failure prints the command that replays it. `MULTIRAIL_TIMES=1`
//! says what each trial took.
//! [`run_or_skip`] is the `main` of other tests that need what a machine may lack.
//!
//! What a subject cannot do is skipped with the reason; what is known to fail is
//! listed in [`Subject::known_failures`], and passing unexpectedly is a failure.

mod apart;
mod check;
mod end;
mod ground;
mod lab;
mod needing;
mod process;
mod real;
mod replay;
mod run;
mod runner;
mod soak;
mod subject;
mod tally;
mod trial;
mod trials;

pub use check::Failure;
pub use needing::run_or_skip;
pub use process::is_helper;
pub use runner::main;
pub use soak::{Soaking, soak};
pub use subject::{KnownFailure, Shape, Side, Subject, Tag, Variant};
pub use trial::{Context, Trial};
pub use trials::trials;
