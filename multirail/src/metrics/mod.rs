//! Metrics of a fabric over HTTP, for Prometheus and what else scrapes its text format (cargo feature `prometheus`).
//!
//! ```
//! use multirail::metrics::MetricsServer;
//!
//! let fabric = multirail::open()?;
//! let server = MetricsServer::start(&fabric, "127.0.0.1:0")?;
//! println!("scrape http://{}/metrics", server.local_addr());
//! # Ok::<(), multirail::Error>(())
//! ```
//!
//! The metrics are those of [`Fabric::publish_metrics`](crate::Fabric::publish_metrics). A program that has an exporter
//! of its own calls that function before each scrape, and needs no server.

mod page;
mod server;

pub use server::MetricsServer;
