//! A rail group: an engine with its cards, and the same group on the other host.

use std::sync::Arc;

use backend_loopback::{Null, Switch};
use multirail::{
    Access, Clock, Fabric, FabricBuilder, HostBuffer, Op, Pages, Peer, Region, RemoteRegion, Time,
    TransportConfig,
};

use super::profile::Profile;
use crate::failure::CommandResult;

/// The number of pages of an operation and of the regions. No page is touched, so they need no memory.
const PAGES: u32 = 1024;

/// The number of outstanding operations, so that the engine always has requests to post.
const INFLIGHT: usize = 4;

/// One rail group that is always busy.
pub struct BusyGroup {
    fabric: Fabric,
    _target: Fabric,
    peer: Peer,
    source: Region,
    landing: RemoteRegion,
    from: Pages,
    to: Pages,
    page: usize,
    inflight: Vec<Op>,
}

impl BusyGroup {
    /// Opens group `number` of `profile`. It writes scattered pages of `page` bytes.
    pub fn open(profile: &Profile, number: u32, page: u64, clock: Arc<dyn Clock>) -> CommandResult<Self> {
        let switch = Switch::default();
        let open = |side: u64, cards: u32| {
            let mut cards = Null::new(cards).link(profile.card.clone());
            // If the other side has fewer cards, its line rate is modelled too.
            if profile.remote_cards_of(number) < profile.cards_of(number) {
                cards = cards.switch(&switch);
            }
            FabricBuilder::new()
                .transport(TransportConfig::new("cards", Arc::new(cards)))
                .clock(Arc::clone(&clock))
                .seed(profile.seed.wrapping_mul(1000).wrapping_add(u64::from(number) * 2 + side))
                .caller_driven()
                .open()
        };
        let fabric = open(0, profile.cards_of(number))?;
        let target = open(1, profile.remote_cards_of(number))?;
        let (peer, _) = fabric.connect_local(&target)?;
        let bytes = PAGES as usize * page as usize;
        let source = untouched(&fabric, bytes, Access::LOCAL)?;
        let landing = untouched(&target, bytes, Access::REMOTE_WRITE)?;
        let landing = peer.import(&landing.descriptor())?;
        let mut random = fastrand::Rng::with_seed(profile.seed);
        let (from, to) = (shuffled_pages(PAGES, &mut random), shuffled_pages(PAGES, &mut random));
        let inflight = Vec::with_capacity(INFLIGHT);
        Ok(Self { fabric, _target: target, peer, source, landing, from, to, page: page as usize, inflight })
    }

    /// Runs one turn of the engine, with enough operations. Returns the number of posted requests, and whether there
    /// was an event.
    pub fn step(&mut self) -> CommandResult<(usize, bool)> {
        let mut ended = Ok(());
        self.inflight.retain_mut(|op| match op.try_result() {
            None => true,
            Some(result) => {
                ended = std::mem::replace(&mut ended, Ok(())).and(result.map(drop));
                false
            }
        });
        ended?;
        while self.inflight.len() < INFLIGHT {
            self.inflight.push(self.peer.write_pages(
                &self.source,
                &self.from,
                &self.landing,
                &self.to,
                self.page,
            )?);
        }
        let step = self.fabric.step();
        Ok((step.posted, step.events > 0))
    }

    /// The time of the cards' next event.
    pub fn due(&self) -> Time {
        self.fabric.due()
    }

    /// The number of completed requests of each card.
    pub fn completed(&self) -> Vec<u64> {
        self.fabric.counters().iter().map(|rail| rail.completions).collect()
    }
}

/// A region of `len` bytes without memory: simulated cards move no bytes, so no page is touched.
#[allow(unsafe_code)]
pub fn untouched(fabric: &Fabric, len: usize, access: Access) -> CommandResult<Region> {
    let buffer = Arc::new(HostBuffer::sparse(len)?);
    // SAFETY: the buffer was allocated just now, and only the region knows it.
    Ok(unsafe { fabric.register(buffer, access)? })
}

/// The pages below `count` in random order, which no cache or prefetcher expects.
pub fn shuffled_pages(count: u32, random: &mut fastrand::Rng) -> Pages {
    let mut pages: Vec<u32> = (0..count).collect();
    random.shuffle(&mut pages);
    Pages::new(pages)
}
