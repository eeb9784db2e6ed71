//! The Python module `multirail`, its native part: `multirail._native`.
//!
//! Read the modules in this order: `fabric`, `region` and `peer` are the classes that users meet first. `operation` is
//! what every asynchronous call returns, and `reactor` brings completions to an event loop. `array`, `buffer` and
//! `dlpack` find the memory of Python objects. `fork` guards against the use of an object in a forked child.
//!
//! No worker of the library takes the GIL.
#![deny(unsafe_code)]
#![allow(missing_docs, reason = "the docs are those of the Python classes: docs/python.md and the stubs")]

mod array;
mod buffer;
mod closeable;
mod dlpack;
mod errors;
mod fabric;
mod fork;
mod group;
mod imm;
mod indices;
mod list;
mod machine;
mod messages;
mod metrics;
mod operation;
mod options;
mod peer;
mod reactor;
mod receipt;
mod region;
mod returned;
mod span_exporter;
mod spin;
mod thread;
mod value;

use pyo3::prelude::*;

#[pymodule(gil_used = true)]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<fabric::Fabric>()?;
    module.add_class::<fabric::Listener>()?;
    module.add_class::<metrics::MetricsServer>()?;
    module.add_class::<group::PeerGroup>()?;
    module.add_class::<imm::Arrivals>()?;
    module.add_class::<imm::ImmCounter>()?;
    module.add_class::<list::LocalList>()?;
    module.add_class::<list::RemoteList>()?;
    module.add_class::<messages::Message>()?;
    module.add_class::<messages::Notification>()?;
    module.add_class::<messages::Notifications>()?;
    module.add_class::<messages::RecvPool>()?;
    module.add_class::<operation::Operation>()?;
    module.add_class::<peer::Explanation>()?;
    module.add_class::<peer::Peer>()?;
    module.add_class::<peer::PreparedTransfer>()?;
    module.add_class::<peer::RemoteCatalogue>()?;
    module.add_class::<receipt::Outcome>()?;
    module.add_class::<receipt::RailReceipt>()?;
    module.add_class::<receipt::Receipt>()?;
    module.add_class::<region::Catalogue>()?;
    module.add_class::<region::Region>()?;
    module.add_class::<region::RemoteRegion>()?;
    module.add_class::<span_exporter::SpanExporter>()?;
    module.add_function(wrap_pyfunction!(fork::after_fork_in_child, module)?)?;
    module.add_function(wrap_pyfunction!(machine::backends, module)?)?;
    module.add_function(wrap_pyfunction!(machine::topology, module)?)?;
    module.add_function(wrap_pyfunction!(machine::run_command, module)?)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))
}
