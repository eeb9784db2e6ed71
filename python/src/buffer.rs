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

/// The buffer of an object, which is released when this is dropped. Until then the object may not move or free the bytes.
///
/// It stays in the thread that has the GIL: the pointers in it are neither `Send` nor `Sync`.
pub struct Buffer {
    /// In a box, because CPython may have put pointers into the structure that point to the structure itself
    /// (`PyBuffer_FillInfo`, for `bytes` and `bytearray`).
    view: Box<RawBuffer>,
}

impl Buffer {
    /// The buffer of an object; `None` if it exports none.
    pub fn of(object: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        let py = object.py();
        // SAFETY: the object is alive, and this thread holds the GIL.
        if unsafe { PyObject_CheckBuffer(object.as_ptr()) } == 0 {
            return Ok(None);
        }
        let mut view = Box::new(RawBuffer {
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
        });
        // SAFETY: `view` has the layout that CPython fills. It is released when the value is dropped.
        if unsafe { PyObject_GetBuffer(object.as_ptr(), &raw mut *view, FULL_READ_ONLY) } == 0 {
            return Ok(Some(Self { view }));
        }
        match PyErr::fetch(py) {
            // torch and others export a buffer for some of their objects only, numpy none for 8-bit floats.
            error
                if error.is_instance_of::<PyBufferError>(py) || error.is_instance_of::<PyValueError>(py) =>
            {
                Ok(None)
            }
            error => Err(error),
        }
    }

    /// The array in the buffer. `owner` keeps the bytes.
    pub fn array(&self, owner: Py<PyAny>) -> PyResult<Array> {
        describe(&self.view, owner)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: `of` has filled it, in this thread, which holds the GIL.
        unsafe { PyBuffer_Release(&raw mut *self.view) };
    }
}

/// The array of an object that exports a buffer; `None` if it exports none.
///
/// The owner is a `memoryview`. While it lives, the object may not move or free the bytes.
pub fn array(object: &Bound<'_, PyAny>) -> PyResult<Option<Array>> {
    let Some(buffer) = Buffer::of(object)? else { return Ok(None) };
    // SAFETY: the object is alive, and this thread holds the GIL. The call returns a new reference, or null and an
    // exception.
    let owner =
        unsafe { Bound::from_owned_ptr_or_err(object.py(), ffi::PyMemoryView_FromObject(object.as_ptr())) };
    buffer.array(owner?.unbind()).map(Some)
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
