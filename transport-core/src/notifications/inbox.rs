//! Where notifications arrive.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};

use foldhash::HashMap;

use super::{Assembly, BLOCK, Header, Notification, NotificationBytes, buffers};
use crate::engine::memory::RegionInner;
use crate::engine::{EngineHandle, Inbox, Message, PoolPart};
use crate::{Error, ErrorKind, PeerId, Result};

/// What an inbox asks of its fabric.
pub(crate) trait InboxHost {
    /// Whether a peer is connected.
    fn has_peer(&self, peer: PeerId) -> bool;

    /// The number of connected peers.
    fn peer_count(&self) -> usize;

    /// A wait is not over: whoever waits has to drive all engines, if nobody else does.
    fn needs_steps(&self);

    /// Makes bytes visible that devices have written into memory which needs a flush.
    fn flush(&self);

    /// Ends the connection to a peer that has broken the protocol.
    fn fail_peer(&self, peer: PeerId, error: Error);
}

/// The messages that have arrived at the companions, and what is joined of them.
///
/// A message is read, and its buffer freed, only when the program takes notifications.
pub(crate) struct NotificationInbox {
    messages: Arc<Inbox>,
    parts: Vec<Arc<PoolPart>>,
    state: Mutex<InboxState>,
}

#[derive(Default)]
struct InboxState {
    complete: VecDeque<Notification>,
    /// The incomplete notifications of each peer.
    assemblies: HashMap<PeerId, Assembly>,
    /// Peers that are gone, and whose assemblies were dropped: the latest last, at most [`MAX_DEPARTED`].
    departed: VecDeque<PeerId>,
}

/// The most peers in [`InboxState::departed`]. The last messages of a peer come soon after its end, so older ones are not
/// needed.
const MAX_DEPARTED: usize = 1024;

impl NotificationInbox {
    /// Posts the buffers of each companion. Its region is registered there.
    pub fn new(companions: Vec<(Arc<EngineHandle>, Arc<RegionInner>)>) -> Self {
        let messages = Arc::new(Inbox::new(companions.len()));
        let part = |(engine, region): (Arc<EngineHandle>, Arc<RegionInner>)| {
            let count = buffers(region.len() as usize);
            let part = Arc::new(PoolPart::new(region, BLOCK, engine, Arc::clone(&messages)));
            (0..count).for_each(|buffer| part.post(buffer));
            part
        };
        let parts = companions.into_iter().map(part).collect();
        Self { messages, parts, state: Mutex::default() }
    }

    /// The next notification, if it has arrived.
    pub fn try_next(&self, fabric: &impl InboxHost) -> Option<Result<Notification>> {
        let messages = || self.messages.try_next().map_or(Poll::Pending, Poll::Ready);
        match self.next(fabric, messages) {
            Poll::Ready(result) => Some(result),
            Poll::Pending => None,
        }
    }

    /// The next notification. Without one, registers `waker`; `id` is the key of the waker.
    pub fn poll_next(
        &self,
        fabric: &impl InboxHost,
        id: &mut Option<u64>,
        waker: &Waker,
    ) -> Poll<Result<Notification>> {
        let polled = self.next(fabric, || self.messages.poll_next(id, waker));
        if polled.is_pending() {
            fabric.needs_steps();
        }
        polled
    }

    /// Removes the waker of a wait that is dropped.
    pub fn forget(&self, id: &mut Option<u64>) {
        self.messages.forget(id);
    }

    fn next(
        &self,
        fabric: &impl InboxHost,
        mut messages: impl FnMut() -> Poll<Result<Message>>,
    ) -> Poll<Result<Notification>> {
        // No holder panics half way through a change, so a poisoned lock holds good data. It stays locked while messages
        // are taken, so that two threads do not exchange them.
        let lock = || self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = lock();
        loop {
            if let Some(notification) = state.complete.pop_front() {
                drop(state);
                // The bytes that it announces came over another endpoint, which has told nobody of them.
                fabric.flush();
                return Poll::Ready(Ok(notification));
            }
            match messages() {
                Poll::Ready(Ok(message)) => {
                    let peer = message.peer();
                    if let Err(why) = state.add(fabric, &message) {
                        state.forget(peer);
                        // Without the lock, because wakers run the user's code.
                        drop(state);
                        fabric.fail_peer(peer, Error::new(ErrorKind::Protocol, "notify", why));
                        state = lock();
                    }
                }
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => {
                    // Peers that are gone complete nothing any more.
                    if state.assemblies.len() > fabric.peer_count() {
                        let gone: Vec<_> =
                            state.assemblies.keys().copied().filter(|peer| !fabric.has_peer(*peer)).collect();
                        gone.into_iter().for_each(|peer| state.forget(peer));
                    }
                    return Poll::Pending;
                }
            }
        }
    }
}

impl Drop for NotificationInbox {
    /// A message holds its pool, and the pool its messages.
    fn drop(&mut self) {
        self.parts.iter().for_each(PoolPart::drop_pool);
        self.messages.clear();
    }
}

impl InboxState {
    fn add(&mut self, fabric: &impl InboxHost, message: &Message) -> std::result::Result<(), String> {
        let mut head = [0; Header::LEN];
        let copied = message.copy_out(&mut head);
        let header = Header::parse(&head[..copied], message.len())?;
        let mut payload = vec![0; message.len() - Header::LEN];
        message.copy_out_from(Header::LEN, &mut payload);
        let peer = message.peer();
        // The last messages of a peer arrive after its end, also all of them.
        let departed = &self.departed;
        let new = || match !fabric.has_peer(peer) && departed.contains(&peer) {
            true => Assembly::from_message(header),
            false => Assembly::default(),
        };
        let complete = &mut self.complete;
        let deliver = |bytes, is_traced| {
            let (trace, bytes) = NotificationBytes::parse(bytes, is_traced)?;
            complete.push_back(Notification { peer, bytes, trace });
            Ok(())
        };
        self.assemblies.entry(peer).or_insert_with(new).add(header, payload, deliver)
    }

    /// Drops the incomplete notifications of a peer that is gone.
    fn forget(&mut self, peer: PeerId) {
        self.assemblies.remove(&peer);
        if self.departed.len() == MAX_DEPARTED {
            self.departed.pop_front();
        }
        self.departed.push_back(peer);
    }
}
