//! Work out: plans are expanded here, lazily and fairly, and nowhere else.

use super::posted::{RUN, Run};
use super::{Engine, Rail};
use crate::observe::What;
use crate::spi::{PostResult, Status, WorkKind};
use crate::{Error, ErrorKind};

impl Engine {
    /// Posts one batch per rail. Returns the number of requests taken, and on how many rails others
    /// have not had their turn since something was taken: what stood first was refused, and a worker
    /// must not sleep before it has tried them all.
    #[inline]
    pub(super) fn post(&mut self) -> (usize, usize) {
        let (mut posted, mut turns_left) = (std::mem::take(&mut self.posted_alone), 0);
        for rail in 0..self.rails.len() {
            let this = &mut self.rails[rail];
            // Counts batches in a row: where none is tried, none was passed over.
            let passed = std::mem::take(&mut this.passed);
            if this.rotation.front().is_none() {
                continue;
            }
            posted += self.post_rail(rail, passed);
            let this = &self.rails[rail];
            turns_left += usize::from((1..=this.rotation.len()).contains(&this.passed));
        }
        (posted, turns_left)
    }

    fn post_rail(&mut self, rail: usize, passed: usize) -> usize {
        let this = &mut self.rails[rail];
        this.window.look(this.posted.charged());
        let mut bytes = self.fill_batch(rail);
        if self.rails[rail].batch.is_empty() {
            if self.rails[rail].rotation.front().is_none() || !self.makes_room(rail) {
                return 0;
            }
            bytes = self.fill_batch(rail);
        }
        if self.rails[rail].batch.is_empty() {
            return 0;
        }
        let result = self.post_batch(rail);
        self.book(rail, bytes, result, passed)
    }

    /// Posts the batch that was built. It is to be booked.
    #[inline]
    pub(super) fn post_batch(&mut self, rail: usize) -> PostResult {
        let this = &mut self.rails[rail];
        // SAFETY: every request's spans were checked when it was submitted, and `self.active` holds its
        // regions and imports until `reap` has seen its end, or will in a moment (`activate`).
        unsafe { this.endpoint.post(&this.batch) }
    }

    /// Books a batch of so many bytes that was posted. Returns the number of requests taken.
    pub(super) fn book(&mut self, rail: usize, bytes: u64, result: PostResult, passed: usize) -> usize {
        let offered = self.rails[rail].batch.len();
        let accepted = result.accepted.min(offered);
        let cut_short = accepted < offered;
        let bytes = if cut_short {
            self.rails[rail].batch.requests().take(accepted).map(|request| request.len).sum()
        } else {
            bytes
        };
        self.handle.counts[rail].batch(accepted as u64, bytes);
        if cut_short {
            let refused = usize::from(result.error.is_some());
            self.handle.counts[rail].cut_short((offered - accepted - refused) as u64);
        }
        if accepted == 0 {
            self.rails[rail].passed = passed + 1;
        }
        self.record_batch(rail, accepted as u32, bytes);
        self.account(rail, accepted as u32, cut_short, result.error);
        self.note(3, accepted as u64);
        accepted
    }

    /// Builds the next batch of a rail; returns its bytes.
    fn fill_batch(&mut self, rail: usize) -> u64 {
        let this = &mut self.rails[rail];
        this.batch.clear();
        this.runs.clear();
        let mut room = this.credits().min(this.most) as u32;
        let was_full = std::mem::replace(&mut this.full, room == 0);
        if room == 0 && !was_full {
            self.record(What::QueueFull { rail: self.numbered(rail) });
            return 0;
        }
        // What posting moves itself counts against the most.
        let (mut bytes, mut moved) = (0, 0);
        let most = this.batch_bytes;
        let (mut ahead, oldest) = (this.posted.charged(), this.posted.oldest_charge());
        while room > 0 && moved < most {
            let this = &mut self.rails[rail];
            let Some(op) = this.rotation.front() else { break };
            let Some(active) = &mut self.active[op as usize] else {
                this.rotation.pop();
                continue;
            };
            let share = active.rails[rail];
            let charge = this.window.charge(active.piece());
            let by_window = this.window.room(ahead, oldest, charge);
            if by_window == 0 && share.left() > 0 {
                this.window.falls_short();
                break;
            }
            let by_bytes = match active.work.far {
                true => by_window,
                false => (most - moved).div_ceil(active.work.shape.piece_bytes()).min(by_window),
            };
            let turn = room.min(RUN).min(u32::try_from(by_bytes).unwrap_or(u32::MAX));
            let mut count = share.left().min(turn);
            if active.metered
                && count > 0
                && let Some(link) = &mut self.links[active.link as usize]
            {
                count = active.take(self.handle.group, link, count);
                if count == 0 {
                    self.park(rail, op);
                    continue;
                }
            }
            if count > 0 {
                let items = share.next..share.next + count;
                let run = Run { op, item: share.next, count, charge };
                ahead += charge * u64::from(count);
                let expanded =
                    active.expand(items, &share, this.posted.id_of(this.runs.len()), &mut this.batch);
                bytes += expanded;
                moved += if active.work.far { 0 } else { expanded };
                this.runs.push(run);
                room -= run.count;
                active.rails[rail].next += run.count;
            }
            let share = &mut active.rails[rail];
            if share.left() == 0 {
                share.queued = false;
                this.rotation.pop();
            } else {
                this.rotation.rotate();
            }
        }
        bytes
    }

    #[inline]
    fn record_batch(&mut self, rail: usize, requests: u32, bytes: u64) {
        let first = self.rails[rail].runs.first().and_then(|run| self.active[run.op as usize].as_ref());
        if let Some(op) = first.filter(|_| requests > 0).map(|active| active.id) {
            self.rails[rail].pressed = false;
            self.record(What::Posted { rail: self.numbered(rail), op, requests, bytes });
        }
    }

    /// Books what was accepted. What was not goes back to its plan; a request that
    /// was refused for good fails its operation.
    fn account(&mut self, rail: usize, accepted: u32, cut_short: bool, refusal: Option<Status>) {
        if cut_short {
            self.give_back_refused(rail, accepted);
        }
        let mut left = accepted;
        let mut refused = refusal;
        let mut cut = None;
        let now = self.now();
        for place in 0..self.rails[rail].runs.len() {
            let run = self.rails[rail].runs[place];
            let taken = run.count.min(left);
            left -= taken;
            let Some(active) = &mut self.active[run.op as usize] else { continue };
            active.unposted -= taken;
            active.outstanding += taken;
            active.work_requests += u64::from(taken);
            if taken > 0 {
                self.rails[rail].posted.push(Run { count: taken, ..run });
                active.rails[rail].held = false;
                active.moves(now, &mut self.next_look);
            }
            if taken == run.count || active.error.is_some() {
                continue;
            }
            // Earlier turns of an operation come first: the least piece stays.
            let share = &mut active.rails[rail];
            share.next = share.next.min(run.item + taken);
            share.held |= cut.is_none() && refused.is_none();
            self.queue(run.op);
            cut.get_or_insert(place);
            if let Some(status) = refused.take() {
                self.handle.counts[rail].completed(0, 1);
                self.fail_with(run.op, rail, status);
            }
        }
        if let Some(cut) = cut {
            self.record_pressure(rail, cut, accepted);
            self.take_turns_after_cut(rail, cut);
        }
    }

    #[cold]
    fn record_pressure(&mut self, rail: usize, cut: usize, accepted: u32) {
        let offered: u32 = self.rails[rail].runs.iter().map(|run| run.count).sum();
        let op = self.active[self.rails[rail].runs[cut].op as usize].as_ref().map(|active| active.id);
        // A peer that takes nothing is asked over and over: that is one record.
        let was_pressed = std::mem::replace(&mut self.rails[rail].pressed, accepted == 0);
        if let Some(op) = op.filter(|_| !was_pressed) {
            self.record(What::Pressure { rail: self.numbered(rail), op, refused: offered - accepted });
        }
    }

    /// Who stood behind the cut comes first next time, in the same order. Who stood
    /// at it comes last: what holds it up (its peer's full queue) is not the others'.
    #[cold]
    fn take_turns_after_cut(&mut self, rail: usize, cut: usize) {
        let Rail { rotation, runs, .. } = &mut self.rails[rail];
        let link = |run: &Run| self.active[run.op as usize].as_ref().map(|active| active.link);
        for run in runs[cut + 1..].iter().rev() {
            if let Some(link) = link(run) {
                rotation.prefer(link, run.op);
            }
        }
        if let Some(link) = link(&runs[cut]) {
            rotation.defer(link, runs[cut].op);
        }
    }

    /// Fails an operation with a status of one of its rails.
    pub(super) fn fail_with(&mut self, op: u32, rail: usize, status: Status) {
        let words = self.rails[rail].endpoint.describe(status);
        let name = self.active[op as usize]
            .as_ref()
            .map_or("write", |active| Self::operation_name(active.work.kind));
        let mut error = Error::new(status.kind, name, words);
        if status.kind == ErrorKind::PeerDied
            && let Some(end) = self.active[op as usize].as_ref().and_then(|active| active.peer.death())
        {
            // The backend saw the end of the link; the peer knows why it ended.
            error = end;
        }
        self.fail_op(op, error);
    }

    /// The name users know an operation by, for its errors.
    pub(super) fn operation_name(kind: WorkKind) -> &'static str {
        match kind {
            WorkKind::Write => "write",
            WorkKind::Read => "read",
            WorkKind::Send => "send",
        }
    }

    /// The error of an operation whose waiter or deadline ended it.
    pub(super) fn ended(kind: ErrorKind, of: WorkKind) -> Error {
        let why = match kind {
            ErrorKind::DeadlineExceeded => "not complete in time; memory stays held until the device lets go",
            _ => "stopped before it was complete",
        };
        Error::new(kind, Self::operation_name(of), why)
    }
}
