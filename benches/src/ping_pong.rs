//! Ping-pong: a write that is announced to the target, and a write back.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use transport_core::{ImmCounter, Notifications, Op, Peer, RecvPool, Region, RemoteRegion, WriteOptions};

use crate::BenchResult;
use crate::driven_fabric::DrivenFabric;

/// The imm of all writes.
const IMM: u32 = 1;

/// What tells the target of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum AnnouncedBy {
    /// Immediate data.
    Imm,
    /// A notification of 8 bytes.
    Notification,
    /// An imm, and at the same time a notification of 8 bytes that does not wait for the write: the least that a
    /// notification in a message of its own can take.
    Both,
    /// Nothing: a message takes the place of the write.
    Message,
}

impl AnnouncedBy {
    /// Whether the fabrics must be opened with notifications.
    pub(crate) fn needs_notifications(self) -> bool {
        matches!(self, Self::Notification | Self::Both)
    }
}

/// Receives of a side, if it receives messages.
const RECEIVES: usize = 256;

/// Where a side learns of the other side's writes.
enum Announcements {
    Imms(ImmCounter),
    Notifications(Notifications),
    Both(ImmCounter, Notifications),
    Messages(RecvPool),
}

/// One side of a ping-pong. The calling thread drives the fabric.
pub struct PingPong<'a> {
    fabric: &'a DrivenFabric,
    peer: &'a Peer,
    src: &'a Region,
    dst: &'a RemoteRegion,
    len: usize,
    options: WriteOptions,
    arrived: Announcements,
    under_way: VecDeque<Op>,
}

impl<'a> PingPong<'a> {
    pub(crate) fn new(
        fabric: &'a DrivenFabric,
        peer: &'a Peer,
        (src, dst): (&'a Region, &'a RemoteRegion),
        len: usize,
        announced: AnnouncedBy,
    ) -> BenchResult<Self> {
        let (options, arrived) = match announced {
            AnnouncedBy::Imm => (WriteOptions::new().imm(IMM), Announcements::Imms(peer.imm(IMM))),
            AnnouncedBy::Notification => {
                (WriteOptions::new().notify([7; 8]), Announcements::Notifications(fabric.notifications()?))
            }
            AnnouncedBy::Message => {
                let pool = fabric.recv_pool(RECEIVES, len)?;
                fabric.step();
                (WriteOptions::new(), Announcements::Messages(pool))
            }
            AnnouncedBy::Both => {
                let arrived = Announcements::Both(peer.imm(IMM), fabric.notifications()?);
                (WriteOptions::new().imm(IMM), arrived)
            }
        };
        Ok(Self { fabric, peer, src, dst, len, options, arrived, under_way: VecDeque::new() })
    }

    /// Posts one write.
    pub fn write(&mut self) -> BenchResult<()> {
        if let Announcements::Messages(_) = self.arrived {
            self.under_way.push_back(self.peer.send(self.src, 0..self.len)?);
            return Ok(());
        }
        self.under_way.push_back(self.peer.write_with(self.src, 0..self.len, self.dst, 0, &self.options)?);
        if let Announcements::Both(..) = self.arrived {
            self.under_way.push_back(self.peer.notify(&[7; 8])?);
        }
        Ok(())
    }

    /// Waits for a write of the other side. Returns false if `is_over` returns true first.
    pub fn await_write(&mut self, is_over: impl Fn() -> bool) -> BenchResult<bool> {
        let mut has_notification = false;
        loop {
            self.fabric.step();
            let has_arrived = match &mut self.arrived {
                Announcements::Imms(imm) => imm.try_take(1),
                Announcements::Notifications(all) => all.try_next().transpose()?.is_some(),
                Announcements::Messages(pool) => pool.try_next().transpose()?.is_some(),
                Announcements::Both(imm, all) => {
                    has_notification = has_notification || all.try_next().transpose()?.is_some();
                    has_notification && imm.try_take(1)
                }
            };
            if has_arrived {
                return Ok(true);
            }
            while let Some(result) = self.under_way.front_mut().and_then(Op::try_result) {
                result?;
                self.under_way.pop_front();
            }
            if is_over() {
                return Ok(false);
            }
        }
    }

    /// Round trips in a second, with `window` of them under way: the median of `bursts` times 1000 round trips, so that
    /// other processes that get the core for a while do not count.
    pub fn rate(&mut self, bursts: usize, window: usize) -> BenchResult<f64> {
        const BURST: usize = 1000;
        let end = Instant::now() + crate::LIMIT;
        for _ in 0..window {
            self.write()?;
        }
        let mut rates = Vec::with_capacity(bursts);
        for _ in 0..bursts {
            let begun = Instant::now();
            for _ in 0..BURST {
                if !self.await_write(|| Instant::now() > end)? {
                    return Err("the target does not answer".into());
                }
                self.write()?;
            }
            rates.push(BURST as f64 / begun.elapsed().as_secs_f64());
        }
        for _ in 0..window {
            self.await_write(|| Instant::now() > end)?;
        }
        rates.sort_unstable_by(f64::total_cmp);
        Ok(rates[bursts / 2])
    }

    /// Half of the median time of `count` round trips.
    pub fn latency(&mut self, count: usize) -> BenchResult<Duration> {
        let end = Instant::now() + crate::LIMIT;
        let mut trips = Vec::with_capacity(count);
        for _ in 0..count {
            let begun = Instant::now();
            self.write()?;
            if !self.await_write(|| false)? || begun > end {
                return Err("the target does not answer".into());
            }
            trips.push(begun.elapsed());
        }
        trips.sort_unstable();
        Ok(trips[count / 2] / 2)
    }
}
