//! The command `multirail`.
//!
//! [`run`] is the `main` of the command; [`run_with`] is for a host program that has the command in it, like the Python
//! module. Programs depend on the library `multirail`, not on this crate. Tests and
//! fuzzers share the protocol of `send` and `serve` through the hidden module `files`.
//!
//! Read the modules in this order: `command` parses the arguments and runs a subcommand, `common` has the options
//! that all subcommands share. The subcommands are `info`, `topo`, `explain`, `doctor`, `bench`, `serve`, `send`,
//! `simulate`, `device`, `top`, `trace`, `nixl` and `peers`; `completions` and `manual` write files for shells and
//! packages. `files` is the file protocol, `wire` sends messages between two commands, and `connection` connects them.
//! `output` prints, `failure` has the errors, and `dump` writes dumps.
#![deny(unsafe_code)]

mod admin_client;
mod bench;
mod command;
mod common;
mod completions;
mod connection;
mod content;
mod device;
mod discovery;
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
mod manual;
mod nixl;
mod output;
#[cfg(feature = "directories")]
mod peers;
mod program;
mod security;
mod send;
mod serve;
mod simulate;
mod top;
mod topo;
mod trace;
mod units;
mod wire;

pub use command::{run, run_with};
use common::{Common, LIBFABRIC};
