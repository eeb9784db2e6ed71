//! Members as EndpointSlices of Kubernetes list them, by a small client of its API: list and watch, over HTTP/1.1 and
//! TLS.

mod api;
mod slices;
mod store;
mod tls;

use api::{Api, LineStream};
use slices::{SliceList, WatchedChange};
pub use store::KubernetesStore;
use tls::TlsTrust;
