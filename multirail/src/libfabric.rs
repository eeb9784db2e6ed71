//! The backend `efa`, configured by environment variables.

use std::sync::Arc;

use backend_efa::{Efa, EfaConfig};
use transport_core::Result;
use transport_core::spi::Backend;

use crate::environment::{given, rails};
use crate::registry::UnavailableBackend;

/// The variable with the name of libfabric's provider.
const PROVIDER: &str = "MULTIRAIL_EFA_PROVIDER";
/// The variable with the local address, for providers on sockets.
const NODE: &str = "MULTIRAIL_EFA_NODE";
/// The variable with the number of domains of a provider without cards. Each domain is a rail.
const DOMAINS: &str = "MULTIRAIL_EFA_DOMAINS";

/// The configuration in these variables:
///
/// - `MULTIRAIL_EFA_PROVIDER`: libfabric's name of the provider, `efa` by default
/// - `MULTIRAIL_EFA_NODE`: a local address or host name, for providers on sockets; several with commas between them, one
///   per interface, give rails on each
/// - `MULTIRAIL_EFA_DOMAINS`: the number of rails of a provider without cards, 1 to 64
///
/// # Errors
/// `InvalidRequest` if a value is invalid, with the valid values.
pub fn efa_config() -> Result<EfaConfig> {
    configured(given(PROVIDER), given(NODE), given(DOMAINS))
}

fn configured(provider: Option<String>, node: Option<String>, domains: Option<String>) -> Result<EfaConfig> {
    let mut config = EfaConfig::default();
    if let Some(provider) = provider {
        config = config.provider(provider);
    }
    if let Some(node) = node {
        config = config.node(node);
    }
    if let Some(domains) = domains {
        config = config.domains(rails(DOMAINS, &domains)?);
    }
    Ok(config)
}

/// The backend with this process's settings. It is unavailable if a value is invalid.
pub(crate) fn from_environment() -> Arc<dyn Backend> {
    match efa_config() {
        Ok(config) => Arc::new(Efa::with(config)),
        Err(error) => UnavailableBackend::invalid_setting("efa", "its environment", &error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_values_are_named() {
        for wrong in ["0", "65", "few"] {
            let error = configured(None, None, Some(wrong.to_owned())).unwrap_err();
            assert!(error.context().contains(DOMAINS) && error.context().contains("1 to 64"), "{error}");
        }
        let all = configured(Some("tcp".into()), Some("127.0.0.1".into()), Some("4".into())).unwrap();
        assert_eq!((all.provider.as_str(), all.node.as_deref(), all.domains), ("tcp", Some("127.0.0.1"), 4));
        assert_eq!(configured(None, None, None).unwrap().provider, "efa");
    }
}
