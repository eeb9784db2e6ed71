//! The options that every command shares, and the fabric that they open.

use std::path::PathBuf;
use std::sync::Arc;
#[cfg(feature = "metrics")]
use std::sync::OnceLock;

use clap::ArgAction;
#[cfg(feature = "metrics")]
use multirail::metrics::MetricsServer;
use multirail::{BackendChoice, Efa, Fabric, FabricBuilder, Registry};

use crate::dump::Dumps;
use crate::failure::{CommandFailure, CommandResult};
use crate::security::Security;

/// The backend that the options of [`ProviderOptions`] belong to.
pub const LIBFABRIC: &str = "efa";

/// The options of every command.
#[derive(clap::Args, Clone)]
pub struct Common {
    /// The backend to use: auto, loopback, efa or verbs [default: $MULTIRAIL_BACKEND, or auto]
    #[arg(long, global = true, value_name = "NAME")]
    pub backend: Option<BackendChoice>,

    /// Print one JSON object per row instead of a table
    #[arg(long, global = true)]
    pub json: bool,

    /// Log to stderr; twice for debug, three times for everything
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub verbose: u8,

    #[command(flatten)]
    pub provider: ProviderOptions,

    #[command(flatten)]
    pub security: Security,

    /// Record the state of the transports to this file on SIGUSR1, on a stall and
    /// when a peer dies; read it with `multirail trace`
    #[arg(long, global = true, value_name = "FILE")]
    pub dump: Option<PathBuf>,

    /// The dumps of the opened fabrics.
    #[arg(skip)]
    pub dumps: Arc<Dumps>,
}

impl Common {
    /// The backend of the option, or of the environment.
    pub fn choice(&self) -> CommandResult<BackendChoice> {
        match &self.backend {
            Some(choice) => Ok(choice.clone()),
            None => Ok(BackendChoice::from_env()?),
        }
    }

    /// Returns true if `backend` was requested by its name or by its own options.
    pub fn asks_for(&self, choice: &BackendChoice, backend: &str) -> bool {
        match choice {
            BackendChoice::Named(name) => name == backend,
            BackendChoice::Auto => backend == LIBFABRIC && self.provider.is_given(),
        }
    }

    /// All backends, configured by the options.
    pub fn registry(&self) -> CommandResult<Registry> {
        match self.choice()? {
            BackendChoice::Named(name) if name != LIBFABRIC && self.provider.is_given() => {
                Err(CommandFailure::new(format!(
                    "--provider, --domains and --node are options of the backend {LIBFABRIC}, but --backend is {name}"
                )))
            }
            _ => self.provider.registry(),
        }
    }

    /// Fails if a requested backend is unavailable.
    pub fn require_requested(&self, registry: &Registry) -> CommandResult {
        let asked = match self.choice()? {
            BackendChoice::Auto if self.provider.is_given() => BackendChoice::Named(LIBFABRIC.to_owned()),
            BackendChoice::Auto => return Ok(()),
            named => named,
        };
        registry.transports(&asked)?;
        Ok(())
    }

    /// Fails if a given token or certificate cannot be read.
    pub fn check_security(&self) -> CommandResult {
        self.security.apply(FabricBuilder::new()).map(drop)
    }

    /// Opens a fabric with the chosen backends.
    pub fn open(&self) -> CommandResult<Fabric> {
        self.open_observed(&ObserveOptions::default())
    }

    /// As [`Self::open`], and other programs may look at the fabric as `observed` says.
    pub fn open_observed(&self, observed: &ObserveOptions) -> CommandResult<Fabric> {
        self.open_with(&self.registry()?, observed)
    }

    /// As [`Self::open_observed`], with the chosen backends of `registry`.
    pub fn open_with(&self, registry: &Registry, observed: &ObserveOptions) -> CommandResult<Fabric> {
        self.require_requested(registry)?;
        let builder = self.security.apply(registry.builder(&self.choice()?)?)?;
        let fabric = self.dumps.open(match &observed.admin {
            Some(path) => builder.admin_socket(path),
            None => builder,
        })?;
        observed.serve_metrics(&fabric)?;
        Ok(fabric)
    }
}

/// How other programs look at the fabric of a command that runs for long.
#[derive(clap::Args, Clone, Default)]
pub struct ObserveOptions {
    /// Listen at this Unix socket for `multirail device` and `top`; bench does so on the client's side
    #[arg(long, value_name = "PATH")]
    admin: Option<PathBuf>,

    /// Serve counters to Prometheus at http://ADDRESS/metrics, such as 127.0.0.1:9469; bench does so on the client's
    /// side. Everyone who reaches the address may read them
    #[cfg(feature = "metrics")]
    #[arg(long, value_name = "ADDRESS")]
    metrics: Option<String>,

    /// With `--metrics`, let this many peers, those with the most bytes, have metrics of their own: their host names and
    /// addresses become labels
    #[cfg(feature = "metrics")]
    #[arg(long, value_name = "COUNT", default_value_t = 0, requires = "metrics")]
    metrics_peers: usize,

    /// The server of `--metrics`, while a copy of these options exists.
    #[cfg(feature = "metrics")]
    #[arg(skip)]
    server: Arc<OnceLock<MetricsServer>>,
}

impl ObserveOptions {
    #[cfg(feature = "metrics")]
    fn serve_metrics(&self, fabric: &Fabric) -> CommandResult {
        if let Some(address) = &self.metrics {
            let server = MetricsServer::start_with_peers(fabric, address.as_str(), self.metrics_peers)?;
            tracing::info!(address = %server.local_addr(), "serving metrics");
            let _ = self.server.set(server);
        }
        Ok(())
    }

    #[cfg(not(feature = "metrics"))]
    fn serve_metrics(&self, _fabric: &Fabric) -> CommandResult {
        Ok(())
    }
}

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

    /// The local address to use, for providers on sockets; several with commas between them, one per interface,
    /// give rails on each [default: $MULTIRAIL_EFA_NODE, or any]
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

    /// The name of libfabric's provider, if it is given.
    pub fn name(&self) -> Option<&str> {
        self.provider.as_deref()
    }

    /// Returns true if an option besides the provider's name is given.
    pub fn has_place(&self) -> bool {
        self.domains.is_some() || self.node.is_some()
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
