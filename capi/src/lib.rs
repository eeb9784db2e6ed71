//! The C interface of multirail. `include/multirail.h` documents every function; this crate makes `libmultirail.so` and
//! `libmultirail.a`.
//!
//! In reading order:
//!
//! - `abi`: the numbers and structs of the header. `arguments`: the pointers that C passes, checked.
//! - `call`: what every entry point runs in. `failure`: errors, and the text of the last one of each thread.
//! - `slab`: objects behind numbers. `handles`: one slab per kind. `fork` guards against the use in a forked child.
//! - `operation`: what every asynchronous function returns. `settings` and `backends`: the options of a fabric.
//!   `metadata`: the bytes that lead to a fabric. `accepted` and `inbox`: the peers and notifications that come to it.
//! - The entry points, by what they are about: [`fabric`], [`region`], [`peer`], [`transfer`], [`list`], [`prepared`],
//!   [`op`], [`message`].
//!
//! An entry point checks its arguments, calls the library, and makes handles of what comes back. It adds no behaviour.
//!
//! # Threads
//! Any thread may call any function. An entry point that waits holds no lock meanwhile, except that of the object
//! that it waits in.
//!
//! # Cleanup
//! The number of a released object is never used again. The object itself lives until the last call that uses it has
//! returned.
#![deny(unsafe_code)]
#![allow(missing_docs, reason = "the docs are those of multirail.h")]

mod abi;
#[allow(unsafe_code, reason = "reads and writes through the pointers of C programs")]
mod arguments;
#[macro_use]
mod call;
mod accepted;
mod backends;
mod failure;
#[allow(unsafe_code, reason = "runs a function at a fork")]
mod fork;
mod handles;
mod inbox;
#[allow(unsafe_code, reason = "reads the system's list of network interfaces")]
mod interfaces;
mod metadata;
mod operation;
#[allow(unsafe_code, reason = "owns memory of C programs")]
mod owner;
mod settings;
#[allow(unsafe_code, reason = "objects that are found by number and freed by their last user")]
mod slab;
mod transfer_options;

pub mod fabric;
pub mod list;
pub mod message;
pub mod op;
pub mod peer;
pub mod prepared;
pub mod region;
pub mod transfer;
pub mod version;

pub use abi::*;
pub use arguments::{Bytes, Entries, Input, Out, Text};
