//! A folder with a file for each member, on a file system that all members share.

use std::collections::HashMap;
use std::fs::{self, File, FileTimes};
use std::io::{self, ErrorKind as IoKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use multirail::{Error, ErrorKind, Result};

use super::{BlockingCalls, from_file_name, to_file_name};
use crate::{Claim, Lease, Listing, MAX_MEMBERS, MAX_RECORD, Member, Renewal, Store};

/// How often a watch lists the folder.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// A member that joins removes files of others that were not renewed for so many leases, and for [`STALE`]. A member that
/// is not dead after all writes its file again.
const STALE_LEASES: u32 = 10;
const STALE: Duration = Duration::from_secs(600);
/// What names of files begin with that are not complete.
const PARTIAL: &str = ".partial-";

/// A folder with a file for each member. A member renews its lease by setting its file's modification time.
///
/// The clocks of the hosts need not agree. A reader counts a lease by its own clock, from the moment at which it saw the
/// time of the file change. Only at the first sight of a file does it compare the file's time with its clock: a file that
/// looks older than its lease counts once its time changes.
pub struct FolderStore {
    url: String,
    state: Arc<FolderState>,
    lists: BlockingCalls,
    claims: BlockingCalls,
}

struct FolderState {
    folder: PathBuf,
    seen: Mutex<HashMap<String, Seen>>,
}

/// A member's file, as this process has seen it.
struct Seen {
    modified: SystemTime,
    /// When the file was last seen to change.
    changed: Instant,
    /// Whether a change was seen, or the file looked young at first sight.
    counts: bool,
}

impl FolderStore {
    /// The members in `folder`. [`Store::claim`] makes the folder.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        let folder = folder.into();
        let url = format!("file://{}", folder.display());
        let state = Arc::new(FolderState { folder, seen: Mutex::default() });
        Self { url, state, lists: BlockingCalls::default(), claims: BlockingCalls::default() }
    }
}

#[async_trait]
impl Store for FolderStore {
    fn url(&self) -> &str {
        &self.url
    }

    fn poll_interval(&self) -> Duration {
        POLL_INTERVAL
    }

    async fn list(&self) -> Result<Listing> {
        let state = Arc::clone(&self.state);
        self.lists.run(move || state.list()).await.map_err(|error| failed("list", error))
    }

    async fn claim(
        &self,
        name: &str,
        record: &[u8],
        _lease: Duration,
        claim: Claim,
    ) -> Result<Option<Box<dyn Lease>>> {
        let (state, record) = (Arc::clone(&self.state), record.to_owned());
        let file = self.state.folder.join(to_file_name(name));
        let lease = FileLease { file: file.clone(), record: record.clone(), calls: BlockingCalls::default() };
        let is_ours = self.claims.run(move || {
            fs::create_dir_all(&state.folder)?;
            if claim == Claim::Restore && read(&file)?.is_some_and(|found| found != record) {
                return Ok(false);
            }
            write(&file, &record)?;
            state.remove_stale();
            Ok(true)
        });
        let is_ours = is_ours.await.map_err(|error| failed("join", error))?;
        Ok(is_ours.then(|| Box::new(lease) as Box<dyn Lease>))
    }
}

impl FolderState {
    fn list(&self) -> io::Result<Listing> {
        let (mut listing, mut seen) =
            (Listing::default(), self.seen.lock().unwrap_or_else(PoisonError::into_inner));
        let mut present = HashMap::new();
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            // Nobody has joined yet.
            Err(error) if error.kind() == IoKind::NotFound => return Ok(listing),
            Err(error) => return Err(error),
        };
        for entry in entries {
            let file = entry?.file_name();
            let Some(file) = file.to_str() else { continue };
            let Some(stem) = from_file_name(file).filter(|_| !file.starts_with('.')) else { continue };
            if present.len() >= MAX_MEMBERS {
                listing.refuse(stem, format!("the folder has more than {MAX_MEMBERS} members"));
                break;
            }
            let path = self.folder.join(file);
            let (modified, record) = match stamped(&path) {
                Ok(Some(found)) => found,
                // It has left since.
                Ok(None) => continue,
                Err(error) => {
                    listing.refuse(stem, format!("its file cannot be read: {error}"));
                    continue;
                }
            };
            let member = match named(&record).map(|name| Member::from_record(&name, &record)) {
                Some(Ok(member)) if to_file_name(&member.name) == file => member,
                Some(Ok(member)) => {
                    listing.refuse(
                        stem,
                        format!("its file is named after another member than {:?}", member.name),
                    );
                    continue;
                }
                Some(Err(why)) => {
                    listing.refuse(stem, why);
                    continue;
                }
                None => {
                    listing.refuse(stem, "its record does not parse".to_owned());
                    continue;
                }
            };
            let now = Instant::now();
            let mut sight = seen.remove(file).unwrap_or_else(|| Seen {
                modified,
                changed: now,
                // A file of the future is young.
                counts: modified.elapsed().is_ok_and(|age| age <= member.lease)
                    || modified.elapsed().is_err(),
            });
            if sight.modified != modified {
                sight = Seen { modified, changed: now, counts: true };
            }
            if sight.counts && sight.changed.elapsed() <= member.lease {
                listing.add(member);
            }
            present.insert(file.to_owned(), sight);
        }
        *seen = present;
        Ok(listing)
    }

    /// Removes files of members that are long dead, and what a dead member had begun to write.
    fn remove_stale(&self) {
        let Ok(entries) = fs::read_dir(&self.folder) else { return };
        for entry in entries.flatten() {
            let (name, path) = (entry.file_name(), entry.path());
            let Some(file) = name.to_str() else { continue };
            let age = entry.metadata().and_then(|data| data.modified()).ok().and_then(|at| at.elapsed().ok());
            let Some(age) = age.filter(|age| *age > STALE) else { continue };
            let is_stale = if file.starts_with(PARTIAL) {
                true
            } else if from_file_name(file).is_some() {
                let lease = read(&path).ok().flatten().and_then(|record| lease_of(&record));
                lease.is_some_and(|lease| age > lease * STALE_LEASES)
            } else {
                false
            };
            if is_stale {
                let _ = fs::remove_file(path);
            }
        }
    }
}

/// The lease of a member's file.
struct FileLease {
    file: PathBuf,
    record: Vec<u8>,
    calls: BlockingCalls,
}

#[async_trait]
impl Lease for FileLease {
    async fn renew(&mut self) -> Result<Renewal> {
        let (path, record) = (self.file.clone(), self.record.clone());
        let renewed = self.calls.run(move || {
            // The file is opened once, so that the time of a member that replaces this one is not touched.
            let Some(mut file) = open(&path, true)? else { return Ok(Renewal::Expired) };
            if content(&mut file)? != record {
                return Ok(Renewal::Replaced);
            }
            // Readers look for a change of the time.
            file.set_times(FileTimes::new().set_modified(SystemTime::now()))?;
            Ok(Renewal::Kept)
        });
        renewed.await.map_err(|error| failed("renew", error))
    }

    async fn release(&mut self) -> Result<()> {
        let (path, record) = (self.file.clone(), self.record.clone());
        let released = self.calls.run(move || {
            if read(&path)?.is_some_and(|found| found == record) {
                fs::remove_file(&path)?;
            }
            Ok(())
        });
        released.await.map_err(|error| failed("leave", error))
    }
}

#[cold]
fn failed(operation: &'static str, error: io::Error) -> Error {
    let kind = match error.kind() {
        IoKind::PermissionDenied => ErrorKind::Permission,
        _ => ErrorKind::Io,
    };
    Error::new(kind, operation, "the folder of the directory").with_source(error)
}

fn open(path: &Path, writable: bool) -> io::Result<Option<File>> {
    match File::options().read(true).write(writable).open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if error.kind() == IoKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// The bytes of a file, one more than a record may have at most.
fn content(file: &mut File) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(MAX_RECORD as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    open(path, false)?.map(|mut file| content(&mut file)).transpose()
}

/// The modification time and the bytes of a member's file.
fn stamped(path: &Path) -> io::Result<Option<(SystemTime, Vec<u8>)>> {
    // A named pipe would block.
    if !fs::metadata(path).is_ok_and(|data| data.is_file()) {
        return if path.exists() { Err(io::Error::other("it is no regular file")) } else { Ok(None) };
    }
    let Some(mut file) = open(path, false)? else { return Ok(None) };
    Ok(Some((file.metadata()?.modified()?, content(&mut file)?)))
}

/// Writes a file under another name, and renames it: readers see all of it or nothing.
fn write(path: &Path, record: &[u8]) -> io::Result<()> {
    let partial = path.with_file_name(format!("{PARTIAL}{}-{:016x}", std::process::id(), fastrand::u64(..)));
    let written = File::create_new(&partial).and_then(|mut file| file.write_all(record));
    let written = written.and_then(|()| fs::rename(&partial, path));
    if written.is_err() {
        let _ = fs::remove_file(&partial);
    }
    written
}

/// The name that a record says.
fn named(record: &[u8]) -> Option<String> {
    field(record, "name").and_then(|name| name.as_str().map(str::to_owned))
}

fn lease_of(record: &[u8]) -> Option<Duration> {
    field(record, "lease_ms").and_then(|lease| lease.as_u64()).map(Duration::from_millis)
}

fn field(record: &[u8], name: &str) -> Option<serde_json::Value> {
    if record.len() > MAX_RECORD {
        return None;
    }
    serde_json::from_slice::<serde_json::Value>(record).ok()?.get_mut(name).map(serde_json::Value::take)
}
