//! A rail group: an engine with its cards, and the same group on the other host.

use std::sync::Arc;

use backend_loopback::{Null, Switch};
use multirail::{
    Access, Clock, Fabric, FabricBuilder, HostBuffer, Op, Pages, Peer, Region, RemoteRegion, Time,
    TransportConfig,
};

use super::host::{GroupStep, GroupTotals};
use super::profile::Profile;
use super::way_plan::WayPlan;
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
    request_ns: f64,
    inflight: Vec<Op>,
}

impl BusyGroup {
    /// Opens group `number` of `profile`. Each of its work requests carries `plan`'s payload, as one page that no other
    /// page follows.
    pub fn open(
        profile: &Profile,
        number: u32,
        plan: &WayPlan,
        clock: Arc<dyn Clock>,
    ) -> CommandResult<Self> {
        let page = plan.payload;
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
        let (page, request_ns) = (page as usize, plan.request_ns);
        Ok(Self { fabric, _target: target, peer, source, landing, from, to, page, request_ns, inflight })
    }

    /// Runs one turn of the engine, with enough operations.
    pub fn step(&mut self) -> CommandResult<GroupStep> {
        let (posted, had_event) = self.turn()?;
        Ok(GroupStep { cpu_ns: posted as f64 * self.request_ns, had_event })
    }

    /// Runs one turn of the engine, with enough operations. Returns the number of posted requests, and whether there
    /// was an event.
    pub fn turn(&mut self) -> CommandResult<(usize, bool)> {
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

    /// What each card has carried.
    pub fn totals(&self) -> GroupTotals {
        let requests: Vec<_> = self.fabric.counters().iter().map(|rail| rail.completions).collect();
        GroupTotals { units: requests.clone(), requests, ..GroupTotals::default() }
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
