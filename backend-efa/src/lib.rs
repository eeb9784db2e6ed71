//! multirail's libfabric backend: EFA cards, and any other provider of reliable datagrams.
//!
//! [`Efa`] opens domains of one provider, `efa` unless told otherwise. libfabric is opened
//! at run time: a machine without it builds and starts, and says what is missing.
//!
//! A transport core endpoint is a libfabric endpoint (`FI_EP_RDM`) with its own address
//! vector and completion queue. Writes are `fi_writemsg` with remote completion data for
//! imms; messages are `fi_sendmsg`.

mod addresses;
mod backend;
mod card;
mod completion_queue;
mod connector;
mod context;
mod deferred_failures;
mod domain;
mod endpoint;
mod endpoint_replacement;
mod error_text;
mod fabric_endpoint;
mod gate;
mod hmem;
mod library;
mod objects;
mod own_receives;
mod peers;
mod queues;
mod reaper;
mod region;
mod settings;
mod shm;
#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod signals;
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
#[path = "signals/elsewhere.rs"]
mod signals;
mod status;
mod submit;
mod tag;

pub use backend::{Efa, EfaConfig};
pub use library::libfabric_version;
