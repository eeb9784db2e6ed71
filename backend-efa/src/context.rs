//! Contexts of what is posted: libfabric hands them back with the completion, and some
//! providers keep notes of their own in them (`FI_CONTEXT2`).

mod taking;

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::ffi::c_void;

use libfabric_sys as sys;
use multirail_spi::{PeerSlot, ReceiveRequest, Time};

pub(crate) use taking::Taking;

/// What a context stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Posted {
    Request { id: u64, peer: PeerSlot },
    Receive { receive: ReceiveRequest, is_recalled: bool },
}

/// A power of two long: its place is told from its address by a shift.
#[repr(C, align(128))]
struct Context {
    /// The provider's, from posting to completion.
    notes: UnsafeCell<sys::fi_context2>,
    /// Of the request or receive.
    id: u64,
    /// The peer's slot of a request; or one of those below.
    peer: u32,
    /// The next free one, while this one is free.
    next: u32,
    /// Of a receive: first byte, key and length of its buffer.
    buffer: (*mut u8, u64, u64),
}

/// No peer's slot: the context is free, or a receive's, or one's that is to be taken back. Slots stay below
/// (`PeerTag::SLOTS`).
const FREE: u32 = u32::MAX;
const RECEIVE: u32 = u32::MAX - 1;
const RECALLED: u32 = u32::MAX - 2;

impl Context {
    fn posted(&self) -> Option<Posted> {
        match self.peer {
            FREE => None,
            RECEIVE | RECALLED => {
                let (local, lkey, len) = self.buffer;
                let receive = ReceiveRequest { id: self.id, local, lkey, len };
                Some(Posted::Receive { receive, is_recalled: self.peer == RECALLED })
            }
            peer => Some(Posted::Request { id: self.id, peer: PeerSlot(peer) }),
        }
    }

    /// What it stood for is over: it is the first of the `free` ones, at `index`.
    #[inline]
    fn release(&mut self, index: usize, free: &mut u32) {
        self.peer = FREE;
        self.next = std::mem::replace(free, index as u32);
    }
}

/// As many contexts as may be posted at once. They never move.
pub(crate) struct Contexts {
    all: Box<[Context]>,
    /// The first free one; `all.len()` if there is none.
    free: u32,
    /// Those that the provider may hand back once more, and until when.
    retired: VecDeque<(u32, Time)>,
    /// How many are posted, as who posts counts them.
    pub(crate) requests: usize,
    pub(crate) receives: usize,
}

// SAFETY: the notes are the provider's, which serialises its own use of them; buffers' addresses
// are told, never followed.
unsafe impl Send for Contexts {}

impl Contexts {
    pub(crate) fn new(count: u32) -> Self {
        let context = |index| {
            // SAFETY: eight pointers, which may be null.
            let notes = UnsafeCell::new(unsafe { std::mem::zeroed() });
            Context { notes, id: 0, peer: FREE, next: index + 1, buffer: (std::ptr::null_mut(), 0, 0) }
        };
        Self {
            all: (0..count).map(context).collect(),
            free: 0,
            retired: VecDeque::new(),
            requests: 0,
            receives: 0,
        }
    }

    /// Contexts for requests to a peer, whose ids count up from `id`.
    #[inline]
    pub(crate) fn taking(&mut self, id: u64, peer: PeerSlot) -> Taking<'_> {
        Taking::new(self, id, peer)
    }

    /// A context for a receive; `None` if all are posted.
    pub(crate) fn take_receive(&mut self, receive: &ReceiveRequest) -> Option<*mut c_void> {
        let context = self.all.get_mut(self.free as usize)?;
        (context.id, context.peer) = (receive.id, RECEIVE);
        context.buffer = (receive.local, receive.lkey, receive.len);
        self.free = context.next;
        Some(context.notes.get().cast())
    }

    /// How many more there are.
    #[inline]
    pub(crate) fn spare(&self) -> usize {
        self.all.len() - self.requests - self.receives - self.retired.len()
    }

    /// Ends requests to one peer with consecutive ids, as many as `contexts` begins with: the peer,
    /// the first id and how many; `None` if it begins with anything else.
    #[inline]
    pub(crate) fn end_requests(
        &mut self,
        mut contexts: impl Iterator<Item = *mut c_void>,
    ) -> Option<(PeerSlot, u64, u32)> {
        let index = self.index(contexts.next()?);
        let context = self.all.get_mut(index)?;
        let (peer, first) = (context.peer, context.id);
        if peer >= RECALLED {
            return None;
        }
        let mut end = first + 1;
        let mut free = self.free;
        context.release(index, &mut free);
        for context in contexts {
            let index = self.index(context);
            let Some(context) = self.all.get_mut(index) else { break };
            if context.peer != peer || context.id != end {
                break;
            }
            context.release(index, &mut free);
            end += 1;
        }
        self.free = free;
        Some((PeerSlot(peer), first, (end - first) as u32))
    }

    /// The place of a context; one that does not exist for what is none.
    #[inline]
    fn index(&self, context: *mut c_void) -> usize {
        (context as usize).wrapping_sub(self.all.as_ptr() as usize) / size_of::<Context>()
    }

    /// What `context` stood for, which is over; `None` for what is no posted context.
    pub(crate) fn end(&mut self, context: *mut c_void) -> Option<Posted> {
        let index = self.index(context);
        let context = self.all.get_mut(index)?;
        let posted = context.posted()?;
        context.release(index, &mut self.free);
        Some(posted)
    }

    /// Keeps a context that has just ended from being taken until then: what is handed back with it
    /// meanwhile is nobody's.
    pub(crate) fn retire(&mut self, context: *mut c_void, until: Time) {
        let index = self.index(context);
        if index == self.free as usize && index < self.all.len() {
            self.free = self.all[index].next;
            self.retired.push_back((index as u32, until));
        }
    }

    /// What was retired until now may be taken again.
    pub(crate) fn readmit(&mut self, now: Time) {
        while let Some((index, _)) = self.retired.pop_front_if(|(_, until)| *until <= now) {
            self.all[index as usize].release(index as usize, &mut self.free);
        }
    }

    /// The context of a posted receive, which is to be taken back.
    pub(crate) fn recall(&mut self, id: u64) -> Option<*mut c_void> {
        let is_it = |context: &&mut Context| matches!(context.peer, RECEIVE | RECALLED) && context.id == id;
        let context = self.all.iter_mut().find(is_it)?;
        context.peer = RECALLED;
        Some(context.notes.get().cast())
    }

    /// Ends all that is posted.
    pub(crate) fn end_all(&mut self) -> Vec<Posted> {
        let mut ended = Vec::new();
        for (index, context) in self.all.iter_mut().enumerate() {
            if let Some(posted) = context.posted() {
                context.release(index, &mut self.free);
                ended.push(posted);
            }
        }
        (self.requests, self.receives) = (0, 0);
        ended
    }
}

#[cfg(test)]
mod tests;
