//! The types and constants of libibverbs (rdma-core 44), generated and checked in
//! (`ci/bindings/generate`), so that nothing of it is needed at build time.

#![no_std]

#[allow(missing_docs, non_camel_case_types, non_snake_case, non_upper_case_globals, dead_code)]
#[allow(unsafe_op_in_unsafe_fn)]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks)]
mod generated;

pub use generated::*;
