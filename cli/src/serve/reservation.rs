//! Room promised to one sender for a group, and what things take of it.

use crate::files::{CHUNK, Entry, Kind, Piece, TreePath};

use super::journal::{self, RECORD};
use super::quota::Quota;
use crate::failure::{CommandResult, Failure};

/// Bytes that file systems allocate at once.
const BLOCK: u64 = 4 << 10;

/// What a file, link or directory takes, besides its bytes.
pub const ENTRY: u64 = BLOCK;

/// What a small file's bytes take.
pub fn whole(len: u64) -> u64 {
    len.div_ceil(BLOCK).saturating_mul(BLOCK)
}

/// What a piece takes: the blocks it touches, and its record in the journal.
pub fn piece(piece: &Piece) -> u64 {
    let blocks = piece.end().div_ceil(BLOCK) - piece.offset / BLOCK;
    blocks.saturating_mul(BLOCK).saturating_add(RECORD)
}

/// What a file in pieces takes before its first piece: its name, and its journal's header.
pub fn partial(path: &TreePath) -> u64 {
    ENTRY + whole(journal::header_bytes(path))
}

/// What an entry takes that is stored anew. Holes make more pieces than are known here;
/// their room is taken as they come. So is that of directories, which may be there.
pub fn entry(entry: &Entry) -> u64 {
    match entry.kind {
        Kind::Directory | Kind::Leave => 0,
        Kind::File { size, data } if size > CHUNK => partial(&entry.path)
            .saturating_add(whole(data))
            .saturating_add(data.div_ceil(CHUNK).saturating_mul(RECORD)),
        Kind::File { data, .. } => ENTRY.saturating_add(whole(data)),
        Kind::Link { .. } => ENTRY,
    }
}

/// Room of the server's quota that nothing is stored in yet. Dropped, it is free again.
pub struct Reservation<'a> {
    quota: &'a Quota,
    /// Bytes of files that were offered and have not come.
    offered: u64,
    /// Reserved for them.
    promised: u64,
}

impl<'a> Reservation<'a> {
    /// Promises room for files of `offered` bytes.
    pub fn reserve(quota: &'a Quota, offered: u64, promised: u64) -> CommandResult<Self> {
        quota.reserve(promised)?;
        Ok(Self { quota, offered, promised })
    }

    /// Makes sure of room for `bytes` of a file, which take `cost`.
    pub fn ensure(&mut self, bytes: u64, cost: u64) -> CommandResult {
        if bytes > self.offered {
            return Err(Failure::new("the sender sent more bytes than it offered; send it again"));
        }
        if let Some(more) = cost.checked_sub(self.promised) {
            self.quota.reserve(more)?;
            self.promised = cost;
        }
        Ok(())
    }

    /// They are stored: who counts them from now on gives their room back. What was not
    /// ensured is not taken.
    pub fn spend(&mut self, bytes: u64, cost: u64) {
        self.offered = self.offered.saturating_sub(bytes);
        self.promised = self.promised.saturating_sub(cost);
    }

    /// Something stored is no longer.
    pub fn give_back(&mut self, cost: u64) {
        self.promised = self.promised.saturating_add(cost);
    }
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        self.quota.release(self.promised);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Size;

    #[test]
    fn what_is_not_stored_takes_no_room() {
        let quota = Quota::new(Some(Size(100)));
        let mut reservation = Reservation::reserve(&quota, 50, 40).unwrap();
        assert!(reservation.ensure(51, 0).is_err() && reservation.ensure(50, 101).is_err());
        reservation.ensure(50, 60).unwrap();
        assert!(quota.check(40).is_ok() && quota.check(41).is_err(), "60 are promised");
        reservation.spend(10, 45);
        assert!(reservation.ensure(41, 0).is_err() && quota.check(41).is_err());
        drop(reservation);
        assert!(quota.check(55).is_ok() && quota.check(56).is_err(), "45 are stored");
    }

    #[test]
    fn small_things_are_not_free() {
        assert_eq!((whole(0), whole(1), whole(BLOCK)), (0, BLOCK, BLOCK));
        let cost = |offset, len| piece(&Piece { offset, len, hash: [0; 32] });
        assert_eq!((cost(0, 1), cost(BLOCK, 4096)), (BLOCK + RECORD, BLOCK + RECORD));
        assert_eq!(cost(BLOCK - 1, 2), 2 * BLOCK + RECORD, "two bytes in two blocks");
        assert!(cost(u64::MAX, u32::MAX) > 0);
        assert!(whole(u64::MAX) >= u64::MAX - BLOCK);
    }
}
