//! The measured loop: posts operations and waits for them. It allocates no memory of its own.

use std::time::{Duration, Instant};

use multirail::{
    Error, ErrorKind, Explanation, LocalList, Op, Outcome, Pages, PathPolicy, Peer, ReadOptions, Region,
    RemoteList, RemoteRegion, Result, SendOptions, WriteOptions,
};

use super::MeasureOptions;
use super::layout::PageLayout;
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
    /// The entries of both sides, for operations on lists: the pages of all regions, in the order of their numbers.
    lists: (LocalList, RemoteList),
    kind: OpKind,
    size: usize,
    layout: PageLayout,
    /// The source and target offsets of the pages in their region, in the order of the transfer.
    offsets: Vec<(usize, usize)>,
    from: Pages,
    to: Pages,
    write: WriteOptions,
    read: ReadOptions,
    send: SendOptions,
    compare: bool,
    per_pass: usize,
    /// True to wait without sleeping, as `cuStreamSynchronize` does in the copies of the limit.
    spins: bool,
    window: Vec<Option<PostedOp>>,
    operations: u64,
    work_requests: u64,
    merged: u64,
}

/// An operation, and the times before and after it was posted, if it is timed.
type PostedOp = (Op, Option<(Instant, Instant)>);

impl<'a> LoadRunner<'a> {
    /// A runner of `load` between the regions `locals` and `remotes`. There are no `remotes` for messages.
    pub fn new(
        peer: &'a Peer,
        locals: &'a [Region],
        remotes: Vec<RemoteRegion>,
        load: &BenchLoad,
        layout: PageLayout,
        asked: &MeasureOptions,
    ) -> Result<Self> {
        let size = load.size as usize;
        let mut lists = (LocalList::new(), RemoteList::new());
        for ((local, remote), pages) in locals.iter().zip(&remotes).zip(&layout.regions) {
            lists.0.push_strided(local, 0, size, pages.len() as u32, size)?;
            lists.1.push_strided(remote, 0, size, pages.len() as u32, size)?;
        }
        let paths = asked.path.map_or(PathPolicy::ANY, PathPolicy::only);
        let (mut write, mut read) =
            (WriteOptions::new().path_policy(paths), ReadOptions::new().path_policy(paths));
        if asked.cold {
            write = write.cold();
            read.locality = multirail::Locality::Cold;
        }
        if let Some(policy) = asked.coalesce {
            (write, read) = (write.coalesce(policy), read.coalesce(policy));
        }
        if load.kind == OpKind::WriteImm {
            write = write.imm(load.imm);
        }
        Ok(Self {
            peer,
            local: &locals[0],
            remote: remotes.into_iter().next(),
            lists,
            kind: load.kind,
            size,
            offsets: layout.offsets().map(|(_, from, to)| (from, to)).collect(),
            from: Pages::new(layout.sources.clone()),
            to: Pages::new(layout.targets.clone()),
            layout,
            write,
            read,
            send: SendOptions::new().path_policy(paths),
            compare: false,
            per_pass: load.operations(),
            spins: load.is_on_gpu(),
            window: (0..load.inflight).map(|_| None).collect(),
            operations: 0,
            work_requests: 0,
            merged: 0,
        })
    }

    /// The number of completed operations.
    pub fn operations(&self) -> u64 {
        self.operations
    }

    /// The mean number of work requests of an operation, and of pages that shared one with the page before them.
    pub fn mean_requests(&self) -> (f64, f64) {
        let mean = |sum: u64| sum as f64 / self.operations.max(1) as f64;
        (mean(self.work_requests), mean(self.merged))
    }

    /// The explanations of the first operation: one for each set of rails.
    pub fn explain(&self) -> CommandResult<Vec<Explanation>> {
        let (from, to) = self.offsets[0];
        let (source, target) = (from..from + self.size, to..to + self.size);
        let ((ours, theirs), PageLayout { sources, targets, .. }) = (&self.lists, &self.layout);
        let explained = match (self.kind, &self.remote) {
            (OpKind::WriteList, Some(_)) => {
                return Ok(self.peer.explain_write_list(ours, sources, theirs, targets, &self.write)?);
            }
            (OpKind::ReadList, Some(_)) => {
                return Ok(self.peer.explain_read_list(ours, targets, theirs, sources, &self.read)?);
            }
            (OpKind::WritePages, Some(remote)) => {
                let (from, to, size) = (&self.from, &self.to, self.size);
                self.peer.explain_write_pages(self.local, from, remote, to, size, &self.write)
            }
            (OpKind::ReadPages, Some(remote)) => {
                let (from, to, size) = (&self.from, &self.to, self.size);
                self.peer.explain_read_pages(self.local, to, remote, from, size, &self.read)
            }
            (OpKind::Read, Some(remote)) => {
                self.peer.explain_read(self.local, target, remote, from, &self.read)
            }
            (OpKind::Send, _) => self.peer.explain_send(self.local, source, &self.send.clone().imm(0)),
            (OpKind::Write | OpKind::WriteImm, Some(remote)) => {
                self.peer.explain_write(self.local, source, remote, to, &self.write)
            }
            (_, None) => return Err(CommandFailure::new(NO_REGION)),
        };
        Ok(vec![explained?])
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
            1 => self.one_by_one(passes, sampler),
            _ => self.windowed(passes, sampler),
        }
    }

    fn one_by_one(&mut self, passes: u64, sampler: &mut Sampler) -> CommandResult {
        for _ in 0..passes {
            for index in 0..self.per_pass {
                let begun = sampler.due().then(Instant::now);
                let mut op = self.post(index)?;
                let times = begun.map(|begun| (begun, Instant::now()));
                self.finish(&mut op, times, sampler)?;
            }
        }
        Ok(())
    }

    fn windowed(&mut self, passes: u64, sampler: &mut Sampler) -> CommandResult {
        let mut at = 0;
        for _ in 0..passes {
            for index in 0..self.per_pass {
                self.finish_slot(at, sampler)?;
                let begun = sampler.due().then(Instant::now);
                let op = self.post(index)?;
                self.window[at] = Some((op, begun.map(|begun| (begun, Instant::now()))));
                at = if at + 1 == self.window.len() { 0 } else { at + 1 };
            }
        }
        for _ in 0..self.window.len() {
            self.finish_slot(at, sampler)?;
            at = if at + 1 == self.window.len() { 0 } else { at + 1 };
        }
        Ok(())
    }

    #[inline]
    fn finish_slot(&mut self, at: usize, sampler: &mut Sampler) -> CommandResult {
        let Some((mut op, times)) = self.window[at].take() else { return Ok(()) };
        self.finish(&mut op, times, sampler)
    }

    /// Waits for an operation. `times` are those before and after its post, if it is measured. The operation is not
    /// moved: that would take a tenth of the time of a write of 8 bytes.
    #[inline]
    fn finish(
        &mut self,
        op: &mut Op,
        times: Option<(Instant, Instant)>,
        sampler: &mut Sampler,
    ) -> CommandResult {
        let outcome = end(op, self.spins)?;
        if let Some((begun, posted)) = times {
            sampler.record_op(begun, posted, Instant::now());
        }
        self.operations += 1;
        self.work_requests += u64::from(outcome.work_requests);
        self.merged += u64::from(outcome.merged);
        Ok(())
    }

    #[inline]
    fn post(&self, index: usize) -> Result<Op> {
        let ((ours, theirs), PageLayout { sources, targets, .. }) = (&self.lists, &self.layout);
        match (self.kind, &self.remote) {
            (OpKind::WritePages, Some(remote)) => {
                self.peer.write_pages_with(self.local, &self.from, remote, &self.to, self.size, &self.write)
            }
            (OpKind::ReadPages, Some(remote)) => {
                self.peer.read_pages_with(self.local, &self.to, remote, &self.from, self.size, &self.read)
            }
            (OpKind::WriteList, Some(_)) => self.peer.write_list(ours, sources, theirs, targets, &self.write),
            (OpKind::ReadList, Some(_)) => self.peer.read_list(ours, targets, theirs, sources, &self.read),
            (OpKind::Read, Some(remote)) => {
                let (from, to) = self.offsets[index];
                self.peer.read_with(self.local, to..to + self.size, remote, from, &self.read)
            }
            (OpKind::Send, _) => {
                let (from, _) = self.offsets[index];
                let flag = if self.compare { COMPARE } else { 0 };
                let options = self.send.clone().imm(index as u32 | flag);
                self.peer.send_with(self.local, from..from + self.size, &options)
            }
            (OpKind::Write | OpKind::WriteImm, Some(remote)) => {
                let (from, to) = self.offsets[index];
                self.peer.write_with(self.local, from..from + self.size, remote, to, &self.write)
            }
            (_, None) => Err(Error::new(ErrorKind::InvalidRequest, "bench", NO_REGION)),
        }
    }
}

/// Waits for an operation, without sleeping if `spins`.
#[inline]
fn end(op: &mut Op, spins: bool) -> Result<Outcome> {
    // Most small operations are over at once: no clock is read for them.
    if let Some(result) = op.try_result() {
        return result;
    }
    let begun = Instant::now();
    while spins && begun.elapsed() < LIMIT {
        if let Some(result) = op.try_result() {
            return result;
        }
        std::hint::spin_loop();
    }
    op.wait(if spins { Duration::ZERO } else { LIMIT })
}
