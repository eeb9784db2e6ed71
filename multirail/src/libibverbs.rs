//! The backend `verbs`, configured by environment variables.

use std::sync::Arc;

use backend_verbs::{Verbs, VerbsConfig};
use transport_core::Result;
use transport_core::spi::Backend;

use crate::environment::{given, number};
use crate::registry::UnavailableBackend;

/// The variables, each with its smallest and largest value.
const QUEUE_PAIRS: (&str, u8, u8) = ("MULTIRAIL_VERBS_QUEUE_PAIRS", 1, 16);
const GID: (&str, u8, u8) = ("MULTIRAIL_VERBS_GID", 0, u8::MAX);
const TRAFFIC_CLASS: (&str, u8, u8) = ("MULTIRAIL_VERBS_TRAFFIC_CLASS", 0, u8::MAX);
const SERVICE_LEVEL: (&str, u8, u8) = ("MULTIRAIL_VERBS_SERVICE_LEVEL", 0, 7);

/// The configuration in these variables:
///
/// - `MULTIRAIL_VERBS_QUEUE_PAIRS`: queue pairs per peer, 1 to 16
/// - `MULTIRAIL_VERBS_GID`: the GID index, 0 to 255
/// - `MULTIRAIL_VERBS_TRAFFIC_CLASS`: 0 to 255
/// - `MULTIRAIL_VERBS_SERVICE_LEVEL`: 0 to 7
///
/// # Errors
/// `InvalidRequest` if a value is invalid, with the valid values.
pub fn verbs_config() -> Result<VerbsConfig> {
    configured(|(name, ..)| given(name))
}

fn configured(given: impl Fn((&str, u8, u8)) -> Option<String>) -> Result<VerbsConfig> {
    let number_of = |variable: (&str, u8, u8)| {
        let (name, least, most) = variable;
        given(variable).map(|text| number(name, &text, least..=most)).transpose()
    };
    let mut config = VerbsConfig::default();
    if let Some(pairs) = number_of(QUEUE_PAIRS)? {
        config = config.queue_pairs(pairs);
    }
    if let Some(index) = number_of(GID)? {
        config = config.gid_index(index);
    }
    if let Some(class) = number_of(TRAFFIC_CLASS)? {
        config = config.traffic_class(class);
    }
    if let Some(level) = number_of(SERVICE_LEVEL)? {
        config = config.service_level(level);
    }
    Ok(config)
}

/// The backend with this process's settings. It is unavailable if a value is invalid.
pub(crate) fn from_environment() -> Arc<dyn Backend> {
    match verbs_config() {
        Ok(config) => Arc::new(Verbs::with(config)),
        Err(error) => UnavailableBackend::invalid_setting("verbs", "its environment", &error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_values_are_named() {
        for (variable, wrong) in [(QUEUE_PAIRS, "0"), (QUEUE_PAIRS, "17"), (GID, "256"), (SERVICE_LEVEL, "8")]
        {
            let error = configured(|asked| (asked == variable).then(|| wrong.to_owned())).unwrap_err();
            assert!(error.context().contains(variable.0) && error.context().contains("use "), "{error}");
        }
        let all = configured(|(_, _, most)| Some(most.min(7).to_string())).unwrap();
        assert_eq!(
            (all.queue_pairs, all.gid_index, all.traffic_class, all.service_level),
            (7, Some(7), 7, 7)
        );
        assert_eq!(configured(|_| None).unwrap(), VerbsConfig::default());
    }
}
