//! Lists of numbers from Python: of pages, entries, offsets and addresses.

use std::sync::Arc;

use multirail::{Pages, Selection};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList};

use crate::array::{Array, Element, Place};
use crate::buffer::Buffer;

/// What a list of numbers is made into: `u32` for indices, `u64` for addresses and offsets.
pub trait Number: Copy + 'static {
    /// The bits that a number of 64 bits may not have, if it is to be one of these.
    const FORBIDDEN: u64;
    /// The largest, for errors.
    const LARGEST: &'static str;

    /// The low bits of a number.
    fn truncate(bits: u64) -> Self;
}

impl Number for u32 {
    const FORBIDDEN: u64 = !(Self::MAX as u64);
    const LARGEST: &'static str = "2^32 - 1";

    fn truncate(bits: u64) -> Self {
        bits as Self
    }
}

impl Number for u64 {
    const FORBIDDEN: u64 = 0;
    const LARGEST: &'static str = "2^64 - 1";

    fn truncate(bits: u64) -> Self {
        bits
    }
}

/// The numbers of an object: an array of integers (numpy, torch, `array.array`, anything with a buffer or DLPack), a
/// `range`, a list or a tuple. `what` names them in errors.
pub fn numbers<T: Number>(object: &Bound<'_, PyAny>, what: &str) -> PyResult<Arc<[T]>> {
    if object.cast::<PyList>().is_err() {
        let named = |error: PyErr| match error.is_instance_of::<PyValueError>(object.py()) {
            true => PyValueError::new_err(format!("{what}: {}", error.value(object.py()))),
            false => error,
        };
        // First what most users give, and without a `memoryview`: the numbers are copied before the buffer is released.
        if let Some(buffer) = Buffer::of(object)? {
            return of_array(&buffer.array(object.clone().unbind()).map_err(named)?, what);
        }
        if let Some(array) = Array::of(object).map_err(named)? {
            return of_array(&array, what);
        }
    }
    let iterator = object.try_iter().map_err(|_| {
        PyTypeError::new_err(format!(
            "{what}: {} holds no integers; give an array, a list or a range of integers",
            type_name(object)
        ))
    })?;
    iterator.map(|number| one(&number?, what)).collect()
}

/// One integer.
pub fn one<T: Number>(number: &Bound<'_, PyAny>, what: &str) -> PyResult<T> {
    if number.is_exact_instance_of::<PyInt>() {
        return bits_of(number, what);
    }
    let not_integer = |_| PyTypeError::new_err(format!("{what}: {} is not an integer", type_name(number)));
    let index = number.call_method0("__index__").map_err(not_integer)?;
    bits_of(&index, what)
}

/// The number of an `int`.
fn bits_of<T: Number>(number: &Bound<'_, PyAny>, what: &str) -> PyResult<T> {
    match number.extract::<u64>() {
        Ok(bits) if bits & T::FORBIDDEN == 0 => Ok(T::truncate(bits)),
        _ => Err(out_of_range::<T>(&number.str()?.to_string_lossy(), what)),
    }
}

fn of_array<T: Number>(array: &Array, what: &str) -> PyResult<Arc<[T]>> {
    if array.place != Place::Host {
        return Err(PyTypeError::new_err(format!(
            "{what}: the array is on a GPU; move it to the host (tensor.cpu())"
        )));
    }
    if array.shape.len() > 1 {
        let why = format!("{what}: the array has {} dimensions; one is expected", array.shape.len());
        return Err(PyValueError::new_err(why));
    }
    match (array.element, array.item) {
        (Element::Unsigned, item) if item == size_of::<T>() => Ok(elements(array, what)?.into()),
        (Element::Unsigned, 4) => convert(array, what, |number: u32| number.into()),
        (Element::Signed, 8) => convert(array, what, |number: i64| number as u64),
        (Element::Unsigned, 8) => convert(array, what, |number: u64| number),
        (Element::Signed, 4) => convert(array, what, |number: i32| number as u64),
        (Element::Signed, 2) => convert(array, what, |number: i16| number as u64),
        (Element::Unsigned, 2) => convert(array, what, |number: u16| number.into()),
        (Element::Signed, 1) => convert(array, what, |number: i8| number as u64),
        (Element::Unsigned, 1) => convert(array, what, |number: u8| number.into()),
        _ => Err(PyTypeError::new_err(format!(
            "{what}: the array's elements are not integers of the machine's byte order; convert it \
             (array.astype(\"uint32\"))"
        ))),
    }
}

/// The elements of an array, which are of type `F`. Copy them under the GIL.
fn elements<'a, F: Copy + 'static>(array: &'a Array, what: &str) -> PyResult<&'a [F]> {
    let count = array.len / size_of::<F>();
    let from = array.address as *const F;
    if count == 0 {
        return Ok(&[]);
    }
    if !from.is_aligned() {
        return Err(PyValueError::new_err(format!(
            "{what}: the array is not aligned; copy it (array.copy())"
        )));
    }
    // SAFETY: the owner keeps `len` bytes at the address, of elements of this size. They are read under the GIL; a thread
    // without it that writes at the same time changes numbers, which are checked after they were copied.
    #[allow(unsafe_code, reason = "reads the elements where the array has them")]
    unsafe {
        Ok(std::slice::from_raw_parts(from, count))
    }
}

/// Copies the numbers of an array of `F`. `bits` extends the sign of signed numbers.
fn convert<F: Copy + 'static, T: Number>(
    array: &Array,
    what: &str,
    bits: impl Fn(F) -> u64,
) -> PyResult<Arc<[T]>> {
    let numbers = elements::<F>(array, what)?;
    // Every number fits in 64 bits; only the sign of a signed one may be lost.
    let sign = if array.element == Element::Signed { 1 << 63 } else { 0 };
    let mut seen = 0;
    // Without a branch, so that the compiler copies many at a time.
    let copied: Arc<[T]> = numbers
        .iter()
        .map(|number| {
            let bits = bits(*number);
            seen |= bits;
            T::truncate(bits)
        })
        .collect();
    let forbidden = T::FORBIDDEN | sign;
    if seen & forbidden == 0 {
        return Ok(copied);
    }
    let first = numbers.iter().map(|number| bits(*number)).find(|bits| bits & forbidden != 0).unwrap_or(seen);
    let shown = if sign == 0 { first.to_string() } else { (first as i64).to_string() };
    Err(out_of_range::<T>(&shown, what))
}

#[cold]
fn out_of_range<T: Number>(number: &str, what: &str) -> PyErr {
    PyValueError::new_err(format!("{what}: {number} is out of range; 0 to {} are allowed", T::LARGEST))
}

/// The name of an object's type, for errors.
pub fn type_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "an object".into(), |name| name.to_string())
}

/// Pages of a region, with their stride and the offset of page 0, both in bytes.
pub fn pages(object: &Bound<'_, PyAny>, stride: Option<usize>, offset: usize, what: &str) -> PyResult<Pages> {
    let pages = Pages::from(numbers::<u32>(object, what)?).offset(offset);
    Ok(match stride {
        Some(stride) => pages.stride(stride),
        None => pages,
    })
}

/// The entries of a list that a transfer uses: all if `object` is `None`.
pub enum Selected {
    All,
    Some(Arc<[u32]>),
}

impl Selected {
    pub fn of(object: Option<&Bound<'_, PyAny>>, what: &str) -> PyResult<Self> {
        match object {
            None => Ok(Self::All),
            Some(object) => Ok(Self::Some(numbers(object, what)?)),
        }
    }

    pub fn selection(&self) -> Selection<'_> {
        match self {
            Self::All => (..).into(),
            Self::Some(indices) => (&indices[..]).into(),
        }
    }
}
