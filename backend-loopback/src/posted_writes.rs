//! Posted writes, as PCI Express has them: the sender has heard of their end, and their bytes are still on
//! the way from the target's card to its memory.

use std::collections::VecDeque;
use std::time::Duration;

use transport_core::Time;
use transport_core::spi::{PeerSlot, WorkRequest};

use crate::link::LinkModel;

/// Those of a device, in order.
pub(crate) struct PostedWrites {
    after: Duration,
    waiting: VecDeque<PostedWrite>,
}

/// A write whose bytes are the card's.
pub(crate) struct PostedWrite {
    visible: Time,
    request: WorkRequest,
    _bytes: Box<[u8]>,
}

impl PostedWrites {
    /// `None` where bytes are visible when their end is told.
    pub(crate) fn of(link: &LinkModel) -> Option<Self> {
        (!link.visible_after.is_zero()).then(|| Self { after: link.visible_after, waiting: VecDeque::new() })
    }

    /// Takes a write over, and a copy of its bytes.
    ///
    /// # Safety
    /// The request's local span is readable.
    pub(crate) unsafe fn push(&mut self, request: &WorkRequest, now: Time) {
        let mut bytes = vec![0; request.len as usize].into_boxed_slice();
        // SAFETY: by the caller; the copy is new.
        unsafe { request.local.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        let request = WorkRequest { local: bytes.as_mut_ptr(), ..*request };
        self.waiting.push_back(PostedWrite { visible: now.after(self.after), request, _bytes: bytes });
    }

    /// Takes the next write that is visible by now.
    pub(crate) fn visible(&mut self, now: Time) -> Option<PostedWrite> {
        if self.waiting.front()?.visible > now {
            return None;
        }
        self.waiting.pop_front()
    }

    /// Takes the next write to a peer: whatever else comes to it over this device comes after its bytes.
    pub(crate) fn pushed(&mut self, peer: PeerSlot) -> Option<PostedWrite> {
        let place = self.waiting.iter().position(|write| write.request.peer == peer)?;
        self.waiting.remove(place)
    }

    /// When the next write is visible by itself.
    pub(crate) fn next_due(&self) -> Time {
        self.waiting.front().map_or(Time::NEVER, |write| write.visible)
    }
}

impl PostedWrite {
    /// The request, whose local span is the card's copy: valid as long as this.
    pub(crate) fn request(&self) -> &WorkRequest {
        &self.request
    }
}
