//! Moves memory between processes and machines at link speed: whole buffers or thousands of
//! scattered pages, from any peer to any peer.
//!
//! Depend on this crate. It re-exports the types and the engine of `transport-core` and adds the
//! backends by name:
//!
//! 1. [`BackendChoice`]: which backend to use, from a string, from `MULTIRAIL_BACKEND`, or
//!    automatic. [`builder`] and [`open`] make a [`Fabric`] with it.
//! 2. [`Registry`]: every backend by name, with its devices or the reason why it is unavailable.
//!
//! # Example
//! Two fabrics in one process. One operation writes three pages, and an imm tells the target that
//! all of them have arrived.
//!
//! ```
//! # pollster::block_on(async {
//! use multirail::{Access, WriteOptions};
//!
//! let (prefill, decode) = (multirail::open()?, multirail::open()?);
//! let (to_decode, from_prefill) = prefill.connect_local(&decode)?; // or listen and connect over TCP
//! let kv = prefill.alloc(1 << 20, Access::LOCAL)?;
//! let cache = decode.alloc(1 << 20, Access::REMOTE_WRITE)?;
//! let remote = to_decode.import(&cache.descriptor())?;
//! # kv.copy_in(0, &vec![7; 1 << 20])?;
//!
//! // Writes pages 3, 1, 2 of `kv` to pages 0, 7, 5 of `cache`, and then sends one imm (32 bits of immediate
//! // data). `landed` is ready once the imm has arrived, that is, after the last byte.
//! let landed = from_prefill.imm(42).expect(1);
//! let imm = WriteOptions::new().imm(42);
//! to_decode.write_pages_with(&kv, [3, 1, 2], &remote, [0, 7, 5], 64 << 10, &imm)?.await?;
//! landed.await?;
//! # let mut page = vec![0; 64 << 10];
//! # cache.copy_out(7 * page.len(), &mut page)?;
//! # assert!(page.iter().all(|byte| *byte == 7));
//! # Ok::<(), multirail::Error>(())
//! # })?;
//! # Ok::<(), multirail::Error>(())
//! ```
//!
//! # Threads
//! A [`Fabric`] and all its objects may be used from any thread. Futures run on any executor, and
//! [`wait`] blocks on a future without an executor. A fabric owns its worker threads and one
//! control thread, which sleep without work. [`FabricBuilder::caller_driven`] and
//! [`FabricBuilder::control_on`] make fabrics without these threads.
//!
//! # Cleanup
//! Dropping the last handle of a fabric, or [`Fabric::close`], closes its
//! connections and joins its threads. The memory of a region stays valid until its last handle is
//! dropped. Dropping an unfinished operation cancels it. [`Op::cancel`], [`Peer::drain`] and, on
//! the target's side, [`Region::revoke`] complete when no byte can land any more.
#![deny(unsafe_code)]

mod choice;
mod environment;
mod libfabric;
mod libibverbs;
mod loopback;
mod machine;
#[cfg(feature = "prometheus")]
pub mod metrics;
#[cfg(feature = "opentelemetry")]
pub mod opentelemetry;
mod rails;
mod registry;

pub use ::staging::Staged;
pub use backend_efa::{Efa, EfaConfig};
pub use backend_verbs::{Verbs, VerbsConfig};
pub use choice::{BackendChoice, builder, open};
pub use cuda;
pub use environment::staged_if_asked;
pub use libfabric::efa_config;
pub use libibverbs::verbs_config;
pub use machine::MachineSource;
pub use rails::BackendGroups;
pub use registry::{BackendRow, Registry};
pub use topology;
pub use transport_core::*;
