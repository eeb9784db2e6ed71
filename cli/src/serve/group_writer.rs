//! One group of entries on its way into the directory.

use std::fs::File;
use std::io::Write;
use std::time::Instant;

use crate::files::{CHUNK, Entry, EntryAction, Item, Kind, Piece};
use rustix::fs::AtFlags;

use super::directory::{Directory, NameClash, exists, set_mode_and_time, times};
use super::partial_file::PartialFile;
use super::report::Stored;
use super::reservation::{self, ENTRY, Reservation};
use super::staged_file::StagedFile;
use super::window_bytes::WindowBytes;
use super::{failed, out_of_turn};
use crate::entry_counts::EntryResult;
use crate::failure::{CommandResult, Failure};

/// A group whose entries have been judged.
pub struct GroupWriter<'a> {
    directory: &'a Directory,
    entries: Vec<Entry>,
    actions: Vec<EntryAction>,
    /// The sender goes on where another ended: the same content under a name is no clash.
    resume: bool,
    /// Items come in ascending order; this is the first that may.
    next: usize,
    /// The file that comes in pieces.
    open: Option<(usize, PartialFile<'a>)>,
    /// The partial file that the sender asks about.
    found: Option<(usize, PartialFile<'a>)>,
    /// What waits for the next sync, in order.
    batch: Vec<Step<'a>>,
    /// For what has not come.
    reservation: Reservation<'a>,
    /// The entry that failed, if it is not the last that came.
    failed: Option<usize>,
    begun: Instant,
    /// What became of each entry.
    outcomes: Vec<Outcome>,
}

/// What became of an entry so far.
#[derive(Clone, Default)]
struct Outcome {
    /// Known once its name is settled.
    entry_result: Option<EntryResult>,
    received: u64,
    hash: Option<blake3::Hash>,
}

impl Outcome {
    /// By the verdict alone.
    fn new(action: &EntryAction) -> Self {
        let entry_result = match action {
            EntryAction::Skip | EntryAction::Compare { skip: true, .. } => Some(EntryResult::Skipped),
            EntryAction::Have => Some(EntryResult::Same),
            EntryAction::Send | EntryAction::Partial | EntryAction::Compare { skip: false, .. } => None,
        };
        Self { entry_result, ..Self::default() }
    }
}

/// What happens once the bytes so far are durable.
enum Step<'a> {
    Publish { index: usize, staged: StagedFile<'a>, hash: Option<blake3::Hash> },
    Leave { index: usize },
}

impl<'a> GroupWriter<'a> {
    /// A group with a verdict on each entry, and room for it.
    pub fn new(
        directory: &'a Directory,
        entries: Vec<Entry>,
        actions: Vec<EntryAction>,
        resume: bool,
        reservation: Reservation<'a>,
    ) -> Self {
        let (open, found, batch, failed) = (None, None, Vec::new(), None);
        let outcomes = actions.iter().map(Outcome::new).collect();
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

    /// What the sender is at, for the sentence if it ends here.
    pub fn current(&self) -> String {
        let last = || self.open.as_ref().map_or(self.next.saturating_sub(1), |(index, _)| *index);
        let index = self.failed.unwrap_or_else(last);
        self.entries.get(index).map_or_else(|| "an empty group".to_owned(), |entry| entry.path.to_string())
    }

    /// Whether something waits for [`Store::commit`].
    pub fn is_pending(&self) -> bool {
        !self.batch.is_empty()
    }

    /// Pieces of the partial file of an entry, from number `first`; whether these are
    /// the last; and bytes of all its pieces.
    pub fn have(&mut self, index: u32, first: u64) -> CommandResult<(Vec<Piece>, bool, u64)> {
        let index = index as usize;
        match self.actions.get(index) {
            Some(EntryAction::Partial | EntryAction::Compare { skip: false, .. }) if self.next == 0 => {}
            _ => return Err(out_of_turn()),
        }
        if let Err(failure) = self.wanted(index) {
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
    pub fn item(&mut self, item: &Item, bytes: &mut WindowBytes<'_>) -> CommandResult {
        let index = match *item {
            Item::Piece(piece) => return self.piece(&piece, bytes),
            Item::End => return self.end(),
            Item::Make { index }
            | Item::Whole { index, .. }
            | Item::Same { index }
            | Item::Begin { index, .. } => self.turn(index)?,
        };
        match *item {
            Item::Whole { hash, .. } => self.whole(index, hash, bytes),
            Item::Same { .. } => self.same(index),
            Item::Begin { keep, .. } => self.begin(index, keep),
            _ => self.make(index),
        }
    }

    /// The index of an item, if it may come now.
    fn turn(&mut self, index: u32) -> CommandResult<usize> {
        let index = index as usize;
        if self.open.is_some() || index < self.next || index >= self.entries.len() {
            return Err(out_of_turn());
        }
        self.next = index + 1;
        Ok(index)
    }

    fn make(&mut self, index: usize) -> CommandResult {
        let (entry, staging) = (&self.entries[index], &self.directory.staging);
        match &entry.kind {
            _ if self.actions[index] != EntryAction::Send => Err(out_of_turn()),
            Kind::Directory => {
                let cost = if self.directory.stat(&entry.path)?.is_none() { ENTRY } else { 0 };
                self.reservation.ensure(0, cost)?;
                self.directory.make(&entry.path)?;
                self.reservation.spend(0, cost);
                self.outcomes[index].entry_result = Some(EntryResult::Stored);
                Ok(())
            }
            Kind::Leave => {
                self.batch.push(Step::Leave { index });
                Ok(())
            }
            Kind::Link { target } => {
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
                self.batch.push(Step::Publish { index, staged, hash: None });
                Ok(())
            }
            _ => Err(out_of_turn()),
        }
    }

    fn whole(&mut self, index: usize, hash: [u8; 32], bytes: &mut WindowBytes<'_>) -> CommandResult {
        let size = self.wanted(index)?;
        if size > CHUNK || self.entries[index].data() != size {
            return Err(out_of_turn());
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
            return Err(Failure::new("what arrived has another checksum than what was sent; send it again"));
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
            _ => Err(out_of_turn()),
        }
    }

    fn begin(&mut self, index: usize, keep: u64) -> CommandResult {
        let size = self.wanted(index)?;
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
            None => return Err(Failure::new("its partial file is gone; send it again")),
        };
        self.open = Some((index, partial));
        Ok(())
    }

    fn piece(&mut self, piece: &Piece, bytes: &mut WindowBytes<'_>) -> CommandResult {
        match (&mut self.open, &self.entries) {
            (Some((index, partial)), entries) if piece.is_valid(entries[*index].size()) => {
                partial.push(piece, bytes, &mut self.reservation)?;
                self.outcomes[*index].received += u64::from(piece.len);
                Ok(())
            }
            _ => Err(out_of_turn()),
        }
    }

    fn end(&mut self) -> CommandResult {
        let (index, partial) = self.open.take().ok_or_else(out_of_turn)?;
        let (staged, file, hash) = partial.finish(self.entries[index].size())?;
        self.ready(index, staged, &file, hash)
    }

    /// The size of a file that may come, by its verdict.
    fn wanted(&self, index: usize) -> CommandResult<u64> {
        match (&self.entries[index].kind, self.actions[index]) {
            (Kind::File { .. }, EntryAction::Compare { skip: false, .. })
                if self.directory.on_clash == NameClash::Refuse =>
            {
                Err(exists())
            }
            (
                Kind::File { size, .. },
                EntryAction::Send | EntryAction::Partial | EntryAction::Compare { skip: false, .. },
            ) => Ok(*size),
            _ => Err(out_of_turn()),
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
        self.batch.push(Step::Publish { index, staged, hash });
        Ok(())
    }

    /// Makes what has come durable, and gives it its final names. A file that cannot get its
    /// name keeps no other from it, but directories stay unfinished.
    pub fn commit(&mut self) -> CommandResult {
        if self.batch.iter().any(|step| matches!(step, Step::Publish { .. })) {
            self.directory.sync()?;
        }
        let mut all = Ok(());
        for step in self.batch.drain(..) {
            let (index, hash, done) = match step {
                Step::Publish { index, staged, hash } => {
                    (index, hash, self.directory.publish(staged, &self.entries[index], self.resume))
                }
                Step::Leave { .. } if all.is_err() => continue,
                Step::Leave { index } => {
                    (index, None, self.directory.leave(&self.entries[index]).map(|()| true))
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
                    tracing::warn!(path = %entry.path, reason = also.message(), "not stored either")
                }
            }
        }
        all
    }

    /// The group is complete with its first `entries` entries: makes it and its names durable,
    /// and says what it was. The next entry may have begun: what came of it stays partial.
    pub fn finish(mut self, entries: u32) -> CommandResult<Vec<Stored>> {
        let entries = entries as usize;
        let begun = self.open.take().map(|(index, _)| index);
        let done = if begun.is_some() { self.next - 1 } else { self.next };
        if entries > self.entries.len() || entries < done || begun.is_some_and(|begun| begun != entries) {
            return Err(out_of_turn());
        }
        self.commit()?;
        self.directory.sync()?;
        let done = self.entries.into_iter().zip(self.outcomes).take(entries);
        let begun = self.begun;
        let stored = done.map(|(entry, Outcome { entry_result, received, hash })| {
            let entry_result = entry_result.ok_or_else(out_of_turn)?;
            Ok(Stored { entry, entry_result, received, hash, begun })
        });
        stored.collect()
    }
}
