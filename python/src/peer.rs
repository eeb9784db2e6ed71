//! A connected peer: transfers to it and from it, and what is known of it.

use std::time::Duration;

use multirail::{
    Descriptor, Explanation as CoreExplanation, Peer as CorePeer, PreparedTransfer as CorePrepared,
};
use multirail::{RemoteCatalogue as CoreRemoteCatalogue, wait};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::{IntoPython, exception};
use crate::fork::ForkSafe;
use crate::imm::ImmCounter;
use crate::indices::{Selected, pages};
use crate::list::{LocalList, RemoteList};
use crate::operation::{Operation, submitted};
use crate::options::{bytes_like, path_policy, read_options, send_options, trace_context, write_options};
use crate::region::{COPY_WITH_GIL, Region, RemoteRegion};
use crate::thread::in_thread;
use crate::value::Value;

/// A lookup ends when its peer does.
const FOREVER: Duration = Duration::from_secs(u32::MAX as u64);

type Any<'a, 'py> = Option<&'a Bound<'py, PyAny>>;

/// A connected peer.
///
/// Every transfer returns an `Operation`: await it, or call `wait()`. Common keywords of transfers:
///
/// - `imm`: 32 bits that the peer gets after the last byte (`Peer.imm`)
/// - `notify`: bytes that the peer gets after the last byte (`Fabric.notifications`)
/// - `deadline`: seconds until the operation fails; `None` takes the fabric's
/// - `paths`: the paths that the bytes may take, as in `Fabric(paths=...)`
/// - `cold`: the bytes are in no cache, and nobody reads them soon
/// - `coalesce`: whether small pages share work requests: "never", "auto" or "always"; `None` takes what
///   `MULTIRAIL_COALESCE` says
/// - `trace`: the span that the operation is a part of, as a W3C `traceparent`; a notification takes it along
///   (`Notification.trace`)
#[pyclass(frozen, weakref, module = "multirail")]
pub struct Peer(ForkSafe<CorePeer>);

impl Peer {
    pub fn new(peer: CorePeer) -> Self {
        Self(ForkSafe::new(peer))
    }

    #[inline]
    pub fn get(&self) -> PyResult<&CorePeer> {
        self.0.get()
    }
}

#[pymethods]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
impl Peer {
    /// The peer's number in its fabric.
    #[getter]
    fn id(&self) -> PyResult<u64> {
        Ok(self.get()?.id().number())
    }

    /// The number of this opening of the peer's fabric: a restarted peer has another.
    #[getter]
    fn incarnation(&self) -> PyResult<u64> {
        Ok(self.get()?.incarnation())
    }

    /// The name of the tenant that the peer belongs to, "" for the fabric itself.
    #[getter]
    fn tenant(&self) -> PyResult<&str> {
        Ok(self.get()?.tenant())
    }

    /// Whether the peer is connected, as far as this side knows.
    #[getter]
    fn is_alive(&self) -> PyResult<bool> {
        Ok(self.get()?.is_alive())
    }

    /// The most bytes that a message to this peer may have.
    #[getter]
    fn max_message(&self) -> PyResult<u64> {
        Ok(self.get()?.max_message())
    }

    /// Sets which paths operations with this peer may take from now on, of those that the fabric allows.
    fn set_paths(&self, paths: &Bound<'_, PyAny>) -> PyResult<()> {
        self.get()?.set_path_policy(path_policy(paths)?);
        Ok(())
    }

    // ---- regions of the peer ----

    /// Makes a region of the peer usable here. `descriptor` is what its `Region.descriptor()` has returned.
    ///
    /// May block up to 2 s per rail, while a backend asks the peer's process; the GIL is released.
    fn import_region(&self, py: Python<'_>, descriptor: &Bound<'_, PyAny>) -> PyResult<RemoteRegion> {
        let (peer, bytes) = (self.get()?, bytes_like(descriptor, "descriptor")?);
        let imported = py.detach(|| peer.import(&Descriptor::from_bytes(&bytes)?));
        imported.into_python().map(RemoteRegion::new)
    }

    /// The region that the peer has published under this name, an operation that returns a `RemoteRegion`.
    fn region(&self, name: &str) -> PyResult<Operation> {
        let found = self.get()?.region(name);
        in_thread("region", move || {
            let region = wait(found, FOREVER)??;
            Ok(Value::lazy(|py| Ok(Py::new(py, RemoteRegion::new(region))?.into_any())))
        })
    }

    /// Makes the regions of a catalogue of the peer usable here: each is imported when it is first found. `catalogue` is
    /// what its `Catalogue.to_bytes()` has returned.
    fn import_catalogue(&self, catalogue: &Bound<'_, PyAny>) -> PyResult<RemoteCatalogue> {
        let bytes = bytes_like(catalogue, "catalogue")?;
        let imported = self.get()?.import_catalogue(&bytes).into_python()?;
        Ok(RemoteCatalogue(ForkSafe::new(imported)))
    }

    /// The catalogue that the peer has published under this name, an operation that returns a `RemoteCatalogue`.
    fn catalogue(&self, name: &str) -> PyResult<Operation> {
        let found = self.get()?.catalogue(name);
        in_thread("catalogue", move || {
            let catalogue = wait(found, FOREVER)??;
            Ok(Value::lazy(|py| Ok(Py::new(py, RemoteCatalogue(ForkSafe::new(catalogue)))?.into_any())))
        })
    }

    // ---- writes and reads ----

    /// Writes `length` bytes of `src`, from byte `src_offset` on, to byte `dst_offset` of `dst`. Without `length`, writes
    /// up to the end of `src`.
    ///
    /// Up to 16 KiB may be copied with the GIL held; larger copies release it.
    #[pyo3(signature = (src, dst, length=None, src_offset=0, dst_offset=0, *, imm=None, notify=None, deadline=None,
        paths=None, cold=false,
        coalesce=None, trace=None))]
    fn write(
        &self,
        py: Python<'_>,
        src: &Bound<'_, Region>,
        dst: &Bound<'_, RemoteRegion>,
        length: Option<usize>,
        src_offset: usize,
        dst_offset: usize,
        imm: Option<u32>,
        notify: Any<'_, '_>,
        deadline: Option<f64>,
        paths: Any<'_, '_>,
        cold: bool,
        coalesce: Option<&str>,
        trace: Option<&str>,
    ) -> PyResult<Operation> {
        let peer = self.get()?;
        let range = src.get().range(src_offset, length)?;
        let (src, dst) = (src.get().get()?, dst.get().get()?);
        let is_short = range.len() <= COPY_WITH_GIL;
        let is_plain = imm.is_none() && notify.is_none() && deadline.is_none() && paths.is_none() && !cold;
        if is_short && is_plain && coalesce.is_none() && trace.is_none() {
            return submitted(peer.write(src, range, dst, dst_offset));
        }
        let options = write_options(imm, notify, deadline, paths, cold, coalesce, false, trace)?;
        match is_short {
            true => submitted(peer.write_with(src, range, dst, dst_offset, &options)),
            false => submitted(py.detach(|| peer.write_with(src, range, dst, dst_offset, &options))),
        }
    }

    /// Reads `length` bytes of `src`, from byte `src_offset` on, to byte `dst_offset` of `dst`. Without `length`, reads as
    /// many as `dst` has from there on.
    #[pyo3(signature = (dst, src, length=None, dst_offset=0, src_offset=0, *, notify=None, deadline=None, paths=None,
        cold=false,
        coalesce=None, trace=None))]
    fn read(
        &self,
        py: Python<'_>,
        dst: &Bound<'_, Region>,
        src: &Bound<'_, RemoteRegion>,
        length: Option<usize>,
        dst_offset: usize,
        src_offset: usize,
        notify: Any<'_, '_>,
        deadline: Option<f64>,
        paths: Any<'_, '_>,
        cold: bool,
        coalesce: Option<&str>,
        trace: Option<&str>,
    ) -> PyResult<Operation> {
        let peer = self.get()?;
        let range = dst.get().range(dst_offset, length)?;
        let (dst, src) = (dst.get().get()?, src.get().get()?);
        let options = read_options(notify, deadline, paths, cold, coalesce, trace)?;
        match range.len() <= COPY_WITH_GIL {
            true => submitted(peer.read_with(dst, range, src, src_offset, &options)),
            false => submitted(py.detach(|| peer.read_with(dst, range, src, src_offset, &options))),
        }
    }

    /// Writes pages: page `src_pages[i]` of `src` to page `dst_pages[i]` of `dst`, for each i.
    ///
    /// Both lists are arrays of integers (numpy, torch, anything with a buffer or DLPack), ranges or lists, of equal
    /// length. `page` is in bytes. The strides are the bytes from one page to the next, by default `page`; the offsets are
    /// those of page 0. With `imm_per_request`, each work request delivers the imm.
    #[pyo3(signature = (src, src_pages, dst, dst_pages, page, *, src_stride=None, src_offset=0, dst_stride=None,
        dst_offset=0, imm=None, imm_per_request=false, notify=None, deadline=None, paths=None, cold=false,
        coalesce=None, trace=None))]
    fn write_pages(
        &self,
        py: Python<'_>,
        src: &Bound<'_, Region>,
        src_pages: &Bound<'_, PyAny>,
        dst: &Bound<'_, RemoteRegion>,
        dst_pages: &Bound<'_, PyAny>,
        page: usize,
        src_stride: Option<usize>,
        src_offset: usize,
        dst_stride: Option<usize>,
        dst_offset: usize,
        imm: Option<u32>,
        imm_per_request: bool,
        notify: Any<'_, '_>,
        deadline: Option<f64>,
        paths: Any<'_, '_>,
        cold: bool,
        coalesce: Option<&str>,
        trace: Option<&str>,
    ) -> PyResult<Operation> {
        let peer = self.get()?;
        let from = pages(src_pages, src_stride, src_offset, "src_pages")?;
        let to = pages(dst_pages, dst_stride, dst_offset, "dst_pages")?;
        let options = write_options(imm, notify, deadline, paths, cold, coalesce, imm_per_request, trace)?;
        let (src, dst) = (src.get().get()?, dst.get().get()?);
        submitted(py.detach(|| peer.write_pages_with(src, from, dst, to, page, &options)))
    }

    /// Reads pages: page `src_pages[i]` of `src` to page `dst_pages[i]` of `dst`, for each i. Arguments as in
    /// `write_pages`.
    #[pyo3(signature = (dst, dst_pages, src, src_pages, page, *, dst_stride=None, dst_offset=0, src_stride=None,
        src_offset=0, notify=None, deadline=None, paths=None, cold=false,
        coalesce=None, trace=None))]
    fn read_pages(
        &self,
        py: Python<'_>,
        dst: &Bound<'_, Region>,
        dst_pages: &Bound<'_, PyAny>,
        src: &Bound<'_, RemoteRegion>,
        src_pages: &Bound<'_, PyAny>,
        page: usize,
        dst_stride: Option<usize>,
        dst_offset: usize,
        src_stride: Option<usize>,
        src_offset: usize,
        notify: Any<'_, '_>,
        deadline: Option<f64>,
        paths: Any<'_, '_>,
        cold: bool,
        coalesce: Option<&str>,
        trace: Option<&str>,
    ) -> PyResult<Operation> {
        let peer = self.get()?;
        let to = pages(dst_pages, dst_stride, dst_offset, "dst_pages")?;
        let from = pages(src_pages, src_stride, src_offset, "src_pages")?;
        let options = read_options(notify, deadline, paths, cold, coalesce, trace)?;
        let (dst, src) = (dst.get().get()?, src.get().get()?);
        submitted(py.detach(|| peer.read_pages_with(dst, to, src, from, page, &options)))
    }

    /// Checks and plans a write of pages, to be posted many times. Arguments as in `write_pages`.
    #[pyo3(signature = (src, src_pages, dst, dst_pages, page, *, src_stride=None, src_offset=0, dst_stride=None,
        dst_offset=0, imm=None, imm_per_request=false, notify=None, deadline=None, paths=None, cold=false,
        coalesce=None, trace=None))]
    fn prepare_write_pages(
        &self,
        py: Python<'_>,
        src: &Bound<'_, Region>,
        src_pages: &Bound<'_, PyAny>,
        dst: &Bound<'_, RemoteRegion>,
        dst_pages: &Bound<'_, PyAny>,
        page: usize,
        src_stride: Option<usize>,
        src_offset: usize,
        dst_stride: Option<usize>,
        dst_offset: usize,
        imm: Option<u32>,
        imm_per_request: bool,
        notify: Any<'_, '_>,
        deadline: Option<f64>,
        paths: Any<'_, '_>,
        cold: bool,
        coalesce: Option<&str>,
        trace: Option<&str>,
    ) -> PyResult<PreparedTransfer> {
        let peer = self.get()?;
        let from = pages(src_pages, src_stride, src_offset, "src_pages")?;
        let to = pages(dst_pages, dst_stride, dst_offset, "dst_pages")?;
        let options = write_options(imm, notify, deadline, paths, cold, coalesce, imm_per_request, trace)?;
        let (src, dst) = (src.get().get()?, dst.get().get()?);
        let prepared = py.detach(|| peer.prepare_write_pages(src, from, dst, to, page, &options));
        prepared.into_python().map(PreparedTransfer::new)
    }

    /// Checks and plans a read of pages, to be posted many times. Arguments as in `read_pages`.
    #[pyo3(signature = (dst, dst_pages, src, src_pages, page, *, dst_stride=None, dst_offset=0, src_stride=None,
        src_offset=0, notify=None, deadline=None, paths=None, cold=false,
        coalesce=None, trace=None))]
    fn prepare_read_pages(
        &self,
        py: Python<'_>,
        dst: &Bound<'_, Region>,
        dst_pages: &Bound<'_, PyAny>,
        src: &Bound<'_, RemoteRegion>,
        src_pages: &Bound<'_, PyAny>,
        page: usize,
        dst_stride: Option<usize>,
        dst_offset: usize,
        src_stride: Option<usize>,
        src_offset: usize,
        notify: Any<'_, '_>,
        deadline: Option<f64>,
        paths: Any<'_, '_>,
        cold: bool,
        coalesce: Option<&str>,
        trace: Option<&str>,
    ) -> PyResult<PreparedTransfer> {
        let peer = self.get()?;
        let to = pages(dst_pages, dst_stride, dst_offset, "dst_pages")?;
        let from = pages(src_pages, src_stride, src_offset, "src_pages")?;
        let options = read_options(notify, deadline, paths, cold, coalesce, trace)?;
        let (dst, src) = (dst.get().get()?, src.get().get()?);
        let prepared = py.detach(|| peer.prepare_read_pages(dst, to, src, from, page, &options));
        prepared.into_python().map(PreparedTransfer::new)
    }

    /// Writes the pieces of a local list to those of a remote list, one by one. The selections are arrays of indices of
    /// pieces, in the order of the transfer; `None` takes all.
    #[pyo3(signature = (local, remote, *, local_selection=None, remote_selection=None, imm=None, notify=None,
        deadline=None, paths=None, cold=false,
        coalesce=None, trace=None))]
    fn write_list(
        &self,
        py: Python<'_>,
        local: &Bound<'_, LocalList>,
        remote: &Bound<'_, RemoteList>,
        local_selection: Any<'_, '_>,
        remote_selection: Any<'_, '_>,
        imm: Option<u32>,
        notify: Any<'_, '_>,
        deadline: Option<f64>,
        paths: Any<'_, '_>,
        cold: bool,
        coalesce: Option<&str>,
        trace: Option<&str>,
    ) -> PyResult<Operation> {
        let peer = self.get()?;
        let from = Selected::of(local_selection, "local_selection")?;
        let to = Selected::of(remote_selection, "remote_selection")?;
        let options = write_options(imm, notify, deadline, paths, cold, coalesce, false, trace)?;
        let (local, remote) = (local.get(), remote.get());
        let submit = || {
            let (local, remote) = (local.lock()?, remote.lock()?);
            PyResult::Ok(peer.write_list(&local, from.selection(), &remote, to.selection(), &options))
        };
        submitted(py.detach(submit)?)
    }

    /// Reads the pieces of a remote list to those of a local list, one by one. Arguments as in `write_list`.
    #[pyo3(signature = (local, remote, *, local_selection=None, remote_selection=None, notify=None, deadline=None,
        paths=None, cold=false,
        coalesce=None, trace=None))]
    fn read_list(
        &self,
        py: Python<'_>,
        local: &Bound<'_, LocalList>,
        remote: &Bound<'_, RemoteList>,
        local_selection: Any<'_, '_>,
        remote_selection: Any<'_, '_>,
        notify: Any<'_, '_>,
        deadline: Option<f64>,
        paths: Any<'_, '_>,
        cold: bool,
        coalesce: Option<&str>,
        trace: Option<&str>,
    ) -> PyResult<Operation> {
        let peer = self.get()?;
        let to = Selected::of(local_selection, "local_selection")?;
        let from = Selected::of(remote_selection, "remote_selection")?;
        let options = read_options(notify, deadline, paths, cold, coalesce, trace)?;
        let (local, remote) = (local.get(), remote.get());
        let submit = || {
            let (local, remote) = (local.lock()?, remote.lock()?);
            PyResult::Ok(peer.read_list(&local, to.selection(), &remote, from.selection(), &options))
        };
        submitted(py.detach(submit)?)
    }

    /// Checks and plans a write of lists, to be posted many times. Arguments as in `write_list`.
    #[pyo3(signature = (local, remote, *, local_selection=None, remote_selection=None, imm=None, notify=None,
        deadline=None, paths=None, cold=false,
        coalesce=None, trace=None))]
    fn prepare_write_list(
        &self,
        py: Python<'_>,
        local: &Bound<'_, LocalList>,
        remote: &Bound<'_, RemoteList>,
        local_selection: Any<'_, '_>,
        remote_selection: Any<'_, '_>,
        imm: Option<u32>,
        notify: Any<'_, '_>,
        deadline: Option<f64>,
        paths: Any<'_, '_>,
        cold: bool,
        coalesce: Option<&str>,
        trace: Option<&str>,
    ) -> PyResult<PreparedTransfer> {
        let peer = self.get()?;
        let from = Selected::of(local_selection, "local_selection")?;
        let to = Selected::of(remote_selection, "remote_selection")?;
        let options = write_options(imm, notify, deadline, paths, cold, coalesce, false, trace)?;
        let (local, remote) = (local.get(), remote.get());
        let prepare = || {
            let (local, remote) = (local.lock()?, remote.lock()?);
            PyResult::Ok(peer.prepare_write_list(&local, from.selection(), &remote, to.selection(), &options))
        };
        py.detach(prepare)?.into_python().map(PreparedTransfer::new)
    }

    /// Checks and plans a read of lists, to be posted many times. Arguments as in `read_list`.
    #[pyo3(signature = (local, remote, *, local_selection=None, remote_selection=None, notify=None, deadline=None,
        paths=None, cold=false,
        coalesce=None, trace=None))]
    fn prepare_read_list(
        &self,
        py: Python<'_>,
        local: &Bound<'_, LocalList>,
        remote: &Bound<'_, RemoteList>,
        local_selection: Any<'_, '_>,
        remote_selection: Any<'_, '_>,
        notify: Any<'_, '_>,
        deadline: Option<f64>,
        paths: Any<'_, '_>,
        cold: bool,
        coalesce: Option<&str>,
        trace: Option<&str>,
    ) -> PyResult<PreparedTransfer> {
        let peer = self.get()?;
        let to = Selected::of(local_selection, "local_selection")?;
        let from = Selected::of(remote_selection, "remote_selection")?;
        let options = read_options(notify, deadline, paths, cold, coalesce, trace)?;
        let (local, remote) = (local.get(), remote.get());
        let prepare = || {
            let (local, remote) = (local.lock()?, remote.lock()?);
            PyResult::Ok(peer.prepare_read_list(&local, to.selection(), &remote, from.selection(), &options))
        };
        py.detach(prepare)?.into_python().map(PreparedTransfer::new)
    }

    // ---- messages ----

    /// Delivers an imm without bytes.
    fn write_imm(&self, imm: u32) -> PyResult<Operation> {
        submitted(self.get()?.write_imm(imm))
    }

    /// Sends a message of `length` bytes of `src`, from byte `offset` on, to a receive of the peer.
    #[pyo3(signature = (src, length=None, offset=0, *, imm=None, deadline=None, paths=None))]
    fn send(
        &self,
        py: Python<'_>,
        src: &Bound<'_, Region>,
        length: Option<usize>,
        offset: usize,
        imm: Option<u32>,
        deadline: Option<f64>,
        paths: Any<'_, '_>,
    ) -> PyResult<Operation> {
        let (peer, range) = (self.get()?, src.get().range(offset, length)?);
        let (options, src) = (send_options(imm, deadline, paths)?, src.get().get()?);
        match range.len() <= COPY_WITH_GIL {
            true => submitted(peer.send_with(src, range, &options)),
            false => submitted(py.detach(|| peer.send_with(src, range, &options))),
        }
    }

    /// Delivers bytes to the peer's `Fabric.notifications()`. They need no registered memory.
    #[pyo3(signature = (data, *, deadline=None, paths=None, trace=None))]
    fn notify(
        &self,
        data: &Bound<'_, PyAny>,
        deadline: Option<f64>,
        paths: Any<'_, '_>,
        trace: Option<&str>,
    ) -> PyResult<Operation> {
        let bytes = bytes_like(data, "data")?;
        let mut options = send_options(None, deadline, paths)?;
        options.trace = trace_context(trace)?;
        submitted(self.get()?.notify_with(&bytes, &options))
    }

    /// The arrivals of one imm from this peer.
    fn imm(&self, imm: u32) -> PyResult<ImmCounter> {
        Ok(ImmCounter::new(self.get()?.imm(imm)))
    }

    /// Does the work of the first transfer in advance, on all rails.
    fn warm_up(&self) -> PyResult<Operation> {
        submitted(self.get()?.warm_up())
    }

    // ---- the connection ----

    /// Waits until no operation with this peer can move bytes any more, also none that was dropped.
    fn drain(&self) -> PyResult<Operation> {
        let drain = self.get()?.drain().into_python()?;
        Ok(Operation::of_task(async move { drain.await.map(|()| Value::Nothing) }))
    }

    /// Waits until the peer is gone, an operation that returns the reason, an `Error`.
    fn closed(&self) -> PyResult<Operation> {
        let closed = self.get()?.closed();
        Ok(Operation::of_task(async move {
            let reason = closed.await;
            Ok(Value::lazy(move |py| Ok(exception(&reason).into_value(py).into_any())))
        }))
    }

    /// Ends the connection. The peer sees `Closed`.
    fn disconnect(&self, py: Python<'_>) -> PyResult<()> {
        let peer = self.get()?;
        py.detach(|| peer.disconnect());
        Ok(())
    }

    /// How this side reaches the peer, as text: transports, rails, paths.
    fn explain(&self) -> PyResult<String> {
        Ok(self.get()?.explain())
    }

    /// What `write` with these arguments would do now, and why.
    #[pyo3(signature = (src, dst, length=None, src_offset=0, dst_offset=0, *, imm=None, paths=None))]
    fn explain_write(
        &self,
        src: &Bound<'_, Region>,
        dst: &Bound<'_, RemoteRegion>,
        length: Option<usize>,
        src_offset: usize,
        dst_offset: usize,
        imm: Option<u32>,
        paths: Any<'_, '_>,
    ) -> PyResult<Explanation> {
        let range = src.get().range(src_offset, length)?;
        let options = write_options(imm, None, None, paths, false, None, false, None)?;
        let explained =
            self.get()?.explain_write(src.get().get()?, range, dst.get().get()?, dst_offset, &options);
        explained.into_python().map(Explanation)
    }

    /// What `read` with these arguments would do now, and why.
    #[pyo3(signature = (dst, src, length=None, dst_offset=0, src_offset=0, *, paths=None))]
    fn explain_read(
        &self,
        dst: &Bound<'_, Region>,
        src: &Bound<'_, RemoteRegion>,
        length: Option<usize>,
        dst_offset: usize,
        src_offset: usize,
        paths: Any<'_, '_>,
    ) -> PyResult<Explanation> {
        let range = dst.get().range(dst_offset, length)?;
        let options = read_options(None, None, paths, false, None, None)?;
        let explained =
            self.get()?.explain_read(dst.get().get()?, range, src.get().get()?, src_offset, &options);
        explained.into_python().map(Explanation)
    }

    /// What `write_pages` with these arguments would do now, and why.
    #[pyo3(signature = (src, src_pages, dst, dst_pages, page, *, imm=None, paths=None))]
    fn explain_write_pages(
        &self,
        src: &Bound<'_, Region>,
        src_pages: &Bound<'_, PyAny>,
        dst: &Bound<'_, RemoteRegion>,
        dst_pages: &Bound<'_, PyAny>,
        page: usize,
        imm: Option<u32>,
        paths: Any<'_, '_>,
    ) -> PyResult<Explanation> {
        let (from, to) = (pages(src_pages, None, 0, "src_pages")?, pages(dst_pages, None, 0, "dst_pages")?);
        let options = write_options(imm, None, None, paths, false, None, false, None)?;
        let explained =
            self.get()?.explain_write_pages(src.get().get()?, from, dst.get().get()?, to, page, &options);
        explained.into_python().map(Explanation)
    }

    fn __repr__(&self) -> PyResult<String> {
        let peer = self.get()?;
        Ok(format!("<Peer {}{}>", peer.id().number(), if peer.is_alive() { "" } else { ", gone" }))
    }
}

/// A transfer that was checked and planned once, to be posted many times.
///
/// A post checks only that the peer is alive, and that no region was revoked. It keeps its regions. Several posts may be
/// under way at once.
#[pyclass(frozen, weakref, module = "multirail")]
pub struct PreparedTransfer(ForkSafe<CorePrepared>);

impl PreparedTransfer {
    fn new(prepared: CorePrepared) -> Self {
        Self(ForkSafe::new(prepared))
    }
}

#[pymethods]
impl PreparedTransfer {
    /// The bytes of one post.
    #[getter]
    fn bytes(&self) -> PyResult<u64> {
        Ok(self.0.get()?.bytes())
    }

    /// Starts the transfer. `notify` replaces the notification that it was prepared with; `imm` replaces its imm, if it
    /// was prepared with one.
    #[pyo3(signature = (*, imm=None, notify=None))]
    fn post(&self, py: Python<'_>, imm: Option<u32>, notify: Any<'_, '_>) -> PyResult<Operation> {
        let prepared = self.0.get()?;
        let is_short = prepared.bytes() <= COPY_WITH_GIL as u64;
        let notification = notify.map(|bytes| bytes_like(bytes, "notify")).transpose()?;
        match (imm, notification) {
            (None, None) if is_short => submitted(prepared.post()),
            (None, None) => submitted(py.detach(|| prepared.post())),
            (Some(imm), None) => submitted(py.detach(|| prepared.post_with_imm(imm))),
            (None, Some(bytes)) => submitted(py.detach(|| prepared.post_and_notify(bytes))),
            (Some(_), Some(_)) => Err(PyValueError::new_err("give imm or notify, not both")),
        }
    }

    /// What each part of the transfer would do now, and why.
    fn explain(&self) -> PyResult<Vec<Explanation>> {
        let explained = self.0.get()?.explain().into_python()?;
        Ok(explained.into_iter().map(Explanation).collect())
    }
}

/// Regions of a peer, to be found by their addresses there.
#[pyclass(frozen, module = "multirail")]
pub struct RemoteCatalogue(pub ForkSafe<CoreRemoteCatalogue>);

#[pymethods]
impl RemoteCatalogue {
    fn __len__(&self) -> PyResult<usize> {
        Ok(self.0.get()?.len())
    }

    /// The region that holds `length` bytes from `address` on, in the peer's process, and the offset of the address in
    /// it.
    fn find(&self, py: Python<'_>, address: u64, length: usize) -> PyResult<(RemoteRegion, usize)> {
        let catalogue = self.0.get()?;
        let (region, offset) = py.detach(|| catalogue.find(address, length)).into_python()?;
        Ok((RemoteRegion::new(region.clone()), offset))
    }

    /// Region `number`, in the order in which the owner gave them.
    fn region(&self, py: Python<'_>, number: usize) -> PyResult<RemoteRegion> {
        let catalogue = self.0.get()?;
        Ok(RemoteRegion::new(py.detach(|| catalogue.region(number)).into_python()?.clone()))
    }
}

/// What a request would do, and why. `str()` of it is a table, `to_json()` has all of it.
#[pyclass(frozen, module = "multirail")]
pub struct Explanation(CoreExplanation);

#[pymethods]
impl Explanation {
    fn __str__(&self) -> String {
        self.0.to_string()
    }

    fn to_json(&self) -> PyResult<String> {
        serde_json::to_string(&self.0).map_err(|error| PyValueError::new_err(error.to_string()))
    }
}
