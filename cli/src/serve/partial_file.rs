//! A large file that arrives in pieces: its bytes, and the journal of its pieces.

use std::fs::File;
use std::os::unix::fs::FileExt;

use crate::files::{FileHash, FilePiece, MAX_HAVE_PIECES, PieceHash, TreePath};

use super::failed;
use super::group_writer::WindowBytes;
use super::journal::Journal;
use super::reservation::{self, QuotaReservation};
use super::staged_file::StagedFile;
use super::staging_directory::StagingDirectory;
use crate::failure::{CommandFailure, CommandResult};

/// A file that arrives in pieces.
pub struct PartialFile<'a> {
    staged: StagedFile<'a>,
    file: File,
    journal: Journal,
    hash: FileHash,
    /// The bytes of its pieces.
    bytes: u64,
    /// The offset after the last stored byte.
    end: u64,
}

impl<'a> PartialFile<'a> {
    /// Starts a new partial file.
    pub fn begin(
        staging: &'a StagingDirectory,
        path: &TreePath,
        reservation: &mut QuotaReservation<'_>,
    ) -> CommandResult<Self> {
        staging.discard(path);
        let cost = reservation::partial(path);
        reservation.ensure(0, cost)?;
        let (mut staged, file, journal) = staging.begin(path)?;
        reservation.spend(0, cost);
        staged.add(cost);
        Ok(Self { staged, file, journal, hash: FileHash::default(), bytes: 0, end: 0 })
    }

    /// Finds the partial file of an earlier attempt.
    pub fn find(staging: &'a StagingDirectory, path: &TreePath) -> Option<Self> {
        let (staged, file, journal) = staging.find(path)?;
        let (bytes, _) = journal.bytes(reservation::piece).ok()?;
        Some(Self { staged, file, journal, hash: FileHash::default(), bytes, end: 0 })
    }

    /// The stored bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The pieces from number `first` on, up to the first that differs from the journal, and whether these are the
    /// last.
    pub fn have(&self, first: u64) -> CommandResult<(Vec<FilePiece>, bool)> {
        let unreadable = |error| failed("read a partial file", error);
        let until = first.saturating_add(MAX_HAVE_PIECES as u64).min(self.journal.count());
        let (mut pieces, mut bytes) = (Vec::new(), Vec::new());
        for index in first..until {
            let Some(piece) = self.journal.piece(index).map_err(unreadable)? else {
                return Ok((pieces, true));
            };
            bytes.resize(piece.len as usize, 0);
            let read = self.file.read_exact_at(&mut bytes, piece.offset);
            if read.is_err() || PieceHash::of(piece.offset, &bytes) != piece.hash {
                return Ok((pieces, true));
            }
            pieces.push(piece);
        }
        Ok((pieces, until == self.journal.count()))
    }

    /// Keeps the first `count` pieces, for a file of `size` bytes. The bytes after them are removed, and their quota is
    /// reserved again.
    pub fn keep(&mut self, count: u64, size: u64, reservation: &mut QuotaReservation<'_>) -> CommandResult {
        let io_failed = |error| failed("continue a partial file", error);
        self.journal.keep(count).map_err(io_failed)?;
        if self.journal.count() < count {
            return Err(CommandFailure::new(
                "the sender keeps more pieces than the server has; send the file again",
            ));
        }
        let mut kept = self.staged.empty();
        self.bytes = 0;
        for index in 0..self.journal.count() {
            let piece = self.journal.piece(index).map_err(io_failed)?;
            let Some(piece) = piece.filter(|piece| piece.is_valid(size) && piece.offset >= self.end) else {
                return Err(CommandFailure::new(
                    "the partial file is invalid; send the file without --resume",
                ));
            };
            self.hash.push(&piece);
            kept += reservation::piece(&piece);
            self.bytes += u64::from(piece.len);
            self.end = piece.end();
        }
        self.file.set_len(self.end).map_err(io_failed)?;
        reservation.give_back(self.staged.shrink(kept));
        Ok(())
    }

    /// Stores the next piece. The quota of the piece is counted before its first byte is written. If the piece fails,
    /// the quota is given back after its bytes are removed.
    pub fn push(
        &mut self,
        piece: &FilePiece,
        bytes: &mut WindowBytes<'_>,
        reservation: &mut QuotaReservation<'_>,
    ) -> CommandResult {
        if piece.offset < self.end {
            return Err(CommandFailure::new("the sender sent pieces in the wrong order"));
        }
        let (len, cost) = (u64::from(piece.len), reservation::piece(piece));
        reservation.ensure(len, cost)?;
        reservation.spend(len, cost);
        self.staged.add(cost);
        if let Err(failure) = self.write(piece, bytes) {
            match self.file.set_len(self.end) {
                Ok(()) => reservation.give_back(self.staged.take(cost)),
                Err(error) => {
                    tracing::warn!(%error, "cannot remove the bytes of a failed piece; they still count")
                }
            }
            return Err(failure);
        }
        self.hash.push(piece);
        self.end = piece.end();
        self.bytes += len;
        Ok(())
    }

    fn write(&mut self, piece: &FilePiece, bytes: &mut WindowBytes<'_>) -> CommandResult {
        let (mut at, mut hash) = (piece.offset, PieceHash::new(piece.offset));
        bytes.take(piece.len as usize, |part| {
            hash.update(part);
            self.file.write_all_at(part, at).map_err(|e| failed("write the file", e))?;
            at += part.len() as u64;
            Ok(())
        })?;
        if hash.finish() != piece.hash {
            return Err(CommandFailure::new("the received bytes have a wrong checksum; send the file again"));
        }
        self.journal.push(piece).map_err(|e| failed("write a journal", e))
    }

    /// Completes a file of `size` bytes. It is ready for its final name.
    pub fn finish(self, size: u64) -> CommandResult<(StagedFile<'a>, File, Option<blake3::Hash>)> {
        self.file.set_len(size).map_err(|e| failed("write the file", e))?;
        Ok((self.staged, self.file, self.hash.finish(size)))
    }
}
