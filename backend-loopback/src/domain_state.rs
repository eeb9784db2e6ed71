//! The state of a domain, which its endpoint and its server thread use too.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, Weak};

use multirail_spi::{Capabilities, DomainSetup, Result, StagingPolicy};

use crate::gpu::GpuConfig;
use crate::imports::ImportTable;
use crate::inbound::Inbound;
use crate::link_model::LinkModel;
use crate::offer::OfferToken;
use crate::peer_table::PeerTable;
use crate::regions::Regions;
use crate::wakeup::Wakeup;

/// The configuration and the tables of a domain.
pub(crate) struct DomainState {
    pub(crate) id: u64,
    pub(crate) capabilities: Capabilities,
    pub(crate) setup: DomainSetup,
    /// The number of the device.
    pub(crate) number: u32,
    pub(crate) link: Option<LinkModel>,
    pub(crate) gpus: GpuConfig,
    pub(crate) peers: PeerTable,
    pub(crate) regions: Arc<Regions>,
    pub(crate) imports: Arc<ImportTable>,
    pub(crate) wakeup: Arc<Wakeup>,
    pub(crate) staging: StagingPolicy,
    /// True while an endpoint is open, which then reports `PeerGone` and frees the slots of peers.
    pub(crate) endpoint_open: AtomicBool,
}

/// The domains of this process by id, with the pid of the process that opened them. A forked child must not take its
/// parent's domains for its own.
static DOMAINS: Mutex<BTreeMap<u64, (u32, Weak<DomainState>)>> = Mutex::new(BTreeMap::new());

impl DomainState {
    /// The domain of this process with that id.
    pub(crate) fn in_this_process(id: u64) -> Option<Arc<Self>> {
        let domains = DOMAINS.lock().expect("domains");
        let (process, state) = domains.get(&id)?;
        (*process == std::process::id()).then(|| state.upgrade())?
    }

    /// Lets other domains of this process find this one.
    pub(crate) fn publish(self: &Arc<Self>) {
        let entry = (std::process::id(), Arc::downgrade(self));
        DOMAINS.lock().expect("domains").insert(self.id, entry);
    }

    /// Ends [`DomainState::publish`].
    pub(crate) fn withdraw(&self) {
        DOMAINS.lock().expect("domains").remove(&self.id);
    }

    /// Admits the initiator that shows `token`. Returns `None` for a token that is unknown or was used.
    ///
    /// Puts memory under the peer's segment. Before, most of it has none: most prepared peers turn out to be on other
    /// hosts, and are never admitted.
    ///
    /// # Errors
    /// `Exhausted` if there is no memory for the segment.
    pub(crate) fn admit(&self, token: &OfferToken) -> Result<Option<Arc<Inbound>>> {
        let Some(inbound) = self.peers.by_token(token).filter(|inbound| inbound.claim()) else {
            return Ok(None);
        };
        inbound.commit()?;
        self.regions.add_peer(inbound.clone());
        Ok(Some(inbound))
    }
}
