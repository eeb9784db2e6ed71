//! The backend `efa` as the environment wants it.

use std::sync::Arc;

use backend_efa::{Efa, EfaConfig};
use transport_core::Result;
use transport_core::spi::Backend;

use crate::environment::{given, rails};
use crate::registry::Absent;

/// The environment variable that names libfabric's provider.
const PROVIDER: &str = "MULTIRAIL_EFA_PROVIDER";
/// The one that names the local address, for providers on sockets.
const NODE: &str = "MULTIRAIL_EFA_NODE";
/// The one that says how many domains of a provider without cards act as rails.
const DOMAINS: &str = "MULTIRAIL_EFA_DOMAINS";

/// What `MULTIRAIL_EFA_PROVIDER` (libfabric's name of the provider, `efa` without it),
/// `MULTIRAIL_EFA_NODE` (a local address or host name, for providers on sockets) and
/// `MULTIRAIL_EFA_DOMAINS` (rails of a provider without cards, 1 to 64) ask for.
///
/// # Errors
/// `InvalidRequest` where one is not understood, with what would be.
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

/// By the variables of this process; unavailable where one is not understood.
pub(crate) fn from_environment() -> Arc<dyn Backend> {
    match efa_config() {
        Ok(config) => Arc::new(Efa::with(config)),
        Err(error) => Absent::misunderstood("efa", "its environment", &error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_understood_is_said() {
        for wrong in ["0", "65", "few"] {
            let error = configured(None, None, Some(wrong.to_owned())).unwrap_err();
            assert!(error.context().contains(DOMAINS) && error.context().contains("1 to 64"), "{error}");
        }
        let all = configured(Some("tcp".into()), Some("127.0.0.1".into()), Some("4".into())).unwrap();
        assert_eq!((all.provider.as_str(), all.node.as_deref(), all.domains), ("tcp", Some("127.0.0.1"), 4));
        assert_eq!(configured(None, None, None).unwrap().provider, "efa");
    }
}
