//! A rail group: an engine with its cards, and the same group of the other host.

use std::sync::Arc;

use backend_loopback::{Null, Switch};
use multirail::{
    Access, Clock, Fabric, FabricBuilder, HostBuffer, Op, Pages, Peer, Region, RemoteRegion, Time,
    TransportConfig,
};

use super::profile::Profile;
use crate::failure::CommandResult;

/// Pages of one operation, and of the regions: untouched, so that they cost nothing.
const PAGES: u32 = 1024;

/// Operations kept under way: the engine always has something to post.
const INFLIGHT: usize = 4;

/// One group, always busy.
pub struct Group {
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

impl Group {
    /// Group `number` of `profile`, writing scattered pages of `page` bytes.
    pub fn open(profile: &Profile, number: u32, page: u64, clock: Arc<dyn Clock>) -> CommandResult<Self> {
        let switch = Switch::default();
        let open = |side: u64, cards: u32| {
            let mut cards = Null::new(cards).link(profile.card.clone());
            // Where the other side's lines are the narrow ones they are modelled too.
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

    /// One turn of the engine, with enough to do. Returns the requests it posted, and
    /// whether anything happened.
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

    /// When the cards have news.
    pub fn due(&self) -> Time {
        self.fabric.due()
    }

    /// Requests completed so far, by card.
    pub fn completed(&self) -> Vec<u64> {
        self.fabric.counters().iter().map(|rail| rail.completions).collect()
    }
}

/// A region of `len` bytes without memory behind it.
#[allow(unsafe_code)]
pub fn untouched(fabric: &Fabric, len: usize, access: Access) -> CommandResult<Region> {
    let buffer = Arc::new(HostBuffer::sparse(len)?);
    // SAFETY: the buffer is new, and only the region will know it.
    Ok(unsafe { fabric.register(buffer, access)? })
}

/// All of `count` pages, shuffled.
pub fn shuffled_pages(count: u32, random: &mut fastrand::Rng) -> Pages {
    let mut pages: Vec<u32> = (0..count).collect();
    random.shuffle(&mut pages);
    Pages::new(pages)
}
