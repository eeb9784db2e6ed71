//! Settings from environment variables.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::Arc;

use ::staging::Staged;
use topology::{Address, Machine};
use transport_core::spi::Backend;
use transport_core::{
    CoalescePolicy, Error, ErrorKind, PathPolicy, Paths, RailGroups, Result, StagingPolicy,
};

use crate::MachineSource;
use crate::registry::UnavailableBackend;

/// The variable with the source of this host's machine, see [`MachineSource`].
pub(crate) const TOPOLOGY: &str = "MULTIRAIL_TOPOLOGY";
/// The variable with rail groups, see [`RailGroups`].
pub(crate) const RAIL_GROUPS: &str = "MULTIRAIL_RAIL_GROUPS";
/// The variable with PCI addresses of the GPUs to serve, separated by commas.
pub(crate) const GPUS: &str = "MULTIRAIL_GPUS";
/// The variable with the paths that bytes may take, separated by commas.
const PATHS: &str = "MULTIRAIL_PATHS";

/// The maximum number of rails of a transport, and so of loopback's threads or libfabric's domains.
const MAX_RAILS: u32 = 64;

/// The value of a variable, or `None` if it is unset or empty.
pub(crate) fn given(name: &str) -> Option<String> {
    let text = std::env::var_os(name)?.to_string_lossy().trim().to_owned();
    (!text.is_empty()).then_some(text)
}

/// Parses `text`, the value of variable `name`, as a number of rails.
pub(crate) fn rails(name: &str, text: &str) -> Result<u32> {
    number(name, text, 1..=MAX_RAILS)
}

/// Parses `text`, the value of variable `name`, as a number within `allowed`.
pub(crate) fn number<T>(name: &str, text: &str, allowed: RangeInclusive<T>) -> Result<T>
where
    T: FromStr + PartialOrd + Display,
{
    text.parse().ok().filter(|number| allowed.contains(number)).ok_or_else(|| {
        let context = format!("{name} is {text:?}; use {} to {}", allowed.start(), allowed.end());
        Error::new(ErrorKind::InvalidRequest, "read the environment", context)
    })
}

/// The environment's settings of the machine and of rail groups.
pub(crate) struct MachineSettings {
    pub groups: Option<RailGroups>,
    pub gpus: Option<Vec<Address>>,
    /// The machine, without the CPUs that this process may not use.
    pub machine: Option<Machine>,
}

impl MachineSettings {
    pub fn from_environment() -> Result<Self> {
        Ok(Self { groups: Self::groups()?, gpus: Self::gpus()?, machine: Self::machine()? })
    }

    fn groups() -> Result<Option<RailGroups>> {
        let groups = given(RAIL_GROUPS).map(|text| text.parse::<RailGroups>()).transpose();
        groups.map_err(|why| invalid_variable(RAIL_GROUPS, why.context()))
    }

    /// The GPUs to serve. `None` means all.
    pub fn gpus() -> Result<Option<Vec<Address>>> {
        let address = |text: &str| text.trim().parse::<Address>();
        let gpus =
            given(GPUS).map(|text| text.split(',').map(address).collect::<std::result::Result<_, _>>());
        gpus.transpose().map_err(|why| invalid_variable(GPUS, why))
    }

    fn machine() -> Result<Option<Machine>> {
        let Some(source) = given(TOPOLOGY) else { return Ok(None) };
        let named = |why: Error| {
            Error::new(why.kind(), "read the environment", format!("{TOPOLOGY}: {}", why.context()))
        };
        let (_, mut machine) =
            source.parse::<MachineSource>().and_then(|source| source.read()).map_err(named)?;
        if let Some(cpus) = topology::Cpus::of_this_thread() {
            machine.allowed = machine.allowed.and(&cpus);
        }
        Ok(Some(machine))
    }
}

/// The paths that `MULTIRAIL_PATHS` allows, with commas between them. `None` if it is unset.
pub(crate) fn path_policy() -> Result<Option<PathPolicy>> {
    let paths = given(PATHS).map(|text| text.parse::<Paths>()).transpose();
    let paths = paths.map_err(|why| invalid_variable(PATHS, why.context()))?;
    Ok(paths.map(PathPolicy::only))
}

/// The error for a variable with an invalid value.
pub(crate) fn invalid_variable(variable: &str, why: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::InvalidRequest, "read the environment", format!("{variable}: {why}"))
}

/// The variable that enables staging of memory that a card cannot register.
const STAGING: &str = "MULTIRAIL_STAGING";
/// The variable that lets small pages share work requests.
const COALESCE: &str = "MULTIRAIL_COALESCE";

/// Adds staging to a backend with cards as `MULTIRAIL_STAGING` says, see [`Staged`]. The values are `0` (never, the
/// default), `1` (stage memory that the cards cannot register) and `always`.
///
/// Adds coalescing as `MULTIRAIL_COALESCE` says, see [`Staged::coalescing`]. The values are `0` (this process does not
/// coalesce, the default), and `never`, `auto` and `always` for operations that state no policy.
///
/// With any other value the backend is unavailable, with this reason.
pub fn staged_if_asked(backend: Arc<dyn Backend>) -> Arc<dyn Backend> {
    let (staging, coalesce) = (given(STAGING).unwrap_or_default(), given(COALESCE).unwrap_or_default());
    staged_as(backend, &staging, &coalesce)
}

fn staged_as(backend: Arc<dyn Backend>, staging: &str, coalesce: &str) -> Arc<dyn Backend> {
    let name = backend.name();
    let staging = match staging.parse::<StagingPolicy>() {
        Ok(staging) => staging,
        Err(error) => return UnavailableBackend::invalid_setting(name, STAGING, &error),
    };
    let coalesce = match coalesce.trim() {
        "" | "0" => None,
        policy => match policy.parse::<CoalescePolicy>() {
            Ok(policy) => Some(policy),
            Err(error) => return UnavailableBackend::invalid_setting(name, COALESCE, &error),
        },
    };
    match (staging, coalesce) {
        (StagingPolicy::Never, None) => backend,
        (staging, None) => Arc::new(Staged::new(backend, staging)),
        (staging, Some(policy)) => Arc::new(Staged::new(backend, staging).coalescing(policy)),
    }
}

#[cfg(test)]
mod tests {
    use backend_loopback::Loopback;

    use super::*;

    #[test]
    fn an_invalid_value_makes_the_backend_unavailable() {
        let of = |text| staged_as(Arc::new(Loopback::new()), text, "").probe();
        let why = of("perhaps").expect_err("unavailable");
        assert!(why.reason.contains(STAGING) && why.remedy.contains("0, 1 or always"), "{why:?}");
        let about = |text| of(text).expect("devices")[0].about.clone();
        assert_eq!(about("0"), about(""));
        assert!(about("1").ends_with(", staged where refused") && about("always").ends_with(", all staged"));
        let of = |text| staged_as(Arc::new(Loopback::new()), "", text).probe();
        let why = of("1").expect_err("unavailable");
        assert!(why.reason.contains(COALESCE) && why.remedy.contains("never, auto or always"), "{why:?}");
        let about = |text| of(text).expect("devices")[0].about.clone();
        assert!(about("0") == about("") && about("auto").ends_with(", coalesces small pages"));
    }
}
