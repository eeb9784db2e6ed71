//! libibverbs from Rust, without libibverbs at build time.
//!
//! - [`Library`]: `libibverbs.so.1`, opened at run time, with the functions that it exports, by the
//!   versions of their symbols. One binary runs with rdma-core 34 and later.
//! - Types and constants of rdma-core 44's headers, generated and checked in
//!   (`ci/bindings/generate`).
//! - The calls that the header defines inline, which go through a device's table:
//!   [`ibv_post_send`], [`ibv_poll_cq`] and so on, by their names in the manual.
//!
//! No call is made safe: the caller upholds the contract of the manual page.

#[allow(missing_docs, non_camel_case_types, non_snake_case, non_upper_case_globals, dead_code)]
#[allow(unsafe_op_in_unsafe_fn)]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks)]
mod generated;
mod library;

pub use generated::*;
pub use library::*;
