//! The initiator's work requests whose bytes go through slots.

use std::collections::VecDeque;

use crate::{Event, PeerSlot, Status, WorkRequest};

/// The staged work requests to one peer, in the order of posting. `T` is what the backend keeps with each of them.
///
/// Work requests are numbered, because a slot names the work request whose bytes it has. The number of a work request
/// that was removed belongs to no other one.
#[derive(Debug)]
pub struct StagedWorkQueue<T> {
    /// The numbers are consecutive: a work request that is removed before an earlier one keeps its place until that one
    /// is removed.
    queue: VecDeque<StagedWork<T>>,
    /// The number of work requests that were not removed.
    len: usize,
    /// The numbers of the work requests that have ended and were not removed, for [`Self::remove_ended`].
    ended: Vec<u64>,
    /// The number of the next work request.
    next: u64,
    /// No work request with a smaller number [is unassigned](StagedWork::is_unassigned).
    first_unassigned: u64,
}

/// A work request of the engine, and how many of its bytes have been assigned to slots.
#[derive(Debug)]
pub struct StagedWork<T> {
    /// The work request as it was posted.
    pub posted: WorkRequest,
    /// What the backend keeps with it.
    pub extra: T,
    number: u64,
    /// The number of bytes that have been assigned to slots.
    assigned: u64,
    /// Whether a slot without bytes is still needed: for the imm, or because the work request has no bytes. If one slot
    /// has all bytes, it takes the imm too.
    needs_empty_slot: bool,
    /// The number of slots that are busy with this work request.
    open_slots: u32,
    is_removed: bool,
    failure: Option<WorkFailure>,
}

/// The part of a work request that a slot carries.
#[derive(Debug, Clone, Copy, Default)]
pub struct SlotContent {
    /// The number of the work request. `None` if it is unknown or has ended.
    pub work: Option<u64>,
    /// The offset of the slot's bytes in the work request.
    pub offset: u64,
    /// The number of bytes.
    pub len: u64,
}

/// Why a work request failed.
#[derive(Debug, Clone, Copy)]
pub struct WorkFailure {
    /// The status that the engine gets.
    pub status: Status,
    /// Whether the peer may have died: then the engine asks the peer ([`Event::FailedUnconfirmed`]).
    pub is_unconfirmed: bool,
}

impl<T> Default for StagedWorkQueue<T> {
    fn default() -> Self {
        Self { queue: VecDeque::new(), len: 0, ended: Vec::new(), next: 0, first_unassigned: 0 }
    }
}

impl<T: Default> StagedWorkQueue<T> {
    /// Adds a work request. `needs_empty_slot` is true if a slot has to deliver its imm, or if it takes a slot although
    /// it has no bytes. Loopback passes false: it delivers imms in another way.
    pub fn push(&mut self, posted: &WorkRequest, extra: T, needs_empty_slot: bool) {
        self.queue.push_back(StagedWork {
            posted: *posted,
            extra,
            number: self.next,
            assigned: 0,
            needs_empty_slot,
            open_slots: 0,
            is_removed: false,
            failure: None,
        });
        if posted.len == 0 && !needs_empty_slot {
            self.ended.push(self.next);
        }
        self.next += 1;
        self.len += 1;
    }

    /// The number of work requests.
    #[inline]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no work request.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All work requests, in the order of posting.
    pub fn iter(&self) -> impl Iterator<Item = &StagedWork<T>> {
        self.queue.iter().filter(|work| !work.is_removed)
    }

    /// The work request with this number, if it has not been removed.
    pub fn get_mut(&mut self, number: Option<u64>) -> Option<&mut StagedWork<T>> {
        Self::find(&mut self.queue, number?)
    }

    fn find(queue: &mut VecDeque<StagedWork<T>>, number: u64) -> Option<&mut StagedWork<T>> {
        let index = number.checked_sub(queue.front()?.number)?;
        queue.get_mut(index as usize).filter(|work| !work.is_removed)
    }

    /// The first work request that has bytes to assign, or that has no bytes and needs an empty slot. The caller
    /// assigns it a slot ([`StagedWork::assign`]). This leaves out a work request of which only the imm still needs a
    /// slot ([`StagedWork::due_empty_slot`]).
    pub fn next_unassigned(&mut self) -> Option<&mut StagedWork<T>> {
        let from = self.first_unassigned_index();
        let index = (from..self.queue.len()).find(|index| self.queue[*index].is_unassigned());
        self.first_unassigned = index.map_or(self.next, |index| self.queue[index].number);
        self.queue.get_mut(index?)
    }

    /// The work requests that [`next_unassigned`](Self::next_unassigned) would return one after the other, if each was
    /// assigned as a whole.
    pub fn unassigned(&self) -> impl Iterator<Item = &StagedWork<T>> {
        self.queue.range(self.first_unassigned_index()..).filter(|work| work.is_unassigned())
    }

    /// Notes that a slot is no longer busy, and the result. Returns the work request, if it has not been removed.
    #[inline]
    pub fn finish_slot(
        &mut self,
        content: &SlotContent,
        result: Result<(), WorkFailure>,
    ) -> Option<&mut StagedWork<T>> {
        let work = Self::find(&mut self.queue, content.work?)?;
        work.open_slots -= 1;
        if let Err(failure) = result {
            work.fail(failure);
        }
        if work.has_ended() {
            self.ended.push(work.number);
        }
        Some(work)
    }

    /// Fails all work requests that have not failed before. Each ends once no slot is busy with it.
    pub fn fail_all(&mut self, failure: WorkFailure) {
        for work in &mut self.queue {
            let had_ended = work.has_ended();
            work.fail(failure);
            if !had_ended && work.has_ended() {
                self.ended.push(work.number);
            }
        }
    }

    /// The oldest work request, if it has ended.
    pub fn first_ended(&self) -> Option<&StagedWork<T>> {
        self.queue.front().filter(|work| work.has_ended())
    }

    /// Removes the oldest work request, which has ended. A queue from which this removes does not use
    /// [`Self::remove_ended`].
    pub fn remove_first(&mut self) {
        self.ended.clear();
        self.len -= usize::from(self.queue.pop_front().is_some());
    }

    /// Removes the work requests that have ended, in the order of their ends, and calls `each` with them.
    pub fn remove_ended(&mut self, mut each: impl FnMut(&mut StagedWork<T>)) {
        for number in self.ended.drain(..) {
            let Some(work) = Self::find(&mut self.queue, number) else { continue };
            each(work);
            // What the backend keeps with it ends now.
            (work.is_removed, work.extra) = (true, T::default());
            self.len -= 1;
        }
        while self.queue.front().is_some_and(|work| work.is_removed) {
            self.queue.pop_front();
        }
    }

    /// Removes all work requests.
    pub fn remove_all(&mut self) -> impl Iterator<Item = StagedWork<T>> {
        self.ended.clear();
        self.len = 0;
        self.queue.drain(..).filter(|work| !work.is_removed)
    }

    /// The index of the first work request that may be unassigned.
    fn first_unassigned_index(&self) -> usize {
        let first = self.queue.front().map_or(self.next, |work| work.number);
        (self.first_unassigned.saturating_sub(first) as usize).min(self.queue.len())
    }
}

impl<T> StagedWork<T> {
    /// Assigns the next bytes to a slot of `slot_len` bytes: as many as fit it.
    pub fn assign(&mut self, slot_len: u64) -> SlotContent {
        let (offset, len) = (self.assigned, (self.posted.len - self.assigned).min(slot_len));
        self.assigned += len;
        self.open_slots += 1;
        self.needs_empty_slot &= len < self.posted.len;
        SlotContent { work: Some(self.number), offset, len }
    }

    /// Assigns a slot without bytes, if one is still needed.
    pub fn assign_empty(&mut self) -> Option<SlotContent> {
        if !std::mem::take(&mut self.needs_empty_slot) {
            return None;
        }
        self.open_slots += 1;
        Some(SlotContent { work: Some(self.number), offset: 0, len: 0 })
    }

    /// Notes the first failure. No further slots are assigned.
    pub fn fail(&mut self, failure: WorkFailure) {
        self.failure.get_or_insert(failure);
        self.assigned = self.posted.len;
        self.needs_empty_slot = false;
    }

    /// The number of bytes that are not assigned to slots.
    #[inline]
    pub fn unassigned_bytes(&self) -> u64 {
        self.posted.len - self.assigned
    }

    /// The first failure.
    #[inline]
    pub fn failure(&self) -> Option<WorkFailure> {
        self.failure
    }

    /// The number of the work request, if all its bytes have arrived and it still needs a slot without bytes. The
    /// caller assigns one ([`StagedWork::assign_empty`]).
    pub fn due_empty_slot(&self) -> Option<u64> {
        let have_bytes_arrived = self.open_slots == 0 && self.assigned == self.posted.len;
        (have_bytes_arrived && self.needs_empty_slot).then_some(self.number)
    }

    /// Whether there are bytes to assign or, for a work request without bytes, the empty slot.
    fn is_unassigned(&self) -> bool {
        self.assigned < self.posted.len || (self.posted.len == 0 && self.needs_empty_slot)
    }

    fn has_ended(&self) -> bool {
        self.open_slots == 0 && self.assigned == self.posted.len && !self.needs_empty_slot
    }

    /// The event that reports the end of the work request.
    pub fn event(&self) -> Event {
        let (id, peer) = (self.posted.id, self.posted.peer);
        self.failure.map_or(Event::Done { first: id, count: 1 }, |failure| failure.event(id, peer))
    }
}

impl WorkFailure {
    /// The event that reports the failure of the work request with this ID.
    pub fn event(self, id: u64, peer: PeerSlot) -> Event {
        match self {
            Self { status, is_unconfirmed: false } => Event::Failed { id, status },
            Self { status, is_unconfirmed: true } => Event::FailedUnconfirmed { id, peer, status },
        }
    }
}

impl From<Status> for WorkFailure {
    /// A failure after which the engine need not ask whether the peer is alive.
    fn from(status: Status) -> Self {
        Self { status, is_unconfirmed: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copy::CopyStrategy;
    use crate::{ErrorKind, WorkKind};

    fn write(id: u64, len: u64) -> WorkRequest {
        WorkRequest {
            id,
            peer: PeerSlot(3),
            kind: WorkKind::Write,
            local: std::ptr::null_mut(),
            lkey: 0,
            len,
            remote: 0,
            rkey: 0,
            imm: None,
            strategy: CopyStrategy::Plain,
        }
    }

    fn assign(queue: &mut StagedWorkQueue<()>) -> Option<SlotContent> {
        queue.next_unassigned().map(|work| work.assign(10))
    }

    fn ended(queue: &mut StagedWorkQueue<()>) -> Vec<Event> {
        let mut events = Vec::new();
        queue.remove_ended(|work| events.push(work.event()));
        events
    }

    fn done(id: u64) -> Event {
        Event::Done { first: id, count: 1 }
    }

    #[test]
    fn bytes_are_cut_to_slots_in_the_order_of_posting() {
        let mut queue = StagedWorkQueue::default();
        queue.push(&write(70, 25), (), false);
        queue.push(&write(71, 0), (), false);
        queue.push(&write(72, 10), (), false);
        assert_eq!(queue.first_ended().map(|work| work.posted.id), None);
        let slots: Vec<_> = std::iter::from_fn(|| assign(&mut queue)).collect();
        let contents: Vec<_> = slots.iter().map(|slot| (slot.work, slot.offset, slot.len)).collect();
        assert_eq!(contents, [(Some(0), 0, 10), (Some(0), 10, 10), (Some(0), 20, 5), (Some(2), 0, 10)]);
        assert_eq!(ended(&mut queue), [done(71)], "it has no bytes and no imm");
        for slot in [&slots[2], &slots[0], &slots[3]] {
            assert!(queue.finish_slot(slot, Ok(())).is_some());
        }
        assert_eq!(ended(&mut queue), [done(72)]);
        queue.finish_slot(&slots[1], Ok(()));
        assert_eq!(queue.first_ended().map(|work| work.posted.id), Some(70));
        assert_eq!(ended(&mut queue), [done(70)]);
        assert!(queue.is_empty() && queue.finish_slot(&slots[1], Ok(())).is_none());
    }

    #[test]
    fn an_imm_takes_the_slot_of_all_bytes_or_one_of_its_own() {
        let mut queue = StagedWorkQueue::default();
        [10, 11, 0].into_iter().for_each(|len| queue.push(&write(len, len), (), true));
        let slots: Vec<_> = std::iter::from_fn(|| assign(&mut queue)).collect();
        assert_eq!(slots.iter().map(|slot| slot.len).collect::<Vec<_>>(), [10, 10, 1, 0]);
        slots.iter().for_each(|slot| assert!(queue.finish_slot(slot, Ok(())).is_some()));
        assert_eq!(ended(&mut queue), [done(10), done(0)]);
        let work = queue.get_mut(Some(1)).unwrap();
        assert_eq!(work.due_empty_slot(), Some(1));
        let last = work.assign_empty().unwrap();
        assert!(work.assign_empty().is_none() && work.due_empty_slot().is_none());
        queue.finish_slot(&last, Ok(()));
        assert_eq!(ended(&mut queue), [done(11)]);
    }

    #[test]
    fn a_failed_work_request_ends_when_no_slot_is_busy_with_it() {
        let mut queue = StagedWorkQueue::default();
        [1, 2].into_iter().for_each(|id| queue.push(&write(id, 30), (), true));
        let (first, second) = (assign(&mut queue).unwrap(), assign(&mut queue).unwrap());
        let [io, died] =
            [ErrorKind::Io, ErrorKind::PeerDied].map(|kind| WorkFailure::from(Status { kind, code: 0 }));
        queue.finish_slot(&first, Err(WorkFailure { is_unconfirmed: true, ..io }));
        assert_eq!(assign(&mut queue).and_then(|slot| slot.work), Some(1), "no further slot for the first");
        queue.fail_all(died);
        assert!(assign(&mut queue).is_none() && ended(&mut queue).is_empty());
        queue.finish_slot(&second, Ok(()));
        let (peer, status) = (PeerSlot(3), io.status);
        assert_eq!(ended(&mut queue), [Event::FailedUnconfirmed { id: 1, peer, status }]);
        let left: Vec<_> = queue.remove_all().map(|work| work.event()).collect();
        assert_eq!(left, [Event::Failed { id: 2, status: died.status }]);
    }
}
