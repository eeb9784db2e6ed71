//! The measured loop: posts operations and waits for them. It allocates no memory of its own.

use std::time::{Duration, Instant};

use multirail::{
    Explanation, Op, Pages, Peer, ReadOptions, Region, RemoteRegion, Result, SendOptions, WriteOptions,
};

use super::content;
use super::load::{BenchLoad, OpKind};
use super::protocol::COMPARE;
use super::sampler::Sampler;
use crate::failure::{CommandFailure, CommandResult};

/// The limit of a wait. The fabric's deadline of an operation is shorter.
const LIMIT: Duration = Duration::from_secs(60);

const NO_REGION: &str = "the server has no region for this operation";

/// Everything that the operations of one load need, prepared once.
pub struct LoadRunner<'a> {
    peer: &'a Peer,
    local: &'a Region,
    remote: Option<RemoteRegion>,
    kind: OpKind,
    size: usize,
    /// The source and target offsets of the pages, in the order of the transfer.
    offsets: Vec<(usize, usize)>,
    from: Pages,
    to: Pages,
    write: WriteOptions,
    read: ReadOptions,
    compare: bool,
    per_pass: usize,
    /// True to wait without sleeping, as `cuStreamSynchronize` does in the copies of the limit.
    spins: bool,
    window: Vec<Option<(Op, Option<Instant>)>>,
    operations: u64,
}

impl<'a> LoadRunner<'a> {
    /// A runner of `load` between `local` and `remote`, which is `None` for messages.
    pub fn new(
        peer: &'a Peer,
        local: &'a Region,
        remote: Option<RemoteRegion>,
        load: &BenchLoad,
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
        if load.kind == OpKind::WriteImm {
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

    /// The number of completed operations.
    pub fn operations(&self) -> u64 {
        self.operations
    }

    /// The explanation of the first operation.
    pub fn explain(&self) -> CommandResult<Explanation> {
        let (from, to) = self.offsets[0];
        let (source, target) = (from..from + self.size, to..to + self.size);
        let explained = match (self.kind, &self.remote) {
            (OpKind::WritePages, Some(remote)) => {
                let (from, to, size) = (&self.from, &self.to, self.size);
                self.peer.explain_write_pages(self.local, from, remote, to, size, &self.write)
            }
            (OpKind::Read, Some(remote)) => {
                self.peer.explain_read(self.local, target, remote, from, &self.read)
            }
            (OpKind::Send, _) => self.peer.explain_send(self.local, source, &SendOptions::new().imm(0)),
            (OpKind::Write | OpKind::WriteImm, Some(remote)) => {
                self.peer.explain_write(self.local, source, remote, to, &self.write)
            }
            (_, None) => return Err(CommandFailure::new(NO_REGION)),
        };
        Ok(explained?)
    }

    /// Moves every page once without timing. With `compare`, messages ask the server to compare them.
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
            for index in 0..self.per_pass {
                let begun = sampler.due().then(Instant::now);
                end(self.post(index)?, self.spins)?;
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
            for index in 0..self.per_pass {
                finish(&mut self.window[at], self.spins, sampler)?;
                let begun = sampler.due().then(Instant::now);
                self.window[at] = Some((self.post(index)?, begun));
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
    fn post(&self, index: usize) -> CommandResult<Op> {
        let posted: Result<Op> = match (self.kind, &self.remote) {
            (OpKind::WritePages, Some(remote)) => {
                self.peer.write_pages_with(self.local, &self.from, remote, &self.to, self.size, &self.write)
            }
            (OpKind::Read, Some(remote)) => {
                let (from, to) = self.offsets[index];
                self.peer.read_with(self.local, to..to + self.size, remote, from, &self.read)
            }
            (OpKind::Send, _) => {
                let (from, _) = self.offsets[index];
                let flag = if self.compare { COMPARE } else { 0 };
                let options = SendOptions::new().imm(index as u32 | flag);
                self.peer.send_with(self.local, from..from + self.size, &options)
            }
            (OpKind::Write | OpKind::WriteImm, Some(remote)) => {
                let (from, to) = self.offsets[index];
                self.peer.write_with(self.local, from..from + self.size, remote, to, &self.write)
            }
            (_, None) => return Err(CommandFailure::new(NO_REGION)),
        };
        Ok(posted?)
    }
}

/// Waits for an operation, without sleeping if `spins`.
#[inline]
fn end(mut op: Op, spins: bool) -> CommandResult {
    let begun = Instant::now();
    while spins && begun.elapsed() < LIMIT {
        if let Some(result) = op.try_result() {
            return result.map(drop).map_err(CommandFailure::from);
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
