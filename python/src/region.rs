//! Registered memory: ours, and that of peers.

use std::any::Any;
use std::sync::Arc;

use multirail::cuda::{CudaMemory, Device};
use multirail::spi::{HostRange, Memory, MemoryKind};
use multirail::{Catalogue as CoreCatalogue, Region as CoreRegion, RemoteRegion as CoreRemoteRegion};
use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::array::{Array, Place};
use crate::dlpack;
use crate::errors::IntoPython;
use crate::fork::ForkSafe;
use crate::indices::type_name;
use crate::operation::{Operation, submitted};
use crate::options::{access_name, with_bytes};

/// Copies of more bytes than this release the GIL. To release and retake it costs about as much as to copy 4 KiB.
pub const COPY_WITH_GIL: usize = 16 << 10;

/// Memory of this process that the fabric has registered.
///
/// It keeps the object whose memory it is. The bytes may change while peers write them. If the memory is on the host,
/// `numpy.asarray(region)` and `memoryview(region.as_buffer())` are views of it; `as_torch()` and DLPack also serve
/// GPUs.
#[pyclass(frozen, weakref, module = "multirail")]
pub struct Region {
    region: ForkSafe<CoreRegion>,
    /// The number of the GPU that has the bytes; `None` for the host.
    device: Option<u32>,
}

/// Keeps the object that owns registered memory.
struct Owner(#[expect(dead_code, reason = "only its drop matters")] Py<PyAny>);

impl Region {
    pub fn new(region: CoreRegion, device: Option<u32>) -> Self {
        Self { region: ForkSafe::new(region), device }
    }

    #[inline]
    pub fn get(&self) -> PyResult<&CoreRegion> {
        self.region.get()
    }

    /// The bytes from `offset` on; all of them if `length` is `None`.
    pub fn range(&self, offset: usize, length: Option<usize>) -> PyResult<std::ops::Range<usize>> {
        let length = match length {
            Some(length) => length,
            None => self.get()?.len().saturating_sub(offset),
        };
        let end = offset.checked_add(length);
        Ok(offset
            ..end.ok_or_else(|| PyValueError::new_err("offset + length is larger than the address space"))?)
    }

    fn host_address(&self) -> PyResult<usize> {
        match self.device {
            None => Ok(self.get()?.as_ptr() as usize),
            Some(device) => Err(PyTypeError::new_err(format!(
                "the region is on GPU {device}; use as_torch(), or any library that takes __cuda_array_interface__ or DLPack"
            ))),
        }
    }
}

#[pymethods]
impl Region {
    fn __len__(&self) -> PyResult<usize> {
        Ok(self.get()?.len())
    }

    /// The address of the first byte.
    #[getter]
    fn address(&self) -> PyResult<usize> {
        Ok(self.get()?.as_ptr() as usize)
    }

    /// What peers may do with the bytes: "local" (nothing), "read", "write" or "all".
    #[getter]
    fn access(&self) -> PyResult<&'static str> {
        Ok(access_name(self.get()?.access()))
    }

    /// "cpu", or "cuda:0" with the number of the GPU.
    #[getter]
    fn device(&self) -> String {
        self.device.map_or_else(|| "cpu".into(), |device| format!("cuda:{device}"))
    }

    /// The bytes that a peer needs to use the region: give them to `Peer.import_region`, by any means.
    fn descriptor<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &self.get()?.descriptor().to_bytes()))
    }

    /// Takes the region back from all peers. Once the operation is over, no byte of a peer can land or be read. The
    /// region may be used on this side until it is dropped.
    fn revoke(&self, py: Python<'_>) -> PyResult<Operation> {
        let region = self.get()?;
        submitted(py.detach(|| region.revoke()))
    }

    /// Copies bytes into the region, from byte `offset` on. `data` is bytes, or anything with a buffer on the host.
    #[pyo3(signature = (data, offset=0))]
    fn write_bytes(&self, py: Python<'_>, data: &Bound<'_, PyAny>, offset: usize) -> PyResult<()> {
        let region = self.get()?;
        with_bytes(data, "data", |bytes| match bytes.len() <= COPY_WITH_GIL {
            true => region.copy_in(offset, bytes),
            false => py.detach(|| region.copy_in(offset, bytes)),
        })?
        .into_python()
    }

    /// A copy of `length` bytes of the region, from byte `offset` on; up to its end if `length` is `None`.
    #[pyo3(signature = (offset=0, length=None))]
    fn read_bytes<'py>(
        &self,
        py: Python<'py>,
        offset: usize,
        length: Option<usize>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let (region, range) = (self.get()?, self.range(offset, length)?);
        // Checked before the bytes are allocated: a wrong length may be huge.
        if range.end > region.len() {
            region.copy_out(range.end, &mut [0]).into_python()?;
        }
        PyBytes::new_with(py, range.len(), |into| {
            py.detach(|| region.copy_out(range.start, into)).into_python()
        })
    }

    /// The bytes as a numpy array of uint8, not copied. The array keeps the region.
    fn as_numpy<'py>(this: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        this.get().host_address()?;
        this.py().import("numpy")?.call_method1("asarray", (this,))
    }

    /// The bytes as a torch tensor of uint8, not copied, on the host or on the region's GPU. The tensor keeps the
    /// region.
    fn as_torch<'py>(this: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        this.py().import("torch")?.getattr("utils")?.getattr("dlpack")?.call_method1("from_dlpack", (this,))
    }

    /// The bytes as an object with the buffer protocol (of ctypes), not copied, for `memoryview`. The object keeps the
    /// region.
    fn as_buffer<'py>(this: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let (address, len) = (this.get().host_address()?, this.get().get()?.len());
        let ctypes = this.py().import("ctypes")?;
        let buffer = ctypes.getattr("c_ubyte")?.mul(len)?.call_method1("from_address", (address,))?;
        buffer.setattr("_region", this)?;
        Ok(buffer)
    }

    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        match self.device {
            None => self.interface(py),
            Some(_) => Err(pyo3::exceptions::PyAttributeError::new_err("the region is on a GPU")),
        }
    }

    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        match self.device {
            Some(_) => self.interface(py),
            None => Err(pyo3::exceptions::PyAttributeError::new_err("the region is on the host")),
        }
    }

    fn __dlpack_device__(&self) -> (i32, u32) {
        self.device.map_or((1, 0), |device| (2, device))
    }

    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        this: &Bound<'py, Self>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<&Bound<'py, PyAny>>,
        dl_device: Option<(i32, u32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        // Whoever writes the region synchronises; an older version serves every consumer.
        let _ = (stream, max_version);
        if copy == Some(true) || dl_device.is_some_and(|device| device != this.get().__dlpack_device__()) {
            return Err(PyBufferError::new_err("a region is handed out where it is, not copied"));
        }
        let region = this.get().get()?;
        dlpack::export(this, region.as_ptr() as usize, region.len(), this.get().device)
    }

    fn __repr__(&self) -> PyResult<String> {
        let region = self.get()?;
        Ok(format!(
            "<Region of {} bytes at {:p} on {}, access {:?}>",
            region.len(),
            region.as_ptr(),
            self.device(),
            access_name(region.access())
        ))
    }
}

impl Region {
    fn interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let region = self.get()?;
        let interface = PyDict::new(py);
        interface.set_item("shape", PyTuple::new(py, [region.len()])?)?;
        interface.set_item("typestr", "|u1")?;
        interface.set_item("data", (region.as_ptr() as usize, false))?;
        interface.set_item("version", 3)?;
        Ok(interface)
    }
}

/// A region of a peer, ready to be used in transfers: `Peer.import_region` and others return it.
#[pyclass(frozen, weakref, module = "multirail")]
pub struct RemoteRegion(ForkSafe<CoreRemoteRegion>);

impl RemoteRegion {
    pub fn new(region: CoreRemoteRegion) -> Self {
        Self(ForkSafe::new(region))
    }

    #[inline]
    pub fn get(&self) -> PyResult<&CoreRemoteRegion> {
        self.0.get()
    }
}

#[pymethods]
impl RemoteRegion {
    fn __len__(&self) -> PyResult<usize> {
        Ok(self.get()?.len())
    }

    /// What this side may do: "local" (nothing), "read", "write" or "all".
    #[getter]
    fn access(&self) -> PyResult<&'static str> {
        Ok(access_name(self.get()?.access()))
    }

    /// The path that bytes take to the region, in a few words for people.
    #[getter]
    fn path(&self) -> PyResult<&'static str> {
        Ok(self.get()?.path())
    }

    fn __repr__(&self) -> PyResult<String> {
        let region = self.get()?;
        Ok(format!("<RemoteRegion of {} bytes, access {:?}>", region.len(), access_name(region.access())))
    }
}

/// Regions of this process, to be found by address.
///
/// Its bytes tell a peer of all of them at once: `Peer.import_catalogue(bytes)`.
#[pyclass(frozen, module = "multirail")]
pub struct Catalogue(pub ForkSafe<CoreCatalogue>);

#[pymethods]
impl Catalogue {
    #[new]
    fn new(regions: Vec<Bound<'_, Region>>) -> PyResult<Self> {
        let regions: Vec<_> =
            regions.iter().map(|region| region.get().get().cloned()).collect::<PyResult<_>>()?;
        Ok(Self(ForkSafe::new(CoreCatalogue::new(regions).into_python()?)))
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(self.0.get()?.regions().len())
    }

    /// The bytes for `Peer.import_catalogue`. They hold the addresses of the regions in this process.
    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let catalogue = self.0.get()?;
        Ok(PyBytes::new(py, &py.detach(|| catalogue.to_bytes())))
    }
}

/// The memory that an object owns, and the number of its GPU. `object` is anything with an array, or a tuple (address,
/// length) or (address, length, device).
pub fn memory_of(
    object: &Bound<'_, PyAny>,
    owner: Option<Bound<'_, PyAny>>,
) -> PyResult<(Arc<dyn Memory>, Option<u32>)> {
    let py = object.py();
    let (address, len, is_cuda, kept) = match object.cast::<PyTuple>() {
        Ok(tuple) => {
            let (address, len, is_cuda) = of_tuple(tuple)?;
            (address, len, is_cuda, owner.map_or_else(|| py.None(), Bound::unbind))
        }
        Err(_) => {
            let array = Array::of(object)?.ok_or_else(|| not_memory(object))?;
            if array.is_read_only {
                return Err(PyValueError::new_err(format!(
                    "the memory of this {} is read-only, and transfers may write registered memory; copy it (bytearray(...), array.copy())",
                    type_name(object)
                )));
            }
            (array.address, array.len, array.place == Place::Cuda, array.owner)
        }
    };
    if len == 0 {
        return Err(PyValueError::new_err(
            "there are no bytes to register: the array is empty, or the length is 0",
        ));
    }
    let owner: Arc<dyn Any + Send + Sync> = Arc::new(Owner(kept));
    // SAFETY: the object that the user gave keeps the bytes; without an owner, the user promises to keep them.
    #[allow(unsafe_code, reason = "memory that Python code owns")]
    let memory: (Arc<dyn Memory>, _) = unsafe {
        match is_cuda {
            false => (Arc::new(HostRange::of_pointer(address, len, owner).into_python()?), None),
            true => {
                let memory = CudaMemory::of_pointer(address as u64, len, owner).into_python()?;
                let device = device_of(memory.kind());
                (Arc::new(memory), device)
            }
        }
    };
    Ok(memory)
}

/// New memory on a GPU.
pub fn cuda_memory(device: u32, len: usize) -> PyResult<(Arc<dyn Memory>, Option<u32>)> {
    let memory = Device::open(device).and_then(|device| CudaMemory::new(&device, len)).into_python()?;
    Ok((Arc::new(memory), Some(device)))
}

fn device_of(kind: MemoryKind) -> Option<u32> {
    match kind {
        MemoryKind::Cuda { device } => Some(device),
        _ => None,
    }
}

fn of_tuple(tuple: &Bound<'_, PyTuple>) -> PyResult<(usize, usize, bool)> {
    let wrong = || {
        PyTypeError::new_err(
            "a tuple must be (address, length) or (address, length, device), the device \"cpu\" or \"cuda:N\"",
        )
    };
    let (address, len, device) = match tuple.len() {
        2 => (tuple.get_item(0)?, tuple.get_item(1)?, None),
        3 => (tuple.get_item(0)?, tuple.get_item(1)?, Some(tuple.get_item(2)?)),
        _ => return Err(wrong()),
    };
    let is_cuda = match device {
        None => false,
        Some(device) => cuda_number(&device.str()?.to_string())?.is_some(),
    };
    let address = crate::indices::one::<u64>(&address, "address")?;
    let len = crate::indices::one::<u64>(&len, "length")?;
    Ok((address as usize, len as usize, is_cuda))
}

/// The number of the GPU in "cuda:N"; `None` for "cpu".
pub fn cuda_number(device: &str) -> PyResult<Option<u32>> {
    let number = match device {
        "cpu" => return Ok(None),
        "cuda" => Some(0),
        other => other.strip_prefix("cuda:").and_then(|number| number.parse().ok()),
    };
    let unknown =
        || PyValueError::new_err(format!("device: {device:?} is unknown; use \"cpu\" or \"cuda:N\""));
    number.map(Some).ok_or_else(unknown)
}

fn not_memory(object: &Bound<'_, PyAny>) -> PyErr {
    PyTypeError::new_err(format!(
        "{} has no memory to register: give an array (numpy, torch, anything with a buffer, DLPack or \
         __cuda_array_interface__), or (address, length, device)",
        type_name(object)
    ))
}
