//! Decides what a sender does with each offered entry.

use std::io;

use crate::files::{EntryAction, EntryKind, OfferedEntry};
use rustix::fs::{FileType, Stat};

use super::directory::{Directory, NameClash, exists, is_directory};
use super::failed;
use super::group_writer::GroupWriter;
use super::reservation::{self, QuotaReservation};
use crate::content;
use crate::failure::{CommandFailure, CommandResult};

/// The maximum number of entries in a group.
const MOST: usize = 1 << 13;

/// Decides about the entries of a group, and reserves quota for the bytes that may come. `wanted` returns false if the
/// sender no longer waits.
pub fn decide<'a>(
    directory: &'a Directory,
    entries: Vec<OfferedEntry>,
    resume: bool,
    wanted: &dyn Fn() -> bool,
) -> CommandResult<(GroupWriter<'a>, Vec<EntryAction>)> {
    if entries.len() > MOST {
        return Err(CommandFailure::new(format!("the sender offers more than {MOST} files at once")));
    }
    let (mut actions, mut offered, mut reservation) = (Vec::with_capacity(entries.len()), 0_u64, 0_u64);
    for entry in &entries {
        let action = one(directory, entry, resume, wanted)
            .map_err(|failure| failure.context(format!("{} was not stored", entry.path)))?;
        let (bytes, cost) = match action {
            EntryAction::Skip | EntryAction::Have | EntryAction::Compare { skip: true, .. } => (0, 0),
            // The stored bytes count already. If they are removed before, quota is reserved as bytes come.
            EntryAction::Partial | EntryAction::Compare { .. } => {
                let stored = directory.staging.bytes(&entry.path).unwrap_or(0);
                (entry.data(), reservation::entry(entry).saturating_sub(stored))
            }
            EntryAction::Send => (entry.data(), reservation::entry(entry)),
        };
        (offered, reservation) = (offered.saturating_add(bytes), reservation.saturating_add(cost));
        actions.push(action);
    }
    let first = entries.first().map_or_else(String::new, |entry| entry.path.to_string());
    let reservation = QuotaReservation::reserve(&directory.staging.quota, offered, reservation)
        .map_err(|failure| failure.context(format!("{first} was not stored")))?;
    Ok((GroupWriter::new(directory, entries, actions.clone(), resume, reservation), actions))
}

fn one(
    directory: &Directory,
    entry: &OfferedEntry,
    resume: bool,
    wanted: &dyn Fn() -> bool,
) -> CommandResult<EntryAction> {
    let is_file = matches!(entry.kind, EntryKind::File { .. });
    if is_file && !resume {
        directory.staging.discard(&entry.path);
    }
    let skip = directory.on_clash == NameClash::Skip;
    if skip && directory.has_file_as_parent(&entry.path) {
        return Ok(EntryAction::Skip);
    }
    let Some(found) = directory.stat(&entry.path)? else {
        let partial = is_file && resume && directory.staging.bytes(&entry.path).is_some();
        return Ok(if partial { EntryAction::Partial } else { EntryAction::Send });
    };
    match (&entry.kind, FileType::from_raw_mode(found.st_mode)) {
        (EntryKind::Directory | EntryKind::Leave, FileType::Directory) => return Ok(EntryAction::Send),
        (EntryKind::Directory | EntryKind::Leave, _) if skip => return Ok(EntryAction::Skip),
        (EntryKind::Directory | EntryKind::Leave, _) => {
            return Err(CommandFailure::new("a file has the name of this directory; remove or rename it"));
        }
        (EntryKind::File { size, .. }, FileType::RegularFile) if resume && is_size(&found, *size) => {
            return Ok(EntryAction::Compare { digest: digest(directory, entry, wanted)?, skip });
        }
        (EntryKind::Link { target }, FileType::Symlink)
            if resume && directory.is_link(&entry.path, target)? =>
        {
            return Ok(EntryAction::Have);
        }
        (_, FileType::Directory) if directory.on_clash == NameClash::Overwrite => return Err(is_directory()),
        _ => {}
    }
    match directory.on_clash {
        NameClash::Skip => Ok(EntryAction::Skip),
        NameClash::Refuse => Err(exists()),
        NameClash::Overwrite | NameClash::Rename => {
            let partial = is_file && resume && directory.staging.bytes(&entry.path).is_some();
            Ok(if partial { EntryAction::Partial } else { EntryAction::Send })
        }
    }
}

fn is_size(found: &Stat, size: u64) -> bool {
    u64::try_from(found.st_size) == Ok(size)
}

fn digest(directory: &Directory, entry: &OfferedEntry, wanted: &dyn Fn() -> bool) -> CommandResult<[u8; 32]> {
    let file = directory.file(&entry.path)?;
    content::digest(&file, entry.size(), wanted).map_err(|error| match error.kind() {
        io::ErrorKind::Interrupted => CommandFailure::new("the sender is gone"),
        _ => failed("read the file that is there", error),
    })
}
