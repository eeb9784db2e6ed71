//! Lists of numbers from Python: of pages, entries, offsets and addresses.

use multirail::{Pages, Selection};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::array::{Array, Element, Place};

/// The numbers of an object: an array of integers (numpy, torch, `array.array`, anything with a buffer or DLPack), a
/// `range`, a list or a tuple. `what` names them in errors.
pub fn numbers<T: TryFrom<i128> + Copy + 'static>(object: &Bound<'_, PyAny>, what: &str) -> PyResult<Vec<T>> {
    if let Ok(list) = object.cast::<pyo3::types::PyList>() {
        return list.iter().map(|number| one(&number, what)).collect();
    }
    if let Some(array) = Array::of(object)? {
        return of_array(&array, what);
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
pub fn one<T: TryFrom<i128>>(number: &Bound<'_, PyAny>, what: &str) -> PyResult<T> {
    let index = number.call_method0("__index__").map_err(|_| {
        PyTypeError::new_err(format!("{what}: {} is not an integer", type_name(number)))
    })?;
    let number: i128 = index.extract::<i64>().map(i128::from).or_else(|_| index.extract::<u64>().map(i128::from)).map_err(
        |_| PyValueError::new_err(format!("{what}: {index} does not fit in 64 bits")),
    )?;
    T::try_from(number).map_err(|_| out_of_range::<T>(number, what))
}

fn of_array<T: TryFrom<i128> + Copy + 'static>(array: &Array, what: &str) -> PyResult<Vec<T>> {
    if array.place != Place::Host {
        return Err(PyTypeError::new_err(format!("{what}: the array is on a GPU; move it to the host (tensor.cpu())")));
    }
    if array.shape.len() > 1 {
        let why = format!("{what}: the array has {} dimensions; one is expected", array.shape.len());
        return Err(PyValueError::new_err(why));
    }
    match (array.element, array.item) {
        (Element::Unsigned, 4) => convert::<u32, T>(array, what),
        (Element::Signed, 8) => convert::<i64, T>(array, what),
        (Element::Unsigned, 8) => convert::<u64, T>(array, what),
        (Element::Signed, 4) => convert::<i32, T>(array, what),
        (Element::Signed, 2) => convert::<i16, T>(array, what),
        (Element::Unsigned, 2) => convert::<u16, T>(array, what),
        (Element::Signed, 1) => convert::<i8, T>(array, what),
        (Element::Unsigned, 1) => convert::<u8, T>(array, what),
        _ => Err(PyTypeError::new_err(format!(
            "{what}: the array's elements are not integers of the machine's byte order; convert it (array.astype(\"uint32\"))"
        ))),
    }
}

/// Copies the numbers of an array of `F`.
fn convert<F, T>(array: &Array, what: &str) -> PyResult<Vec<T>>
where
    F: Copy + Into<i128> + 'static,
    T: TryFrom<i128> + Copy + 'static,
{
    let count = array.len / size_of::<F>();
    let from = array.address as *const F;
    if count == 0 {
        return Ok(Vec::new());
    }
    if !from.is_aligned() {
        return Err(PyValueError::new_err(format!("{what}: the array is not aligned; copy it (array.copy())")));
    }
    // SAFETY: the owner keeps `len` bytes at the address, of elements of this size. They are read under the GIL; a thread
    // without it that writes at the same time changes numbers, which are checked after they were copied.
    #[allow(unsafe_code, reason = "reads the elements where the array has them")]
    let numbers = unsafe { std::slice::from_raw_parts(from, count) };
    let mut converted = Vec::with_capacity(count);
    for number in numbers {
        let number: i128 = (*number).into();
        converted.push(T::try_from(number).map_err(|_| out_of_range::<T>(number, what))?);
    }
    Ok(converted)
}

#[cold]
fn out_of_range<T>(number: i128, what: &str) -> PyErr {
    let most = if size_of::<T>() == 4 { "2^32 - 1" } else { "2^64 - 1" };
    PyValueError::new_err(format!("{what}: {number} is out of range; 0 to {most} are allowed"))
}

/// The name of an object's type, for errors.
pub fn type_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "an object".into(), |name| name.to_string())
}

/// Pages of a region, with their stride and the offset of page 0, both in bytes.
pub fn pages(
    object: &Bound<'_, PyAny>,
    stride: Option<usize>,
    offset: usize,
    what: &str,
) -> PyResult<Pages> {
    let pages = Pages::from(std::sync::Arc::<[u32]>::from(numbers::<u32>(object, what)?)).offset(offset);
    Ok(match stride {
        Some(stride) => pages.stride(stride),
        None => pages,
    })
}

/// The entries of a list that a transfer uses: all if `object` is `None`.
pub enum Selected {
    All,
    Some(Vec<u32>),
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
