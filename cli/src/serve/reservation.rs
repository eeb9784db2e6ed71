//! The quota reserved for a sender's group, and the disk use of files.

use crate::files::{CHUNK, EntryKind, FilePiece, OfferedEntry, TreePath};

use super::journal::{self, RECORD};
use super::quota::Quota;
use crate::failure::{CommandFailure, CommandResult};

/// The block size of file systems.
const BLOCK: u64 = 4 << 10;

/// The disk use of a file, link or directory, without its bytes.
pub const ENTRY: u64 = BLOCK;

/// The disk use of a small file's bytes.
pub fn whole(len: u64) -> u64 {
    len.div_ceil(BLOCK).saturating_mul(BLOCK)
}

/// The disk use of a piece: the blocks it touches, and its record in the journal.
pub fn piece(piece: &FilePiece) -> u64 {
    let blocks = piece.end().div_ceil(BLOCK) - piece.offset / BLOCK;
    blocks.saturating_mul(BLOCK).saturating_add(RECORD)
}

/// The disk use of a file in pieces before its first piece: its name, and its journal's header.
pub fn partial(path: &TreePath) -> u64 {
    ENTRY + whole(journal::header_bytes(path))
}

/// The disk use of a new entry. Holes make more pieces than are known here, whose quota is reserved as they come. So is
/// the quota of directories, which may exist already.
pub fn entry(entry: &OfferedEntry) -> u64 {
    match entry.kind {
        EntryKind::Directory | EntryKind::Leave => 0,
        EntryKind::File { size, data } if size > CHUNK => partial(&entry.path)
            .saturating_add(whole(data))
            .saturating_add(data.div_ceil(CHUNK).saturating_mul(RECORD)),
        EntryKind::File { data, .. } => ENTRY.saturating_add(whole(data)),
        EntryKind::Link { .. } => ENTRY,
    }
}

/// The part of the server's quota that is reserved for a group and not used yet. Dropping it releases the rest.
pub struct QuotaReservation<'a> {
    quota: &'a Quota,
    /// The offered bytes of files that were not received yet.
    offered: u64,
    /// The quota reserved for them.
    reserved: u64,
}

impl<'a> QuotaReservation<'a> {
    /// Reserves quota for files of `offered` bytes.
    pub fn reserve(quota: &'a Quota, offered: u64, reserved: u64) -> CommandResult<Self> {
        quota.reserve(reserved)?;
        Ok(Self { quota, offered, reserved })
    }

    /// Makes sure that `cost` is reserved for `bytes` of a file.
    pub fn ensure(&mut self, bytes: u64, cost: u64) -> CommandResult {
        if bytes > self.offered {
            return Err(CommandFailure::new(
                "the sender sent more bytes than it offered; send the file again",
            ));
        }
        if let Some(more) = cost.checked_sub(self.reserved) {
            self.quota.reserve(more)?;
            self.reserved = cost;
        }
        Ok(())
    }

    /// Moves `cost` from the reservation to the caller, who has stored the bytes and counts them from now on. The
    /// caller must have called [`QuotaReservation::ensure`].
    pub fn spend(&mut self, bytes: u64, cost: u64) {
        self.offered = self.offered.saturating_sub(bytes);
        self.reserved = self.reserved.saturating_sub(cost);
    }

    /// Takes the quota of removed bytes back into the reservation.
    pub fn give_back(&mut self, cost: u64) {
        self.reserved = self.reserved.saturating_add(cost);
    }
}

impl Drop for QuotaReservation<'_> {
    fn drop(&mut self) {
        self.quota.release(self.reserved);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Size;

    #[test]
    fn unused_reservations_are_released() {
        let quota = Quota::new(Some(Size(100)));
        let mut reservation = QuotaReservation::reserve(&quota, 50, 40).unwrap();
        assert!(reservation.ensure(51, 0).is_err() && reservation.ensure(50, 101).is_err());
        reservation.ensure(50, 60).unwrap();
        assert!(quota.check(40).is_ok() && quota.check(41).is_err(), "60 are reserved");
        reservation.spend(10, 45);
        assert!(reservation.ensure(41, 0).is_err() && quota.check(41).is_err());
        drop(reservation);
        assert!(quota.check(55).is_ok() && quota.check(56).is_err(), "45 are stored");
    }

    #[test]
    fn small_files_use_whole_blocks() {
        assert_eq!((whole(0), whole(1), whole(BLOCK)), (0, BLOCK, BLOCK));
        let cost = |offset, len| piece(&FilePiece { offset, len, hash: [0; 32] });
        assert_eq!((cost(0, 1), cost(BLOCK, 4096)), (BLOCK + RECORD, BLOCK + RECORD));
        assert_eq!(cost(BLOCK - 1, 2), 2 * BLOCK + RECORD, "two bytes in two blocks");
        assert!(cost(u64::MAX, u32::MAX) > 0);
        assert!(whole(u64::MAX) >= u64::MAX - BLOCK);
    }
}
