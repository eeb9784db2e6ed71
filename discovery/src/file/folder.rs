//! A folder with a file for each member, on a file system that all members share.

use std::cell::LazyCell;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, ErrorKind as IoKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use async_trait::async_trait;
use multirail::{Error, ErrorKind, Result};
use rustix::fs::{Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, futimens};

use super::{BlockingCalls, from_file_name, to_file_name};
use crate::{Claim, Lease, Listing, MAX_MEMBERS, MAX_RECORD, Member, Renewal, Store};

/// How often a watch lists the folder.
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// A process that has joined removes files that it has seen unchanged for so many leases, and for [`STALE`]. A member
/// that is not dead after all writes its file again.
const STALE_LEASES: u32 = 10;
const STALE: Duration = Duration::from_secs(600);
/// What names of files begin with that are not complete.
const PARTIAL: &str = ".partial-";

/// A folder with a file for each member. A member renews its lease by setting its file's modification time.
///
/// The clocks of the hosts need not agree. The file system sets the times, and a reader counts a lease by its own
/// clock, from the moment at which it saw the time of the file change. Only at the first sight of a file does it
/// compare the file's time with a clock: with that of the file system, if its own says that the lease has ended, and if
/// it may write to the folder. A file that is older than its lease counts once its time changes.
pub struct FolderStore {
    url: String,
    state: Arc<FolderState>,
    lists: BlockingCalls,
    claims: BlockingCalls,
}

struct FolderState {
    folder: PathBuf,
    seen: Mutex<HashMap<String, Seen>>,
    /// This process has joined.
    has_joined: AtomicBool,
    /// [`STALE`].
    stale: Duration,
    /// The host's clock.
    clock: fn() -> SystemTime,
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
        let state = Arc::new(FolderState {
            folder,
            seen: Mutex::default(),
            has_joined: AtomicBool::new(false),
            stale: STALE,
            clock: SystemTime::now,
        });
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
            state.has_joined.store(true, Ordering::Relaxed);
            state.remove_partial();
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
            // No member has joined yet.
            Err(error) if error.kind() == IoKind::NotFound => return Ok(listing),
            Err(error) => return Err(error),
        };
        let (host_time, file_system_time) = ((self.clock)(), LazyCell::new(|| self.file_system_time().ok()));
        // A file of the future is young.
        let has_ended = |modified, lease| {
            let is_over = |now: SystemTime| now.duration_since(modified).is_ok_and(|age| age > lease);
            is_over(host_time) && file_system_time.is_none_or(is_over)
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
            let member = match Member::parse(&record) {
                Ok(member) if to_file_name(&member.name) == file => member,
                Ok(member) => {
                    listing.refuse(
                        stem,
                        format!("its file is named after another member than {:?}", member.name),
                    );
                    continue;
                }
                Err(why) => {
                    listing.refuse(stem, why);
                    continue;
                }
            };
            let now = Instant::now();
            let mut sight = seen.remove(file).unwrap_or_else(|| Seen {
                modified,
                changed: now,
                counts: !has_ended(modified, member.lease),
            });
            if sight.modified != modified {
                sight = Seen { modified, changed: now, counts: true };
            }
            if sight.counts && sight.changed.elapsed() <= member.lease {
                listing.add(member);
            } else if sight.changed.elapsed() > self.stale.max(member.lease * STALE_LEASES)
                && self.has_joined.load(Ordering::Relaxed)
            {
                let _ = fs::remove_file(&path);
            }
            present.insert(file.to_owned(), sight);
        }
        *seen = present;
        Ok(listing)
    }

    /// The present time of the file system, whose server may have another clock. Fails where this process may not
    /// write.
    fn file_system_time(&self) -> io::Result<SystemTime> {
        let probe = partial(&self.folder);
        let modified = File::create_new(&probe).and_then(|file| file.metadata()?.modified());
        let _ = fs::remove_file(&probe);
        modified
    }

    /// Removes what processes had begun to write that died then.
    fn remove_partial(&self) {
        let (Ok(entries), Ok(now)) = (fs::read_dir(&self.folder), self.file_system_time()) else { return };
        for entry in entries.flatten() {
            let modified = entry.metadata().and_then(|data| data.modified());
            let is_stale = modified.is_ok_and(|at| now.duration_since(at).is_ok_and(|age| age > STALE));
            if is_stale && entry.file_name().as_encoded_bytes().starts_with(PARTIAL.as_bytes()) {
                let _ = fs::remove_file(entry.path());
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
            touch(&file)?;
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

/// A new name of a file that is not complete.
fn partial(folder: &Path) -> PathBuf {
    folder.join(format!("{PARTIAL}{}-{:016x}", std::process::id(), fastrand::u64(..)))
}

/// Writes a file under another name, and renames it: readers see all of it or nothing.
fn write(path: &Path, record: &[u8]) -> io::Result<()> {
    let partial = partial(path.parent().unwrap_or(path));
    let written = File::create_new(&partial).and_then(|mut file| file.write_all(record));
    let written = written.and_then(|()| fs::rename(&partial, path));
    if written.is_err() {
        let _ = fs::remove_file(&partial);
    }
    written
}

/// Lets the file system set a file's modification time to its present time.
fn touch(file: &File) -> io::Result<()> {
    let unset = |tv_nsec| Timespec { tv_sec: 0, tv_nsec };
    let times = Timestamps { last_access: unset(UTIME_OMIT), last_modification: unset(UTIME_NOW) };
    Ok(futimens(file, &times)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(5);

    fn store(folder: &tempfile::TempDir, clock: fn() -> SystemTime) -> FolderStore {
        let mut store = FolderStore::new(folder.path());
        let state = Arc::get_mut(&mut store.state).unwrap();
        (state.clock, state.stale) = (clock, Duration::from_millis(100));
        store
    }

    fn run<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
    }

    /// Writes the file of a member, as if it was renewed so long ago.
    fn write_member(folder: &tempfile::TempDir, name: &str, lease: Duration, age: Duration) -> PathBuf {
        let mut member = Member::new(name, 1).address("h:1");
        member.lease = lease;
        let path = folder.path().join(to_file_name(name));
        write(&path, &member.to_record(1)).unwrap();
        File::open(&path).unwrap().set_modified(SystemTime::now() - age).unwrap();
        path
    }

    fn names(store: &FolderStore) -> Vec<String> {
        run(store.list()).unwrap().into_members().into_keys().collect()
    }

    #[test]
    fn a_reader_with_a_fast_clock_finds_the_living() {
        let folder = tempfile::tempdir().unwrap();
        write_member(&folder, "dead", LEASE, 2 * LEASE);
        write_member(&folder, "living", LEASE, LEASE / 2);
        for clock in [|| SystemTime::now() + Duration::from_secs(3600), SystemTime::now] {
            assert_eq!(names(&store(&folder, clock)), ["living"]);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    /// The file's time is that of the file system, whatever the renewing host's clock says.
    #[test]
    fn a_renewal_takes_the_file_systems_time() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(&folder, SystemTime::now);
        run(async {
            let record = Member::new("a", 1).address("h:1").to_record(1);
            let mut lease = store.claim("a", &record, LEASE, Claim::Replace).await.unwrap().unwrap();
            let path = folder.path().join("a.member");
            File::open(&path).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
            assert_eq!(lease.renew().await.unwrap(), Renewal::Kept);
            assert!(fs::metadata(&path).unwrap().modified().unwrap().elapsed().unwrap() < LEASE);
        });
    }

    /// Only what a joined process has seen unchanged for long is removed: old times may be those of another clock.
    #[test]
    fn a_dead_members_file_is_removed_late() {
        let folder = tempfile::tempdir().unwrap();
        let store = store(&folder, SystemTime::now);
        let lease = Duration::from_millis(10);
        let dead = write_member(&folder, "dead", lease, 10 * STALE);
        let is_removed = |after| {
            names(&store);
            std::thread::sleep(Duration::from_millis(after));
            names(&store);
            !dead.exists()
        };
        assert!(!is_removed(150));
        let record = Member::new("a", 1).address("h:1").to_record(1);
        run(store.claim("a", &record, LEASE, Claim::Replace)).unwrap().unwrap();
        assert!(dead.exists());
        // It is renewed once more, whatever its time. The list that sees it does not remove it, however late it comes.
        File::open(&dead).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
        names(&store);
        assert!(dead.exists());
        assert!(is_removed(150));
    }
}
