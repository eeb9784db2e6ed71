//! The initiator's work requests that have not ended: one entry of the queue for a run of small pieces, which share
//! slots as *pages*, and one for each other work request.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use multirail_spi::staging::{SlotContent, StagedWork, StagedWorkQueue, WorkFailure};
use multirail_spi::{Event, Piece, WorkKind, WorkRequest};

use crate::imports::SlotAddress;
use crate::page_table::{GROUP_WORDS, MAX_PAGES, SlotLimit};
use crate::region::StagedRegion;
use crate::staging_buffer::{SLOT_BYTES, SLOT_COUNT};

/// The most work requests that wait for slots or are in slots.
const MAX_QUEUED: usize = SLOT_COUNT * MAX_PAGES;
/// The most bytes of work requests that wait for slots or are in slots, if these are more than [`SLOT_COUNT`]: twice
/// those of all slots.
const MAX_QUEUED_BYTES: u64 = 2 * (SLOT_COUNT * SLOT_BYTES) as u64;
/// The most lists of pieces that are kept for reuse: more than the runs of all slots, if the runs are long.
const MAX_SPARE: usize = 4 * SLOT_COUNT;

/// The work requests that have not ended, in the order of posting.
#[derive(Default)]
pub(crate) struct RunQueue {
    entries: StagedWorkQueue<StagedRun>,
    /// The number of work requests that have not ended.
    requests: usize,
    /// Bytes of these work requests.
    bytes: u64,
    /// Whether an entry may have ended since the last report.
    may_have_ended: bool,
    /// Lists of pieces for reuse.
    spare: Vec<Vec<Piece>>,
}

/// What the initiator keeps with an entry of the queue.
#[derive(Default)]
pub(crate) struct StagedRun {
    /// How the bytes get from and to the regions of both ends.
    pub ends: WorkEnds,
    /// The pages of a run: each is a work request, whose ID counts up from that of the entry, and has its place in one
    /// slot. Empty for an entry that is one work request, whose bytes may take several slots.
    pieces: Vec<Piece>,
    /// The number of bytes of each page.
    page_len: u64,
    /// The number of pieces that have been assigned to slots.
    assigned: usize,
}

/// How the bytes of a work request get from and to the regions of both ends.
#[derive(Default)]
pub(crate) struct WorkEnds {
    /// This process's region, if it is staged.
    pub local: Option<Arc<StagedRegion>>,
    /// The peer's region, if the bytes go through the target's slot: because the region is staged, or because the
    /// request is coalesced.
    pub through_slot: Option<SlotAddress>,
    /// Whether a slot request has the imm although the peer's region is not staged. The reason: the imm is one of
    /// [those that slots use](crate::wire::is_reserved), so the peer's endpoint would take it for its own. (If the
    /// peer's region is staged, a slot request has the imm anyway.)
    pub sends_imm_in_slot_request: bool,
}

/// The part of an entry that a slot carries: some pages of a run, or some bytes of a work request.
#[derive(Debug, Clone)]
pub(crate) struct Segment {
    pub content: SlotContent,
    /// The pages of a run, as a range of its pieces. `0..1` for bytes of a work request, which are one page.
    pub pieces: Range<usize>,
    /// Why all pages have failed.
    pub failure: Option<WorkFailure>,
}

impl RunQueue {
    /// Whether there is no work request.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Whether there is room for one more work request of this kind. The queue has room for twice the bytes of all
    /// slots. The initiator keeps the order of posting, even if the engine would now choose another operation first.
    /// Queued work requests also take up the rail's send window, which requests to other peers need. So a longer queue
    /// would delay others. Sends may wait long for the peer's receives, so at most half of [`SLOT_COUNT`] sends are
    /// queued.
    pub(crate) fn has_room(&self, kind: WorkKind) -> bool {
        let is_send = |work: &&StagedWork<StagedRun>| work.posted.kind == WorkKind::Send;
        Self::has_room_beside(self.requests, self.bytes)
            && (kind != WorkKind::Send || self.entries.iter().filter(is_send).count() < SLOT_COUNT / 2)
    }

    fn has_room_beside(requests: usize, bytes: u64) -> bool {
        requests < MAX_QUEUED && (bytes < MAX_QUEUED_BYTES || requests < SLOT_COUNT)
    }

    /// Adds a work request whose bytes share no slot with others.
    pub(crate) fn push(&mut self, work: &WorkRequest, ends: WorkEnds) {
        // A work request without bytes takes a slot, too.
        let needs_empty_slot = work.imm.is_some() || work.len == 0;
        self.requests += 1;
        self.bytes += work.len;
        self.entries.push(work, StagedRun { ends, ..StagedRun::default() }, needs_empty_slot);
    }

    /// Adds pieces of a run that share slots, as far as there is room. Returns how many these are. All `pieces` have
    /// the same number of bytes.
    pub(crate) fn push_pages(&mut self, run: &WorkRequest, mut pieces: &[Piece], ends: WorkEnds) -> usize {
        let page_len = pieces[0].len;
        let mut bytes = page_len * pieces.len() as u64;
        if self.requests + pieces.len() > MAX_QUEUED || self.bytes + bytes > MAX_QUEUED_BYTES {
            pieces = &pieces[..self.room_for_pages(page_len).min(pieces.len())];
            bytes = page_len * pieces.len() as u64;
            if pieces.is_empty() {
                return 0;
            }
        }
        let mut list = self.spare.pop().unwrap_or_default();
        list.extend_from_slice(pieces);
        self.requests += pieces.len();
        self.bytes += bytes;
        let posted = WorkRequest { len: bytes, ..*run };
        self.entries.push(&posted, StagedRun { ends, pieces: list, page_len, assigned: 0 }, false);
        pieces.len()
    }

    /// How many more pages of this length the queue has room for.
    #[cold]
    fn room_for_pages(&self, page_len: u64) -> usize {
        let has_room = |count: &usize| {
            Self::has_room_beside(self.requests + count, self.bytes + page_len * *count as u64)
        };
        (0..MAX_QUEUED).take_while(has_room).count()
    }

    /// The entry of a segment.
    #[inline]
    pub(crate) fn of(&mut self, segment: &Segment) -> Option<&mut StagedWork<StagedRun>> {
        self.entries.get_mut(segment.content.work)
    }

    /// Whether neither a segment nor its entry has failed.
    #[inline]
    pub(crate) fn is_live(&mut self, segment: &Segment) -> bool {
        segment.failure.is_none() && self.of(segment).is_some_and(|work| work.failure().is_none())
    }

    /// Fails the work requests of a segment.
    pub(crate) fn fail(&mut self, segment: &mut Segment, failure: WorkFailure) {
        self.may_have_ended = true;
        match self.entries.get_mut(segment.content.work) {
            // The first failure counts.
            Some(work) if work.extra.is_pages() => {
                segment.failure.get_or_insert(work.failure().unwrap_or(failure));
            }
            Some(work) => work.fail(failure),
            None => {}
        }
    }

    /// The entry with this number, if it has not ended.
    pub(crate) fn numbered(&mut self, number: u64) -> Option<&mut StagedWork<StagedRun>> {
        self.entries.get_mut(Some(number))
    }

    /// The first entry that has bytes to assign, or that has no bytes and needs an empty slot.
    pub(crate) fn next_unassigned(&mut self) -> Option<&mut StagedWork<StagedRun>> {
        self.entries.next_unassigned()
    }

    /// Whether the next work requests fill a slot up to a limit, or share none.
    pub(crate) fn has_full_slot(&self, limit: SlotLimit) -> bool {
        let (mut pages, mut bytes) = (0, 0);
        self.entries.unassigned().any(|work| {
            pages += work.extra.unassigned().len();
            bytes += work.unassigned_bytes();
            !work.extra.is_pages() || !limit.fits(pages + 1, bytes + 1)
        })
    }

    /// Assigns the next pages of this kind to a slot, up to a limit. Returns how many these are.
    pub(crate) fn assign_pages(
        &mut self,
        kind: WorkKind,
        limit: SlotLimit,
        segments: &mut Vec<Segment>,
    ) -> usize {
        let (mut pages, mut bytes) = (0, 0);
        while let Some(work) = self.entries.next_unassigned() {
            if work.posted.kind != kind {
                break;
            }
            let StagedRun { page_len, assigned: first, .. } = work.extra;
            // Zero if the entry is no run of pages.
            let left = work.extra.unassigned().len().min(limit.pages - pages);
            let count = left.min((limit.bytes - bytes).checked_div(page_len).unwrap_or_default() as usize);
            if count == 0 {
                break;
            }
            let more = page_len * count as u64;
            work.extra.assigned += count;
            segments.push(Segment {
                content: work.assign(more),
                pieces: first..first + count,
                failure: None,
            });
            (pages, bytes) = (pages + count, bytes + more);
        }
        pages
    }

    /// Ends a segment whose slot is free now, and reports its pages. `failures` are those of single pages, by their
    /// number in the segment; the other ones have this result, unless the entry has failed before. Returns the number
    /// of the work request if only its imm still needs a slot.
    pub(crate) fn finish(
        &mut self,
        segment: &Segment,
        failures: &[(usize, WorkFailure)],
        result: Result<(), WorkFailure>,
        events: &mut VecDeque<Event>,
    ) -> Option<u64> {
        self.may_have_ended = true;
        let work = self.entries.get_mut(segment.content.work)?;
        if !work.extra.is_pages() {
            let result = failures.first().map_or(result, |(_, failure)| Err(*failure));
            let work = self.entries.finish_slot(&segment.content, segment.failure.map_or(result, Err))?;
            return work.due_empty_slot();
        }
        let (first, count) = (work.posted.id + segment.pieces.start as u64, segment.pieces.len());
        let common = segment.failure.or(work.failure());
        if common.is_none() && failures.is_empty() && result.is_ok() {
            push_joined(events, Event::Done { first, count: count as u32 });
        } else {
            for page in 0..count {
                let own = failures.iter().find(|(failed, _)| *failed == page).map(|(_, failure)| *failure);
                let id = first + page as u64;
                push_joined(events, page_event(common.or(own).or(result.err()), id, work));
            }
        }
        self.requests -= count;
        self.bytes -= segment.content.len;
        self.entries.finish_slot(&segment.content, Ok(()));
        None
    }

    /// Fails all entries with `failure`. Each ends once no slot is busy with it.
    pub(crate) fn fail_all(&mut self, failure: WorkFailure) {
        self.may_have_ended = true;
        self.entries.fail_all(failure);
    }

    /// Reports the entries that have ended, and removes them.
    pub(crate) fn report_ended(&mut self, events: &mut VecDeque<Event>) {
        if !std::mem::take(&mut self.may_have_ended) {
            return;
        }
        let Self { entries, requests, bytes, spare, .. } = self;
        entries.remove_ended(|work| {
            if work.extra.is_pages() {
                // Their segments have reported the assigned pages.
                for index in work.extra.assigned..work.extra.pieces.len() {
                    *requests -= 1;
                    *bytes -= work.extra.page_len;
                    events.push_back(page_event(work.failure(), work.posted.id + index as u64, work));
                }
                let mut pieces = std::mem::take(&mut work.extra.pieces);
                pieces.clear();
                if spare.len() < MAX_SPARE {
                    spare.push(pieces);
                }
            } else {
                *requests -= 1;
                *bytes -= work.posted.len;
                push_joined(events, work.event());
            }
        });
    }

    /// Removes all entries, and reports each work request that `segments` do not carry.
    pub(crate) fn remove_all(&mut self, events: &mut VecDeque<Event>) {
        (self.requests, self.bytes) = (0, 0);
        for work in self.entries.remove_all() {
            match work.extra.is_pages() {
                true => events.extend(
                    (work.extra.assigned..work.extra.pieces.len())
                        .map(|index| page_event(work.failure(), work.posted.id + index as u64, &work)),
                ),
                false => events.push_back(work.event()),
            }
        }
    }
}

/// The event that reports the end of a page.
fn page_event(failure: Option<WorkFailure>, id: u64, work: &StagedWork<StagedRun>) -> Event {
    failure.map_or(Event::Done { first: id, count: 1 }, |failure| failure.event(id, work.posted.peer))
}

/// Appends an event. Joins it to the last one if both report successes with consecutive IDs.
fn push_joined(events: &mut VecDeque<Event>, event: Event) {
    if let (Some(Event::Done { first, count }), Event::Done { first: next, count: more }) =
        (events.back_mut(), event)
        && *first + u64::from(*count) == next
    {
        *count += more;
        return;
    }
    events.push_back(event);
}

impl Segment {
    /// Words of its pages in the page table.
    #[inline]
    pub(crate) fn table_words(&self) -> usize {
        GROUP_WORDS + self.pieces.len()
    }

    /// Some bytes of a work request that is no page of a run.
    pub(crate) fn whole(content: SlotContent) -> Self {
        Self { content, pieces: 0..1, failure: None }
    }
}

impl StagedRun {
    /// Whether the entry is a run of pages, rather than one work request.
    #[inline]
    pub(crate) fn is_pages(&self) -> bool {
        !self.pieces.is_empty()
    }

    /// The pieces that have no slot yet.
    fn unassigned(&self) -> &[Piece] {
        &self.pieces[self.assigned..]
    }

    /// The pages of a segment, which have the same number of bytes. `whole` becomes the only page if the entry, which
    /// was `posted`, is one work request.
    #[inline]
    pub(crate) fn pages<'a>(
        &'a self,
        posted: &WorkRequest,
        segment: &Segment,
        whole: &'a mut Option<Piece>,
    ) -> &'a [Piece] {
        if self.is_pages() {
            return &self.pieces[segment.pieces.clone()];
        }
        let SlotContent { offset, len, .. } = segment.content;
        let local = posted.local.wrapping_add(offset as usize);
        std::slice::from_ref(whole.insert(Piece { local, remote: posted.remote.wrapping_add(offset), len }))
    }
}

impl WorkEnds {
    /// Whether a slot that delivers this imm sends a slot request.
    pub(crate) fn need_slot_request(&self, imm: Option<u32>) -> bool {
        self.through_slot.is_some() || (self.sends_imm_in_slot_request && imm.is_some())
    }

    /// The key by which a slot request names the peer's region, and the remote address of the region's first byte. The
    /// offset in a staged region keeps the bit [`RemoteKey::STAGED`](multirail_spi::RemoteKey::STAGED).
    #[inline]
    pub(crate) fn address(&self) -> SlotAddress {
        self.through_slot.unwrap_or(SlotAddress { key: 0, base: 0 })
    }
}
