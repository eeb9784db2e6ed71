//! One source, many peers: all parts checked before any is submitted.

use std::ops::Range;
use std::sync::Arc;

use super::{PeerGroup, refused};
use crate::engine::Work;
use crate::engine::peer::{CheckedRange, Link};
use crate::peer::PeerInner;
use crate::request::{cut_write, imm_alone};
use crate::spi::WorkKind;
use crate::striping::OpSlots;
use crate::{Error, ImmMode, Op, Peer, Region, RemoteRegion, Result, WriteOptions};

/// What one peer gets of a scatter: a range of the source to an offset in its region,
/// which also says whose it is.
#[derive(Debug, Clone)]
pub struct ScatterPart<'a> {
    dst: &'a RemoteRegion,
    range: Range<usize>,
    offset: usize,
}

impl<'a> ScatterPart<'a> {
    /// `range` of the source to `offset` bytes into `dst`.
    pub fn new(dst: &'a RemoteRegion, range: Range<usize>, offset: usize) -> Self {
        Self { dst, range, offset }
    }
}

impl PeerGroup {
    /// Writes ranges of one source to several peers. Nothing is submitted unless every
    /// part could be; the one [`Op`] resolves when all parts have, to the sum of their
    /// bytes or to the first error.
    ///
    /// A peer may have several parts, and need not have any. With [`ImmMode::Last`] each
    /// peer gets the imm of `options` once, after its own bytes: then a peer has one part,
    /// which may be empty. With [`ImmMode::PerWr`] each part delivers imms as a write of
    /// its own would.
    ///
    /// # Errors
    /// As those of [`Peer::write_with`] before submission, with the number of the part;
    /// `InvalidRequest` for no parts, or a peer that is not of the group; `Busy` if there
    /// is not room for all.
    pub fn scatter(&self, src: &Region, parts: &[ScatterPart<'_>], options: &WriteOptions) -> Result<Op> {
        if parts.is_empty() {
            return Err(refused("scatter", "a scatter of no parts".into()));
        }
        let mut checked = Vec::with_capacity(parts.len());
        for (place, part) in parts.iter().enumerate() {
            let one = self.check(src, part, options);
            let of_part = |error: Error| {
                Error::new(error.kind(), "scatter", format!("part {place}: {}", error.context()))
            };
            checked.push(one.map_err(of_part)?);
        }
        if options.imm.is_some() && options.imm_mode == ImmMode::Last {
            self.check_once(parts)?;
        }
        submit_all("scatter", options, Some(src), checked)
    }

    /// Splits a range of `src` evenly: the i-th peer gets its [`share`](Self::share) at
    /// `offset` bytes into `dst[i]`, a region of its own. A share of no bytes is left
    /// out, or is an imm alone if `options` have one.
    ///
    /// # Errors
    /// As [`PeerGroup::scatter`]'s, and `InvalidRequest` unless `dst` has one region of each peer,
    /// in the order of the group.
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
                "one region of each peer is needed, in the order of the group".into(),
            ));
        }
        // As a whole: it may have no bytes, or be no range at all.
        src.0.check(range.clone(), "scatter")?;
        let parts = dst.iter().enumerate().map(|(place, dst)| {
            let share = self.share(place, range.clone());
            ScatterPart::new(dst, share, offset)
        });
        let parts: Vec<_> = parts.filter(|part| !part.range.is_empty() || options.imm.is_some()).collect();
        self.scatter(src, &parts, options)
    }

    /// Delivers immediate data alone to every peer; to none unless all can be told.
    ///
    /// # Errors
    /// As [`Peer::write_imm`]'s for any of them.
    pub fn write_imm(&self, imm: u32) -> Result<Op> {
        let options = WriteOptions::new().imm(imm);
        let checked = self.peers().iter().map(|peer| {
            let link = peer.0.check_imm(imm, "write_imm")?;
            Ok(Checked { peer: &peer.0, link, work: imm_alone(imm), bytes: None })
        });
        submit_all("write_imm", &options, None, checked.collect::<Result<_>>()?)
    }

    fn check<'a>(
        &'a self,
        src: &Region,
        part: &ScatterPart<'a>,
        options: &WriteOptions,
    ) -> Result<Checked<'a>> {
        let place = self.position(part.dst.peer());
        let place =
            place.ok_or_else(|| refused("scatter", "its region is not of a peer of the group".into()))?;
        let peer = &self.peers()[place].0;
        let (link, span) =
            peer.check_write(src, part.range.clone(), part.dst, part.offset, options, "scatter")?;
        let work = options.work(cut_write(link, span, options, "scatter")?, src, part.dst);
        Ok(Checked { peer, link, work, bytes: Some((part.dst, span)) })
    }

    /// No peer has two parts.
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

/// A part that may be submitted.
struct Checked<'a> {
    peer: &'a Arc<PeerInner>,
    link: &'a Link,
    work: Work,
    /// Of a part with bytes.
    bytes: Option<(&'a RemoteRegion, CheckedRange)>,
}

/// Submits all parts, or none: with a slot for each nothing can be refused any more.
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
        slots.push(OpSlots::take(part.peer, part.link, &part.work, name)?);
    }
    let submit = |(part, slots): (Checked<'_>, OpSlots<'_>)| {
        let Checked { peer, link, work, bytes } = part;
        let now = match (bytes, src) {
            (Some((dst, span)), Some(src)) => link.try_direct(src, &dst.0, span, WorkKind::Write, options),
            (Some(_), None) => None,
            (None, _) => link.try_direct_message(WorkKind::Write, std::ptr::null_mut(), 0, work.imm),
        };
        now.unwrap_or_else(|| peer.submit_with(slots, work, times.clone(), name))
    };
    Ok(Op::all(parts.into_iter().zip(slots).map(submit).collect()))
}
