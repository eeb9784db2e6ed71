//! The fabric: opened transports, memory, listening and connecting.

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;

use multirail::{
    BackendChoice, Error, ErrorKind, Fabric as CoreFabric, Listener as CoreListener, TlsBootstrap, Token,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::errors::IntoPython;
use crate::fork::ForkSafe;
use crate::messages::{Notifications, RecvPool};
use crate::metrics::MetricsServer;
use crate::operation::{Operation, seconds, submitted};
use crate::options::{access, path_policy};
use crate::peer::Peer;
use crate::region::{Catalogue, Region, cuda_memory, cuda_number, memory_of};
use crate::returned::{NextItem, Returned};
use crate::thread::in_thread;
use crate::value::Value;

/// Opened transports, ready to register memory and to connect to peers.
///
/// - `backend`: "loopback", "efa", "verbs", or "auto" for all that are available; `None` takes `MULTIRAIL_BACKEND`
/// - `token`: at least 16 random bytes; only peers with the same token connect
/// - `tls`: the paths of certificate chain, key and authorities, PEM: encrypts the control connections
/// - `notifications`: `True`, or the bytes of memory for arriving notifications (16 MiB unless told)
/// - `deadline`: seconds until an operation fails, unless it has its own
/// - `heartbeat`, `peer_timeout`: seconds between signs of life, and until a silent peer counts as dead
/// - `paths`: the paths that bytes may take: names, of "rdma", "gpu-copy", "memory-copy", "sockets", "staged"
/// - `max_operations`: the most operations under way on each worker
///
/// Use it as a context manager, or call `close()`.
#[pyclass(frozen, weakref, module = "multirail")]
pub struct Fabric(ForkSafe<CoreFabric>);

/// The memory for arriving notifications if the user gives no number.
const NOTIFICATION_MEMORY: usize = 16 << 20;

impl Fabric {
    fn get(&self) -> PyResult<&CoreFabric> {
        self.0.get()
    }
}

#[pymethods]
#[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
impl Fabric {
    #[new]
    #[pyo3(signature = (backend=None, *, token=None, tls=None, notifications=None, deadline=None, heartbeat=None,
        peer_timeout=None, paths=None, max_operations=None))]
    fn new(
        py: Python<'_>,
        backend: Option<&str>,
        token: Option<&Bound<'_, PyAny>>,
        tls: Option<(PathBuf, PathBuf, PathBuf)>,
        notifications: Option<&Bound<'_, PyAny>>,
        deadline: Option<f64>,
        heartbeat: Option<f64>,
        peer_timeout: Option<f64>,
        paths: Option<&Bound<'_, PyAny>>,
        max_operations: Option<usize>,
    ) -> PyResult<Self> {
        let token = token.map(token_of).transpose()?;
        let memory = notifications.map(notification_memory).transpose()?.flatten();
        let paths = paths.map(path_policy).transpose()?;
        let [deadline, heartbeat, peer_timeout] =
            [deadline, heartbeat, peer_timeout].map(|given| given.map(seconds).transpose());
        let (deadline, heartbeat, peer_timeout) = (deadline?, heartbeat?, peer_timeout?);
        let backend = backend.map(str::to_owned);
        let open = move || {
            let choice = backend.map_or_else(BackendChoice::from_env, |name| name.parse())?;
            let mut builder = multirail::builder(&choice)?;
            if let Some(token) = token {
                builder = builder.token(token);
            }
            if let Some((certificates, key, roots)) = tls {
                builder = builder.bootstrap(Arc::new(TlsBootstrap::from_files(certificates, key, roots)?));
            }
            if let Some(memory) = memory {
                builder = builder.notifications(memory);
            }
            if let Some(span) = deadline {
                builder = builder.deadline(span);
            }
            if let Some(span) = heartbeat {
                builder = builder.heartbeat(span);
            }
            if let Some(span) = peer_timeout {
                builder = builder.peer_timeout(span);
            }
            if let Some(policy) = paths {
                builder = builder.path_policy(policy);
            }
            if let Some(operations) = max_operations {
                builder = builder.max_operations(operations);
            }
            builder.open()
        };
        Ok(Self(ForkSafe::new(py.detach(open).into_python()?)))
    }

    /// The number of this opening.
    #[getter]
    fn incarnation(&self) -> PyResult<u64> {
        Ok(self.get()?.incarnation())
    }

    // ---- memory ----

    /// Allocates `length` zeroed bytes and registers them. `device` is "cpu" or "cuda:N". Host memory of this kind is
    /// faster between processes of one host than memory that was allocated elsewhere.
    ///
    /// `access`: what peers may do: "local" (nothing), "read", "write" or "all".
    #[pyo3(signature = (length, access="all", *, device="cpu"))]
    fn alloc(&self, py: Python<'_>, length: usize, access: &str, device: &str) -> PyResult<Region> {
        let (fabric, access) = (self.get()?, self::access(access)?);
        let Some(device) = cuda_number(device)? else {
            return Ok(Region::new(py.detach(|| fabric.alloc(length, access)).into_python()?, None));
        };
        let (memory, device) = py.detach(|| cuda_memory(device, length))?;
        // SAFETY: the memory is new, and only the region will know it.
        #[allow(unsafe_code, reason = "registers memory")]
        let region = unsafe { fabric.register(memory, access) };
        Ok(Region::new(region.into_python()?, device))
    }

    /// Registers the memory of an object, and keeps the object: numpy and torch arrays, anything with a buffer, DLPack,
    /// `__array_interface__` or `__cuda_array_interface__`, or a tuple (address, length) or (address, length, device),
    /// with `owner` an object that keeps the memory.
    ///
    /// The memory must be contiguous and writable. While it is registered, peers may change the bytes as `access`
    /// allows.
    #[pyo3(signature = (object, access="all", *, owner=None))]
    fn register(
        &self,
        py: Python<'_>,
        object: &Bound<'_, PyAny>,
        access: &str,
        owner: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Region> {
        let (fabric, access) = (self.get()?, self::access(access)?);
        let (memory, device) = memory_of(object, owner)?;
        // SAFETY: Python code holds no Rust reference into the bytes.
        #[allow(unsafe_code, reason = "registers memory that Python code owns")]
        let region = py.detach(|| unsafe { fabric.register(memory, access) });
        Ok(Region::new(region.into_python()?, device))
    }

    /// Publishes a region: peers find it by name, with `Peer.region`.
    fn publish(&self, name: &str, region: &Bound<'_, Region>) -> PyResult<()> {
        self.get()?.publish(name, region.get().get()?).into_python()
    }

    /// Publishes a catalogue: peers find it by name, with `Peer.catalogue`.
    fn publish_catalogue(&self, name: &str, catalogue: &Bound<'_, Catalogue>) -> PyResult<()> {
        catalogue.get().0.get()?.publish(self.get()?, name).into_python()
    }

    /// Removes a published name. Peers that use the region keep it.
    fn unpublish(&self, name: &str) -> PyResult<()> {
        self.get()?.unpublish(name);
        Ok(())
    }

    // ---- peers ----

    /// Listens for peers, an operation that returns a `Listener`. Port 0 is any free port.
    #[pyo3(signature = (address="127.0.0.1:0"))]
    fn listen(&self, address: &str) -> PyResult<Operation> {
        let listening = self.get()?.listen(address);
        Ok(Operation::of_task(async move {
            let listener = Listener::new(listening.await?);
            Ok(Value::lazy(|py| Ok(Py::new(py, listener)?.into_any())))
        }))
    }

    /// Connects to a fabric that listens, an operation that returns a `Peer`.
    fn connect(&self, address: &str) -> PyResult<Operation> {
        let connecting = self.get()?.connect(address);
        Ok(Operation::of_task(async move {
            let peer = Peer::new(connecting.await?);
            Ok(Value::lazy(|py| Ok(Py::new(py, peer)?.into_any())))
        }))
    }

    /// Connects two fabrics of this process, or one with itself. Returns this fabric's handle of the other, and the
    /// other's of this one.
    fn connect_local(&self, py: Python<'_>, other: &Bound<'_, Self>) -> PyResult<(Peer, Peer)> {
        let (fabric, other) = (self.get()?, other.get().get()?);
        let (there, here) = py.detach(|| fabric.connect_local(other)).into_python()?;
        Ok((Peer::new(there), Peer::new(here)))
    }

    /// Opens a tenant: a fabric of its own behind the same listener, for the peers that have its token.
    fn tenant(&self, py: Python<'_>, name: &str, token: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (fabric, token) = (self.get()?, token_of(token)?);
        let tenant = py.detach(|| fabric.tenant(name, token)).into_python()?;
        Ok(Self(ForkSafe::new(tenant)))
    }

    // ---- messages ----

    /// Posts one receive, an operation whose outcome names the sender, the bytes and the imm. Cancel it to take it
    /// back.
    #[pyo3(signature = (region, length=None, offset=0))]
    fn recv(&self, region: &Bound<'_, Region>, length: Option<usize>, offset: usize) -> PyResult<Operation> {
        let range = region.get().range(offset, length)?;
        submitted(self.get()?.recv(region.get().get()?, range))
    }

    /// Posts `count` receives of `size` bytes on every transport.
    fn recv_pool(&self, py: Python<'_>, count: usize, size: usize) -> PyResult<RecvPool> {
        let fabric = self.get()?;
        py.detach(|| fabric.recv_pool(count, size)).into_python().map(RecvPool::new)
    }

    /// The peer with this number, the `peer` of a notification, a message or an error, while it is connected. It does not
    /// matter which side connected, or whether a listener has returned the peer. `NotFound` if there is none.
    fn peer(&self, number: u64) -> PyResult<Peer> {
        let found = multirail::PeerId::from_number(number);
        let found = match found {
            Some(found) => self.get()?.peer(found),
            None => None,
        };
        let missing =
            || Error::new(ErrorKind::NotFound, "peer", format!("no peer with number {number} is connected"));
        found.map(Peer::new).ok_or_else(missing).into_python()
    }

    /// The notifications that peers deliver to this fabric. It must have been opened with `notifications`.
    fn notifications(&self) -> PyResult<Notifications> {
        self.get()?.notifications().into_python().map(Notifications::new)
    }

    // ---- what is known ----

    /// The opened transports, in order of preference.
    fn transports<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let row = |transport: multirail::TransportInfo| {
            let row = PyDict::new(py);
            row.set_item("label", &transport.label)?;
            row.set_item("backend", transport.backend)?;
            row.set_item("devices", transport.devices.iter().map(|device| &device.name).collect::<Vec<_>>())?;
            Ok(row)
        };
        self.get()?.transports().into_iter().map(row).collect()
    }

    /// The counters of every rail, since the fabric was opened.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let row = |rail: multirail::RailCounters| {
            let row = PyDict::new(py);
            row.set_item("transport", &rail.transport)?;
            row.set_item("backend", &rail.backend)?;
            row.set_item("rail", rail.rail)?;
            row.set_item("device", &rail.device)?;
            let numbers = [
                ("posts", rail.posts),
                ("doorbells", rail.doorbells),
                ("bytes", rail.bytes),
                ("completions", rail.completions),
                ("errors", rail.errors),
                ("queue_full", rail.queue_full),
                ("retries", rail.retries),
                ("grant_waits", rail.grant_waits),
                ("direct", rail.direct),
                ("direct_bytes", rail.direct_bytes),
                ("taken_over", rail.taken_over),
                ("replayed", rail.replayed),
                ("replayed_bytes", rail.replayed_bytes),
                ("paths_broken", rail.paths_broken),
                ("paths_mended", rail.paths_mended),
            ];
            numbers.into_iter().try_for_each(|(name, number)| row.set_item(name, number))?;
            Ok(row)
        };
        self.get()?.counters().into_iter().map(row).collect()
    }

    // ---- maintenance ----

    /// Takes a device out of service, for its maintenance, an operation that is over once no operation uses the device.
    /// New operations use other devices; what running ones have not posted on it goes over other devices of its rail
    /// group. It fails with `DeadlineExceeded` after the fabric's deadline, and the device stays out of service.
    fn drain_device(&self, device: &str) -> PyResult<Operation> {
        let drain = self.get()?.drain_device(device).into_python()?;
        Ok(Operation::of_task(async move { drain.await.map(|()| Value::Nothing) }))
    }

    /// Takes a device back into service. Does nothing if it is in service.
    fn restore_device(&self, device: &str) -> PyResult<()> {
        self.get()?.restore_device(device).into_python()
    }

    // ---- metrics ----

    /// Serves the fabric's counters to Prometheus at `http://ADDRESS/metrics`; port 0 takes a free one. Everyone who
    /// reaches the address may read them. Up to `peers` peers, those with the most bytes, have counters of their own: their
    /// host names and addresses become labels.
    #[pyo3(signature = (address, *, peers=0))]
    fn serve_metrics(&self, py: Python<'_>, address: &str, peers: usize) -> PyResult<MetricsServer> {
        let fabric = self.get()?;
        let start = || multirail::metrics::MetricsServer::start_with_peers(fabric, address, peers);
        let server = py.detach(start);
        Ok(MetricsServer::new(server.into_python()?))
    }

    // ---- the end ----

    /// Closes the fabric: peers see `Closed`, operations end, threads are joined. May be called twice.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let fabric = self.get()?;
        py.detach(|| fabric.close());
        Ok(())
    }

    /// As `close`, an operation.
    fn aclose(&self) -> PyResult<Operation> {
        let fabric = self.get()?.clone();
        in_thread("close", move || {
            fabric.close();
            Ok(Value::Nothing)
        })
    }

    fn __enter__(this: Py<Self>) -> Py<Self> {
        this
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<()> {
        self.close(py)
    }

    fn __aenter__(this: Py<Self>) -> Operation {
        Operation::of_task(async move { Ok(Value::lazy(|_| Ok(this.into_any()))) })
    }

    #[pyo3(signature = (*_exception))]
    fn __aexit__(&self, _exception: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<Operation> {
        self.aclose()
    }
}

impl Drop for Fabric {
    fn drop(&mut self) {
        // The last reference closes the fabric, which joins its threads.
        if let Some(fabric) = self.0.take() {
            Python::attach(|py| py.detach(|| drop(fabric)));
        }
    }
}

/// Waits for peers.
#[pyclass(frozen, module = "multirail")]
pub struct Listener {
    listener: ForkSafe<Arc<CoreListener>>,
    address: String,
    returned: Arc<Returned>,
}

impl Listener {
    fn new(listener: CoreListener) -> Self {
        let address = listener.local_addr();
        Self { address, listener: ForkSafe::new(Arc::new(listener)), returned: Arc::default() }
    }

    fn future(&self) -> PyResult<impl Future<Output = Result<Value, Error>> + Send + 'static> {
        let (listener, returned) = (Arc::clone(self.listener.get()?), Arc::clone(&self.returned));
        Ok(NextItem::new(&self.returned, async move {
            let peer = Peer::new(listener.accept().await?);
            Ok(Value::item(&returned, |py| Ok(Py::new(py, peer)?.into_any())))
        }))
    }
}

#[pymethods]
impl Listener {
    /// The address for `Fabric.connect`.
    #[getter]
    fn address(&self) -> &str {
        &self.address
    }

    /// Waits for the next peer, an operation that returns a `Peer`. `await`, `wait()` or `result()` takes the peer; one
    /// that nobody takes goes to the next `accept`.
    fn accept(&self) -> PyResult<Operation> {
        self.future().map(Operation::of_task)
    }

    fn __aiter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __anext__(&self) -> PyResult<Operation> {
        self.future().map(Operation::of_iteration)
    }

    fn __repr__(&self) -> String {
        format!("<Listener at {}>", self.address)
    }
}

fn token_of(token: &Bound<'_, PyAny>) -> PyResult<Token> {
    match token.cast::<PyBytes>() {
        Ok(bytes) => Token::new(bytes.as_bytes()).into_python(),
        Err(_) => {
            let path: PathBuf = token.extract().map_err(|_| {
                pyo3::exceptions::PyTypeError::new_err(
                    "token: give bytes, or the path of a file with the token",
                )
            })?;
            Token::from_file(path).into_python()
        }
    }
}

/// The memory for notifications; `None` for none.
fn notification_memory(given: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
    if let Ok(wanted) = given.extract::<bool>() {
        return Ok(wanted.then_some(NOTIFICATION_MEMORY));
    }
    let bytes: usize = given.extract().map_err(|_| {
        PyValueError::new_err("notifications: give True, or the bytes of memory for arriving notifications")
    })?;
    Ok(Some(bytes))
}
