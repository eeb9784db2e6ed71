//! Groups of peers.

use multirail::PeerGroup as CorePeerGroup;
use pyo3::prelude::*;

use crate::errors::IntoPython;
use crate::fork::ForkSafe;
use crate::operation::{Operation, seconds, submitted};
use crate::options::write_options;
use crate::peer::Peer;
use crate::region::{Region, RemoteRegion};
use crate::value::Value;

/// Peers of one fabric, in an order.
#[pyclass(frozen, module = "multirail")]
pub struct PeerGroup(ForkSafe<CorePeerGroup>);

#[pymethods]
impl PeerGroup {
    #[new]
    fn new(peers: Vec<Bound<'_, Peer>>) -> PyResult<Self> {
        let peers: Vec<_> = peers.iter().map(|peer| peer.get().get().cloned()).collect::<PyResult<_>>()?;
        CorePeerGroup::new(peers).into_python().map(|group| Self(ForkSafe::new(group)))
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.0.get()?.len())
    }

    /// Waits until every peer of the group has reached the barrier of this name too, at most `timeout` seconds. Each side
    /// calls it with its own group of the others.
    #[pyo3(signature = (name, timeout=60.0))]
    fn barrier(&self, name: &str, timeout: f64) -> PyResult<Operation> {
        let barrier = self.0.get()?.barrier(name, seconds(timeout)?).into_python()?;
        Ok(Operation::of_task(async move { barrier.await.map(|()| Value::Nothing) }))
    }

    /// Splits `length` bytes of `src` evenly: peer i gets its share at byte `dst_offset` of `dst[i]`, which is a region of
    /// that peer.
    #[pyo3(signature = (src, dst, length=None, src_offset=0, dst_offset=0, *, imm=None, deadline=None,
        trace=None))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn scatter(
        &self,
        py: Python<'_>,
        src: &Bound<'_, Region>,
        dst: Vec<Bound<'_, RemoteRegion>>,
        length: Option<usize>,
        src_offset: usize,
        dst_offset: usize,
        imm: Option<u32>,
        deadline: Option<f64>,
        trace: Option<&str>,
    ) -> PyResult<Operation> {
        let group = self.0.get()?;
        let range = src.get().range(src_offset, length)?;
        let dst: Vec<_> = dst.iter().map(|region| region.get().get().cloned()).collect::<PyResult<_>>()?;
        let options = write_options(imm, None, deadline, None, false, None, false, trace)?;
        let src = src.get().get()?;
        submitted(py.detach(|| group.scatter_evenly(src, range, &dst, dst_offset, &options)))
    }

    /// Delivers an imm without bytes to every peer.
    fn write_imm(&self, imm: u32) -> PyResult<Operation> {
        submitted(self.0.get()?.write_imm(imm))
    }
}
