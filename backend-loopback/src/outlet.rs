//! The initiator's end of staging: requests to one peer, a slot's worth at a time.
//!
//! A request is done when the target has acknowledged its last byte, so `Delivered`
//! holds, and its imm goes out after that.

use std::collections::VecDeque;
use std::sync::Arc;

use multirail_spi::{
    ErrorKind, WorkKind, WorkRequest,
    copy::{self, CopyStrategy},
};

use crate::ended::Ended;
use crate::lane;
use crate::peer::Outbound;
use crate::region::Key;
use crate::runner::send_imm;
use crate::stage::{Ask, Progress, SLOT, SLOTS};
use crate::status::status;

/// Where the initiator is in a stage's ring: slots `tail..head` are the target's to
/// answer. Kept with the connection, since endpoints come and go.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Cursor {
    head: u64,
    tail: u64,
}

/// What is staged for one peer, in order.
pub(crate) struct Outlet {
    target: Arc<Outbound>,
    cursor: Cursor,
    /// One per slot in `tail..head`.
    parts: VecDeque<Part>,
    requests: VecDeque<Staged>,
    /// The number of the first of `requests`.
    first: u64,
    /// Of `requests`, those that have no bytes left to post.
    posted: usize,
}

/// What a slot was filled with.
struct Part {
    /// The request's number; `None` if it is not there any more.
    request: Option<u64>,
    /// Offset in the request.
    at: u64,
    len: usize,
}

struct Staged {
    request: WorkRequest,
    key: Key,
    /// Bytes that went into slots.
    posted: u64,
    /// Slots that are not answered.
    open: u32,
    failed: Option<ErrorKind>,
}

impl Staged {
    fn fail(&mut self, kind: ErrorKind) {
        self.failed.get_or_insert(kind);
        self.posted = self.request.len;
    }
}

impl Outlet {
    /// Continues where the last endpoint left the stage.
    pub(crate) fn new(target: Arc<Outbound>) -> Self {
        let cursor = *target.staged.lock().expect("stage cursor");
        let stray = || Part { request: None, at: 0, len: 0 };
        let parts = (cursor.tail..cursor.head).map(|_| stray()).collect();
        Self { target, cursor, parts, requests: VecDeque::new(), first: 0, posted: 0 }
    }

    /// Takes a request that was checked against its import.
    pub(crate) fn push(&mut self, request: &WorkRequest, key: Key) {
        self.requests.push_back(Staged { request: *request, key, posted: 0, open: 0, failed: None });
    }

    /// Requests that have not ended.
    pub(crate) fn requests(&self) -> usize {
        self.requests.len()
    }

    /// Moves what can be moved. The kind of a request that the peer's lane has no room for.
    pub(crate) fn advance(&mut self, ended: &mut Ended) -> Option<WorkKind> {
        if self.requests.is_empty() {
            return None;
        }
        self.reap();
        if !self.target.is_alive() {
            self.fail(ErrorKind::PeerDied, ended);
            return None;
        }
        let starved = self.retire(ended);
        self.fill();
        starved
    }

    /// Ends all with `kind`: what the target has not taken at once, the rest when it is done.
    pub(crate) fn stop(&mut self, kind: ErrorKind, ended: &mut Ended) {
        self.reap();
        self.take_back();
        self.requests.iter_mut().for_each(|staged| staged.fail(kind));
        self.posted = self.requests.len();
        self.retire(ended);
    }

    /// Ends all with `kind` now.
    pub(crate) fn fail(&mut self, kind: ErrorKind, ended: &mut Ended) {
        self.take_back();
        self.parts.iter_mut().for_each(|part| part.request = None);
        for staged in self.requests.drain(..) {
            ended.request(staged.request.id, Err(status(staged.failed.unwrap_or(kind))));
            self.first += 1;
        }
        self.posted = 0;
    }

    /// Asks to be rung at the next answer. `false` if there is something to do already.
    pub(crate) fn arm(&self) -> bool {
        if self.requests.is_empty() {
            return true;
        }
        let stage = self.target.stage().filter(|_| self.target.is_alive());
        // With nothing in the ring only the peer's lane can be waited for, which has a flag of its own.
        stage.is_some_and(|stage| self.parts.is_empty() || stage.arm(self.cursor.tail))
    }

    /// Takes the target's answers.
    fn reap(&mut self) {
        let Some(stage) = self.target.stage() else { return };
        while let Some(part) = self.parts.front() {
            let outcome = match stage.progress(self.cursor.tail) {
                Progress::Open => return,
                Progress::Answered(outcome) => outcome,
                Progress::Nonsense => {
                    tracing::warn!(peer = self.target.peer.0, "loopback: nonsense in a stage; peer cut off");
                    return self.target.hang_up();
                }
            };
            let index = part.request.and_then(|number| number.checked_sub(self.first));
            if let Some(staged) = index.and_then(|index| self.requests.get_mut(index as usize)) {
                staged.open -= 1;
                match outcome {
                    Ok(()) if staged.request.kind == WorkKind::Read && staged.failed.is_none() => {
                        let to = staged.request.local.wrapping_add(part.at as usize);
                        // SAFETY: the request has not ended, so its local span is valid by the
                        // contract of `post`; `fill` bounded the part by span and slot.
                        unsafe {
                            copy::copy(CopyStrategy::Plain, to, stage.bytes(self.cursor.tail), part.len)
                        };
                    }
                    Ok(()) => {}
                    Err(kind) => staged.fail(kind),
                }
            }
            stage.release(self.cursor.tail);
            self.cursor.tail += 1;
            self.parts.pop_front();
        }
    }

    /// Files what has ended, in order.
    fn retire(&mut self, ended: &mut Ended) -> Option<WorkKind> {
        while let Some(staged) = self.requests.front() {
            let request = &staged.request;
            if staged.open > 0 || staged.posted < request.len {
                return None;
            }
            if let (Some(imm), WorkKind::Write, None) = (request.imm, request.kind, staged.failed)
                && !send_imm(&self.target, imm)
            {
                return Some(WorkKind::Write);
            }
            ended.request(request.id, staged.failed.map_or(Ok(()), |kind| Err(status(kind))));
            self.requests.pop_front();
            self.first += 1;
            self.posted = self.posted.saturating_sub(1);
        }
        None
    }

    /// Fills free slots and wakes the target.
    fn fill(&mut self) {
        let Some(stage) = self.target.stage() else { return };
        let before = self.cursor.head;
        while let Some(staged) = self.requests.get_mut(self.posted) {
            let request = &staged.request;
            let len = (request.len - staged.posted).min(SLOT as u64) as usize;
            if len == 0 {
                self.posted += 1;
                continue;
            }
            if self.parts.len() == SLOTS {
                break;
            }
            if !stage.is_free(self.cursor.head) {
                tracing::warn!(peer = self.target.peer.0, "loopback: nonsense in a stage; peer cut off");
                return self.target.hang_up();
            }
            if request.kind == WorkKind::Write {
                let from = request.local.wrapping_add(staged.posted as usize);
                // SAFETY: the local span is valid by the contract of `post`, `len` is within
                // it and a slot; a free slot is ours, and the stage stays mapped with `target`.
                unsafe { copy::copy(CopyStrategy::Plain, stage.bytes(self.cursor.head), from, len) };
            }
            let remote = request.remote + staged.posted;
            stage.post(self.cursor.head, &Ask { kind: request.kind, key: staged.key, remote, len });
            let number = self.first + self.posted as u64;
            self.parts.push_back(Part { request: Some(number), at: staged.posted, len });
            self.cursor.head += 1;
            staged.posted += len as u64;
            staged.open += 1;
        }
        if self.cursor.head != before {
            lane::wake(self.target.layout(), || self.target.ring());
        }
    }

    /// Takes back the slots that the target has not taken, the last first: it takes the
    /// first first, so that what is left stays in one piece.
    fn take_back(&mut self) {
        let Some(stage) = self.target.stage() else { return };
        while !self.parts.is_empty() && stage.take_back(self.cursor.head - 1) {
            self.cursor.head -= 1;
            let number = self.parts.pop_back().and_then(|part| part.request);
            let index = number.and_then(|number| number.checked_sub(self.first));
            if let Some(staged) = index.and_then(|index| self.requests.get_mut(index as usize)) {
                staged.open -= 1;
            }
        }
    }
}

impl Drop for Outlet {
    fn drop(&mut self) {
        self.take_back();
        *self.target.staged.lock().expect("stage cursor") = self.cursor;
    }
}
