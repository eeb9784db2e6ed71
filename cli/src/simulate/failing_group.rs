//! A rail group that loses cards under way, with real memory: the model delivers late what a lost card had sent.

use std::sync::Arc;
use std::time::Duration;

use backend_loopback::{LinkModel, Loopback, LoopbackConfig};
use multirail::{
    Access, Clock, Fabric, FabricBuilder, Op, Pages, Peer, Region, RemoteRegion, Time, TransportConfig,
    VirtualClock,
};

use super::host::CpuMeter;
use super::profile::Profile;
use crate::failure::{CommandFailure, CommandResult};
use crate::units::Size;

/// The operations of a transfer. Each has its own part of the target's memory.
const OPS: usize = 32;
/// The number of outstanding operations. So operations end soon after the loss, while late bytes still arrive.
const INFLIGHT: usize = 8;
/// The bytes of an operation for each card. An operation has at least one page for each card.
const BYTES_PER_CARD: u64 = 512 << 10;
/// The most memory of a transfer.
const MAX_BYTES: u64 = 1 << 30;
/// The target writes this byte over the memory of an operation that has ended. The content does not have it.
const OVERWRITTEN: u8 = 0xa5;
/// The time that operations have beyond a fence.
const DEADLINE: Duration = Duration::from_secs(10);

/// The loss of cards of one rail group.
#[derive(Debug, Clone, Copy)]
pub struct CardLoss {
    /// The number of lost cards. All are lost at the same time.
    pub cards: u32,
    /// The time of the loss.
    pub at: Time,
    /// How long the target takes to fence a lost card.
    pub fence_takes: Duration,
    /// The bytes that a lost card had sent arrive up to this long after the loss, until the target has fenced it.
    pub late_after: Duration,
    /// The target says that it has fenced a card and does nothing: for tests, which must find late bytes.
    pub ignores_fences: bool,
}

impl CardLoss {
    /// No card is lost.
    pub const NONE: Self = Self {
        cards: 0,
        at: Time::ZERO,
        fence_takes: Duration::ZERO,
        late_after: Duration::ZERO,
        ignores_fences: false,
    };
}

/// What a transfer and its healing took.
#[derive(Debug)]
pub struct Healing {
    /// The time of the whole transfer.
    pub took: Duration,
    /// The payload from the loss to the end of the transfer, in Gbps.
    pub gbps: f64,
    /// The requests that were posted again, and their bytes.
    pub replayed: u64,
    pub replayed_bytes: u64,
    /// The time from the loss to the first request that was posted again. `None` if none was.
    pub healed_after: Option<Duration>,
    /// The bytes that landed after their operation had ended.
    pub late_bytes: u64,
}

/// Two connected hosts with the cards of one rail group.
pub struct FailingGroup {
    clock: VirtualClock,
    fabrics: [Fabric; 2],
    peer: Peer,
    source: Region,
    target: Region,
    landing: RemoteRegion,
    content: Vec<u8>,
    page: usize,
    /// The pages of an operation in random order.
    order: Vec<u32>,
    loss: CardLoss,
    meter: CpuMeter,
}

impl FailingGroup {
    /// Opens group `number` of `profile`, which will lose cards. A transfer moves pages of `page` bytes, and each
    /// request costs `cost` nanoseconds of CPU time.
    pub fn open(profile: &Profile, number: u32, page: u64, cost: f64, loss: CardLoss) -> CommandResult<Self> {
        let cards = profile.cards_of(number);
        let pages = u64::from(cards) * (BYTES_PER_CARD / page).max(1);
        let part = pages * page;
        if part * OPS as u64 > MAX_BYTES {
            return Err(CommandFailure::new(format!(
                "a rail group of {cards} cards would move {} in pages of {}; --fail-rails uses real memory, at most {} \
                 for each side of a group: use a smaller --size or fewer --cards",
                Size(part * OPS as u64),
                Size(page),
                Size(MAX_BYTES)
            )));
        }
        let clock = VirtualClock::default();
        let open = |side: u64, link: LinkModel| {
            let cards = Loopback::with(LoopbackConfig::default().devices(cards).link(link));
            FabricBuilder::new()
                .transport(TransportConfig::new("cards", Arc::new(cards)))
                .clock(Arc::new(clock.clone()))
                .seed(profile.seed.wrapping_mul(1000).wrapping_add(u64::from(number) * 2 + side))
                .deadline(loss.fence_takes.saturating_mul(2).saturating_add(DEADLINE))
                .caller_driven()
                .open()
        };
        let lost = (0..loss.cards).map(|card| (card, loss.at)).collect();
        let ours = LinkModel { lose_devices_at: lost, late_after: loss.late_after, ..profile.card.clone() };
        let theirs = LinkModel {
            fence_takes: loss.fence_takes,
            ignores_fences: loss.ignores_fences,
            ..profile.card.clone()
        };
        let fabrics = [open(0, ours)?, open(1, theirs)?];
        let (peer, _) = fabrics[0].connect_local(&fabrics[1])?;
        let source = fabrics[0].alloc(part as usize, Access::LOCAL)?;
        let target = fabrics[1].alloc(part as usize * OPS, Access::REMOTE_WRITE)?;
        let landing = peer.import(&target.descriptor())?;
        let mut random = fastrand::Rng::with_seed(profile.seed);
        let mut content = vec![0; part as usize];
        random.fill(&mut content);
        content.iter_mut().for_each(|byte| *byte &= 0x7f);
        source.copy_in(0, &content)?;
        let mut order: Vec<u32> = (0..pages as u32).collect();
        random.shuffle(&mut order);
        let (page, meter) = (page as usize, CpuMeter::new(cost));
        Ok(Self { clock, fabrics, peer, source, target, landing, content, page, order, loss, meter })
    }

    /// Runs the transfer to its end, and then as long as late bytes may arrive.
    pub fn run(mut self) -> CommandResult<Healing> {
        let total = (self.content.len() * OPS) as u64;
        let (mut running, mut next, mut ended) = (Vec::<(usize, Op)>::with_capacity(INFLIGHT), 0, 0);
        // When the cards were polled first after the loss, and the bytes that they had carried until then.
        let mut lost = None;
        let mut healed_after = None;
        while ended < OPS {
            while running.len() < INFLIGHT && next < OPS {
                running.push((next, self.write(next)?));
                next += 1;
            }
            let polled_at = self.clock.now();
            self.step()?;
            if lost.is_none() && polled_at >= self.loss.at {
                lost = Some((polled_at, self.counted(|rail| rail.completions) * self.page as u64));
            }
            if healed_after.is_none() && self.counted(|rail| rail.replayed) > 0 {
                healed_after = Some(self.clock.now().since(self.loss.at));
            }
            let mut at = 0;
            while at < running.len() {
                match running[at].1.try_result() {
                    None => at += 1,
                    Some(result) => {
                        result?;
                        self.overwrite(running.swap_remove(at).0)?;
                        ended += 1;
                    }
                }
            }
        }
        let end = self.clock.now();
        let (lost_at, carried_before) = lost.unwrap_or((Time::ZERO, 0));
        let carried = total - carried_before;
        self.run_until(self.loss.at.after(self.loss.late_after).max(end).after(Duration::from_millis(1)));
        Ok(Healing {
            took: end.since(Time::ZERO),
            gbps: carried as f64 * 8.0 / end.since(lost_at).as_secs_f64() / 1e9,
            replayed: self.counted(|rail| rail.replayed),
            replayed_bytes: self.counted(|rail| rail.replayed_bytes),
            healed_after,
            late_bytes: self.late_bytes()?,
        })
    }

    /// Starts operation `number`.
    fn write(&self, number: usize) -> CommandResult<Op> {
        let from = Pages::new(self.order.clone());
        let to = from.clone().offset(number * self.content.len());
        Ok(self.peer.write_pages(&self.source, &from, &self.landing, &to, self.page)?)
    }

    /// Runs one turn of both hosts. The clock moves by the CPU cost, or to the next event.
    fn step(&mut self) -> CommandResult {
        let step = self.fabrics[0].step();
        let events = step.events + self.fabrics[1].step().events;
        self.clock.advance(self.meter.charge(step.posted));
        if events > 0 {
            return Ok(());
        }
        let due = self.fabrics.iter().map(Fabric::due).fold(Time::NEVER, Time::min);
        if due == Time::NEVER {
            return Err(CommandFailure::new(
                "the simulation makes no progress; this is a bug, please report it",
            ));
        }
        self.clock.advance(due.since(self.clock.now()).max(Duration::from_nanos(1)));
        Ok(())
    }

    /// Runs both hosts until `end`.
    fn run_until(&self, end: Time) {
        while self.clock.now() < end {
            if self.fabrics.iter().map(|fabric| fabric.step().events).sum::<usize>() == 0 {
                let due = self.fabrics.iter().map(Fabric::due).fold(end, Time::min);
                self.clock.advance(due.since(self.clock.now()).max(Duration::from_nanos(1)));
            }
        }
    }

    /// Checks what an operation has moved, as its target does once the operation has ended. Then writes over it.
    fn overwrite(&self, number: usize) -> CommandResult {
        let (start, mut arrived) = (number * self.content.len(), vec![0; self.content.len()]);
        self.target.copy_out(start, &mut arrived)?;
        if arrived != self.content {
            return Err(CommandFailure::new(
                "an operation has succeeded, but other bytes have arrived; this is a bug, please report it",
            ));
        }
        arrived.fill(OVERWRITTEN);
        Ok(self.target.copy_in(start, &arrived)?)
    }

    /// The bytes of the target that changed after it had written over them.
    fn late_bytes(&self) -> CommandResult<u64> {
        let mut part = vec![0; self.content.len()];
        let mut late = 0;
        for number in 0..OPS {
            self.target.copy_out(number * part.len(), &mut part)?;
            late += part.iter().filter(|byte| **byte != OVERWRITTEN).count() as u64;
        }
        Ok(late)
    }

    /// A sum over the counters of the sending cards.
    fn counted(&self, count: impl Fn(&multirail::RailCounters) -> u64) -> u64 {
        self.fabrics[0].counters().iter().map(count).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::super::profile::ProfileName;
    use super::*;

    /// If the target only pretends to fence, late bytes are seen.
    #[test]
    fn late_bytes_are_counted() {
        let profile = Profile::named(ProfileName::P5);
        let loss = CardLoss {
            cards: 1,
            at: Time::from_nanos(200_000),
            late_after: Duration::from_millis(1),
            ..CardLoss::NONE
        };
        let run = |loss| FailingGroup::open(&profile, 0, 64 << 10, 0.0, loss).unwrap().run().unwrap();
        let healed = run(loss);
        assert!(healed.replayed > 0 && healed.healed_after.is_some(), "{healed:?}");
        assert_eq!((healed.late_bytes, healed.replayed_bytes), (0, healed.replayed << 16), "{healed:?}");
        let pretended = run(CardLoss { ignores_fences: true, ..loss });
        assert!(pretended.late_bytes > 0, "{pretended:?}");
    }
}
