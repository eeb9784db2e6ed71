//! Ping-pong: a write with an imm there, and one back.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use transport_core::{ImmCounter, Op, Peer, Region, RemoteRegion, WriteOptions};

use crate::BenchResult;
use crate::turns::Turns;

/// What both sides' writes bring along.
const IMM: u32 = 1;

/// One side of it. The thread that calls drives it.
pub struct Volley<'a> {
    turns: &'a Turns,
    peer: &'a Peer,
    src: &'a Region,
    dst: &'a RemoteRegion,
    len: usize,
    arrived: ImmCounter,
    under_way: VecDeque<Op>,
}

impl<'a> Volley<'a> {
    pub(crate) fn new(
        turns: &'a Turns,
        peer: &'a Peer,
        src: &'a Region,
        dst: &'a RemoteRegion,
        len: usize,
    ) -> Self {
        Self { turns, peer, src, dst, len, arrived: peer.imm(IMM), under_way: VecDeque::new() }
    }

    /// Writes.
    pub fn plays(&mut self) -> BenchResult<()> {
        let options = WriteOptions::new().imm(IMM);
        self.under_way.push_back(self.peer.write_with(self.src, 0..self.len, self.dst, 0, &options)?);
        Ok(())
    }

    /// Waits for the other side's; false if it is over before.
    pub fn takes(&mut self, is_over: impl Fn() -> bool) -> BenchResult<bool> {
        loop {
            self.turns.step();
            if self.arrived.try_take(1) {
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

    /// Half of the median round trip of `count`.
    pub fn latency(&mut self, count: usize) -> BenchResult<Duration> {
        let end = Instant::now() + crate::LIMIT;
        let mut trips = Vec::with_capacity(count);
        for _ in 0..count {
            let begun = Instant::now();
            self.plays()?;
            if !self.takes(|| false)? || begun > end {
                return Err("the target does not answer".into());
            }
            trips.push(begun.elapsed());
        }
        trips.sort_unstable();
        Ok(trips[count / 2] / 2)
    }
}
