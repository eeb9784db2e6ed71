//! Memory that belongs to a Python object: where it is, what lies in it, and what keeps it.

use pyo3::exceptions::{PyException, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::{buffer, dlpack};

/// What the elements of an array are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    Signed,
    Unsigned,
    Other,
}

/// Where an array's memory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Host,
    Cuda,
}

/// A contiguous array of a Python object.
pub struct Array {
    pub address: usize,
    /// In bytes.
    pub len: usize,
    /// The bytes of one element.
    pub item: usize,
    pub element: Element,
    pub is_read_only: bool,
    pub place: Place,
    /// The lengths of the dimensions.
    pub shape: Vec<usize>,
    /// Keeps the memory where it is while it lives.
    pub owner: Py<PyAny>,
}

impl Array {
    /// The array of any object that has one: by `__cuda_array_interface__`, the buffer protocol, DLPack or
    /// `__array_interface__`, in this order. `None` if the object has none of them.
    ///
    /// # Errors
    /// `ValueError` if the array is not contiguous.
    pub fn of(object: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        if let Some(interface) = interface(object, "__cuda_array_interface__")? {
            return Self::of_interface(object, &interface, Place::Cuda).map(Some);
        }
        if let Some(array) = buffer::array(object)? {
            return Ok(Some(array));
        }
        if let Some(array) = dlpack::array(object)? {
            return Ok(Some(array));
        }
        match interface(object, "__array_interface__")? {
            Some(interface) => Self::of_interface(object, &interface, Place::Host).map(Some),
            None => Ok(None),
        }
    }

    /// Reads `__array_interface__` (numpy's documentation, "The array interface protocol", version 3) or
    /// `__cuda_array_interface__` (Numba's documentation, version 3), which has the same fields.
    fn of_interface(
        object: &Bound<'_, PyAny>,
        interface: &Bound<'_, PyDict>,
        place: Place,
    ) -> PyResult<Self> {
        let field = |name: &str| {
            let missing = || PyTypeError::new_err(format!("the object's array interface has no {name:?}"));
            interface.get_item(name)?.ok_or_else(missing)
        };
        let shape: Vec<usize> = field("shape")?.extract()?;
        let kind: String = field("typestr")?.extract()?;
        let data = field("data")?;
        let unusable =
            || PyTypeError::new_err("the object's array interface has no address: `data` must be a tuple");
        let data = data.cast::<PyTuple>().map_err(|_| unusable())?;
        let (address, is_read_only): (usize, bool) = data.extract()?;
        let item = kind.get(2..).and_then(|digits| digits.parse().ok());
        let item: usize =
            item.ok_or_else(|| PyTypeError::new_err(format!("the element type {kind:?} is not known")))?;
        if let Some(mask) = interface.get_item("mask")?
            && !mask.is_none()
        {
            return Err(PyTypeError::new_err("the array is masked; register the array that it masks"));
        }
        if let Some(strides) = interface.get_item("strides")?
            && !strides.is_none()
        {
            let strides: Vec<isize> = strides.extract()?;
            check_contiguous(&shape, &strides, item)?;
        }
        let element = match kind.as_bytes() {
            [b'>', ..] if item > 1 => Element::Other,
            [_, b'i', ..] => Element::Signed,
            [_, b'u', ..] => Element::Unsigned,
            _ => Element::Other,
        };
        let len = bytes_of(&shape, item)?;
        check_address(address, len)?;
        Ok(Self { address, len, item, element, is_read_only, place, shape, owner: object.clone().unbind() })
    }
}

/// A dictionary that an object may have under this name.
fn interface<'py>(object: &Bound<'py, PyAny>, name: &str) -> PyResult<Option<Bound<'py, PyDict>>> {
    match object.getattr_opt(name) {
        Ok(Some(interface)) => Ok(interface.cast_into::<PyDict>().ok()),
        Ok(None) => Ok(None),
        // torch raises a TypeError for a tensor on another device, a KeyError for one of 8-bit floats. DLPack may serve
        // it, or has the better error.
        Err(error) if error.is_instance_of::<PyException>(object.py()) && object.hasattr("__dlpack__")? => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// The bytes of an array.
pub fn bytes_of(shape: &[usize], item: usize) -> PyResult<usize> {
    let bytes = shape.iter().try_fold(item, |bytes, dimension| bytes.checked_mul(*dimension));
    bytes.ok_or_else(|| PyValueError::new_err("the array is larger than the address space"))
}

/// Refuses bytes at no address.
pub fn check_address(address: usize, len: usize) -> PyResult<()> {
    match address == 0 && len > 0 {
        true => {
            Err(PyValueError::new_err("the array says that its bytes are at address 0; it has no memory"))
        }
        false => Ok(()),
    }
}

/// Refuses an array whose elements do not follow each other in C order. `strides` are in bytes.
pub fn check_contiguous(shape: &[usize], strides: &[isize], item: usize) -> PyResult<()> {
    if shape.len() != strides.len() {
        let why = format!("the array has {} dimensions and {} strides", shape.len(), strides.len());
        return Err(PyValueError::new_err(why));
    }
    if shape.contains(&0) {
        return Ok(());
    }
    let mut expected = item as isize;
    for (dimension, stride) in shape.iter().zip(strides).rev() {
        if *dimension > 1 && *stride != expected {
            return Err(PyValueError::new_err(
                "the array is not contiguous in C order; make a copy that is (numpy.ascontiguousarray, tensor.contiguous()), or \
                 use the array that it is a view of",
            ));
        }
        expected = expected.saturating_mul(*dimension as isize);
    }
    Ok(())
}

impl Array {
    /// The bytes of an array on the host, as long as nobody else writes them: copy them under the GIL.
    pub fn bytes(&self) -> &[u8] {
        if self.len == 0 || self.place != Place::Host {
            return &[];
        }
        // SAFETY: `owner` keeps the bytes. The callers copy them under the GIL.
        #[allow(unsafe_code, reason = "reads the bytes where the array has them")]
        unsafe {
            std::slice::from_raw_parts(self.address as *const u8, self.len)
        }
    }
}
