//! Scatter: one source, many peers. All parts are checked before any is submitted.

use std::ops::Range;

use super::{PeerGroup, refused};
use crate::engine::Work;
use crate::engine::peer::{CheckedRange, Link};
use crate::operations::{cut_write, imm_alone};
use crate::span_link::TracedTransfer;
use crate::spi::WorkKind;
use crate::striping::OpSlots;
use crate::{Error, ImmMode, Op, Peer, Region, RemoteRegion, Result, WriteOptions};

/// One part of a scatter: a range of the source, and an offset in a peer's region. The region determines the peer.
#[derive(Debug, Clone)]
pub struct ScatterPart<'a> {
    dst: &'a RemoteRegion,
    range: Range<usize>,
    offset: usize,
}

impl<'a> ScatterPart<'a> {
    /// A part that writes `range` of the source to `offset` bytes into `dst`.
    pub fn new(dst: &'a RemoteRegion, range: Range<usize>, offset: usize) -> Self {
        Self { dst, range, offset }
    }
}

impl PeerGroup {
    /// Writes ranges of one source to several peers. Submits all parts or none. The one [`Op`] resolves when all parts
    /// have resolved, to the sum of their bytes or to the first error.
    ///
    /// A peer may have any number of parts, also none. With [`ImmMode::Last`] each peer gets the imm of `options`
    /// once, after its own bytes: in this mode a peer may have one part only, which may be empty. With
    /// [`ImmMode::PerWr`] each part delivers imms as a write of its own would.
    ///
    /// # Errors
    /// Those of [`Peer::write_with`] before submission, with the number of the part; `InvalidRequest` if there are no
    /// parts, if a part's peer is not in the group, or if `options` have a notification; `Busy` if the op tables have no room for all parts.
    pub fn scatter(&self, src: &Region, parts: &[ScatterPart<'_>], options: &WriteOptions) -> Result<Op> {
        if parts.is_empty() {
            return Err(refused("scatter", "the scatter has no parts; give at least one".into()));
        }
        if options.notification().is_some() {
            let why =
                "a scatter delivers no notification: call Peer::notify of each peer once the scatter is done";
            return Err(refused("scatter", why.into()));
        }
        let _transfer = TracedTransfer::begin(options.parent_trace(), "scatter", None);
        let mut checked = Vec::with_capacity(parts.len());
        for (number, part) in parts.iter().enumerate() {
            let one = self.check(src, part, options);
            let of_part = |error: Error| {
                Error::new(error.kind(), "scatter", format!("part {number}: {}", error.context()))
            };
            checked.push(one.map_err(of_part)?);
        }
        if options.imm.is_some() && options.imm_mode == ImmMode::Last {
            self.check_once(parts)?;
        }
        submit_all("scatter", options, Some(src), checked)
    }

    /// Splits a range of `src` evenly: the i-th peer gets its [`share`](Self::share) at `offset` bytes into `dst[i]`,
    /// which is a region of that peer. If a share has no bytes, its peer gets the imm of `options` alone, or nothing if
    /// there is no imm.
    ///
    /// # Errors
    /// Those of [`PeerGroup::scatter`], and `InvalidRequest` unless `dst` has one region of each peer, in the order of
    /// the group.
    pub fn scatter_evenly(
        &self,
        src: &Region,
        range: Range<usize>,
        dst: &[RemoteRegion],
        offset: usize,
        options: &WriteOptions,
    ) -> Result<Op> {
        let theirs = self.peers().iter().map(Peer::id);
        if !theirs.eq(dst.iter().map(RemoteRegion::peer)) {
            return Err(refused(
                "scatter",
                "`dst` needs one region of each peer, in the order of the group".into(),
            ));
        }
        // Checked as a whole, because the shares of an invalid range may all be empty.
        src.0.check(range.clone(), "scatter")?;
        let parts = dst.iter().enumerate().map(|(position, dst)| {
            let share = self.share(position, range.clone());
            ScatterPart::new(dst, share, offset)
        });
        let parts: Vec<_> = parts.filter(|part| !part.range.is_empty() || options.imm.is_some()).collect();
        self.scatter(src, &parts, options)
    }

    /// Delivers immediate data without bytes to every peer. Submits all writes or none.
    ///
    /// # Errors
    /// Those of [`Peer::write_imm`] for any of the peers.
    pub fn write_imm(&self, imm: u32) -> Result<Op> {
        let options = WriteOptions::new().imm(imm);
        let checked = self.peers().iter().map(|peer| {
            let link = peer.check_imm(imm, "write_imm")?;
            Ok(Checked { peer, link, work: imm_alone(imm), bytes: None })
        });
        submit_all("write_imm", &options, None, checked.collect::<Result<_>>()?)
    }

    fn check<'a>(
        &'a self,
        src: &Region,
        part: &ScatterPart<'a>,
        options: &WriteOptions,
    ) -> Result<Checked<'a>> {
        let position = self.position(part.dst.peer());
        let position = position
            .ok_or_else(|| refused("scatter", "its region belongs to no peer of the group".into()))?;
        let peer = &self.peers()[position];
        let (link, span) =
            peer.check_write(src, part.range.clone(), part.dst, part.offset, options, "scatter")?;
        let shape = cut_write(link, span, options, "scatter")?;
        let work = peer.work(WorkKind::Write, shape, src, part.dst, options)?;
        Ok(Checked { peer, link, work, bytes: Some((part.dst, span)) })
    }

    /// Refuses two parts for one peer.
    fn check_once(&self, parts: &[ScatterPart<'_>]) -> Result<()> {
        let mut seen: Vec<_> = parts.iter().map(|part| part.dst.peer()).collect();
        seen.sort_unstable();
        match seen.windows(2).find(|pair| pair[0] == pair[1]) {
            None => Ok(()),
            Some(twice) => Err(refused(
                "scatter",
                format!(
                    "{} has several parts, and its one imm would not wait for all of them: leave the imm out, \
                 and write_imm once the scatter is done",
                    twice[0]
                ),
            )),
        }
    }
}

/// A part that was checked and may be submitted.
struct Checked<'a> {
    peer: &'a Peer,
    link: &'a Link,
    work: Work,
    /// The remote region and the range, for a part with bytes.
    bytes: Option<(&'a RemoteRegion, CheckedRange)>,
}

/// Submits all parts or none: once each part has its slots, nothing can fail.
fn submit_all(
    name: &'static str,
    options: &WriteOptions,
    src: Option<&Region>,
    parts: Vec<Checked<'_>>,
) -> Result<Op> {
    let Some(first) = parts.first() else { return Err(refused(name, "no parts".into())) };
    let times = first.peer.times(options.trigger.as_ref(), options.deadline);
    let mut slots = Vec::with_capacity(parts.len());
    for part in &parts {
        slots.push(OpSlots::take(&part.peer.0, part.link, &part.work, name)?);
    }
    let submit = |(part, slots): (Checked<'_>, OpSlots<'_>)| {
        let Checked { peer, link, work, bytes } = part;
        let now = match (bytes, src) {
            (Some((dst, span)), Some(src)) if options.trigger.is_none() => {
                link.try_direct(&src.0, &dst.0, span, WorkKind::Write, options.imm, options.locality)
            }
            (Some(_), _) => None,
            (None, _) => link.try_direct_message(WorkKind::Write, std::ptr::null_mut(), 0, work.imm),
        };
        now.unwrap_or_else(|| peer.submit_with(slots, work, times.clone(), name))
    };
    Ok(Op::all(parts.into_iter().zip(slots).map(submit).collect()))
}
