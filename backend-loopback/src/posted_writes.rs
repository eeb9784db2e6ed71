//! Posted writes, as PCI Express has them: the sender has heard of their end, and their bytes are still on
//! the way from the target's card to its memory.

use std::collections::VecDeque;
use std::time::Duration;

use multirail_spi::{PeerSlot, Time, WorkRequest};

use crate::link::LinkModel;

/// Those of a device, in order.
pub(crate) struct PostedWrites {
    after: Duration,
    waiting: VecDeque<PostedWrite>,
}

/// A write whose bytes are the card's.
pub(crate) struct PostedWrite {
    visible: Time,
    /// Its local span is the sender's, which may have other bytes by now.
    request: WorkRequest,
    bytes: Box<[u8]>,
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
        self.waiting.push_back(PostedWrite { visible: now.after(self.after), request: *request, bytes });
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
    /// The request, whose local span is the card's copy: valid until this is moved, as a box is the only one who has
    /// its bytes then.
    pub(crate) fn request(&mut self) -> WorkRequest {
        WorkRequest { local: self.bytes.as_mut_ptr(), ..self.request }
    }
}

#[cfg(test)]
mod tests {
    use multirail_spi::{WorkKind, copy::CopyStrategy};

    use super::*;

    /// Miri sees it where a pointer to the copy does not outlive a move of the copy's owner.
    #[test]
    fn a_posted_write_has_a_copy_of_its_own() {
        let mut writes = PostedWrites { after: Duration::ZERO, waiting: VecDeque::new() };
        let mut bytes = [1, 2, 3];
        let request = WorkRequest {
            id: 0,
            peer: PeerSlot(0),
            kind: WorkKind::Write,
            local: bytes.as_mut_ptr(),
            lkey: 0,
            len: 3,
            remote: 0,
            rkey: 0,
            imm: None,
            strategy: CopyStrategy::Plain,
        };
        // SAFETY: three bytes.
        unsafe { writes.push(&request, Time::ZERO) };
        bytes.fill(9);
        let mut write = writes.visible(Time::ZERO).unwrap();
        let request = write.request();
        // SAFETY: as `request` says.
        assert_eq!(unsafe { std::slice::from_raw_parts(request.local, request.len as usize) }, [1, 2, 3]);
    }
}
