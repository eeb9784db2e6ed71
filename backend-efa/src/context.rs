//! Contexts of what is posted: libfabric hands them back with the completion, and some
//! providers keep notes of their own in them (`FI_CONTEXT2`).

use std::cell::UnsafeCell;
use std::ffi::c_void;

use libfabric_sys as sys;
use transport_core::spi::PeerSlot;

/// What a context stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Posted {
    Request { id: u64, peer: PeerSlot },
    Receive { id: u64 },
}

#[repr(C)]
struct Context {
    /// The provider's, from posting to completion.
    notes: UnsafeCell<sys::fi_context2>,
    posted: Option<Posted>,
}

/// As many contexts as may be posted at once. They never move.
pub(crate) struct Contexts {
    all: Box<[Context]>,
    free: Vec<u32>,
}

// SAFETY: the notes are the provider's, which serialises its own use of them.
unsafe impl Send for Contexts {}

impl Contexts {
    pub(crate) fn new(count: u32) -> Self {
        // SAFETY: eight pointers, which may be null.
        let context = |_| Context { notes: UnsafeCell::new(unsafe { std::mem::zeroed() }), posted: None };
        Self { all: (0..count).map(context).collect(), free: (0..count).rev().collect() }
    }

    /// A context for `posted`; `None` if all are posted.
    pub(crate) fn take(&mut self, posted: Posted) -> Option<*mut c_void> {
        let index = self.free.pop()? as usize;
        self.all[index].posted = Some(posted);
        Some(self.all[index].notes.get().cast())
    }

    /// What `context` stood for, which is over; `None` for what is no posted context.
    pub(crate) fn end(&mut self, context: *mut c_void) -> Option<Posted> {
        let offset = (context as usize).checked_sub(self.all.as_ptr() as usize)?;
        let index = offset / size_of::<Context>();
        let posted = self.all.get_mut(index)?.posted.take()?;
        self.free.push(index as u32);
        Some(posted)
    }

    /// The context of a posted receive.
    pub(crate) fn receive(&self, id: u64) -> Option<*mut c_void> {
        let is_it = |context: &&Context| context.posted == Some(Posted::Receive { id });
        Some(self.all.iter().find(is_it)?.notes.get().cast())
    }

    /// Ends all that is posted.
    pub(crate) fn end_all(&mut self) -> Vec<Posted> {
        let mut ended = Vec::new();
        for (index, context) in self.all.iter_mut().enumerate() {
            if let Some(posted) = context.posted.take() {
                self.free.push(index as u32);
                ended.push(posted);
            }
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_once_in_any_order() {
        let mut contexts = Contexts::new(3);
        let posted = [0, 1, 2].map(|id| Posted::Request { id, peer: PeerSlot(9) });
        let taken = posted.map(|posted| contexts.take(posted).unwrap());
        assert_eq!(contexts.take(Posted::Receive { id: 7 }), None);
        assert_eq!(contexts.end(taken[1]), Some(posted[1]));
        assert_eq!(contexts.end(taken[1]), None);
        let receive = contexts.take(Posted::Receive { id: 7 }).unwrap();
        assert_eq!((contexts.receive(7), contexts.receive(8)), (Some(receive), None));
        assert_eq!(contexts.end(std::ptr::null_mut()), None);
        assert_eq!(contexts.end(std::ptr::without_provenance_mut(usize::MAX)), None);
        assert_eq!(contexts.end_all(), [posted[0], Posted::Receive { id: 7 }, posted[2]]);
        assert_eq!(contexts.free.len(), 3);
    }
}
