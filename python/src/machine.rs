//! The functions of the module that need no fabric: they describe this machine, and run the command.

use multirail::{MachineSource, Registry};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::IntoPython;

/// The backends: whether each is available, its devices, or the reason why it is not and the remedy.
#[pyfunction]
pub fn backends(py: Python<'_>) -> PyResult<Vec<Bound<'_, PyDict>>> {
    let rows = py.detach(|| Registry::standard().rows());
    let row = |row: multirail::BackendRow| {
        let described = PyDict::new(py);
        described.set_item("backend", row.name)?;
        described.set_item("available", row.probe.is_ok())?;
        match row.probe {
            Ok(devices) => {
                let names: Vec<_> = devices.into_iter().map(|device| device.name).collect();
                described.set_item("devices", names)?;
            }
            Err(why) => {
                described.set_item("reason", why.reason)?;
                described.set_item("remedy", why.remedy)?;
            }
        }
        Ok(described)
    };
    rows.into_iter().map(row).collect()
}

/// The machine as JSON: its PCI functions, NUMA nodes and cores.
#[pyfunction]
#[pyo3(name = "_topology")]
pub fn topology(py: Python<'_>) -> PyResult<String> {
    let (_, machine) = py.detach(|| MachineSource::of_this_host()?.read()).into_python()?;
    serde_json::to_string(&machine).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Runs the command `multirail` with these arguments, the first of which is its name. `program` runs it once more, in a
/// process of its own. Returns the exit code.
#[pyfunction]
#[pyo3(name = "_run_command")]
pub fn run_command(py: Python<'_>, arguments: Vec<String>, program: Vec<String>) -> u8 {
    py.detach(|| {
        multirail_cli::run_with(
            arguments.into_iter().map(Into::into),
            program.into_iter().map(Into::into).collect(),
        )
    })
}
