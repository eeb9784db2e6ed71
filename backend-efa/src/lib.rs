//! multirail's backend for libfabric: EFA cards, and any other provider of reliable datagrams.
//!
//! [`Efa`] opens domains of one provider, which is `efa` by default. It opens libfabric at run time: a program runs on
//! a machine without libfabric, and [`Efa`] reports what is missing.
//!
//! The backend's endpoint is a libfabric endpoint (`FI_EP_RDM`) with its own address vector and completion queue. It
//! posts writes by `fi_writemsg`, with remote completion data for imms, and messages by `fi_sendmsg`.
//!
//! In this crate a *card* is an EFA device. Providers such as `tcp` and `shm` have no cards. *EFA's own protocols* are
//! those of the provider's fabric `efa`; its fabric `efa-direct` posts to the card without them. *1.17*, *2.1* and
//! similar numbers are versions of libfabric.
//!
//! In reading order: `library` finds devices; `backend`, `domain` and `objects` open them. `connector`, `peers` and
//! `address_vector` connect peers. `endpoint` with `completion_queue` posts and polls by `submit`, `context`, `tag` and
//! `fabric_endpoint`; `endpoint_replacement`, `reaper` and `deregistrations` are about requests that do not end.

mod address_vector;
mod backend;
mod completion_queue;
mod connector;
mod context;
mod deferred_failures;
mod deregistrations;
mod domain;
mod endpoint;
mod endpoint_replacement;
mod fabric_endpoint;
mod hmem;
mod internal_receives;
mod library;
mod objects;
mod peers;
mod reaper;
mod region;
mod settings;
mod shm;
mod signals;
mod status;
mod submit;
mod tag;

pub use backend::{Efa, EfaConfig};
pub use library::libfabric_version;
