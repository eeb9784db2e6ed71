//! The command `multirail`: arguments in, one sentence out if it fails.
//!
//! The crate is the command's; [`run`] is its `main`. Programs depend on the library `multirail`. Tests and fuzzers
//! share the protocol of `send` and `serve` through the hidden `files`.
#![deny(unsafe_code)]

mod bench;
mod command;
mod common;
mod connection;
mod content;
mod doctor;
mod dump;
mod entry_counts;
mod explain;
mod failure;
#[doc(hidden)]
pub mod files;
#[cfg(fuzzing)]
pub mod fuzz;
mod info;
mod output;
mod provider;
mod security;
mod send;
mod serve;
mod simulate;
mod table;
mod topo;
mod trace;
mod units;
mod wire;

pub use command::run;
use common::{Common, LIBFABRIC};
