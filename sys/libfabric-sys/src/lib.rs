//! libfabric from Rust, without libfabric at build time.
//!
//! - [`Library`]: `libfabric.so.1`, opened at run time, with the few functions that it
//!   exports. One binary runs with versions 1.17 to 2.x, and also starts without the library.
//! - Types and constants of the headers of 1.17, generated and checked in
//!   (`ci/bindings/generate`). `newer` has the later additions that are used. The library
//!   itself allocates the structures that a later version may make larger.
//! - The calls that the headers define inline, which go through tables in the objects:
//!   [`fi_writemsg`], [`fi_cq_read`] and so on, by their names in the manual.
//!
//! No call is made safe: the caller upholds the contract of the manual page.

mod calls;
#[allow(missing_docs, non_camel_case_types, non_upper_case_globals, dead_code, unsafe_op_in_unsafe_fn)]
#[allow(clippy::all, clippy::undocumented_unsafe_blocks)]
mod generated;
mod library;
#[allow(non_camel_case_types, reason = "named as in C")]
mod newer;

pub use calls::*;
pub use generated::*;
pub use library::{Library, LoadError};
pub use newer::*;

/// `FI_VERSION(major, minor)` of `rdma/fabric.h`.
pub const fn version(major: u16, minor: u16) -> u32 {
    (major as u32) << 16 | minor as u32
}

/// An unspecified address (`rdma/fabric.h`). The header defines it with a cast, which bindgen leaves out.
pub const FI_ADDR_UNSPEC: fi_addr_t = fi_addr_t::MAX;

/// An endpoint option of 1.18 and later (`rdma/fi_endpoint.h`).
pub const FI_OPT_CUDA_API_PERMITTED: u32 = 10;
/// An endpoint option of EFA's provider, of 1.18 and later (`rdma/fi_ext.h`).
pub const FI_OPT_EFA_EMULATED_WRITE: i32 = -(0xefa << 16) + 2;
/// An endpoint option of 1.21 and later (`rdma/fi_endpoint.h`).
pub const FI_OPT_SHARED_MEMORY_PERMITTED: u32 = 11;
