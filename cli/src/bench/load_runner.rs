//! The measured loop: posts operations, waits for them, allocates nothing of its own.

use std::time::{Duration, Instant};

use multirail::{
    Explanation, Op, Pages, Peer, ReadOptions, Region, RemoteRegion, Result, SendOptions, WriteOptions,
};

use super::content;
use super::load::{Kind, Load};
use super::protocol::COMPARE;
use super::sampler::Sampler;
use crate::failure::{CommandResult, Failure};

/// Longer than the fabric's deadline of an operation, which ends it first.
const LIMIT: Duration = Duration::from_secs(60);

const NO_REGION: &str = "the server has no region for this operation";

/// Everything the operations of one load need, prepared once.
pub struct LoadRunner<'a> {
    peer: &'a Peer,
    local: &'a Region,
    remote: Option<RemoteRegion>,
    kind: Kind,
    size: usize,
    /// Offsets of the pages' sources and targets, in the order they are moved.
    offsets: Vec<(usize, usize)>,
    from: Pages,
    to: Pages,
    write: WriteOptions,
    read: ReadOptions,
    compare: bool,
    per_pass: usize,
    /// Waits without sleeping, as `cuStreamSynchronize` does in the limit's copies.
    spins: bool,
    window: Vec<Option<(Op, Option<Instant>)>>,
    operations: u64,
}

impl<'a> LoadRunner<'a> {
    /// A mover of `load` between `local` and `remote` (none for messages).
    pub fn new(
        peer: &'a Peer,
        local: &'a Region,
        remote: Option<RemoteRegion>,
        load: &Load,
        cold: bool,
    ) -> Self {
        let (sources, targets) = (content::sources(load), content::targets(load));
        let size = load.size as usize;
        let offsets =
            sources.iter().zip(&targets).map(|(&s, &t)| (s as usize * size, t as usize * size)).collect();
        let (mut write, mut read) = (WriteOptions::default(), ReadOptions::default());
        if cold {
            write = write.cold();
            read.locality = multirail::Locality::Cold;
        }
        if load.kind == Kind::WriteImm {
            write = write.imm(load.imm);
        }
        Self {
            peer,
            local,
            remote,
            kind: load.kind,
            size,
            offsets,
            from: Pages::new(sources),
            to: Pages::new(targets),
            write,
            read,
            compare: false,
            per_pass: load.operations(),
            spins: load.is_on_gpu(),
            window: (0..load.inflight).map(|_| None).collect(),
            operations: 0,
        }
    }

    /// Operations done so far.
    pub fn operations(&self) -> u64 {
        self.operations
    }

    /// What the first operation would do now.
    pub fn explain(&self) -> CommandResult<Explanation> {
        let (from, to) = self.offsets[0];
        let (source, target) = (from..from + self.size, to..to + self.size);
        let explained = match (self.kind, &self.remote) {
            (Kind::WritePages, Some(remote)) => {
                let (from, to, size) = (&self.from, &self.to, self.size);
                self.peer.explain_write_pages(self.local, from, remote, to, size, &self.write)
            }
            (Kind::Read, Some(remote)) => {
                self.peer.explain_read(self.local, target, remote, from, &self.read)
            }
            (Kind::Send, _) => self.peer.explain_send(self.local, source, &SendOptions::new().imm(0)),
            (Kind::Write | Kind::WriteImm, Some(remote)) => {
                self.peer.explain_write(self.local, source, remote, to, &self.write)
            }
            (_, None) => return Err(Failure::new(NO_REGION)),
        };
        Ok(explained?)
    }

    /// Moves every page once, untimed; with `compare`, messages say so.
    pub fn pass(&mut self, compare: bool) -> CommandResult {
        self.compare = compare;
        let done = self.run(1, &mut Sampler::new(Duration::MAX));
        self.compare = false;
        done
    }

    /// Moves every page `passes` times.
    pub fn run(&mut self, passes: u64, sampler: &mut Sampler) -> CommandResult {
        match self.window.len() {
            1 => self.one_by_one(passes, sampler)?,
            _ => self.windowed(passes, sampler)?,
        }
        self.operations += passes * self.per_pass as u64;
        Ok(())
    }

    fn one_by_one(&self, passes: u64, sampler: &mut Sampler) -> CommandResult {
        for _ in 0..passes {
            for place in 0..self.per_pass {
                let begun = sampler.due().then(Instant::now);
                end(self.post(place)?, self.spins)?;
                if let Some(begun) = begun {
                    sampler.record(begun.elapsed());
                }
            }
        }
        Ok(())
    }

    fn windowed(&mut self, passes: u64, sampler: &mut Sampler) -> CommandResult {
        let mut at = 0;
        for _ in 0..passes {
            for place in 0..self.per_pass {
                finish(&mut self.window[at], self.spins, sampler)?;
                let begun = sampler.due().then(Instant::now);
                self.window[at] = Some((self.post(place)?, begun));
                at = if at + 1 == self.window.len() { 0 } else { at + 1 };
            }
        }
        for _ in 0..self.window.len() {
            finish(&mut self.window[at], self.spins, sampler)?;
            at = if at + 1 == self.window.len() { 0 } else { at + 1 };
        }
        Ok(())
    }

    #[inline]
    fn post(&self, place: usize) -> CommandResult<Op> {
        let posted: Result<Op> = match (self.kind, &self.remote) {
            (Kind::WritePages, Some(remote)) => {
                self.peer.write_pages_with(self.local, &self.from, remote, &self.to, self.size, &self.write)
            }
            (Kind::Read, Some(remote)) => {
                let (from, to) = self.offsets[place];
                self.peer.read_with(self.local, to..to + self.size, remote, from, &self.read)
            }
            (Kind::Send, _) => {
                let (from, _) = self.offsets[place];
                let flag = if self.compare { COMPARE } else { 0 };
                let options = SendOptions::new().imm(place as u32 | flag);
                self.peer.send_with(self.local, from..from + self.size, &options)
            }
            (Kind::Write | Kind::WriteImm, Some(remote)) => {
                let (from, to) = self.offsets[place];
                self.peer.write_with(self.local, from..from + self.size, remote, to, &self.write)
            }
            (_, None) => return Err(Failure::new(NO_REGION)),
        };
        Ok(posted?)
    }
}

/// Waits for an operation; one that `looks` does not sleep.
#[inline]
fn end(mut op: Op, spins: bool) -> CommandResult {
    let begun = Instant::now();
    while spins && begun.elapsed() < LIMIT {
        if let Some(result) = op.try_result() {
            return result.map(drop).map_err(Failure::from);
        }
        std::hint::spin_loop();
    }
    op.wait(if spins { Duration::ZERO } else { LIMIT })?;
    Ok(())
}

#[inline]
fn finish(slot: &mut Option<(Op, Option<Instant>)>, spins: bool, sampler: &mut Sampler) -> CommandResult {
    if let Some((op, begun)) = slot.take() {
        end(op, spins)?;
        if let Some(begun) = begun {
            sampler.record(begun.elapsed());
        }
    }
    Ok(())
}
