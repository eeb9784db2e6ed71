//! Members as keys with leases in etcd, by its v3 API over gRPC.

mod client;
mod messages;
mod store;

use client::{EtcdClient, Responses};
pub use store::EtcdStore;
