//! The endpoint: the card's, and what is staged beside it.

mod events;
mod local;

use std::collections::VecDeque;
use std::sync::Arc;

use multirail_spi::{
    Armed, Batch, Completions, DeliveredScope, Endpoint, ErrorKind, Event, KeyMaterial, PeerSlot, Piece,
    PostResult, ReceiveRequest, Status, Time, WorkKind, WorkRequest,
};

use crate::copies::Copies;
use crate::domain::Shared;
use crate::outlet::Outlet;
use crate::receives::Receives;
use crate::ring::There;
use crate::service::Service;
use crate::status::{describe, status};
use crate::wire::KNOCK;
use local::{Local, Surroundings};

pub(crate) use local::{Around, Copied};

/// Events of the card's that are looked at before they are handed on.
const ROOM: usize = 256;
/// Looks at the card's in a row, however many of them are knocks.
const ROUNDS: usize = 16;
/// Requests of ours that go to the card at once.
const BATCH: usize = 32;

/// Dropped in order: no copy is under way once the first is gone, no request once the second is.
pub(crate) struct StagedEndpoint {
    copies: Copies<Copied>,
    inner: Box<dyn Endpoint>,
    receives: Receives,
    /// By slot.
    locals: Vec<Option<Local>>,
    shared: Arc<Shared>,
    seen: u64,
    events: VecDeque<Event>,
    has_moved: bool,
    /// Of bytes that the card wrote, and may not have flushed for: it has not told of them.
    has_told: bool,
    is_lost: bool,
    /// For reuse.
    polled: Completions,
    batch: Batch,
    plain: Batch,
}

impl StagedEndpoint {
    pub(crate) fn new(shared: Arc<Shared>, inner: Box<dyn Endpoint>) -> Self {
        Self {
            copies: Copies::new(),
            inner,
            receives: Receives::default(),
            locals: Vec::new(),
            shared,
            seen: u64::MAX,
            events: VecDeque::new(),
            has_moved: false,
            has_told: false,
            is_lost: false,
            polled: Completions::with_room(ROOM),
            batch: Batch::with_capacity(BATCH),
            plain: Batch::default(),
        }
    }

    /// Takes over connections that are new.
    #[inline]
    fn refresh(&mut self) {
        if self.is_lost {
            return;
        }
        let Some(links) = self.shared.links.since(&mut self.seen) else { return };
        self.locals.resize_with(links.len().max(self.locals.len()), || None);
        for (local, link) in self.locals.iter_mut().zip(links) {
            // The one before is there until its goodbye.
            if let (None, Some(link)) = (&local, link) {
                *local = Some(Local {
                    outlet: Outlet::new(Arc::clone(&link)),
                    service: Service::new(Arc::clone(&link)),
                    outbox: VecDeque::new(),
                    link,
                });
            }
        }
    }

    /// Does something with a connection, if there is one.
    fn with<T>(
        &mut self,
        peer: PeerSlot,
        act: impl FnOnce(&mut Local, &mut Surroundings<'_>) -> T,
    ) -> Option<T> {
        let local = self.locals.get_mut(peer.0 as usize)?.as_mut()?;
        let mut surroundings = Surroundings {
            copies: &mut self.copies,
            regions: &self.shared.regions,
            far: &self.shared.far,
            events: &mut self.events,
            has_moved: &mut self.has_moved,
            has_told: &mut self.has_told,
        };
        Some(act(local, &mut surroundings))
    }

    /// Moves on all that can be moved here.
    fn advance(&mut self) {
        self.launch();
        if self.is_lost {
            return;
        }
        for at in 0..self.locals.len() {
            let peer = PeerSlot(at as u32);
            self.with(peer, |Local { outlet, service, outbox, link }, around| {
                let around = &mut around.with(outbox);
                if around.events.len() < ROOM && link.there().is_some() {
                    service.advance(around);
                }
                outlet.advance(around);
            });
            self.post_ours(at);
        }
        self.launch();
    }

    /// Takes requests of a run of which one side is staged, as many as there is room for; `None` where the peer is
    /// gone.
    fn stage(&mut self, run: &WorkRequest, pieces: &[Piece]) -> Option<usize> {
        let local = self.shared.regions.local(run.lkey);
        self.with(run.peer, |peer, _| {
            let mut taken = 0;
            while taken < pieces.len() && peer.outlet.has_room(run.kind) {
                peer.outlet.push(&run.with_piece(taken, &pieces[taken]), local.clone());
                taken += 1;
            }
            taken
        })
    }

    /// Whether a side of a run is staged, or its imm must not go by the card. A run without bytes or imm warms up or,
    /// where the card needs that, flushes: its keys mean nothing.
    fn is_staged(&self, run: &WorkRequest, pieces: &[Piece]) -> bool {
        let is_keyless = |piece: &Piece| {
            piece.len == 0 && run.imm.is_none() && (run.kind == WorkKind::Write || self.is_flush(run))
        };
        let there = |piece: &Piece| run.kind != WorkKind::Send && piece.remote & KeyMaterial::STAGED != 0;
        let is_either = |first: &Piece| run.lkey & KeyMaterial::STAGED != 0 || there(first);
        pieces.first().is_some_and(|first| !is_keyless(first) && is_either(first))
            || (run.imm == Some(KNOCK)
                && self.shared.links.of(run.peer).is_some_and(|link| link.is_knock(run.kind, run.imm)))
    }

    /// Whether a run without bytes flushes the card.
    fn is_flush(&self, run: &WorkRequest) -> bool {
        let scope = self.shared.inner.capabilities().delivered_scope;
        run.kind == WorkKind::Read && scope == DeliveredScope::Device
    }

    /// Whether anything is to be done here that no event of the card's will tell of.
    fn is_busy(&self) -> bool {
        self.has_moved
            || !self.events.is_empty()
            || self.copies.is_busy()
            || self.locals.iter().flatten().any(|local| !local.outbox.is_empty())
    }
}

impl Drop for StagedEndpoint {
    fn drop(&mut self) {
        // What peers have asked of this endpoint is not the next one's to do.
        self.shared.links.clear();
    }
}

impl Endpoint for StagedEndpoint {
    unsafe fn post(&mut self, batch: &Batch) -> PostResult {
        if self.is_lost || !batch.runs().any(|(run, pieces)| self.is_staged(run, pieces)) {
            // SAFETY: by the caller.
            return unsafe { self.inner.post(batch) };
        }
        self.refresh();
        let mut accepted = 0;
        let mut error = None;
        for (run, pieces) in batch.runs() {
            let taken;
            if self.is_staged(run, pieces) {
                let staged = self.stage(run, pieces);
                error = staged.is_none().then(|| status(ErrorKind::PeerDied));
                taken = staged.unwrap_or(0);
            } else {
                self.plain.clear();
                self.plain.push_run(*run, |all| all.extend_from_slice(pieces));
                // SAFETY: by the caller, for a part of the batch.
                PostResult { accepted: taken, error } = unsafe { self.inner.post(&self.plain) };
            }
            accepted += taken;
            if taken < pieces.len() {
                break;
            }
        }
        self.advance();
        PostResult { accepted, error }
    }

    unsafe fn post_recv(&mut self, batch: &[ReceiveRequest]) -> PostResult {
        if batch.iter().all(|receive| receive.lkey & KeyMaterial::STAGED == 0) {
            // SAFETY: by the caller.
            return unsafe { self.inner.post_recv(batch) };
        }
        for (accepted, receive) in batch.iter().enumerate() {
            let mut posted = *receive;
            if let Some(entry) = self.shared.regions.local(receive.lkey) {
                posted = match self.receives.take(&*self.shared.inner, receive, entry) {
                    Ok(posted) => posted,
                    Err(why) => {
                        tracing::warn!(%why, "staging: no memory for a receive");
                        return PostResult { accepted, error: Some(status(why.kind())) };
                    }
                };
            }
            // SAFETY: by the caller; or the memory is `receives`', until this has ended.
            let PostResult { accepted: taken, error } = unsafe { self.inner.post_recv(&[posted]) };
            if taken == 0 {
                self.receives.forget(receive.id);
                return PostResult { accepted, error };
            }
        }
        PostResult { accepted: batch.len(), error: None }
    }

    fn poll(&mut self, into: &mut Completions) {
        // All there is: the rings are looked at below, and knocks must not pile up behind what they tell of. But a
        // peer's end is told first: who polls the card again has heard of it.
        for _ in 0..ROUNDS {
            let has_end = self.events.iter().any(|event| matches!(event, Event::PeerGone { .. }));
            if has_end || self.events.len() >= ROOM || !self.poll_inner(into) {
                break;
            }
        }
        self.advance();
        while into.spare() > 0
            && let Some(event) = self.events.pop_front()
        {
            let _ = into.push(event);
        }
        if std::mem::take(&mut self.has_told) {
            self.shared.fences.flush_if_arrivals(into);
        }
        if std::mem::take(&mut self.has_moved) {
            into.note_progress();
        }
    }

    fn arm(&mut self) -> Armed {
        self.refresh();
        if self.is_busy() {
            return Armed::Ready;
        }
        let is_silent = |there: There| there.knock.is_none();
        match self.inner.arm() {
            #[cfg(unix)]
            Armed::Fd(fd) if self.locals.iter().flatten().filter_map(|it| it.link.there()).any(is_silent) => {
                Armed::FdOrNap(fd)
            }
            armed => armed,
        }
    }

    fn due(&self) -> Time {
        self.inner.due()
    }

    fn abort(&mut self, peer: PeerSlot) {
        self.with(peer, |local, around| {
            local.outlet.stop(ErrorKind::Cancelled, &mut around.with(&mut local.outbox))
        });
        self.inner.abort(peer);
    }

    fn cancel_recv(&mut self, id: u64) -> bool {
        self.inner.cancel_recv(id)
    }

    fn describe(&self, status: Status) -> String {
        describe(status).unwrap_or_else(|| self.inner.describe(status))
    }
}
