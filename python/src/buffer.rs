//! The buffer protocol of CPython.
//!
//! It joined the limited API in CPython 3.11; the functions and the structure are the same in 3.10 ("Buffer Protocol" in
//! the C API's documentation). So they are declared here, and one module serves 3.10 and later.
#![allow(unsafe_code, reason = "calls CPython, and reads the structure that it fills")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::slice;

use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::array::{Array, Element, Place, check_contiguous};

/// `PyBUF_FULL_RO`: shape, strides and format, and a read-only buffer is good enough (CPython's `pybuffer.h`).
const FULL_READ_ONLY: c_int = 0x0100 | 0x0010 | 0x0008 | 0x0004;

/// `Py_buffer` of CPython's `pybuffer.h`.
#[repr(C)]
struct RawBuffer {
    buf: *mut c_void,
    obj: *mut ffi::PyObject,
    len: isize,
    itemsize: isize,
    readonly: c_int,
    ndim: c_int,
    format: *const c_char,
    shape: *const isize,
    strides: *const isize,
    suboffsets: *const isize,
    internal: *mut c_void,
}

unsafe extern "C" {
    fn PyObject_CheckBuffer(object: *mut ffi::PyObject) -> c_int;
    fn PyObject_GetBuffer(object: *mut ffi::PyObject, view: *mut RawBuffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut RawBuffer);
}

/// The array of an object that exports a buffer; `None` if it exports none.
///
/// The owner is a `memoryview`. While it lives, the object may not move or free the bytes.
pub fn array(object: &Bound<'_, PyAny>) -> PyResult<Option<Array>> {
    let py = object.py();
    // SAFETY: the object is alive, and this thread holds the GIL.
    if unsafe { PyObject_CheckBuffer(object.as_ptr()) } == 0 {
        return Ok(None);
    }
    // SAFETY: as above. The call returns a new reference, or null and an exception.
    let owner = unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyMemoryView_FromObject(object.as_ptr())) };
    let owner = match owner {
        Ok(owner) => owner,
        // torch and others export a buffer for some of their objects only, numpy none for 8-bit floats.
        Err(error)
            if error.is_instance_of::<PyBufferError>(py) || error.is_instance_of::<PyValueError>(py) =>
        {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    let mut view = RawBuffer {
        buf: std::ptr::null_mut(),
        obj: std::ptr::null_mut(),
        len: 0,
        itemsize: 0,
        readonly: 0,
        ndim: 0,
        format: std::ptr::null(),
        shape: std::ptr::null(),
        strides: std::ptr::null(),
        suboffsets: std::ptr::null(),
        internal: std::ptr::null_mut(),
    };
    // SAFETY: `view` has the layout that CPython fills. It is released below.
    if unsafe { PyObject_GetBuffer(owner.as_ptr(), &raw mut view, FULL_READ_ONLY) } != 0 {
        return Err(PyErr::fetch(py));
    }
    let array = describe(&view, owner.unbind());
    // SAFETY: `view` was filled above, and is used no more. `owner` keeps a buffer of its own.
    unsafe { PyBuffer_Release(&raw mut view) };
    array.map(Some)
}

/// What a buffer holds.
fn describe(view: &RawBuffer, owner: Py<PyAny>) -> PyResult<Array> {
    if !view.suboffsets.is_null() {
        let why =
            "the buffer holds pointers to its bytes (suboffsets), not the bytes; copy it into one that does";
        return Err(PyValueError::new_err(why));
    }
    let dimensions = view.ndim.max(0) as usize;
    let item = view.itemsize.max(1) as usize;
    let numbers = |from: *const isize| match from.is_null() {
        true => &[][..],
        // SAFETY: CPython has filled it with `ndim` numbers, which live until the buffer is released.
        false => unsafe { slice::from_raw_parts(from, dimensions) },
    };
    let shape: Vec<usize> = numbers(view.shape).iter().map(|length| (*length).max(0) as usize).collect();
    // Without strides, the elements follow each other.
    if !view.strides.is_null() {
        check_contiguous(&shape, numbers(view.strides), item)?;
    }
    let format = match view.format.is_null() {
        true => c"B",
        // SAFETY: a format is a string of C, which lives until the buffer is released.
        false => unsafe { CStr::from_ptr(view.format) },
    };
    // Python's `struct`: an order of bytes may stand before the type. All supported machines are little-endian.
    let element = match format.to_bytes() {
        [b'b' | b'h' | b'i' | b'l' | b'q' | b'n']
        | [b'<' | b'=' | b'@', b'b' | b'h' | b'i' | b'l' | b'q'] => Element::Signed,
        [b'B' | b'H' | b'I' | b'L' | b'Q' | b'N']
        | [b'<' | b'=' | b'@', b'B' | b'H' | b'I' | b'L' | b'Q'] => Element::Unsigned,
        _ => Element::Other,
    };
    Ok(Array {
        address: view.buf as usize,
        len: view.len.max(0) as usize,
        item,
        element,
        is_read_only: view.readonly != 0,
        place: Place::Host,
        shape,
        owner,
    })
}
