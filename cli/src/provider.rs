//! The options of the backend `efa`: libfabric's provider, domains and local address.

use std::sync::Arc;

use multirail::{Efa, Registry};

use crate::failure::CommandResult;

/// The libfabric options of the command line. Options that are not given come from the environment.
#[derive(clap::Args, Clone, Default)]
pub struct ProviderOptions {
    /// libfabric's provider for the backend efa: efa, efa-direct, tcp, shm, ...
    /// [default: $MULTIRAIL_EFA_PROVIDER, or efa]
    #[arg(long, global = true, value_name = "NAME")]
    provider: Option<String>,

    /// Domains of a provider without cards, each a rail [default: $MULTIRAIL_EFA_DOMAINS, or 1]
    #[arg(long, global = true, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=64))]
    domains: Option<u32>,

    /// The local address to use, for providers on sockets [default: $MULTIRAIL_EFA_NODE, or any]
    #[arg(long, global = true, value_name = "ADDR")]
    node: Option<String>,
}

impl ProviderOptions {
    /// All backends, with `efa` configured by these options.
    pub fn registry(&self) -> CommandResult<Registry> {
        let registry = Registry::standard();
        if !self.is_given() {
            return Ok(registry);
        }
        let mut config = multirail::efa_config()?;
        if let Some(provider) = &self.provider {
            config = config.provider(provider);
        }
        if let Some(domains) = self.domains {
            config = config.domains(domains);
        }
        if let Some(node) = &self.node {
            config = config.node(node);
        }
        Ok(registry.with(multirail::staged_if_asked(Arc::new(Efa::with(config)))))
    }

    /// Returns true if an option is given.
    pub fn is_given(&self) -> bool {
        !self.arguments().is_empty()
    }

    /// The arguments that give another process of this program the same options.
    pub fn arguments(&self) -> Vec<String> {
        let domains = self.domains.map(|domains| domains.to_string());
        let all = [("--provider", &self.provider), ("--domains", &domains), ("--node", &self.node)];
        let given = all.into_iter().filter_map(|(name, value)| Some([name.to_owned(), value.clone()?]));
        given.flatten().collect()
    }
}
