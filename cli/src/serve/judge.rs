//! What to do with each entry that a sender offers.

use std::io;

use crate::files::{Entry, Kind, Verdict};
use rustix::fs::{FileType, Stat};

use super::directory::{Clash, Directory, exists, is_directory};
use super::reason::failed;
use super::room::{self, Room};
use super::store::Store;
use crate::content;
use crate::failure::{Done, Failure};

/// Most entries in a group.
const MOST: usize = 1 << 13;

/// Judges entries, and promises room for what may come. `wanted` says whether the
/// sender still waits for it.
pub fn judge<'a>(
    directory: &'a Directory,
    entries: Vec<Entry>,
    resume: bool,
    wanted: &dyn Fn() -> bool,
) -> Done<(Store<'a>, Vec<Verdict>)> {
    if entries.len() > MOST {
        return Err(Failure::new(format!("the sender offers more than {MOST} files at once")));
    }
    let (mut verdicts, mut offered, mut room) = (Vec::with_capacity(entries.len()), 0_u64, 0_u64);
    for entry in &entries {
        let verdict = one(directory, entry, resume, wanted)
            .map_err(|failure| failure.within(format!("{} was not stored", entry.path)))?;
        let (bytes, cost) = match verdict {
            Verdict::Skip | Verdict::Have | Verdict::Compare { skip: true, .. } => (0, 0),
            // What is stored counts already. If it is gone by then, room is taken as bytes come.
            Verdict::Partial | Verdict::Compare { .. } => {
                let stored = directory.staging.bytes(&entry.path).unwrap_or(0);
                (entry.data(), room::entry(entry).saturating_sub(stored))
            }
            Verdict::Send => (entry.data(), room::entry(entry)),
        };
        (offered, room) = (offered.saturating_add(bytes), room.saturating_add(cost));
        verdicts.push(verdict);
    }
    let first = entries.first().map_or_else(String::new, |entry| entry.path.to_string());
    let room = Room::reserve(&directory.staging.quota, offered, room)
        .map_err(|failure| failure.within(format!("{first} was not stored")))?;
    Ok((Store::new(directory, entries, verdicts.clone(), resume, room), verdicts))
}

fn one(directory: &Directory, entry: &Entry, resume: bool, wanted: &dyn Fn() -> bool) -> Done<Verdict> {
    let is_file = matches!(entry.kind, Kind::File { .. });
    if is_file && !resume {
        directory.staging.discard(&entry.path);
    }
    let skip = directory.clash == Clash::Skip;
    if skip && directory.is_barred(&entry.path) {
        return Ok(Verdict::Skip);
    }
    let Some(found) = directory.look(&entry.path)? else {
        let partial = is_file && resume && directory.staging.bytes(&entry.path).is_some();
        return Ok(if partial { Verdict::Partial } else { Verdict::Send });
    };
    match (&entry.kind, FileType::from_raw_mode(found.st_mode)) {
        (Kind::Directory | Kind::Leave, FileType::Directory) => return Ok(Verdict::Send),
        (Kind::Directory | Kind::Leave, _) if skip => return Ok(Verdict::Skip),
        (Kind::Directory | Kind::Leave, _) => {
            return Err(Failure::new("a file has the name of this directory; remove or rename it"));
        }
        (Kind::File { size, .. }, FileType::RegularFile) if resume && is_size(&found, *size) => {
            return Ok(Verdict::Compare { digest: digest(directory, entry, wanted)?, skip });
        }
        (Kind::Link { target }, FileType::Symlink) if resume && directory.is_link(&entry.path, target)? => {
            return Ok(Verdict::Have);
        }
        (_, FileType::Directory) if directory.clash == Clash::Overwrite => return Err(is_directory()),
        _ => {}
    }
    match directory.clash {
        Clash::Skip => Ok(Verdict::Skip),
        Clash::Refuse => Err(exists()),
        Clash::Overwrite | Clash::Rename => {
            let partial = is_file && resume && directory.staging.bytes(&entry.path).is_some();
            Ok(if partial { Verdict::Partial } else { Verdict::Send })
        }
    }
}

fn is_size(found: &Stat, size: u64) -> bool {
    u64::try_from(found.st_size) == Ok(size)
}

fn digest(directory: &Directory, entry: &Entry, wanted: &dyn Fn() -> bool) -> Done<[u8; 32]> {
    let file = directory.file(&entry.path)?;
    content::digest(&file, entry.size(), wanted).map_err(|error| match error.kind() {
        io::ErrorKind::Interrupted => Failure::new("the sender is gone"),
        _ => failed("read the file that is there", error),
    })
}
