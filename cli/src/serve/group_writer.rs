//! Stores one group of entries in the directory.

use std::fs::File;
use std::io::Write;
use std::time::Instant;

use multirail::Region;
use rustix::fs::AtFlags;

use super::directory::{Directory, NameClash, exists, set_mode_and_time, times};
use super::partial_file::PartialFile;
use super::report::Stored;
use super::reservation::{self, ENTRY, QuotaReservation};
use super::staged_file::StagedFile;
use super::{failed, unexpected_item};
use crate::entry_counts::EntryResult;
use crate::failure::{CommandFailure, CommandResult};
use crate::files::{CHUNK, EntryAction, EntryKind, FilePiece, OfferedEntry, TableItem};

/// A group whose actions are decided.
pub struct GroupWriter<'a> {
    directory: &'a Directory,
    entries: Vec<OfferedEntry>,
    actions: Vec<EntryAction>,
    /// True if the sender continues an earlier attempt: then an existing file with the same content is no clash.
    resume: bool,
    /// The first entry that may come next. Items come in ascending order.
    next: usize,
    /// The file that is arriving in pieces.
    open: Option<(usize, PartialFile<'a>)>,
    /// The partial file that the sender has asked about.
    found: Option<(usize, PartialFile<'a>)>,
    /// The steps after the next sync, in order.
    batch: Vec<DurableStep<'a>>,
    /// The quota of the bytes that were not received yet.
    reservation: QuotaReservation<'a>,
    /// The entry that failed, if it is not the current one.
    failed: Option<usize>,
    begun: Instant,
    /// The outcome of each entry.
    outcomes: Vec<EntryOutcome>,
}

/// The outcome of an entry so far.
#[derive(Clone, Default)]
struct EntryOutcome {
    /// The result, once the entry has its final name.
    entry_result: Option<EntryResult>,
    received: u64,
    hash: Option<blake3::Hash>,
}

impl EntryOutcome {
    /// The outcome that follows from the action alone.
    fn new(action: &EntryAction) -> Self {
        let entry_result = match action {
            EntryAction::Skip | EntryAction::Compare { skip: true, .. } => Some(EntryResult::Skipped),
            EntryAction::Have => Some(EntryResult::Same),
            EntryAction::Send | EntryAction::Partial | EntryAction::Compare { skip: false, .. } => None,
        };
        Self { entry_result, ..Self::default() }
    }
}

/// A step after the bytes so far are durable.
enum DurableStep<'a> {
    Publish { index: usize, staged: StagedFile<'a>, hash: Option<blake3::Hash> },
    FinishDirectory { index: usize },
}

impl<'a> GroupWriter<'a> {
    /// A group with an action for each entry, and its reservation.
    pub fn new(
        directory: &'a Directory,
        entries: Vec<OfferedEntry>,
        actions: Vec<EntryAction>,
        resume: bool,
        reservation: QuotaReservation<'a>,
    ) -> Self {
        let (open, found, batch, failed) = (None, None, Vec::new(), None);
        let outcomes = actions.iter().map(EntryOutcome::new).collect();
        Self {
            directory,
            entries,
            actions,
            resume,
            next: 0,
            open,
            found,
            batch,
            reservation,
            failed,
            begun: Instant::now(),
            outcomes,
        }
    }

    /// The path of the current or failed entry, for error messages.
    pub fn current(&self) -> String {
        let last = || self.open.as_ref().map_or(self.next.saturating_sub(1), |(index, _)| *index);
        let index = self.failed.unwrap_or_else(last);
        self.entries.get(index).map_or_else(|| "an empty group".to_owned(), |entry| entry.path.to_string())
    }

    /// Returns true if files wait for [`GroupWriter::commit`].
    pub fn is_pending(&self) -> bool {
        !self.batch.is_empty()
    }

    /// The pieces of an entry's partial file from number `first` on, whether these are the last, and the bytes of all
    /// pieces.
    pub fn have(&mut self, index: u32, first: u64) -> CommandResult<(Vec<FilePiece>, bool, u64)> {
        let index = index as usize;
        match self.actions.get(index) {
            Some(EntryAction::Partial | EntryAction::Compare { skip: false, .. }) if self.next == 0 => {}
            _ => return Err(unexpected_item()),
        }
        if let Err(failure) = self.expected_size(index) {
            self.failed = Some(index);
            return Err(failure);
        }
        if self.found.as_ref().is_none_or(|(found, _)| *found != index) {
            self.found = None;
            self.found =
                PartialFile::find(&self.directory.staging, &self.entries[index].path).map(|p| (index, p));
        }
        match &self.found {
            Some((_, partial)) => {
                let (pieces, last) = partial.have(first)?;
                Ok((pieces, last, partial.bytes()))
            }
            None => Ok((Vec::new(), true, 0)),
        }
    }

    /// Stores one item with its bytes.
    pub fn item(&mut self, item: &TableItem, bytes: &mut WindowBytes<'_>) -> CommandResult {
        let index = match *item {
            TableItem::Piece(piece) => return self.piece(&piece, bytes),
            TableItem::End => return self.end(),
            TableItem::Make { index }
            | TableItem::Whole { index, .. }
            | TableItem::Same { index }
            | TableItem::Begin { index, .. } => self.accept_index(index)?,
        };
        match *item {
            TableItem::Whole { hash, .. } => self.whole(index, hash, bytes),
            TableItem::Same { .. } => self.same(index),
            TableItem::Begin { keep, .. } => self.begin(index, keep),
            _ => self.make(index),
        }
    }

    /// Checks that the item of entry `index` may come now.
    fn accept_index(&mut self, index: u32) -> CommandResult<usize> {
        let index = index as usize;
        if self.open.is_some() || index < self.next || index >= self.entries.len() {
            return Err(unexpected_item());
        }
        self.next = index + 1;
        Ok(index)
    }

    fn make(&mut self, index: usize) -> CommandResult {
        let (entry, staging) = (&self.entries[index], &self.directory.staging);
        match &entry.kind {
            _ if self.actions[index] != EntryAction::Send => Err(unexpected_item()),
            EntryKind::Directory => {
                let cost = if self.directory.stat(&entry.path)?.is_none() { ENTRY } else { 0 };
                self.reservation.ensure(0, cost)?;
                self.directory.make(&entry.path)?;
                self.reservation.spend(0, cost);
                self.outcomes[index].entry_result = Some(EntryResult::Stored);
                Ok(())
            }
            EntryKind::Leave => {
                self.batch.push(DurableStep::FinishDirectory { index });
                Ok(())
            }
            EntryKind::Link { target } => {
                self.reservation.ensure(0, ENTRY)?;
                let mut staged = staging.link(target)?;
                self.reservation.spend(0, ENTRY);
                staged.add(ENTRY);
                rustix::fs::utimensat(
                    &staging.fd,
                    staged.name(),
                    &times(entry.mtime),
                    AtFlags::SYMLINK_NOFOLLOW,
                )
                .map_err(|error| failed("set a time", error))?;
                self.batch.push(DurableStep::Publish { index, staged, hash: None });
                Ok(())
            }
            _ => Err(unexpected_item()),
        }
    }

    fn whole(&mut self, index: usize, hash: [u8; 32], bytes: &mut WindowBytes<'_>) -> CommandResult {
        let size = self.expected_size(index)?;
        if size > CHUNK || self.entries[index].data() != size {
            return Err(unexpected_item());
        }
        let cost = ENTRY + reservation::whole(size);
        self.reservation.ensure(size, cost)?;
        let (mut staged, mut file) = self.directory.staging.temporary()?;
        self.reservation.spend(size, cost);
        staged.add(cost);
        let mut hasher = blake3::Hasher::new();
        bytes.take(size as usize, |part| {
            hasher.update(part);
            file.write_all(part).map_err(|error| failed("write the file", error))
        })?;
        if hasher.finalize() != hash {
            return Err(CommandFailure::new("the received bytes have a wrong checksum; send the file again"));
        }
        self.outcomes[index].received = size;
        self.ready(index, staged, &file, Some(hash.into()))
    }

    fn same(&mut self, index: usize) -> CommandResult {
        match self.actions[index] {
            EntryAction::Compare { .. } => {
                let entry = &self.entries[index];
                self.directory.staging.discard(&entry.path);
                set_mode_and_time(&self.directory.file(&entry.path)?, entry)?;
                self.outcomes[index].entry_result = Some(EntryResult::Same);
                Ok(())
            }
            _ => Err(unexpected_item()),
        }
    }

    fn begin(&mut self, index: usize, keep: u64) -> CommandResult {
        let size = self.expected_size(index)?;
        let (path, staging) = (&self.entries[index].path, &self.directory.staging);
        let found = match self.found.take() {
            Some((found, partial)) if found == index => Some(partial),
            other => {
                drop(other);
                PartialFile::find(staging, path).filter(|_| keep > 0)
            }
        };
        let partial = match found {
            Some(mut partial) => {
                partial.keep(keep, size, &mut self.reservation)?;
                partial
            }
            None if keep == 0 => PartialFile::begin(staging, path, &mut self.reservation)?,
            None => {
                return Err(CommandFailure::new("its partial file no longer exists; send the file again"));
            }
        };
        self.open = Some((index, partial));
        Ok(())
    }

    fn piece(&mut self, piece: &FilePiece, bytes: &mut WindowBytes<'_>) -> CommandResult {
        match (&mut self.open, &self.entries) {
            (Some((index, partial)), entries) if piece.is_valid(entries[*index].size()) => {
                partial.push(piece, bytes, &mut self.reservation)?;
                self.outcomes[*index].received += u64::from(piece.len);
                Ok(())
            }
            _ => Err(unexpected_item()),
        }
    }

    fn end(&mut self) -> CommandResult {
        let (index, partial) = self.open.take().ok_or_else(unexpected_item)?;
        let (staged, file, hash) = partial.finish(self.entries[index].size())?;
        self.ready(index, staged, &file, hash)
    }

    /// The size of a file. Fails unless its action allows the sender to send it.
    fn expected_size(&self, index: usize) -> CommandResult<u64> {
        match (&self.entries[index].kind, self.actions[index]) {
            (EntryKind::File { .. }, EntryAction::Compare { skip: false, .. })
                if self.directory.on_clash == NameClash::Refuse =>
            {
                Err(exists())
            }
            (
                EntryKind::File { size, .. },
                EntryAction::Send | EntryAction::Partial | EntryAction::Compare { skip: false, .. },
            ) => Ok(*size),
            _ => Err(unexpected_item()),
        }
    }

    fn ready(
        &mut self,
        index: usize,
        staged: StagedFile<'a>,
        file: &File,
        hash: Option<blake3::Hash>,
    ) -> CommandResult {
        set_mode_and_time(file, &self.entries[index])?;
        self.directory.durable.one(file)?;
        self.batch.push(DurableStep::Publish { index, staged, hash });
        Ok(())
    }

    /// Makes the received files durable and gives them their final names. If a file cannot get its name, the other
    /// files still get theirs, but directories stay unfinished.
    pub fn commit(&mut self) -> CommandResult {
        if self.batch.iter().any(|step| matches!(step, DurableStep::Publish { .. })) {
            self.directory.sync()?;
        }
        let mut all = Ok(());
        for step in self.batch.drain(..) {
            let (index, hash, done) = match step {
                DurableStep::Publish { index, staged, hash } => {
                    (index, hash, self.directory.publish(staged, &self.entries[index], self.resume))
                }
                DurableStep::FinishDirectory { .. } if all.is_err() => continue,
                DurableStep::FinishDirectory { index } => {
                    (index, None, self.directory.finish_directory(&self.entries[index]).map(|()| true))
                }
            };
            let entry = &self.entries[index];
            match done {
                Ok(named) => {
                    let outcome = &mut self.outcomes[index];
                    outcome.entry_result =
                        Some(if named { EntryResult::Stored } else { EntryResult::Skipped });
                    outcome.hash = hash;
                }
                Err(failure) if all.is_ok() => (self.failed, all) = (Some(index), Err(failure)),
                Err(also) => {
                    tracing::warn!(path = %entry.path, reason = also.message(), "another entry was not stored")
                }
            }
        }
        all
    }

    /// Completes the group with its first `entries` entries: makes the files and their names durable, and returns them.
    /// The next entry may have begun; its pieces stay in a partial file.
    pub fn finish(mut self, entries: u32) -> CommandResult<Vec<Stored>> {
        let entries = entries as usize;
        let begun = self.open.take().map(|(index, _)| index);
        let done = if begun.is_some() { self.next - 1 } else { self.next };
        if entries > self.entries.len() || entries < done || begun.is_some_and(|begun| begun != entries) {
            return Err(unexpected_item());
        }
        self.commit()?;
        self.directory.sync()?;
        let done = self.entries.into_iter().zip(self.outcomes).take(entries);
        let begun = self.begun;
        let stored = done.map(|(entry, EntryOutcome { entry_result, received, hash })| {
            let entry_result = entry_result.ok_or_else(unexpected_item)?;
            Ok(Stored { entry, entry_result, received, hash, begun })
        });
        stored.collect()
    }
}

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
