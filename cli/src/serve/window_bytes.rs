//! The bytes of one window, read from its start to its end.

use multirail::Region;

use crate::failure::{CommandFailure, CommandResult};

/// The number of bytes read from a window at a time. They stay in a core's cache while they are hashed and written.
const PART: usize = 256 << 10;

/// The unread bytes of a window.
pub struct WindowBytes<'a> {
    region: &'a Region,
    part: &'a mut Vec<u8>,
    at: usize,
    left: usize,
}

impl<'a> WindowBytes<'a> {
    /// `len` bytes of the region at `at`. `part` is a reusable buffer.
    pub fn new(region: &'a Region, part: &'a mut Vec<u8>, at: usize, len: usize) -> Self {
        Self { region, part, at, left: len }
    }

    /// Passes the next `len` bytes to `part`, in parts.
    pub fn take(&mut self, len: usize, mut part: impl FnMut(&[u8]) -> CommandResult) -> CommandResult {
        self.left = match self.left.checked_sub(len) {
            Some(left) => left,
            None => return Err(CommandFailure::new("the sender's table names more bytes than it sent")),
        };
        self.part.resize(PART, 0);
        for done in (0..len).step_by(PART) {
            let bytes = &mut self.part[..PART.min(len - done)];
            self.region.copy_out(self.at, bytes)?;
            self.at += bytes.len();
            part(bytes)?;
        }
        Ok(())
    }
}
