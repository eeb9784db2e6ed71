//! Explanations: what a request would do if it were made now, and why. An explanation names the transport, the thread,
//! the rails, and how bytes are copied. It is computed by the same code that the request itself runs.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use serde::Serialize;

use crate::coalescing::pieces_of;
use crate::copy::{self, CopyStrategy};
use crate::engine::memory::{RegionInner, RemoteInner};
use crate::engine::peer::{CheckedRange, Link, PairedRail};
use crate::engine::plan::split;
use crate::engine::{SharedState, Work};
use crate::observe::OperationKind;
use crate::operations::{cut_read, cut_write, message};
use crate::peer::PeerInner;
use crate::prepared::Part;
use crate::spi::WorkKind;
use crate::striping::Shares;
use crate::{
    ImmMode, LocalList, Pages, Peer, PreparedTransfer, ReadOptions, Region, RemoteList, RemoteRegion, Result,
    Selection, SendOptions, Trigger, WriteOptions,
};

/// What a request would do now: the result of [`Peer::explain_write`] and its siblings. It prints as a table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Explanation {
    /// The kind of operation.
    pub operation: OperationKind,
    /// The bytes of the whole request.
    pub bytes: u64,
    /// The peer's number and its host's name.
    pub peer: String,
    /// The transports in order of preference, and whether the request takes them.
    pub transports: Vec<TransportChoice>,
    /// How bytes get to the remote regions, as in [`RemoteRegion::path`]: each way once. `None` for a message.
    pub path: Option<String>,
    /// Why the device does not move the local region's bytes by itself; `None` if it does.
    pub staging_reason: Option<String>,
    /// Why the request does not run in the calling thread; `None` if it does.
    pub queued: Option<String>,
    /// Whether the pieces share large work requests, through slots of both sides, and why. `None` for a message, and if
    /// the transport does not coalesce.
    pub coalescing: Option<String>,
    /// Whether copies by the CPU bypass the caches. It says nothing of copies by devices.
    pub streams: bool,
    /// When the imm is delivered; `None` without an imm.
    pub imm: Option<&'static str>,
    /// The share of each rail of the taken transport.
    pub rails: Vec<RailPlan>,
}

/// A transport that a request might take.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TransportChoice {
    /// The transport's label.
    pub transport: String,
    /// Whether the request takes this transport.
    pub taken: bool,
    /// Why the request takes it, or why not.
    pub why: String,
}

/// A rail's share of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct RailPlan {
    /// The rail's number in the transport.
    pub rail: u32,
    /// The local device.
    pub device: String,
    /// The number of work requests, the one for a last imm included.
    pub requests: u64,
    /// The bytes of the rail's share.
    pub bytes: u64,
    /// Why the rail cannot have a share. `None` if it can have one, even if it has none this time.
    pub unusable: Option<&'static str>,
}

impl Peer {
    /// Explains what [`Peer::write_with`] with these arguments would do now.
    ///
    /// The explanation runs the same code as that call, up to the submission. Before a later call a queue may fill, or
    /// a device may be lost. If the peer's queue is full, a transport may give a request to its worker that the
    /// explanation shows in the calling thread.
    ///
    /// # Errors
    /// Those of the call before submission.
    pub fn explain_write(
        &self,
        src: &Region,
        range: Range<usize>,
        dst: &RemoteRegion,
        offset: usize,
        options: &WriteOptions,
    ) -> Result<Explanation> {
        let (link, span) = self.check_write(src, range, dst, offset, options, "write")?;
        let shape = cut_write(link, span, options, "write")?;
        let work = self.work(WorkKind::Write, shape, src, dst, options)?;
        let queued = why_waits(options.trigger.as_ref()).or_else(|| why_queued(link, &src.0, &dst.0, span));
        explain(&self.0, link, &work, queued)
    }

    /// Explains what [`Peer::write_pages_with`] with these arguments would do now.
    ///
    /// # Errors
    /// As [`Peer::explain_write`].
    pub fn explain_write_pages(
        &self,
        src: &Region,
        from: impl Into<Pages>,
        dst: &RemoteRegion,
        to: impl Into<Pages>,
        page: usize,
        options: &WriteOptions,
    ) -> Result<Explanation> {
        let (link, work) = self.plan_write_pages(src, from.into(), dst, to.into(), page, options)?;
        explain_pages(&self.0, link, &work)
    }

    /// Explains what [`Peer::read_with`] with these arguments would do now.
    ///
    /// # Errors
    /// As [`Peer::explain_write`].
    pub fn explain_read(
        &self,
        dst: &Region,
        range: Range<usize>,
        src: &RemoteRegion,
        offset: usize,
        options: &ReadOptions,
    ) -> Result<Explanation> {
        let (link, span) = self.check_read(dst, range, src, offset, options)?;
        let shape = cut_read(link, span)?;
        let work = self.work(WorkKind::Read, shape, dst, src, &options.as_write())?;
        let queued = why_waits(options.trigger.as_ref()).or_else(|| why_queued(link, &dst.0, &src.0, span));
        explain(&self.0, link, &work, queued)
    }

    /// Explains what [`Peer::read_pages_with`] with these arguments would do now.
    ///
    /// # Errors
    /// As [`Peer::explain_write`].
    pub fn explain_read_pages(
        &self,
        dst: &Region,
        to: impl Into<Pages>,
        src: &RemoteRegion,
        from: impl Into<Pages>,
        page: usize,
        options: &ReadOptions,
    ) -> Result<Explanation> {
        let (link, work) = self.plan_read_pages(dst, to.into(), src, from.into(), page, options)?;
        explain_pages(&self.0, link, &work)
    }

    /// Explains what [`Peer::write_list`] with these arguments would do now: one explanation for each part, that is,
    /// for all regions that lie on the same rails.
    ///
    /// # Errors
    /// As [`Peer::explain_write`].
    pub fn explain_write_list<'a>(
        &self,
        local: &LocalList,
        local_selection: impl Into<Selection<'a>>,
        remote: &RemoteList,
        remote_selection: impl Into<Selection<'a>>,
        options: &WriteOptions,
    ) -> Result<Vec<Explanation>> {
        self.prepare_write_list(local, local_selection, remote, remote_selection, options)?.explain()
    }

    /// Explains what [`Peer::read_list`] with these arguments would do now, as [`Peer::explain_write_list`].
    ///
    /// # Errors
    /// As [`Peer::explain_write`].
    pub fn explain_read_list<'a>(
        &self,
        local: &LocalList,
        local_selection: impl Into<Selection<'a>>,
        remote: &RemoteList,
        remote_selection: impl Into<Selection<'a>>,
        options: &ReadOptions,
    ) -> Result<Vec<Explanation>> {
        self.prepare_read_list(local, local_selection, remote, remote_selection, options)?.explain()
    }

    /// Explains what [`Peer::send_with`] with these arguments would do now.
    ///
    /// # Errors
    /// As [`Peer::explain_write`].
    pub fn explain_send(
        &self,
        src: &Region,
        range: Range<usize>,
        options: &SendOptions,
    ) -> Result<Explanation> {
        let (link, span) = self.check_send(src, range, options)?;
        let work = message(src, span, options.imm);
        let queued = match link.message_path(span.len) {
            None => Some(closed(link, link.direct.as_ref().map(|_| link.max_direct), span.len)),
            Some(_) if src.0.device_memory_mask != 0 => {
                Some("the bytes are in GPU memory, and go through host memory".into())
            }
            Some(_) => None,
        };
        explain(&self.0, link, &work, queued)
    }
}

impl PreparedTransfer {
    /// Explains what a post would do now: one explanation for each part, that is, for all regions that lie on the same
    /// rails. Pages have one part.
    ///
    /// # Errors
    /// Those of [`PreparedTransfer::post`] before submission.
    pub fn explain(&self) -> Result<Vec<Explanation>> {
        self.check()?;
        let peer = &self.peer().0;
        let parts = self.parts();
        let explain = |(number, part): (usize, &Part)| {
            let mut work = part.work.clone();
            if parts.len() > 1 && work.imm_mode == ImmMode::Last {
                // The imm comes after all parts. The first part's explanation counts its request.
                let is_first = number == 0;
                work.imm = work.imm.filter(|_| is_first);
                work.shared = work.imm.map(|_| Arc::new(SharedState::new(parts.len() as u32, None)));
            }
            let link = peer.first_link_of(part.transport);
            match (self.only(), work.locals().next(), work.remotes().next()) {
                (Some(range), Some(local), Some(remote)) => {
                    let queued = why_queued(link, local, remote, range);
                    explain(peer, link, &work, queued)
                }
                _ => explain_pages(peer, link, &work),
            }
        };
        parts.iter().enumerate().map(explain).collect()
    }
}

fn explain_pages(peer: &PeerInner, link: &Link, work: &Work) -> Result<Explanation> {
    let why = "pages and lists are posted in batches, by the worker";
    explain(peer, link, work, Some(why.into()))
}

/// The reason why an operation waits in the worker, if it has a trigger.
fn why_waits(trigger: Option<&Trigger>) -> Option<String> {
    trigger.map(|_| "it waits for its trigger, which the worker polls".into())
}

/// The reason why a request to a region goes to the worker, if it does.
fn why_queued(link: &Link, local: &RegionInner, remote: &RemoteInner, span: CheckedRange) -> Option<String> {
    let Some(path) = link.direct_path(remote, span.len) else {
        return Some(closed(link, remote.direct_path.as_ref().map(|path| path.max), span.len));
    };
    path.direct.decline_reason(&*path.import, local.device_memory_mask != 0, span.len).map(Into::into)
}

/// The reason why the direct path is closed. `max` is the most bytes for it, if there is one.
fn closed(link: &Link, max: Option<u64>, len: u64) -> String {
    match max {
        None => format!("transport {} has no direct path", link.label),
        Some(max) if len > max => {
            format!("{} is more than the {} that run at once", size(len), size(max))
        }
        Some(_) => {
            let before = link.backlog.operations();
            format!("{before} operations to the peer are queued before it")
        }
    }
}

fn explain(peer: &PeerInner, link: &Link, work: &Work, queued: Option<String>) -> Result<Explanation> {
    let taken = link.engine.transport;
    let data_links = peer.first_links().filter(|link| !link.engine.for_notifications);
    let transports = data_links.map(|other| TransportChoice {
        transport: other.label.clone(),
        taken: other.engine.transport == taken,
        why: match &other.refused {
            Some(why) => why.clone(),
            None if other.engine.transport > taken => "comes later in order of preference".into(),
            None if other.engine.transport < taken => "the region has no usable entry for it".into(),
            None if work.remote.is_some() => "the first that has the region too".into(),
            None => "the first that reaches the peer".into(),
        },
    });
    Ok(Explanation {
        operation: work.operation_kind(),
        bytes: work.shape.bytes(),
        peer: format!("{} ({})", peer.id, peer.context.identity.host),
        transports: transports.collect(),
        path: work.remote.as_ref().map(|_| {
            let mut paths: Vec<_> = work.remotes().map(|remote| remote.path()).collect();
            paths.sort_unstable();
            paths.dedup();
            paths.join("; ")
        }),
        staging_reason: work.locals().find_map(|local| {
            let mut regions = local.regions[taken].iter().flatten();
            regions.find_map(|region| region.staging_reason()).map(str::to_owned)
        }),
        coalescing: work
            .remote
            .as_ref()
            .filter(|_| link.capabilities().is_some_and(|caps| caps.coalesce.is_some()))
            .map(|remote| explain_coalescing(work, remote)),
        streams: copy::strategy(work.shape.bytes(), work.locality) == CopyStrategy::Stream,
        imm: match work.imm {
            None => None,
            Some(_) if work.imm_comes_last() && queued.is_some() => {
                Some("once, by a request of no bytes after all others")
            }
            Some(_) if work.shape.piece_count() == 1 || queued.is_none() => {
                Some("once, with the only request")
            }
            Some(_) => Some("with every request"),
        },
        rails: rails(peer, link, work, queued.is_none())?,
        queued,
    })
}

/// Whether the pieces of an operation are coalesced, and why.
fn explain_coalescing(work: &Work, remote: &RemoteInner) -> String {
    let ((_, mean), most) = (pieces_of(work), remote.max_coalesced);
    if work.coalesce {
        let left_out =
            if work.shape.list().is_some() { format!(" of at most {}", size(most)) } else { String::new() };
        return format!("coalesced: the pieces{left_out} share slots; they have {} on average", size(mean));
    }
    match most {
        0 => "not coalesced: the peer does not allow it".into(),
        most if mean > most => {
            format!("not coalesced: {} on average is more than {}", size(mean), size(most))
        }
        _ => "not coalesced: the policy does not ask for it, or a request for each piece is as fast".into(),
    }
}

/// The share of each rail, by the split that the workers would make now.
fn rails(peer: &PeerInner, link: &Link, work: &Work, at_once: bool) -> Result<Vec<RailPlan>> {
    let groups = peer.links_of(link.engine.transport);
    let mut plans: Vec<_> = groups.iter().flat_map(|link| blank(link, work)).collect();
    if at_once || work.is_one_request() {
        if let Some(first) = plans.iter_mut().find(|plan| plan.unusable.is_none()) {
            (first.requests, first.bytes) = (1, work.shape.bytes());
        }
        return Ok(plans);
    }
    let shares = match Shares::new(peer, link, work, "explain")? {
        Shares::One(link) => vec![(link, work.pieces)],
        Shares::Many(shares) => shares,
    };
    let mut ranges = Vec::new();
    for (index, (link, pieces)) in shares.into_iter().enumerate() {
        let engine = &link.engine;
        let plans = &mut plans[engine.first_rail..][..link.rails.len()];
        let weight = |(plan, paired): (&RailPlan, &Option<PairedRail>)| match (plan.unusable, paired) {
            (None, Some(paired)) => u32::try_from(paired.capacity.load(Relaxed)).unwrap_or(u32::MAX),
            _ => 0,
        };
        let weights: Vec<_> = plans.iter().zip(&link.rails).map(weight).collect();
        split(&work.shape, pieces, weights.into_iter(), engine.next_split_from.load(Relaxed), &mut ranges);
        for (plan, range) in plans.iter_mut().zip(&ranges) {
            plan.requests = range.len().into();
            plan.bytes = work.shape.bytes_of(range.start..range.end);
        }
        // The group that ends last sends the imm, over its first usable rail.
        let first = plans.iter_mut().find(|plan| plan.unusable.is_none());
        if let Some(first) = first.filter(|_| index == 0 && work.imm_comes_last()) {
            first.requests += 1;
        }
    }
    Ok(plans)
}

/// The plans for the rails of a link, without shares.
fn blank<'a>(link: &'a Link, work: &'a Work) -> impl Iterator<Item = RailPlan> + 'a {
    let (engine, transport) = (&link.engine, link.engine.transport);
    let unusable = move |index: usize| {
        let rail = engine.first_rail + index;
        match &link.rails[index] {
            None => Some("its device was lost before the two sides connected, or the peer's"),
            Some(_) if engine.counts[index].is_lost() => Some("its device is lost"),
            Some(paired) if paired.capacity.load(Relaxed) == 0 => Some("its path to the peer is broken"),
            Some(_) if !work.is_local_on(transport, rail) => Some("the local region is not on it"),
            Some(_) if !work.is_remote_on(rail) => Some("the region is not on it"),
            Some(_) => None,
        }
    };
    // What no rail in service can carry goes over those that are retired.
    let is_in_service = move |index: usize| unusable(index).is_none() && !engine.counts[index].is_retired();
    let any_in_service = (0..link.rails.len()).any(is_in_service);
    (0..link.rails.len()).map(move |index| RailPlan {
        rail: (engine.first_rail + index) as u32,
        device: engine.devices[index].clone(),
        requests: 0,
        bytes: 0,
        unusable: match unusable(index) {
            None if any_in_service && !is_in_service(index) => Some("its device is taken out of service"),
            why => why,
        },
    })
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} of {} to {}", self.operation.name(), size(self.bytes), self.peer)?;
        for (at, choice) in self.transports.iter().enumerate() {
            let head = if at == 0 { "transport" } else { "" };
            let verdict = if choice.taken { "taken" } else { "not taken" };
            writeln!(f, "  {head:<10} {}: {verdict}: {}", choice.transport, choice.why)?;
        }
        if let Some(path) = &self.path {
            writeln!(f, "  {:<10} {path}", "region by")?;
        }
        if let Some(reason) = &self.staging_reason {
            writeln!(f, "  {:<10} {reason}", "local by")?;
        }
        match &self.queued {
            None => writeln!(f, "  {:<10} the calling thread, at once", "runs in")?,
            Some(why) => writeln!(f, "  {:<10} the transport's worker: {why}", "runs in")?,
        }
        if let Some(coalescing) = &self.coalescing {
            writeln!(f, "  {:<10} {coalescing}", "pieces are")?;
        }
        let way = if self.streams { "past the caches" } else { "through the caches" };
        writeln!(f, "  {:<10} {way}, where the processor copies", "bytes go")?;
        writeln!(f, "  {:<10} {}", "imm", self.imm.unwrap_or("none"))?;
        let width = self.rails.iter().map(|rail| rail.device.len()).max().unwrap_or(0).max("device".len());
        write!(f, "  {:>4}  {:<width$}  {:>8}  {:>9}", "rail", "device", "requests", "bytes")?;
        for rail in &self.rails {
            let bytes = size(rail.bytes);
            write!(f, "\n  {:>4}  {:<width$}  {:>8}  {bytes:>9}", rail.rail, rail.device, rail.requests)?;
            if let Some(why) = rail.unusable {
                write!(f, "  {why}")?;
            }
        }
        Ok(())
    }
}

/// Bytes in the largest unit without a remainder.
fn size(bytes: u64) -> String {
    match bytes {
        1.. if bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        1.. if bytes.is_multiple_of(1 << 10) => format!("{} KiB", bytes >> 10),
        _ => format!("{bytes} B"),
    }
}
