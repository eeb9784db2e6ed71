//! What the keyword arguments of transfers say.

use std::time::Duration;

use multirail::{
    Access, CoalescePolicy, Locality, PathPolicy, ReadOptions, SendOptions, TraceContext, WriteOptions,
};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyString};

use crate::array::{Array, Place};
use crate::errors::IntoPython;
use crate::indices::type_name;
use crate::operation::seconds;

/// The options of writes.
#[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
pub fn write_options(
    imm: Option<u32>,
    notify: Option<&Bound<'_, PyAny>>,
    deadline: Option<f64>,
    paths: Option<&Bound<'_, PyAny>>,
    cold: bool,
    coalesce: Option<&str>,
    imm_per_request: bool,
    trace: Option<&str>,
) -> PyResult<WriteOptions> {
    let mut options = WriteOptions::new();
    if imm_per_request {
        options = options.per_wr();
    }
    if let Some(bytes) = notify {
        options = options.notify(bytes_like(bytes, "notify")?);
    }
    if let Some(parent) = trace_context(trace)? {
        options = options.trace(parent);
    }
    options.imm = imm;
    (options.deadline, options.path_policy) = limits(deadline, paths)?;
    options.locality = locality(cold);
    options.coalesce = coalesce_policy(coalesce)?;
    Ok(options)
}

/// The options of reads.
pub fn read_options(
    notify: Option<&Bound<'_, PyAny>>,
    deadline: Option<f64>,
    paths: Option<&Bound<'_, PyAny>>,
    cold: bool,
    coalesce: Option<&str>,
    trace: Option<&str>,
) -> PyResult<ReadOptions> {
    let mut options = ReadOptions::new();
    if let Some(bytes) = notify {
        options = options.notify(bytes_like(bytes, "notify")?);
    }
    if let Some(parent) = trace_context(trace)? {
        options = options.trace(parent);
    }
    (options.deadline, options.path_policy) = limits(deadline, paths)?;
    options.locality = locality(cold);
    options.coalesce = coalesce_policy(coalesce)?;
    Ok(options)
}

/// The options of sends.
pub fn send_options(
    imm: Option<u32>,
    deadline: Option<f64>,
    paths: Option<&Bound<'_, PyAny>>,
) -> PyResult<SendOptions> {
    let mut options = SendOptions::new();
    options.imm = imm;
    (options.deadline, options.path_policy) = limits(deadline, paths)?;
    Ok(options)
}

/// The span that a `traceparent` names.
pub fn trace_context(traceparent: Option<&str>) -> PyResult<Option<TraceContext>> {
    traceparent.map(|text| text.parse().into_python()).transpose()
}

/// The deadline and the allowed paths of any transfer.
fn limits(
    deadline: Option<f64>,
    paths: Option<&Bound<'_, PyAny>>,
) -> PyResult<(Option<Duration>, PathPolicy)> {
    let policy = paths.map_or(Ok(PathPolicy::ANY), path_policy)?;
    Ok((deadline.map(seconds).transpose()?, policy))
}

fn coalesce_policy(name: Option<&str>) -> PyResult<Option<CoalescePolicy>> {
    name.map(|name| name.parse().into_python()).transpose()
}

fn locality(cold: bool) -> Locality {
    if cold { Locality::Cold } else { Locality::Auto }
}

/// The paths that bytes may take: one name, several with commas between them, or a list of names.
pub fn path_policy(paths: &Bound<'_, PyAny>) -> PyResult<PathPolicy> {
    let names = match paths.cast::<PyString>() {
        Ok(names) => names.to_string(),
        Err(_) => {
            let names: Vec<String> = paths.extract().map_err(|_| {
                PyTypeError::new_err(
                    "paths: give the name of a path, or a list of names: \"rdma\", \"gpu-copy\", ...",
                )
            })?;
            names.join(",")
        }
    };
    Ok(PathPolicy::only(names.parse().into_python()?))
}

/// What peers may do with a region.
pub fn access(name: &str) -> PyResult<Access> {
    match name {
        "local" => Ok(Access::LOCAL),
        "read" => Ok(Access::REMOTE_READ),
        "write" => Ok(Access::REMOTE_WRITE),
        "all" => Ok(Access::all()),
        other => Err(PyValueError::new_err(format!(
            "access: {other:?} is unknown; \"local\", \"read\", \"write\" and \"all\" are known"
        ))),
    }
}

/// The name of an access, as [`access`] takes it.
pub fn access_name(access: Access) -> &'static str {
    match (access.contains(Access::REMOTE_READ), access.contains(Access::REMOTE_WRITE)) {
        (false, false) => "local",
        (true, false) => "read",
        (false, true) => "write",
        (true, true) => "all",
    }
}

/// A copy of the bytes of an object with a buffer.
pub fn bytes_like(object: &Bound<'_, PyAny>, what: &str) -> PyResult<Vec<u8>> {
    with_bytes(object, what, <[u8]>::to_vec)
}

/// Calls `use_bytes` with the bytes of an object with a buffer, where they are.
pub fn with_bytes<T>(
    object: &Bound<'_, PyAny>,
    what: &str,
    use_bytes: impl FnOnce(&[u8]) -> T,
) -> PyResult<T> {
    if let Ok(bytes) = object.cast::<PyBytes>() {
        return Ok(use_bytes(bytes.as_bytes()));
    }
    let array = Array::of(object)?.filter(|array| array.place == Place::Host);
    let array = array.ok_or_else(|| {
        PyTypeError::new_err(format!(
            "{what}: {} has no bytes on the host; give bytes, or a buffer",
            type_name(object)
        ))
    })?;
    Ok(use_bytes(array.bytes()))
}
