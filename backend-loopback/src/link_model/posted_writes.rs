//! Posted writes, as in PCI Express: the sender has their completions, and their bytes are not yet in the target's
//! memory.

use std::collections::VecDeque;
use std::time::Duration;

use multirail_spi::{PeerSlot, Time, WorkRequest};

use super::LinkModel;

/// The posted writes of a device, in order.
pub(crate) struct PostedWrites {
    after: Duration,
    waiting: VecDeque<PostedWrite>,
}

/// A completed write whose bytes the device has.
pub(crate) struct PostedWrite {
    visible: Time,
    /// The local span belongs to the sender again, which may have changed its bytes.
    request: WorkRequest,
    bytes: Box<[u8]>,
}

impl PostedWrites {
    /// Returns `None` if the link model makes bytes visible before the completion.
    pub(crate) fn of(link: &LinkModel) -> Option<Self> {
        (!link.visible_after.is_zero()).then(|| Self { after: link.visible_after, waiting: VecDeque::new() })
    }

    /// Adds a write, and copies its bytes.
    ///
    /// # Safety
    /// The request's local span is readable.
    pub(crate) unsafe fn push(&mut self, request: &WorkRequest, now: Time) {
        // SAFETY: by the caller.
        self.waiting.push_back(unsafe { PostedWrite::new(request, now.after(self.after)) });
    }

    /// Takes the next write that becomes visible by `now`.
    pub(crate) fn visible(&mut self, now: Time) -> Option<PostedWrite> {
        if self.waiting.front()?.visible > now {
            return None;
        }
        self.waiting.pop_front()
    }

    /// Takes the next write to a peer. Any other request to the peer over this device must come after its bytes.
    pub(crate) fn next_to(&mut self, peer: PeerSlot) -> Option<PostedWrite> {
        let at = self.waiting.iter().position(|write| write.request.peer == peer)?;
        self.waiting.remove(at)
    }

    /// The time at which the next write becomes visible without another request.
    pub(crate) fn next_due(&self) -> Time {
        self.waiting.front().map_or(Time::NEVER, |write| write.visible)
    }
}

impl PostedWrite {
    /// Copies the bytes of a write, which become visible at the time `visible`.
    ///
    /// # Safety
    /// The request's local span is readable.
    pub(super) unsafe fn new(request: &WorkRequest, visible: Time) -> Self {
        let mut bytes = vec![0; request.len as usize].into_boxed_slice();
        // SAFETY: by the caller; the copy is new.
        unsafe { request.local.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        Self { visible, request: *request, bytes }
    }

    /// When the bytes become visible.
    pub(crate) fn visible(&self) -> Time {
        self.visible
    }

    /// The request, with the copy as its local span. The span is valid until this value is moved, since a box must
    /// have sole access to its bytes then.
    pub(crate) fn request(&mut self) -> WorkRequest {
        WorkRequest { local: self.bytes.as_mut_ptr(), ..self.request }
    }
}

#[cfg(test)]
mod tests {
    use multirail_spi::{WorkKind, copy::CopyStrategy};

    use super::*;

    /// Miri reports a pointer to the copy that is used after a move of the copy's owner.
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
