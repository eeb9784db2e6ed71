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
//! use multirail::{Access, Pages, WriteOptions};
//! # fn main() -> multirail::Result<()> {
//! let (here, there) = (multirail::open()?, multirail::open()?);
//! let (peer, origin) = here.connect_local(&there)?;
//! let window = there.alloc(8 * 4096, Access::REMOTE_WRITE)?;
//! there.publish("window", &window)?;
//! let source = here.alloc(8 * 4096, Access::LOCAL)?;
//! source.copy_in(4096, &[7; 4096])?;
//!
//! pollster::block_on(async {
//!     let remote = peer.region("window").await?;
//!     let (from, to) = (Pages::new([0, 1, 2]), Pages::new([6, 3, 5]));
//!     let options = WriteOptions::default().imm(42);
//!     peer.write_pages_with(&source, &from, &remote, &to, 4096, &options)?.await?;
//!     origin.imm(42).expect(1).await
//! })?;
//!
//! let mut page = [0; 4096];
//! window.copy_out(3 * 4096, &mut page)?;
//! assert_eq!(page, [7; 4096]);
//! # Ok(())
//! # }
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
