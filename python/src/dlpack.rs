//! DLPack: how torch, JAX, CuPy and numpy hand over arrays (dmlc/dlpack, `dlpack.h`, and the Python specification in its
//! documentation).
#![allow(unsafe_code, reason = "reads and fills the structures of DLPack")]

use std::ffi::{CStr, c_void};
use std::slice;

use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::array::{Array, Element, Place, bytes_of, check_address, check_contiguous};
use crate::region::Region;

/// The name of a capsule that nobody has consumed.
const NAME: &CStr = c"dltensor";

/// `kDLCPU`.
const CPU: i32 = 1;
/// `kDLCUDA`.
const CUDA: i32 = 2;
/// `kDLCUDAHost`: host memory that CUDA has locked.
const CUDA_HOST: i32 = 3;

/// `DLDataType`. Codes: 0 signed, 1 unsigned, 2 float.
#[repr(C)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct ManagedTensor {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut ManagedTensor)>,
}

/// The array of an object that has `__dlpack__`; `None` if it has not.
///
/// The owner is the capsule. Nobody consumes it, so it frees what it holds when it is dropped.
pub fn array(object: &Bound<'_, PyAny>) -> PyResult<Option<Array>> {
    let py = object.py();
    let Ok(Some(device)) = object.getattr_opt("__dlpack_device__") else { return Ok(None) };
    let (kind, _number): (i32, i32) = device.call0()?.extract()?;
    let keywords = PyDict::new(py);
    let place = match kind {
        CPU | CUDA_HOST => Place::Host,
        CUDA => {
            // The library does not read the bytes here, so the producer need not wait for a stream.
            keywords.set_item("stream", -1)?;
            Place::Cuda
        }
        other => {
            let why = format!(
                "the array is on a device of DLPack's kind {other}; only host memory and CUDA are known"
            );
            return Err(PyTypeError::new_err(why));
        }
    };
    let capsule = object.call_method("__dlpack__", (), Some(&keywords))?;
    // SAFETY: the object is alive. The call checks that it is a capsule of this name.
    let tensor = unsafe { ffi::PyCapsule_GetPointer(capsule.as_ptr(), NAME.as_ptr()) };
    if tensor.is_null() {
        return Err(PyErr::fetch(py));
    }
    // SAFETY: a capsule of this name holds a `DLManagedTensor`, which lives as long as the capsule.
    let tensor = unsafe { &(*tensor.cast::<ManagedTensor>()).tensor };
    describe(tensor, place, capsule.unbind()).map(Some)
}

fn describe(tensor: &Tensor, place: Place, owner: Py<PyAny>) -> PyResult<Array> {
    let dimensions = tensor.ndim.max(0) as usize;
    let numbers = |from: *const i64| match from.is_null() || dimensions == 0 {
        true => Vec::new(),
        // SAFETY: DLPack's arrays have one number per dimension.
        false => unsafe { slice::from_raw_parts(from, dimensions) }.to_vec(),
    };
    let shape: Vec<usize> = numbers(tensor.shape).iter().map(|length| (*length).max(0) as usize).collect();
    let bits = usize::from(tensor.dtype.bits) * usize::from(tensor.dtype.lanes);
    if bits == 0 || bits % 8 != 0 {
        let why = format!("elements of {bits} bits are not whole bytes; view the array as bytes first");
        return Err(PyTypeError::new_err(why));
    }
    let item = bits / 8;
    let strides: Vec<isize> = numbers(tensor.strides)
        .iter()
        .map(|stride| (*stride as isize).saturating_mul(item as isize))
        .collect();
    // Without strides, the elements follow each other.
    if !tensor.strides.is_null() {
        check_contiguous(&shape, &strides, item)?;
    }
    let element = match (tensor.dtype.code, tensor.dtype.lanes) {
        (0, 1) => Element::Signed,
        (1, 1) => Element::Unsigned,
        _ => Element::Other,
    };
    let address = (tensor.data as usize).checked_add(tensor.byte_offset as usize);
    let address = address.ok_or_else(|| PyValueError::new_err("the array ends beyond the address space"))?;
    let len = bytes_of(&shape, item)?;
    check_address(address, len)?;
    Ok(Array { address, len, item, element, is_read_only: false, place, shape, owner })
}

/// What a tensor that we hand out needs: its numbers, and the region.
struct Export {
    tensor: ManagedTensor,
    shape: [i64; 1],
    _region: Py<Region>,
}

/// A capsule with the bytes of a region, which it keeps alive. `device` is the number of the GPU, `None` for the host.
pub fn export<'py>(
    region: &Bound<'py, Region>,
    address: usize,
    len: usize,
    device: Option<u32>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = region.py();
    let (device_type, device_id) = device.map_or((CPU, 0), |device| (CUDA, device as i32));
    let dtype = DataType { code: 1, bits: 8, lanes: 1 };
    let tensor = Tensor {
        data: address as *mut c_void,
        device_type,
        device_id,
        ndim: 1,
        dtype,
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    let shape =
        i64::try_from(len).map_err(|_| PyBufferError::new_err("the region is too large for DLPack"))?;
    let managed = ManagedTensor { tensor, context: std::ptr::null_mut(), deleter: Some(delete) };
    let export = Box::new(Export { tensor: managed, shape: [shape], _region: region.clone().unbind() });
    let export = Box::into_raw(export);
    // SAFETY: `export` is a valid box, which only `delete` frees.
    let managed = unsafe {
        (*export).tensor.tensor.shape = (*export).shape.as_mut_ptr();
        (*export).tensor.context = export.cast();
        &raw mut (*export).tensor
    };
    // SAFETY: the name lives for ever, and the destructor has the type that CPython asks for.
    let capsule = unsafe { ffi::PyCapsule_New(managed.cast(), NAME.as_ptr(), Some(drop_capsule)) };
    // SAFETY: the call returns a new reference, or null and an exception.
    unsafe { Bound::from_owned_ptr_or_err(py, capsule) }.inspect_err(|_| {
        // SAFETY: nobody else has the tensor.
        unsafe { delete(managed) }
    })
}

/// Called once by whoever consumes the tensor, in any thread.
unsafe extern "C" fn delete(managed: *mut ManagedTensor) {
    // SAFETY: `context` is the box that `export` has made, and nobody frees it twice.
    let export = unsafe { Box::from_raw((*managed).context.cast::<Export>()) };
    // An interpreter that exits gives the GIL to nobody: then the reference stays, and the process ends with it.
    let mut export = Some(export);
    Python::try_attach(|_| drop(export.take()));
}

/// A capsule that nobody has consumed frees its tensor.
unsafe extern "C" fn drop_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: CPython calls this with the capsule, while it is alive, and with the GIL. A consumer has renamed it.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, NAME.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, NAME.as_ptr()).cast());
        }
    }
}
