//! The contexts of posted requests and receives. libfabric returns a context with its completion, and some providers
//! use its bytes until then (`FI_CONTEXT2`).

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ffi::c_void;

use libfabric_sys as sys;
use multirail_spi::{PeerSlot, ReceiveRequest, Time};

/// A request or a receive that was posted with a context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Posted {
    Request {
        id: u64,
        peer: PeerSlot,
    },
    /// `is_cancelled` if the engine has cancelled the receive.
    Receive {
        receive: ReceiveRequest,
        is_cancelled: bool,
    },
}

/// The size is a power of two, so that a shift computes the index of a context from its address.
#[repr(C, align(128))]
struct Context {
    /// The provider writes here, from posting to completion.
    provider_area: UnsafeCell<sys::fi_context2>,
    /// The id of the request or receive.
    id: u64,
    /// The peer's slot of a request, or one of the constants below.
    peer: u32,
    /// While this context is free: the index of the next free one.
    next: u32,
    /// For a receive: first byte, local key and length of its buffer.
    buffer: (*mut u8, u64, u64),
}

// Values of `Context::peer` that are no slot. All slots are smaller (`PeerTag::SLOTS`).
const FREE: u32 = u32::MAX;
const RECEIVE: u32 = u32::MAX - 1;
const CANCELLED_RECEIVE: u32 = u32::MAX - 2;

impl Context {
    fn posted(&self) -> Option<Posted> {
        match self.peer {
            FREE => None,
            RECEIVE | CANCELLED_RECEIVE => {
                let (local, lkey, len) = self.buffer;
                let receive = ReceiveRequest { id: self.id, local, lkey, len };
                Some(Posted::Receive { receive, is_cancelled: self.peer == CANCELLED_RECEIVE })
            }
            peer => Some(Posted::Request { id: self.id, peer: PeerSlot(peer) }),
        }
    }

    /// Frees this context, whose index is `index`: puts it in front of the list that begins at `first_free`.
    #[inline]
    fn free(&mut self, index: usize, first_free: &mut u32) {
        self.peer = FREE;
        self.next = std::mem::replace(first_free, index as u32);
    }
}

/// All contexts of an endpoint: as many as requests and receives may be posted at once. They never move.
pub(crate) struct Contexts {
    all: Box<[Context]>,
    /// The index of the first free context; `all.len()` if there is none.
    first_free: u32,
    /// The indices of contexts that the provider may return once more, each with the time at which it is free again.
    retired: VecDeque<(u32, Time)>,
    /// The number of posted requests. The endpoint counts them.
    pub(crate) requests: usize,
    /// The number of posted receives. The endpoint counts them.
    pub(crate) receives: usize,
}

// SAFETY: `provider_area` belongs to the provider, which serialises its own use of it; the addresses of buffers
// are passed on, never followed.
unsafe impl Send for Contexts {}

impl Contexts {
    pub(crate) fn new(count: u32) -> Self {
        let context = |index| {
            // SAFETY: eight pointers, which may be null.
            let provider_area = UnsafeCell::new(unsafe { std::mem::zeroed() });
            Context {
                provider_area,
                id: 0,
                peer: FREE,
                next: index + 1,
                buffer: (std::ptr::null_mut(), 0, 0),
            }
        };
        Self {
            all: (0..count).map(context).collect(),
            first_free: 0,
            retired: VecDeque::new(),
            requests: 0,
            receives: 0,
        }
    }

    /// Begins to take contexts for requests to a peer. Their ids count up from `id`.
    #[inline]
    pub(crate) fn reserve(&mut self, id: u64, peer: PeerSlot) -> ContextReservation<'_> {
        let first_free = self.first_free;
        ContextReservation {
            contexts: self,
            next_id: id,
            peer: peer.0,
            uncommitted: first_free,
            next: first_free,
        }
    }

    /// Takes a context for a receive; `None` if no context is free.
    pub(crate) fn take_for_receive(&mut self, receive: &ReceiveRequest) -> Option<*mut c_void> {
        let context = self.all.get_mut(self.first_free as usize)?;
        (context.id, context.peer) = (receive.id, RECEIVE);
        context.buffer = (receive.local, receive.lkey, receive.len);
        self.first_free = context.next;
        Some(context.provider_area.get().cast())
    }

    /// The number of free contexts.
    #[inline]
    pub(crate) fn free_count(&self) -> usize {
        self.all.len() - self.requests - self.receives - self.retired.len()
    }

    /// Frees the contexts of requests to one peer with consecutive ids, as many as are in front of `contexts`. Returns
    /// the peer, the first id and the number; `None` if the first context is not that of a request.
    #[inline]
    pub(crate) fn end_requests(
        &mut self,
        mut contexts: impl Iterator<Item = *mut c_void>,
    ) -> Option<(PeerSlot, u64, u32)> {
        let index = self.index(contexts.next()?);
        let context = self.all.get_mut(index)?;
        let (peer, first) = (context.peer, context.id);
        if peer >= CANCELLED_RECEIVE {
            return None;
        }
        let mut end = first + 1;
        let mut first_free = self.first_free;
        context.free(index, &mut first_free);
        for context in contexts {
            let index = self.index(context);
            let Some(context) = self.all.get_mut(index) else { break };
            if context.peer != peer || context.id != end {
                break;
            }
            context.free(index, &mut first_free);
            end += 1;
        }
        self.first_free = first_free;
        Some((PeerSlot(peer), first, (end - first) as u32))
    }

    /// The index of a context. An address that is not of a context gives an index that does not exist.
    #[inline]
    fn index(&self, context: *mut c_void) -> usize {
        (context as usize).wrapping_sub(self.all.as_ptr() as usize) / size_of::<Context>()
    }

    /// Frees a context, and returns what was posted with it; `None` if the address is not of a posted context.
    pub(crate) fn end(&mut self, context: *mut c_void) -> Option<Posted> {
        let index = self.index(context);
        let context = self.all.get_mut(index)?;
        let posted = context.posted()?;
        context.free(index, &mut self.first_free);
        Some(posted)
    }

    /// Takes a context, which was just freed, out of use until `until`. If the provider returns it before that time,
    /// the backend ignores the completion.
    pub(crate) fn retire(&mut self, context: *mut c_void, until: Time) {
        let index = self.index(context);
        if index == self.first_free as usize && index < self.all.len() {
            self.first_free = self.all[index].next;
            self.retired.push_back((index as u32, until));
        }
    }

    /// Frees the contexts that were retired until `now` or earlier.
    pub(crate) fn free_retired(&mut self, now: Time) {
        while let Some((index, _)) = self.retired.pop_front_if(|(_, until)| *until <= now) {
            self.all[index as usize].free(index as usize, &mut self.first_free);
        }
    }

    /// Marks a posted receive as cancelled. Returns its context.
    pub(crate) fn cancel_receive(&mut self, id: u64) -> Option<*mut c_void> {
        let is_receive =
            |context: &&mut Context| matches!(context.peer, RECEIVE | CANCELLED_RECEIVE) && context.id == id;
        let context = self.all.iter_mut().find(is_receive)?;
        context.peer = CANCELLED_RECEIVE;
        Some(context.provider_area.get().cast())
    }

    /// Frees all contexts. Returns what was posted.
    pub(crate) fn end_all(&mut self) -> Vec<Posted> {
        let mut ended = Vec::new();
        for (index, context) in self.all.iter_mut().enumerate() {
            if let Some(posted) = context.posted() {
                context.free(index, &mut self.first_free);
                ended.push(posted);
            }
        }
        (self.requests, self.receives) = (0, 0);
        ended
    }
}

/// Takes contexts for requests to one peer. When the reservation is dropped, the contexts that were not committed are
/// free again.
///
/// No context is freed meanwhile. So the taken contexts are still linked, each to the next one.
pub(crate) struct ContextReservation<'a> {
    contexts: &'a mut Contexts,
    /// The id of the next request.
    next_id: u64,
    peer: u32,
    /// The index of the first context that is not committed.
    uncommitted: u32,
    /// The index of the next context to take.
    next: u32,
}

impl ContextReservation<'_> {
    /// Takes the next context; `None` if no context is free.
    #[inline]
    pub(crate) fn take(&mut self) -> Option<*mut c_void> {
        let context = self.contexts.all.get_mut(self.next as usize)?;
        (context.id, context.peer) = (self.next_id, self.peer);
        self.next = context.next;
        self.next_id += 1;
        Some(context.provider_area.get().cast())
    }

    /// Commits the contexts that were taken so far: their requests are posted.
    #[inline]
    pub(crate) fn commit(&mut self) {
        self.uncommitted = self.next;
    }
}

impl Drop for ContextReservation<'_> {
    #[inline]
    fn drop(&mut self) {
        let mut index = self.uncommitted;
        self.contexts.first_free = index;
        while index != self.next {
            let context = &mut self.contexts.all[index as usize];
            (context.peer, index) = (FREE, context.next);
        }
    }
}

#[cfg(test)]
mod tests;
