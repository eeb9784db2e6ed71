//! An active operation: what is posted, what is not, and how it will end.

use std::ops::Range;
use std::sync::Arc;

use super::Work;
use crate::flow_control::{CreditCounter, SendCredit, Weight};
use crate::index::{GroupIndex, TransportIndex};
use crate::op::OpId;
use crate::peer::{LinkState, PeerState};
use crate::plan::{RailRange, Shape};
use crate::rail::{MAX_RUN, Rail};
use crate::spi::{Batch, WorkKind, WorkRequest};
use crate::trace::GrantOf;
use crate::{Error, Time, Trigger};

/// A rail that has posted all of its pieces looks at another rail. The other rail is far behind if it has posted less
/// than 7/8 as many pieces as this one, or if at least 1/8 of the other rail's range is not posted yet. Rails of equal
/// speed differ by less when they end, and their pieces should stay where they are.
const FAR_BEHIND: u32 = 8;

/// What the engine posts for an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The pieces.
    Data,
    /// Reads without bytes: they make the bytes that other rails have delivered visible before the imm arrives. Only
    /// for devices whose completions cover their own rail alone
    /// ([`DeliveredScope::Device`](crate::spi::DeliveredScope::Device)).
    Flush,
    /// The one imm without bytes that announces the delivered bytes.
    Imm,
}

/// An operation that the engine has activated. It owns `work`, and so every region that the hardware may touch,
/// until `outstanding` is zero.
pub(crate) struct ActiveOp {
    pub id: OpId,
    pub work: Work,
    /// The bytes of this engine's pieces.
    pub bytes: u64,
    pub link: u32,
    pub peer: Arc<PeerState>,
    /// The trigger that the operation waits for. `None` once it is due.
    pub trigger: Option<Trigger>,
    pub deadline: Time,
    /// When the user submitted the operation.
    pub submitted_at: Time,
    /// When a request of the operation was last posted, or when its trigger was due.
    pub posted_at: Time,
    /// When a request of the operation last ended.
    pub ended_at: Time,
    /// Whether the engine has reported the operation as stalled.
    pub stalled: bool,
    /// Whether requests of the operation take credit of the peer's grant.
    pub takes_credit: bool,
    /// Whether the operation is in its link's list of operations that wait for credit.
    pub waits_for_credit: bool,
    /// The tracing span of the operation, if a subscriber wants it.
    pub span: Option<Box<tracing::Span>>,
    pub stage: Stage,
    /// The rail that carries the operation if it is a message.
    pub message_rail: u16,
    /// 0 if pieces share requests with others; else all bits are set. For the send window (`masked_cost`).
    pub cost_mask: u64,
    /// One per rail of the engine. The engine reuses the allocation.
    pub rails: Vec<ActiveRail>,
    /// Pieces that are not posted, and that are in no rail's range.
    pub unplaced: Unplaced,
    /// Pieces that are not posted yet, over all rails.
    pub unposted: u32,
    /// Pieces that are posted and not acknowledged, over all rails.
    pub outstanding: u32,
    pub work_requests: u32,
    /// Whether another rail group carries the rest ([`Continuation`](super::Continuation)), the imm included. It counts as
    /// one outstanding request, and the stage is `Imm`: this engine sends none any more.
    pub is_elsewhere: bool,
    /// The error that the operation will end with once nothing is outstanding.
    pub error: Option<Error>,
    /// Whether `Engine::stop` has stopped the operation, for a cancel or for a revoked region. If the operation is not
    /// over at its deadline, the engine aborts the link.
    pub stopped: bool,
    /// Whether the engine has told the waiter that the deadline has passed.
    pub expired: bool,
    /// Whether the engine has aborted the link for this operation.
    pub aborted: bool,
}

/// An operation's share of one rail.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ActiveRail {
    /// The pieces that go over this rail.
    pub range: RailRange,
    /// The bytes of the pieces that the operation has for this rail.
    pub bytes: u64,
    /// The next piece to post.
    pub next: u32,
    /// For a list: the segment (neighbouring pieces of the same local and remote region) of the run that is being
    /// posted, or of the last one.
    pub segment: u32,
    /// Whether the operation is in the rail's queue. Also true while its pieces are handed over, so that
    /// `Engine::queue` passes over them.
    pub queued: bool,
    /// Whether other rails post what is left. Until they do, these pieces wait here.
    pub is_handed_over: bool,
    /// The pieces that the rail has posted before those in `range`.
    posted_before: u32,
    /// The rail's weight among the rails of the operation; 0 if the rail does not reach the peer or the region.
    pub weight: u32,
    /// Whether the endpoint refused the next piece because the peer had no room.
    pub refused_by_endpoint: bool,
    /// The peer's slot on this rail.
    pub slot: u32,
    pub lkey: u64,
    pub rkey: u64,
    pub base: u64,
}

/// Pieces that are in no rail's range. There are two kinds: *replays*, which a lost device had posted and other rails
/// post again, and pieces that a rail has put aside because it posts replays first.
#[derive(Debug, Default)]
pub(crate) struct Unplaced {
    /// First those that were put aside. The last `replays` ranges are the replays.
    ranges: Vec<RailRange>,
    /// How many of `ranges` are to be posted again.
    replays: usize,
}

/// What the next run of a rail may have.
pub(crate) struct NextRun {
    /// The most pieces.
    pub most: u32,
    /// The bytes of each piece: their mean where pieces differ in length.
    pub piece_bytes: u64,
    /// The segment of the pieces, if the operation is a list.
    pub segment: u32,
}

impl Unplaced {
    /// All pieces of an operation that no rail reaches.
    pub fn of(work: &Work) -> Self {
        let pieces = if work.is_one_request() { RailRange { start: 0, end: 1 } } else { work.pieces };
        Self { ranges: vec![pieces], replays: 0 }
    }

    #[inline]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// The number of pieces.
    pub fn len(&self) -> u32 {
        self.ranges.iter().map(|range| range.len()).sum()
    }

    /// Takes at most 1/`parts` of the pieces, all from one range. If there are pieces to be posted again, takes only
    /// these.
    fn take(&mut self, parts: u32) -> Option<RailRange> {
        let from = if self.replays > 0 { self.ranges.len() - self.replays } else { 0 };
        let all: u32 = self.ranges[from..].iter().map(|range| range.len()).sum();
        let last = self.ranges.last_mut()?;
        let start = last.end - last.len().min(all.div_ceil(parts.max(1)));
        let taken = RailRange { start, end: last.end };
        last.end = start;
        if last.len() == 0 {
            self.ranges.pop();
            self.replays = self.replays.saturating_sub(1);
        }
        Some(taken)
    }
}

impl ActiveRail {
    /// Whether the rail reaches the peer and the region.
    pub fn usable(&self) -> bool {
        self.weight > 0
    }

    /// Finds the keys of the operation's memory on a rail, which has number `number` in its transport. If memory is not
    /// registered or imported there, the rail gets no weight.
    #[inline]
    pub fn find_keys(&mut self, work: &Work, transport: TransportIndex, number: usize) {
        if let Some(region) = &work.local {
            match &region.regions[transport][number] {
                Some(registered) => self.lkey = registered.lkey(),
                None => self.weight = 0,
            }
        }
        if work.coalesce {
            self.lkey |= WorkRequest::COALESCE;
        }
        if let Some(remote) = &work.remote {
            match remote.imports.get(number) {
                Some(Some(import)) => (self.rkey, self.base) = (import.rkey(), import.base()),
                _ => self.weight = 0,
            }
        }
    }

    /// Whether the rail carries, or has carried, a part of the operation.
    pub fn is_used(&self) -> bool {
        self.range.len() > 0 || self.posted_before > 0
    }

    /// The number of pieces that are not posted yet.
    pub fn left(&self) -> u32 {
        self.range.end - self.next
    }

    /// Whether requests of the operation are or will be posted on the rail, or were. The drain of a retired rail waits
    /// for such operations.
    pub fn is_awaited(&self) -> bool {
        self.is_used() && !(self.is_handed_over && self.posted() == 0)
    }

    /// Whether requests are posted on the rail, or have ended well.
    pub fn has_posted(&self) -> bool {
        self.posted() > 0
    }

    /// The number of pieces that are posted.
    fn posted(&self) -> u32 {
        self.posted_before + (self.next - self.range.start)
    }
}

impl ActiveOp {
    /// Gives up all pieces that are not posted yet.
    pub fn drop_unposted(&mut self) {
        for rail in &mut self.rails {
            rail.next = rail.range.end;
        }
        self.unplaced = Unplaced::default();
        self.unposted = 0;
    }

    // ---- pieces that change their rail ----

    /// Whether a rail reaches the peer and the regions. Only rails for which `counts` returns true are considered.
    #[cold]
    pub fn is_reached_by(&self, rails: &[Rail], counts: impl Fn(&Rail) -> bool) -> bool {
        let mut shares = self.rails.iter().zip(rails).enumerate();
        shares.any(|(number, (share, rail))| share.usable() && counts(rail) && self.may_go_over(number))
    }

    /// Whether a rail may carry the operation: messages have a rail of their own.
    fn may_go_over(&self, rail: usize) -> bool {
        self.work.kind != WorkKind::Send || rail == usize::from(self.message_rail)
    }

    /// Hands the pieces that are not posted on `rail` to the rails that `takes` is true for. Each of them takes its
    /// part by [`ActiveOp::take_over`], as soon as it has posted its own pieces. Returns false if nothing can be handed
    /// over.
    #[cold]
    pub fn hand_over(&mut self, rail: usize, takes: impl Fn(usize) -> bool) -> bool {
        let is_taker = |other: usize| other != rail && self.rails[other].usable() && takes(other);
        let has_takers = (0..self.rails.len()).any(is_taker);
        if !has_takers || self.rails[rail].left() == 0 || !self.may_change_rails() {
            return false;
        }
        let share = &mut self.rails[rail];
        (share.queued, share.is_handed_over) = (true, true);
        true
    }

    /// Puts the pieces that are not posted on `rail` aside: no rail that may carry them reaches the peer now. Returns
    /// false if they cannot wait.
    #[cold]
    pub fn set_aside(&mut self, rail: usize) -> bool {
        if !self.may_be_set_aside() {
            return false;
        }
        let share = &mut self.rails[rail];
        let aside = RailRange { start: share.next, end: share.range.end };
        share.range.end = share.next;
        share.bytes -= self.work.shape.bytes_of(aside.start..aside.end);
        (share.queued, share.is_handed_over) = (false, false);
        self.unplaced.ranges.insert(0, aside);
        true
    }

    /// Whether another rail group may carry what is left. Pieces and an imm may change the group, a flush may not.
    pub fn may_change_group(&self) -> bool {
        self.error.is_none()
            && self.stage != Stage::Flush
            && !self.is_elsewhere
            && self.work.may_change_group()
    }

    /// Takes all that is not delivered, for another rail group. Nothing may be outstanding.
    #[cold]
    pub fn take_rest(&mut self) -> Work {
        let is_imm = self.stage == Stage::Imm;
        let mut ranges = std::mem::take(&mut self.unplaced).ranges;
        for share in &mut self.rails {
            let left = RailRange { start: share.next, end: share.range.end };
            share.range.end = share.next;
            (share.queued, share.is_handed_over) = (false, false);
            if !is_imm && left.len() > 0 {
                share.bytes -= self.work.shape.bytes_of(left.start..left.end);
                ranges.push(left);
            }
        }
        (self.is_elsewhere, self.stage) = (true, Stage::Imm);
        (self.unposted, self.outstanding) = (0, 1);
        if is_imm {
            return self.work.imm_alone();
        }
        ranges.sort_unstable_by_key(|range| range.start);
        ranges.dedup_by(|next, last| {
            let follows = last.end == next.start;
            if follows {
                last.end = next.end;
            }
            follows
        });
        self.work.part_of(&ranges)
    }

    /// Whether the operation has to send its imm, and no rail reached the peer when it was to.
    pub fn awaits_rail_for_imm(&self) -> bool {
        self.stage == Stage::Imm
            && self.unposted > 0
            && self.outstanding == 0
            && self.rails.iter().all(|rail| rail.left() == 0)
    }

    /// Takes back pieces that a lost device had posted on `rail`, and that are not acknowledged, so that others post
    /// them again. `pieces` is in ascending order. Returns their bytes.
    #[cold]
    pub fn replay(&mut self, rail: usize, pieces: impl Iterator<Item = u32>) -> u64 {
        let (mut count, mut bytes) = (0, 0);
        let first = self.unplaced.ranges.len();
        for piece in pieces {
            count += 1;
            bytes += self.work.shape.bytes_of(piece..piece + 1);
            match self.unplaced.ranges[first..].last_mut() {
                Some(last) if last.end == piece => last.end += 1,
                _ => self.unplaced.ranges.push(RailRange { start: piece, end: piece + 1 }),
            }
        }
        self.unplaced.replays += self.unplaced.ranges.len() - first;
        let share = &mut self.rails[rail];
        share.posted_before = share.posted() - count;
        share.range.start = share.next;
        share.bytes -= bytes;
        self.outstanding -= count;
        self.work_requests -= count;
        self.unposted += count;
        bytes
    }

    /// Gives `rail` pieces that are in no rail's range; returns how many. Replays come first: if there are any and the
    /// rail still has pieces of its own, it puts its own aside and takes replays instead.
    #[cold]
    pub fn take_unplaced(&mut self, rail: usize) -> u32 {
        let share = &self.rails[rail];
        let is_busy = share.left() > 0 && (self.unplaced.replays == 0 || share.is_handed_over);
        let may_take = self.may_be_set_aside() && self.may_go_over(rail);
        if self.unplaced.is_empty() || is_busy || !share.usable() || !may_take {
            return 0;
        }
        let takers = self.rails.iter().filter(|share| share.usable()).count() as u32;
        let Some(taken) = self.unplaced.take(takers) else { return 0 };
        let share = &mut self.rails[rail];
        let aside = RailRange { start: share.next, end: share.range.end };
        share.range.end = share.next;
        if aside.len() > 0 {
            share.bytes -= self.work.shape.bytes_of(aside.start..aside.end);
            self.unplaced.ranges.insert(0, aside);
        }
        self.place(rail, taken);
        taken.len()
    }

    /// Lets `rail`, which has posted all of its pieces, take pieces of another one. If another rail has pieces that are
    /// handed over,
    /// `rail` takes an even part of them. Otherwise `rail` looks at the rail with the most pieces left. If that rail is far
    /// behind, `rail` takes half of these pieces. `margin` is how many bytes rails of the same speed may be apart.
    /// Returns how many pieces it took.
    #[cold]
    pub fn take_over(&mut self, rail: usize, margin: impl Fn(usize) -> u64) -> u32 {
        let share = &self.rails[rail];
        if share.left() > 0 || !share.usable() || !self.may_change_rails() {
            return 0;
        }
        let posted = share.posted();
        let order = |share: &ActiveRail| (share.is_handed_over && share.left() > 0, share.left());
        let from = (0..self.rails.len()).max_by_key(|other| order(&self.rails[*other])).unwrap_or(rail);
        let share = &self.rails[from];
        let left = share.left();
        let mean = (self.bytes / u64::from(self.work.pieces.len().max(1))).max(1);
        let bytes = |pieces: u32| u64::from(pieces) * mean;
        // Both rails began with the operation, so what they have posted shows their speeds.
        let is_slower = bytes(posted.saturating_sub(share.posted())) >= margin(from)
            && u64::from(share.posted()) * u64::from(FAR_BEHIND)
                < u64::from(posted) * u64::from(FAR_BEHIND - 1);
        // A rail that has taken over pieces may have more left, although it is not slower.
        let has_more = bytes(left) >= margin(from) && left >= share.range.len() / FAR_BEHIND;
        let count = if share.is_handed_over {
            // The others take theirs when they have posted what they have.
            left.div_ceil(self.rails.iter().filter(|share| share.usable()).count() as u32)
        } else if is_slower || has_more {
            left / 2
        } else {
            0
        };
        if count > 0 {
            self.move_pieces(from, rail, count);
        }
        count
    }

    /// Takes back what was handed over from `rail` and is not taken.
    #[cold]
    pub fn take_back(&mut self, rail: usize) {
        let share = &mut self.rails[rail];
        if std::mem::take(&mut share.is_handed_over) {
            share.queued = false;
        }
    }

    /// Whether pieces wait for a rail that takes them: handed over, or in no rail's range.
    pub fn has_untaken(&self) -> bool {
        let is_handed_over = |share: &ActiveRail| share.is_handed_over && share.left() > 0;
        !self.unplaced.is_empty() || self.rails.iter().any(is_handed_over)
    }

    /// Whether requests of the current stage may be posted again over another rail, once nothing of them can arrive any
    /// more. Also true if the operation has failed and posts nothing any more.
    pub fn may_repeat(&self) -> bool {
        let is_message = self.work.kind == WorkKind::Send;
        let may_repeat = self.stage == Stage::Imm || is_message || self.may_change_rails();
        may_repeat && !self.work.no_replay || self.error.is_some()
    }

    /// Whether pieces that are not posted may wait for a rail.
    fn may_be_set_aside(&self) -> bool {
        let is_warm_up = matches!(self.work.shape, Shape::WarmUp { .. });
        self.stage == Stage::Data && self.error.is_none() && !is_warm_up
    }

    /// Whether any of the rails that reach the memory may carry any piece.
    fn may_change_rails(&self) -> bool {
        let is_bound = self.work.kind == WorkKind::Send || matches!(self.work.shape, Shape::WarmUp { .. });
        self.stage == Stage::Data && self.error.is_none() && !is_bound
    }

    /// Moves the last `count` pieces that are not posted on rail `from` to rail `to`, which has posted all of its own.
    fn move_pieces(&mut self, from: usize, to: usize, count: u32) {
        let share = &mut self.rails[from];
        let end = share.range.end;
        let moved = RailRange { start: end - count, end };
        let bytes = self.work.shape.bytes_of(moved.start..moved.end);
        share.range.end = moved.start;
        share.bytes -= bytes;
        if share.left() == 0 && std::mem::take(&mut share.is_handed_over) {
            share.queued = false;
        }
        self.place(to, moved);
    }

    /// Gives pieces to a rail that has none left.
    fn place(&mut self, rail: usize, pieces: RailRange) {
        let share = &mut self.rails[rail];
        share.posted_before = share.posted();
        (share.range, share.next) = (pieces, pieces.start);
        share.bytes += self.work.shape.bytes_of(pieces.start..pieces.end);
    }

    /// Appends the requests of `pieces` over one rail to a batch. `number` is the rail's number in the transport.
    /// Returns the bytes of the requests.
    #[inline]
    pub fn expand(
        &self,
        pieces: Range<u32>,
        number: usize,
        rail: &ActiveRail,
        first_id: u64,
        batch: &mut Batch,
    ) -> u64 {
        let imm = self.piece_imm();
        if self.stage == Stage::Data {
            return match &self.work.shape {
                Shape::List(list) => {
                    let template = self.work.request(rail, imm, first_id);
                    list.expand(pieces, rail.segment, number, template, batch)
                }
                _ => self.work.expand(pieces, rail, imm, first_id, batch),
            };
        }
        let kind = if self.stage == Stage::Flush { WorkKind::Read } else { self.work.kind };
        batch.push(WorkRequest { kind, ..self.work.request(rail, imm, first_id) });
        0
    }

    /// The imm that each piece of the current stage carries.
    pub fn piece_imm(&self) -> Option<u32> {
        match self.stage {
            Stage::Data => self.work.imm_of_pieces(),
            Stage::Flush => None,
            Stage::Imm => self.work.imm,
        }
    }

    /// The imm that each piece of the current stage carries, if the receiver counts it. `None` for a message: the
    /// receiver does not count its imm.
    pub fn counted_imm(&self) -> Option<u32> {
        self.piece_imm().filter(|_| self.work.kind == WorkKind::Write)
    }

    /// What the next run of a rail's share may have.
    #[inline]
    pub fn next_run(&self, rail: &ActiveRail) -> NextRun {
        let most = rail.left().min(MAX_RUN);
        match &self.work.shape {
            Shape::List(list) if self.stage == Stage::Data && most > 0 => {
                let segment = list.segment_of(rail.next, rail.segment);
                let pieces = list.run_from(rail.next, segment, most);
                let count = pieces.len() as u32;
                let piece_bytes = list.bytes_of(pieces).div_ceil(u64::from(count.max(1)));
                NextRun { most: count, piece_bytes, segment }
            }
            _ => NextRun { most, piece_bytes: self.piece_bytes(), segment: 0 },
        }
    }

    /// The most bytes that one piece of the current stage has.
    #[inline]
    pub fn piece_bytes(&self) -> u64 {
        match self.stage {
            Stage::Data => self.work.shape.piece_bytes().min(self.work.shape.bytes()),
            Stage::Flush | Stage::Imm => 0,
        }
    }

    /// When a request of the operation was last posted or ended.
    pub fn last_progress(&self) -> Time {
        self.posted_at.max(self.ended_at)
    }

    /// Notes that a request of the operation was posted or ended. A stalled operation may stall again from now on:
    /// `next_stall_check` becomes `now`.
    #[inline]
    pub fn note_progress(&mut self, now: Time, next_stall_check: &mut Time) {
        if self.stalled {
            self.stalled = false;
            *next_stall_check = now;
        }
    }

    /// Removes the operation from its link's backlog. An operation that waits for its trigger is not in the backlog.
    #[inline(always)]
    pub fn leave_backlog(&self, group: GroupIndex) {
        if self.trigger.is_none() {
            self.peer.links[group].backlog.remove(Weight::of(self.bytes, self.work.pieces.len()));
        }
    }

    /// Whether nothing is posted and nothing will be.
    pub fn is_over(&self) -> bool {
        self.outstanding == 0 && self.unposted == 0
    }

    fn credit(&self, group: GroupIndex) -> &SendCredit {
        &self.peer.links[group].credit
    }

    /// What one request takes of the peer's grant besides bytes: one imm, or one message, or nothing.
    pub fn credit_counter(&self, group: GroupIndex) -> Option<&CreditCounter> {
        self.credit(group).counter(self.work.kind, self.piece_imm())
    }

    /// Takes credit for up to `wanted` requests. Returns the number of requests it was enough for.
    pub fn take_credit(&self, group: GroupIndex, link: &mut LinkState, wanted: u32) -> u32 {
        // All engines of the transport share the granted bytes evenly.
        let engines = self.peer.links_of(self.peer.links[group].engine.transport).len() as u64;
        let (granted, piece) = (self.credit(group).bytes().div_ceil(engines), self.piece_bytes());
        let fit = match piece {
            0 => u64::MAX,
            // If nothing is posted to the peer, one request fits, however large: a grant does not limit the size of a
            // request.
            _ if link.posted_bytes == 0 && granted > 0 => (granted / piece).max(1),
            _ => granted.saturating_sub(link.posted_bytes) / piece,
        };
        let wanted = wanted.min(u32::try_from(fit).unwrap_or(u32::MAX));
        let taken = self.credit_counter(group).map_or(wanted, |counter| counter.take(wanted));
        link.posted_bytes += piece * u64::from(taken);
        taken
    }

    /// The part of the peer's grant that is used up.
    pub fn missing_credit(&self, group: GroupIndex) -> GrantOf {
        match self.credit_counter(group) {
            Some(counter) if counter.is_used_up() && self.work.kind == WorkKind::Send => GrantOf::Messages,
            Some(counter) if counter.is_used_up() => GrantOf::Imms,
            _ => GrantOf::Bytes,
        }
    }
}
