//! What a request would do if it were made now, and why: the transport, the thread, the
//! rails, how bytes are copied. Computed by what the request itself goes through.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use serde::Serialize;

use crate::copy::{self, CopyStrategy};
use crate::engine::Work;
use crate::engine::peer::{CheckedRange, Link, PairedRail};
use crate::observe::OperationKind;
use crate::peer::PeerInner;
use crate::plan::split;
use crate::request::{cut_read, cut_write, message};
use crate::spi::WorkKind;
use crate::striping::Shares;
use crate::{
    Pages, Peer, PreparedWrite, ReadOptions, Region, RemoteRegion, Result, SendOptions, WriteOptions,
};

/// What a request would do now: [`Peer::explain_write`] and its siblings. It prints as a table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Explanation {
    /// What was asked.
    pub operation: OperationKind,
    /// Bytes of the whole.
    pub bytes: u64,
    /// The peer's number and its host's name.
    pub peer: String,
    /// The transports in order of preference, and what becomes of each.
    pub transports: Vec<TransportChoice>,
    /// What carries bytes to the remote region, as [`RemoteRegion::path`] says; `None` for a message.
    pub path: Option<&'static str>,
    /// Why the local region's bytes do not go by the device alone; `None` where they do.
    pub staging_reason: Option<String>,
    /// Why it does not run in the calling thread; `None` if it does.
    pub queued: Option<String>,
    /// Whether copies by the processor stream past the caches; devices do as they like.
    pub streams: bool,
    /// When the imm is delivered; `None` without one.
    pub imm: Option<&'static str>,
    /// What each rail of the taken transport has to do.
    pub rails: Vec<RailPlan>,
}

/// A transport that a request might take.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TransportChoice {
    /// Its label.
    pub transport: String,
    /// Whether it is the one.
    pub taken: bool,
    /// Why, or why not.
    pub why: String,
}

/// A rail's share of a request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct RailPlan {
    /// Its position.
    pub rail: u32,
    /// The local device.
    pub device: String,
    /// Requests, that of a last imm among them.
    pub requests: u64,
    /// Bytes.
    pub bytes: u64,
    /// Why it can have no share; `None` if it can, even if it has none this time.
    pub unusable: Option<&'static str>,
}

impl Peer {
    /// What [`Peer::write_with`] of these arguments would do now.
    ///
    /// It is what that call goes through, up to the submission; between the two a queue may
    /// fill or a device be lost. A transport may hand a request that should run in the calling thread
    /// to its worker after all, when the peer's queue is full.
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
        let (link, span) = self.0.check_write(src, range, dst, offset, options, "write")?;
        let work = options.work(cut_write(link, span, options, "write")?, src, dst);
        let why = || "it waits for its trigger, which the worker looks at".into();
        let queued = options.trigger.as_ref().map(|_| why()).or_else(|| why_queued(link, src, dst, span));
        explain(&self.0, link, OperationKind::Write, &work, queued)
    }

    /// What [`Peer::write_pages_with`] of these arguments would do now.
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

    /// What [`Peer::read_with`] of these arguments would do now.
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
        let (link, span) = self.0.check_read(dst, range, src, offset)?;
        let shape = cut_read(link, span)?;
        let work = Work { kind: WorkKind::Read, ..options.as_write().work(shape, dst, src) };
        explain(&self.0, link, OperationKind::Read, &work, why_queued(link, dst, src, span))
    }

    /// What [`Peer::send_with`] of these arguments would do now.
    ///
    /// # Errors
    /// As [`Peer::explain_write`].
    pub fn explain_send(
        &self,
        src: &Region,
        range: Range<usize>,
        options: &SendOptions,
    ) -> Result<Explanation> {
        let (link, span) = self.0.check_send(src, range, options)?;
        let work = message(src, span, options.imm);
        let queued = match link.message_path(span.len) {
            None => Some(closed(link, link.direct.as_ref().map(|_| link.max_direct), span.len)),
            Some(_) if src.0.device_memory_mask != 0 => {
                Some("a GPU has the bytes, which go through host memory".into())
            }
            Some(_) => None,
        };
        explain(&self.0, link, OperationKind::Send, &work, queued)
    }
}

impl PreparedWrite {
    /// What a post of it would do now.
    ///
    /// # Errors
    /// Those of [`PreparedWrite::post`] before submission.
    pub fn explain(&self) -> Result<Explanation> {
        let (peer, link, work) = self.checked()?;
        explain_pages(peer, link, work)
    }
}

fn explain_pages(peer: &PeerInner, link: &Link, work: &Work) -> Result<Explanation> {
    let why = "paged writes are the worker's, which posts them in batches";
    explain(peer, link, OperationKind::WritePages, work, Some(why.into()))
}

/// Why a request to a region goes to the worker.
fn why_queued(link: &Link, local: &Region, remote: &RemoteRegion, span: CheckedRange) -> Option<String> {
    let Some(path) = link.direct_path(&remote.0, span.len) else {
        return Some(closed(link, remote.0.direct_path.as_ref().map(|path| path.max), span.len));
    };
    path.direct.declines(&*path.import, local.0.device_memory_mask != 0, span.len).map(Into::into)
}

/// Why the direct path, for up to `max` bytes if there is one, is closed.
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

fn explain(
    peer: &PeerInner,
    link: &Link,
    operation: OperationKind,
    work: &Work,
    queued: Option<String>,
) -> Result<Explanation> {
    let taken = link.engine.transport;
    let transports = peer.first_links().map(|other| TransportChoice {
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
        operation,
        bytes: work.shape.bytes(),
        peer: format!("{} ({})", peer.id, peer.identity.host),
        transports: transports.collect(),
        path: work.remote.as_ref().map(|remote| remote.path()),
        staging_reason: work.local.as_ref().and_then(|local| {
            let regions = local.regions[taken].iter().flatten();
            regions.filter_map(|region| region.staging_reason()).next().map(str::to_owned)
        }),
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

/// Each rail's share, by the split that the workers would make now.
fn rails(peer: &PeerInner, link: &Link, work: &Work, at_once: bool) -> Result<Vec<RailPlan>> {
    let groups = peer.links_of(link.engine.transport);
    let mut plans: Vec<_> = groups.iter().flat_map(|link| blank(link, work)).collect();
    if at_once || work.is_whole() {
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
            (None, Some(paired)) => paired.weight,
            _ => 0,
        };
        let weights: Vec<_> = plans.iter().zip(&link.rails).map(weight).collect();
        split(pieces, weights.into_iter(), engine.next_first_rail.load(Relaxed), &mut ranges);
        for (plan, range) in plans.iter_mut().zip(&ranges) {
            plan.requests = range.len().into();
            plan.bytes = work.shape.bytes_of(range.start..range.end);
        }
        // Whichever group is done last sends it, on the first rail it has.
        let first = plans.iter_mut().find(|plan| plan.unusable.is_none());
        if let Some(first) = first.filter(|_| index == 0 && work.imm_comes_last()) {
            first.requests += 1;
        }
    }
    Ok(plans)
}

/// The rails of a link, without shares.
fn blank<'a>(link: &'a Link, work: &'a Work) -> impl Iterator<Item = RailPlan> + 'a {
    let (engine, transport) = (&link.engine, link.engine.transport);
    link.rails.iter().enumerate().map(move |(index, paired)| {
        let rail = engine.first_rail + index;
        RailPlan {
            rail: rail as u32,
            device: engine.devices[index].clone(),
            requests: 0,
            bytes: 0,
            unusable: match paired {
                None => Some("the peer has no rail for it"),
                Some(_) if engine.counts[index].is_lost() => Some("its device is lost"),
                Some(_) if !work.is_local_on(transport, rail) => Some("the local region is not on it"),
                Some(_) if !work.is_remote_on(rail) => Some("the region is not on it"),
                Some(_) => None,
            },
        }
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
        if let Some(path) = self.path {
            writeln!(f, "  {:<10} {path}", "region by")?;
        }
        if let Some(reason) = &self.staging_reason {
            writeln!(f, "  {:<10} {reason}", "local by")?;
        }
        match &self.queued {
            None => writeln!(f, "  {:<10} the calling thread, at once", "runs in")?,
            Some(why) => writeln!(f, "  {:<10} the transport's worker: {why}", "runs in")?,
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

/// Bytes, in the largest unit that leaves nothing over.
fn size(bytes: u64) -> String {
    match bytes {
        1.. if bytes.is_multiple_of(1 << 20) => format!("{} MiB", bytes >> 20),
        1.. if bytes.is_multiple_of(1 << 10) => format!("{} KiB", bytes >> 10),
        _ => format!("{bytes} B"),
    }
}
