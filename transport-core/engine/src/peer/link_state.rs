//! The engine's state of the link to one peer.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::PeerState;
use super::comeback::{Comeback, FIRST_SHARE, PathHistory};
use super::link::FULL_CAPACITY;
use crate::index::GroupIndex;
use crate::rail::{FIRST_MESSAGE_RAIL, FULL_SPEED, PostedPiece};
use crate::spi::{FenceKind, FenceReport, PeerSlot, WorkKind};
use crate::{Error, Result, Time};

/// The engine's state of the link to one peer.
pub(crate) struct LinkState {
    pub peer: Arc<PeerState>,
    /// The slot over which each rail sends. `None` if the rail is not paired, once its path is broken, and once
    /// the slot is gone.
    pub send_slots: Vec<Option<PeerSlot>>,
    /// The slots over which only the peer sends, because it has more rails than this side or because the path is
    /// broken. Each with its rail, until it is gone.
    pub receive_slots: Vec<(usize, PeerSlot)>,
    /// Whether an operation has gone on over another rail group, which is logged once.
    pub has_continued: bool,
    /// Whether the link has failed. The engine reuses its index once all slots are gone and no operation is left.
    pub has_failed: bool,
    /// Unacknowledged bytes of operations that take credit.
    pub posted_bytes: u64,
    /// Operations that wait for credit of the peer's grant. They are in no rail's queue.
    pub waiting_for_credit: VecDeque<u32>,
    /// The rails over which nothing is sent to the peer: this side's or the peer's device is lost, or the path between
    /// them.
    broken_paths: Vec<BrokenPath>,
    /// Per rail: how often its path has broken.
    pub histories: Vec<PathHistory>,
    /// Per rail: its share of an operation's bytes, relative to the other rails. 0 if the rail is not paired.
    pub weights: Vec<u32>,
    /// Per rail: until when its path carries [`FIRST_SHARE`] only, because it has just come back.
    on_trial_until: Vec<Option<Time>>,
    /// When a request to the peer is known to have ended well.
    pub last_success: Time,
    /// Per rail: the imms that were posted over `send_slots`. `None` once one of them has failed: it may have arrived.
    sent_imms: Vec<Option<u64>>,
    /// Per rail: the messages that were posted over `send_slots` and are acknowledged. `None` once one has failed.
    acknowledged_messages: Vec<Option<u64>>,
    /// Per rail: the messages that were posted over `send_slots`, as the peer is told.
    posted_messages: Vec<u64>,
    /// Whether the peer is told of each message: the two sides may not agree on the rail, or other peers of the receiver
    /// use another one.
    pub announces: bool,
    /// Whether the peer was asked to announce its messages.
    pub asked_to_announce: bool,
    /// Whether the peer has announced messages, so that `receive_rail` is what the peer says.
    pub has_announced: bool,
    /// The rail over which messages to the peer go. It changes when its path is broken for good.
    pub message_rail: usize,
    /// The rail on which the peer's messages arrive.
    pub receive_rail: usize,
    /// Imms and messages that arrived since the peer was last granted more.
    pub arrivals: [u64; 2],
    /// The numbers of arrivals after which the engine grants the peer more.
    pub renew_after: [u64; 2],
}

/// A rail over which nothing is sent to a peer.
pub(crate) struct BrokenPath {
    pub rail: usize,
    pub slot: PeerSlot,
    pub error: Error,
    /// The requests that were posted over it, that this side's device has ended, and that may have arrived.
    pub lost: Vec<PostedPiece>,
    /// The peer's answer. If it is `Ok`, nothing arrives any more; if it is an error, bytes may.
    pub fenced: Option<Result<FenceReport>>,
    /// Whether the peer's device is lost, so that the path never comes back.
    pub stays_broken: bool,
    pub comeback: Comeback,
}

/// The link that a slot belongs to, and what has arrived over the slot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SlotLink {
    pub link: u32,
    /// The imms that have arrived over the slot.
    pub imms: u64,
    /// The messages that have arrived over the slot.
    pub messages: u64,
    /// The messages that the peer has posted there, as far as it has said so.
    pub announced: u64,
    /// Whether a message may have been consumed without being counted: its receive has failed.
    pub is_uncounted: bool,
    /// The fences that the peer has asked for, without a pause of [`CALM`] between them.
    fences: u32,
    last_fence: Time,
}

/// A peer may ask for this many fences of a slot in a row before this side lets it wait: a fence may cost other peers
/// something, since efa replaces its endpoint.
const FREE_FENCES: u32 = 4;
/// The first wait; it doubles with each further fence, up to [`LONGEST_FENCE_WAIT`].
const FIRST_FENCE_WAIT: Duration = Duration::from_millis(10);
const LONGEST_FENCE_WAIT: Duration = Duration::from_secs(10);
/// After so long without a fence, fences are free again.
const CALM: Duration = Duration::from_secs(60);

/// The most messages of one slot for which receives move to its rail.
const MAX_AWAITED: u64 = 1024;

impl SlotLink {
    pub fn new(link: u32) -> Self {
        Self {
            link,
            imms: 0,
            messages: 0,
            announced: 0,
            is_uncounted: false,
            fences: 0,
            last_fence: Time::ZERO,
        }
    }

    /// The answer to a peer that has asked for a fence: what has arrived. This side may have consumed messages without
    /// counting them. Then it reports more messages than the peer can have sent, and the peer sends none again.
    pub fn report(self) -> FenceReport {
        let messages = if self.is_uncounted { u64::MAX } else { self.messages };
        FenceReport { imms: self.imms, messages }
    }

    /// The messages that the peer has announced, and that have not arrived. A peer may announce any number.
    pub fn awaited(self) -> u64 {
        self.announced.saturating_sub(self.messages).min(MAX_AWAITED)
    }

    /// Notes that the peer asks for a fence. Returns how long this side lets it wait.
    pub fn note_fence(&mut self, now: Time, kind: FenceKind) -> Duration {
        if kind == FenceKind::Lift {
            return Duration::ZERO;
        }
        self.fences = if now.since(self.last_fence) >= CALM { 1 } else { self.fences + 1 };
        self.last_fence = now;
        let above = self.fences.saturating_sub(FREE_FENCES);
        match above {
            0 => Duration::ZERO,
            _ => FIRST_FENCE_WAIT.saturating_mul(1 << (above - 1).min(16)).min(LONGEST_FENCE_WAIT),
        }
    }
}

/// What a peer's grant counts; indexes [`LinkState::arrivals`].
#[derive(Debug, Clone, Copy)]
pub(crate) enum ArrivalKind {
    Imm = 0,
    Message = 1,
}

impl LinkState {
    pub fn new(
        peer: Arc<PeerState>,
        send_slots: Vec<Option<PeerSlot>>,
        receive_slots: Vec<(usize, PeerSlot)>,
        renew_after: [u64; 2],
    ) -> Self {
        let rails = send_slots.len();
        Self {
            peer,
            broken_paths: Vec::new(),
            histories: vec![PathHistory::default(); rails],
            weights: vec![0; rails],
            on_trial_until: vec![None; rails],
            last_success: Time::ZERO,
            sent_imms: vec![Some(0); rails],
            acknowledged_messages: vec![Some(0); rails],
            posted_messages: vec![0; rails],
            announces: false,
            asked_to_announce: false,
            has_announced: false,
            message_rail: FIRST_MESSAGE_RAIL,
            receive_rail: FIRST_MESSAGE_RAIL,
            send_slots,
            receive_slots,
            has_continued: false,
            has_failed: false,
            posted_bytes: 0,
            waiting_for_credit: VecDeque::new(),
            arrivals: [0; 2],
            renew_after,
        }
    }

    /// Counts an arrival. Returns true if the engine has to grant the peer more.
    #[inline]
    pub fn count_arrival(&mut self, kind: ArrivalKind) -> bool {
        let kind = kind as usize;
        self.arrivals[kind] += 1;
        self.arrivals[kind] >= self.renew_after[kind] && !self.has_failed
    }

    /// Counts posted imms.
    pub fn count_sent_imms(&mut self, rail: usize, more: u32) {
        if let Some(sent) = &mut self.sent_imms[rail] {
            // The peer's report may be any number.
            *sent = sent.wrapping_add(more.into());
        }
    }

    /// Counts messages that are to be posted over the rail for messages, and announces them if the peer is to be told.
    pub fn add_messages(&mut self, group: GroupIndex, more: u64) {
        let posted = &mut self.posted_messages[self.message_rail];
        *posted = posted.wrapping_add(more);
        if self.announces && more > 0 {
            self.announce_messages(group, self.message_rail);
        }
    }

    /// Counts a message that was posted over a rail and is acknowledged.
    pub fn count_acknowledged_message(&mut self, rail: usize) {
        self.acknowledged_messages[rail] =
            self.acknowledged_messages[rail].map(|count| count.wrapping_add(1));
    }

    /// Tells the peer how many messages were posted over a rail, so that it posts receives there.
    #[cold]
    pub fn announce_messages(&self, group: GroupIndex, rail: usize) {
        let messages = self.posted_messages[rail];
        if let Some(slot) = self.send_slots[rail] {
            self.peer.context.messages_posted(group, rail, slot, messages);
        }
    }

    /// Notes that a request with an imm, or a message, has failed: nobody knows any more how many have arrived.
    #[cold]
    pub fn note_failed(&mut self, kind: WorkKind, rail: usize) {
        let counts =
            if kind == WorkKind::Send { &mut self.acknowledged_messages } else { &mut self.sent_imms };
        counts[rail] = None;
    }

    /// The messages that were posted over a rail: those that are acknowledged, and `others`. `None` if one has failed.
    pub fn sent_messages(&self, rail: usize, others: u64) -> Option<u64> {
        Some(self.acknowledged_messages[rail]?.wrapping_add(others))
    }

    /// The imms that were posted over a rail. `None` if one of them has failed.
    pub fn sent_imms(&self, rail: usize) -> Option<u64> {
        self.sent_imms[rail]
    }

    /// Sends nothing over a rail any more; what arrives there is still taken. Returns the slot, or `None` if nothing
    /// was sent there before.
    pub fn break_path(&mut self, group: GroupIndex, rail: usize, error: &Error) -> Option<PeerSlot> {
        let slot = self.send_slots[rail].take()?;
        // From now on the two sides may disagree on the rail for messages.
        self.announces = true;
        self.receive_slots.push((rail, slot));
        self.on_trial_until[rail] = None;
        if let Some(pair) = &self.peer.links[group].rails[rail] {
            pair.capacity.store(0, Ordering::Relaxed);
        }
        let error = error.clone();
        let comeback = Comeback::Unsettled;
        self.broken_paths.push(BrokenPath {
            rail,
            slot,
            error,
            lost: Vec::new(),
            fenced: None,
            stays_broken: false,
            comeback,
        });
        Some(slot)
    }

    /// The path over a rail works again, and carries little at first. Returns until when.
    pub fn mend_path(&mut self, rail: usize, now: Time) -> Time {
        if let Some(at) = self.broken_paths.iter().position(|path| path.rail == rail) {
            let path = self.broken_paths.swap_remove(at);
            self.receive_slots.retain(|known| *known != (rail, path.slot));
            self.send_slots[rail] = Some(path.slot);
        }
        let until = now.after(self.histories[rail].note_return(now));
        self.on_trial_until[rail] = Some(until);
        until
    }

    /// Until when the path over a rail carries little, because it has just come back.
    pub fn on_trial_until(&self, rail: usize) -> Option<Time> {
        self.on_trial_until[rail]
    }

    /// The path over a rail carries its whole share again.
    pub fn end_trial(&mut self, rail: usize) {
        self.on_trial_until[rail] = None;
    }

    /// Sets the weights anew. `speeds` has each rail's speed relative to what its device reports, in 1/[`FULL_SPEED`].
    pub fn set_weights(&mut self, group: GroupIndex, speeds: impl Iterator<Item = u32> + Clone) {
        let paired = &self.peer.links[group].rails;
        let is_even = speeds.clone().all(|speed| speed == FULL_SPEED)
            && self.on_trial_until.iter().all(Option::is_none);
        for (rail, speed) in speeds.enumerate() {
            let Some(pair) = &paired[rail] else { continue };
            let part = if self.on_trial_until[rail].is_some() { FIRST_SHARE } else { 1 };
            let full = u64::from(pair.weight) * FULL_CAPACITY;
            let capacity = (full * u64::from(speed.max(1)) / u64::from(FULL_SPEED * part)).max(1);
            let is_broken = self.send_slots[rail].is_none();
            pair.capacity.store(if is_broken { 0 } else { capacity }, Ordering::Relaxed);
            // The larger numbers keep a share for a slow rail.
            let uneven = u32::try_from(capacity).unwrap_or(u32::MAX);
            self.weights[rail] = if is_even || pair.weight == 0 { pair.weight } else { uneven };
        }
    }

    /// Notes how many imms and messages the peer has counted of those that were posted over a rail. All others are
    /// settled.
    pub fn set_sent(&mut self, rail: usize, report: FenceReport) {
        (self.sent_imms[rail], self.acknowledged_messages[rail]) = (Some(report.imms), Some(report.messages));
        self.posted_messages[rail] = report.messages;
    }

    /// The slots of a rail that have only ever received, because the peer has more rails than this side.
    pub fn slots_that_only_receive(&self, rail: usize) -> impl Iterator<Item = PeerSlot> + '_ {
        let is_broken =
            move |slot: PeerSlot| self.broken_paths.iter().any(|path| path.slot == slot && path.rail == rail);
        let of_rail = self.receive_slots.iter().filter(move |(of, _)| *of == rail).map(|(_, slot)| *slot);
        of_rail.filter(move |slot| !is_broken(*slot))
    }

    pub fn broken_path(&mut self, rail: usize) -> Option<&mut BrokenPath> {
        self.broken_paths.iter_mut().find(|path| path.rail == rail)
    }

    pub fn take_broken_paths(&mut self) -> Vec<BrokenPath> {
        std::mem::take(&mut self.broken_paths)
    }

    pub fn broken_paths(&self) -> &[BrokenPath] {
        &self.broken_paths
    }

    /// All slots that are not gone, with their rails.
    pub fn all_slots(&self) -> impl Iterator<Item = (usize, PeerSlot)> {
        let sending = self.send_slots.iter().enumerate().filter_map(|(rail, slot)| Some((rail, (*slot)?)));
        sending.chain(self.receive_slots.iter().copied())
    }

    /// Removes a slot that is gone.
    pub fn remove_slot(&mut self, rail: usize, slot: PeerSlot) {
        if self.send_slots[rail] == Some(slot) {
            self.send_slots[rail] = None;
        }
        self.receive_slots.retain(|known| *known != (rail, slot));
    }
}
