//! Members of directories: joining, leaving, losing a lease, outages, entries that are not valid.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use multirail::{Error, ErrorKind, Result, wait};
use multirail_discovery::{
    Changes, Claim, Directory, Event, FolderStore, Lease, Listing, Member, MembershipState, Renewal, Store,
    StoreDirectory, Watch, open,
};

const LIMIT: Duration = limit::HANG;
/// Long enough for a busy machine, where a member may come late to renew it.
const LEASE: Duration = Duration::from_secs(3);
/// For a store that removes nothing by itself.
const SHORT_LEASE: Duration = Duration::from_secs(1);

fn now<T>(future: impl Future<Output = T>) -> T {
    wait(future, LIMIT).expect("an answer")
}

/// A folder of members, and the directory over it.
fn folder() -> (tempfile::TempDir, StoreDirectory<FolderStore>) {
    let folder = tempfile::tempdir().unwrap();
    let directory = StoreDirectory::new(FolderStore::new(folder.path())).unwrap();
    (folder, directory)
}

fn member(name: &str, incarnation: u64) -> Member {
    Member::new(name, incarnation).address("127.0.0.1:1")
}

/// The next event, as `+name`, `-name`, `name` for a change, `outage` or `synced`.
fn told(watch: &mut Watch) -> String {
    match now(watch.next()) {
        Event::Joined(member) => format!("+{}", member.name),
        Event::Left(member) => format!("-{}", member.name),
        Event::Changed { member, .. } => member.name,
        Event::Outage(_) => "outage".to_owned(),
        Event::Synced => "synced".to_owned(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn members_join_and_leave() {
    let (_folder, directory) = folder();
    let a = now(directory.join(member("a", 1), LEASE)).unwrap();
    let mut watch = directory.watch();
    assert_eq!([told(&mut watch), told(&mut watch)], ["+a", "synced"]);
    let b = now(directory.join(member("b/ä", 2), LEASE)).unwrap();
    assert_eq!(told(&mut watch), "+b/ä");
    assert_eq!(now(directory.lookup("b/ä")).unwrap(), *b.member());
    assert_eq!(now(directory.members()).unwrap().len(), 2);
    now(a.leave()).unwrap();
    assert_eq!(told(&mut watch), "-a");
    assert_eq!(now(directory.lookup("a")).unwrap_err().kind(), ErrorKind::NotFound);
    drop(b);
    assert_eq!(told(&mut watch), "-b/ä");
}

#[test]
fn a_lease_is_kept_for_longer_than_it_lasts() {
    let (_folder, directory) = folder();
    let membership = now(directory.join(member("a", 1), LEASE)).unwrap();
    let mut watch = directory.watch();
    assert_eq!([told(&mut watch), told(&mut watch)], ["+a", "synced"]);
    std::thread::sleep(2 * LEASE);
    assert!(matches!(membership.state(), MembershipState::Joined));
    now(membership.leave()).unwrap();
    assert_eq!(told(&mut watch), "-a");
}

#[test]
fn a_restarted_member_takes_the_place_of_the_former() {
    let (_folder, directory) = folder();
    let mut first = now(directory.join(member("a", 1), LEASE)).unwrap();
    let mut watch = directory.watch();
    assert_eq!([told(&mut watch), told(&mut watch)], ["+a", "synced"]);
    let second = now(directory.join(member("a", 2), LEASE)).unwrap();
    assert_eq!(told(&mut watch), "a");
    let MembershipState::Ended(error) = now(first.changed()) else { panic!("the first goes on") };
    assert_eq!(error.kind(), ErrorKind::Busy);
    // The end of the first is not the second's.
    now(first.leave()).unwrap();
    assert_eq!(now(directory.lookup("a")).unwrap().incarnation, 2);
    assert!(matches!(second.state(), MembershipState::Joined));
}

/// A second membership of the same member, such as after a reconfiguration: the end of the first is not the second's.
#[test]
fn the_same_member_joins_twice() {
    let (_folder, directory) = folder();
    let mut first = now(directory.join(member("a", 1), LEASE)).unwrap();
    let second = now(directory.join(member("a", 1), LEASE)).unwrap();
    let MembershipState::Ended(error) = now(first.changed()) else { panic!("the first goes on") };
    assert_eq!(error.kind(), ErrorKind::Busy);
    now(first.leave()).unwrap();
    let third = now(directory.join(member("a", 1), LEASE)).unwrap();
    // Without a renewal in between.
    now(second.leave()).unwrap();
    assert_eq!(now(directory.lookup("a")).unwrap(), *third.member());
}

#[test]
fn a_lost_entry_is_joined_again() {
    let (folder, directory) = folder();
    let mut membership = now(directory.join(member("a", 1), LEASE)).unwrap();
    std::fs::remove_file(folder.path().join("a.member")).unwrap();
    assert!(matches!(now(membership.changed()), MembershipState::Lost(_) | MembershipState::Joined));
    let is_back = || now(directory.lookup("a")).ok();
    assert_eq!(limit::Limit::of(LIMIT).ask(is_back).unwrap(), *membership.member());
}

#[test]
fn what_is_not_valid_is_refused_or_skipped() {
    let (folder, directory) = folder();
    for (member, lease) in [
        (member("", 1), LEASE),
        (Member::new("a", 1), LEASE),
        (member("a", 1).attribute("k", "v".repeat(9000)), LEASE),
        (member("a", 1), Duration::from_millis(999)),
        (member("a", 1), Duration::MAX),
    ] {
        let refused = now(directory.join(member, lease)).err().unwrap();
        assert_eq!(refused.kind(), ErrorKind::InvalidRequest);
    }
    let _a = now(directory.join(member("a", 1), LEASE)).unwrap();
    let good = std::fs::read(folder.path().join("a.member")).unwrap();
    std::fs::write(folder.path().join("empty.member"), "").unwrap();
    std::fs::write(folder.path().join("b.member"), &good).unwrap();
    std::fs::write(folder.path().join("large.member"), vec![b'['; 1 << 20]).unwrap();
    std::fs::write(folder.path().join("other"), good).unwrap();
    std::fs::create_dir(folder.path().join("folder.member")).unwrap();
    let names: Vec<_> = now(directory.members()).unwrap().into_iter().map(|member| member.name).collect();
    assert_eq!(names, ["a"]);
}

#[test]
fn a_static_list_is_read_again_and_not_joined() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("fleet.toml");
    let directory = open(&format!("file://{}", file.display())).unwrap();
    let mut watch = directory.watch();
    assert_eq!(told(&mut watch), "outage");
    std::fs::write(&file, "[[members]]\nname = 'a'\naddresses = ['h:1']\n").unwrap();
    assert_eq!([told(&mut watch), told(&mut watch)], ["+a", "synced"]);
    std::fs::write(&file, "[[members]]\nname = 'b'\naddresses = ['h:1']\n").unwrap();
    assert_eq!([told(&mut watch), told(&mut watch)], ["-a", "+b"]);
    let refused = now(directory.join(member("c", 1), LEASE)).err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Unsupported);
}

#[test]
fn urls_are_read() {
    for url in ["", "/tmp", "file://relative", "file:/x", "ftp://h/x"] {
        assert_eq!(open(url).err().unwrap().kind(), ErrorKind::InvalidRequest, "{url}");
    }
    assert_eq!(open("file:///no/such/folder").unwrap().url(), "file:///no/such/folder");
    assert!(now(open("file:///no/such/folder").unwrap().members()).unwrap().is_empty());
}

/// A store in memory that a test can switch off, and empty.
#[derive(Clone, Default)]
struct Memory(Arc<Mutex<MemoryState>>);

#[derive(Default)]
struct MemoryState {
    records: BTreeMap<String, Vec<u8>>,
    is_down: bool,
    /// How often it was listed.
    lists: usize,
    /// Tells a watch of [`Telling`] of a change.
    tell: Option<tokio::sync::mpsc::UnboundedSender<()>>,
}

impl Memory {
    fn with<T>(&self, access: impl FnOnce(&mut MemoryState) -> T) -> Result<T> {
        let mut state = self.0.lock().unwrap();
        match state.is_down {
            true => Err(Error::new(ErrorKind::Unreachable, "memory", "it is down")),
            false => Ok(access(&mut state)),
        }
    }

    fn set_down(&self, is_down: bool) {
        self.0.lock().unwrap().is_down = is_down;
    }

    /// Gives it the members `m0000` to `m`, `count` - 1.
    fn set_members(&self, count: usize) {
        let entry = |number: usize| {
            let name = format!("m{number:04}");
            let json = format!(r#"{{"version":1,"name":"{name}","addresses":["h:1"],"incarnation":1}}"#);
            (name, json.into_bytes())
        };
        self.0.lock().unwrap().records = (0..count).map(entry).collect();
    }

    fn clear(&self) {
        self.0.lock().unwrap().records.clear();
    }
}

#[async_trait::async_trait]
impl Store for Memory {
    fn url(&self) -> &str {
        "memory"
    }

    fn poll_interval(&self) -> Duration {
        Duration::from_millis(20)
    }

    async fn list(&self) -> Result<Listing> {
        self.with(|state| {
            state.lists += 1;
            let mut listing = Listing::default();
            state.records.iter().for_each(|(name, record)| listing.add_record(name, record));
            listing
        })
    }

    async fn claim(
        &self,
        name: &str,
        record: &[u8],
        _lease: Duration,
        claim: Claim,
    ) -> Result<Option<Box<dyn Lease>>> {
        let (name, record) = (name.to_owned(), record.to_owned());
        let is_ours = self.with(|state| {
            let is_other = state.records.get(&name).is_some_and(|found| *found != record);
            let is_ours = claim == Claim::Replace || !is_other;
            if is_ours {
                state.records.insert(name.clone(), record.clone());
            }
            is_ours
        })?;
        Ok(is_ours.then(|| Box::new(MemoryLease { memory: self.clone(), name, record }) as Box<dyn Lease>))
    }
}

struct MemoryLease {
    memory: Memory,
    name: String,
    record: Vec<u8>,
}

#[async_trait::async_trait]
impl Lease for MemoryLease {
    async fn renew(&mut self) -> Result<Renewal> {
        self.memory.with(|state| match state.records.get(&self.name) {
            Some(found) if *found == self.record => Renewal::Kept,
            Some(_) => Renewal::Replaced,
            None => Renewal::Expired,
        })
    }

    async fn release(&mut self) -> Result<()> {
        self.memory.with(|state| drop(state.records.remove(&self.name)))
    }
}

#[test]
fn an_outage_is_told_once_and_changes_no_member() {
    let memory = Memory::default();
    let directory = StoreDirectory::new(memory.clone()).unwrap();
    let mut a = now(directory.join(member("a", 1), SHORT_LEASE)).unwrap();
    let b = now(directory.join(member("b", 1), SHORT_LEASE)).unwrap();
    let mut watch = directory.watch();
    assert_eq!([told(&mut watch), told(&mut watch), told(&mut watch)], ["+a", "+b", "synced"]);
    memory.set_down(true);
    assert_eq!(told(&mut watch), "outage");
    assert_eq!(now(directory.members()).unwrap_err().kind(), ErrorKind::Unreachable);
    let joining = now(directory.join(member("c", 1), SHORT_LEASE));
    assert_eq!(joining.err().unwrap().kind(), ErrorKind::Unreachable);
    // The lease ends meanwhile, and this side knows.
    assert!(matches!(now(a.changed()), MembershipState::Lost(_)));
    // The store comes back without its members. Those that live join again.
    assert_eq!(now(b.leave()).unwrap_err().kind(), ErrorKind::Unreachable);
    memory.clear();
    memory.set_down(false);
    assert_eq!(told(&mut watch), "synced");
    assert!(matches!(now(a.changed()), MembershipState::Joined));
    // The one that has left is missing, and `a` never was.
    assert_eq!(told(&mut watch), "-b");
    now(a.leave()).unwrap();
    assert_eq!(told(&mut watch), "-a");
}

/// A reader that falls behind by more events than are kept for it loses none.
#[test]
fn a_slow_reader_loses_nothing() {
    let memory = Memory::default();
    let directory = StoreDirectory::new(memory.clone()).unwrap();
    let mut watch = directory.watch();
    assert_eq!(told(&mut watch), "synced");
    memory.set_members(5000);
    assert_eq!(told(&mut watch), "+m0000");
    // The watch has told of 1024 others at most.
    memory.clear();
    let (mut joined, mut left) = (1, 0);
    while left < 5000 {
        match now(watch.next()) {
            Event::Joined(_) => joined += 1,
            Event::Left(_) => left += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(joined, 5000);
}

#[test]
fn a_watch_is_a_stream() {
    fn is_stream<T: futures_core::Stream<Item = Event> + Send + Unpin>(_: T) {}
    is_stream(StoreDirectory::new(Memory::default()).unwrap().watch());
    fn is_object_safe(_: &dyn Directory) {}
    is_object_safe(&StoreDirectory::new(Memory::default()).unwrap());
}

/// A reader that reads late does not make the watch rest for as long.
#[test]
fn a_slow_reader_does_not_slow_the_watch() {
    let memory = Memory::default();
    let directory = StoreDirectory::new(memory.clone()).unwrap();
    let mut watch = directory.watch();
    assert_eq!(told(&mut watch), "synced");
    memory.set_members(3000);
    // The watch waits for its reader meanwhile.
    std::thread::sleep(Duration::from_secs(2));
    (0..3000).for_each(|number| assert_eq!(told(&mut watch), format!("+m{number:04}")));
    let emptied = std::time::Instant::now();
    memory.clear();
    assert_eq!(told(&mut watch), "-m0000");
    let took = emptied.elapsed();
    assert!(took < limit::stretched(Duration::from_secs(2)), "{took:?}");
}

/// Changes that come together are listed once.
#[test]
fn many_messages_are_one_list() {
    let memory = Memory::default();
    let directory = StoreDirectory::new(Telling(memory.clone())).unwrap();
    let mut watch = directory.watch();
    assert_eq!(told(&mut watch), "synced");
    let before = memory.with(|state| state.lists).unwrap();
    memory.set_members(1000);
    let tell = memory.with(|state| state.tell.clone()).unwrap().unwrap();
    (0..1000).for_each(|_| tell.send(()).unwrap());
    (0..1000).for_each(|number| assert_eq!(told(&mut watch), format!("+m{number:04}")));
    std::thread::sleep(Duration::from_millis(500));
    let lists = memory.with(|state| state.lists).unwrap() - before;
    assert!((1..=5).contains(&lists), "{lists} lists");
}

/// A store that is listed when it tells of a change alone.
struct Telling(Memory);

#[async_trait::async_trait]
impl Store for Telling {
    fn url(&self) -> &str {
        "telling"
    }

    fn poll_interval(&self) -> Duration {
        Duration::from_secs(3600)
    }

    async fn list(&self) -> Result<Listing> {
        self.0.list().await
    }

    async fn changes(&self) -> Result<Box<dyn Changes>> {
        let (tell, told) = tokio::sync::mpsc::unbounded_channel();
        self.0.with(|state| state.tell = Some(tell))?;
        Ok(Box::new(Told(told)))
    }
}

struct Told(tokio::sync::mpsc::UnboundedReceiver<()>);

#[async_trait::async_trait]
impl Changes for Told {
    async fn next(&mut self) -> Result<()> {
        self.0.recv().await.ok_or_else(|| Error::new(ErrorKind::Closed, "watch", "the test has ended"))
    }
}
