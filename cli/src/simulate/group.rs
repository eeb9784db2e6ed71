//! A rail group: an engine with its cards, and the same group of the other host.

use std::sync::Arc;

use backend_loopback::{Null, Switch};
use multirail::{
    Access, Clock, Fabric, FabricBuilder, Op, Pages, Peer, Region, RemoteRegion, Time, TransportConfig,
};

use super::memory::untouched;
use super::profile::Profile;
use crate::failure::Done;
use crate::pages::shuffled;

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
    flight: Vec<Op>,
}

impl Group {
    /// Group `number` of `profile`, writing scattered pages of `page` bytes.
    pub fn open(profile: &Profile, number: u32, page: u64, clock: Arc<dyn Clock>) -> Done<Self> {
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
        let (from, to) = (shuffled(PAGES, &mut random), shuffled(PAGES, &mut random));
        let flight = Vec::with_capacity(INFLIGHT);
        Ok(Self { fabric, _target: target, peer, source, landing, from, to, page: page as usize, flight })
    }

    /// One turn of the engine, with enough to do. Returns the requests it posted, and
    /// whether anything happened.
    pub fn turn(&mut self) -> Done<(usize, bool)> {
        let mut ended = Ok(());
        self.flight.retain_mut(|op| match op.try_result() {
            None => true,
            Some(result) => {
                ended = std::mem::replace(&mut ended, Ok(())).and(result.map(drop));
                false
            }
        });
        ended?;
        while self.flight.len() < INFLIGHT {
            self.flight.push(self.peer.write_pages(
                &self.source,
                &self.from,
                &self.landing,
                &self.to,
                self.page,
            )?);
        }
        let turn = self.fabric.step();
        Ok((turn.posted, turn.events > 0))
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
