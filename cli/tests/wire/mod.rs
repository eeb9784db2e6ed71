//! A hand-written client of the file protocol.
#![allow(dead_code)]

use std::path::Path;
use std::time::Duration;

use multirail::{Access, Descriptor, Fabric, Peer, RecvPool, Region, RemoteRegion};
use multirail_cli::files::{
    EntryKind, Mtime, ReceiverMessage, SenderMessage, TableItem, WindowLayout, encode,
};
use tempfile::TempDir;

use crate::process::RunningCommand;

const LIMIT: Duration = limit::HANG;

/// A sender that can break the protocol.
pub struct Hostile {
    fabric: Fabric,
    peer: Peer,
    pool: RecvPool,
    buffer: Region,
    windows: RemoteRegion,
}

impl Hostile {
    /// Connects and waits for the welcome.
    pub fn connect(address: &str) -> Self {
        Self::meet(address).unwrap_or_else(|reason| panic!("no welcome: {reason}"))
    }

    /// Connects and waits for the welcome or the refusal.
    fn meet(address: &str) -> Result<Self, String> {
        let (fabric, peer, pool) = Self::reach(address);
        let buffer = fabric.alloc(WindowLayout::OFFERED.data as usize, Access::LOCAL).expect("memory");
        match heard(&pool) {
            ReceiverMessage::Welcome { region, layout: WindowLayout::OFFERED, .. } => {
                let windows = peer.import(&Descriptor::from_bytes(&region).expect("bytes")).expect("import");
                Ok(Self { fabric, peer, pool, buffer, windows })
            }
            other => {
                fabric.close();
                Err(format!("{other:?}"))
            }
        }
    }

    fn reach(address: &str) -> (Fabric, Peer, RecvPool) {
        let fabric = multirail::open().expect("open");
        let pool = fabric.recv_pool(40, 16 << 10).expect("receives");
        let peer = pollster::block_on(fabric.connect(address)).expect("connect");
        (fabric, peer, pool)
    }

    /// Connects and sends the first message.
    pub fn ready(address: &str) -> Self {
        Self::greet(address, false)
    }

    /// Connects and continues an earlier attempt.
    pub fn resuming(address: &str) -> Self {
        Self::greet(address, true)
    }

    /// The same, if the server serves it.
    pub fn try_ready(address: &str) -> Option<Self> {
        let hostile = Self::meet(address).ok()?;
        hostile.say(&SenderMessage::Hello { total: 0, resume: false });
        (hostile.hear() == ReceiverMessage::Ready).then_some(hostile)
    }

    fn greet(address: &str, resume: bool) -> Self {
        let hostile = Self::connect(address);
        hostile.say(&SenderMessage::Hello { total: 0, resume });
        assert_eq!(hostile.hear(), ReceiverMessage::Ready);
        hostile
    }

    /// Sends any bytes. Returns true if the server took them.
    pub fn say_bytes(&self, bytes: &[u8]) -> bool {
        self.buffer.copy_in(0, bytes).expect("copy");
        self.peer.send(&self.buffer, 0..bytes.len()).and_then(|mut op| op.wait(LIMIT)).is_ok()
    }

    /// Sends a message.
    pub fn say(&self, message: &SenderMessage) {
        assert!(self.say_bytes(&postcard::to_stdvec(message).expect("encoded")), "sent");
    }

    fn hear(&self) -> ReceiverMessage {
        heard(&self.pool)
    }

    /// The next response that is not about windows.
    pub fn answer(&self) -> ReceiverMessage {
        loop {
            match self.hear() {
                ReceiverMessage::Free { .. } => {}
                other => return other,
            }
        }
    }

    fn write(&self, bytes: &[u8], at: usize) {
        self.buffer.copy_in(0, bytes).expect("copy");
        let written = self.peer.write(&self.buffer, 0..bytes.len(), &self.windows, at);
        written.and_then(|mut op| op.wait(LIMIT)).expect("written");
    }

    /// Offers a table in the first window.
    pub fn offer(&self, table: &[u8]) {
        self.write(table, WindowLayout::OFFERED.table_at(0));
        self.say(&SenderMessage::Offer { sequence: 0, table: table.len() as u32 });
    }

    /// Sends items with bytes in the second window.
    pub fn fill(&self, items: &[TableItem], bytes: &[u8]) {
        let mut table = Vec::new();
        items.iter().for_each(|item| encode(item, &mut table).expect("encoded"));
        self.write(&table, WindowLayout::OFFERED.table_at(1));
        self.write(bytes, WindowLayout::OFFERED.data_at(1));
        self.say(&SenderMessage::Filled { sequence: 1, table: table.len() as u32, data: bytes.len() as u32 });
    }

    /// Waits for a refusal with a reason that contains `why`.
    pub fn ends_refused(self, why: &str) {
        match self.answer() {
            ReceiverMessage::Refused(reason) => assert!(reason.contains(why), "{reason}"),
            other => panic!("not refused: {other:?}"),
        }
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        self.fabric.close();
    }
}

fn heard(pool: &RecvPool) -> ReceiverMessage {
    ReceiverMessage::decode(&pool.next().wait(LIMIT).expect("an answer").to_vec()).expect("a message")
}

/// A sender that the server refuses, and that stays connected.
pub struct Refused {
    fabric: Fabric,
    peer: Peer,
}

impl Refused {
    /// Connects and waits for a refusal with a reason that contains `why`.
    pub fn connect(address: &str, why: &str) -> Self {
        let (fabric, peer, pool) = Hostile::reach(address);
        match heard(&pool) {
            ReceiverMessage::Refused(reason) => assert!(reason.contains(why), "{reason}"),
            other => panic!("not refused: {other:?}"),
        }
        Self { fabric, peer }
    }

    /// Waits until the server closes the connection.
    pub fn is_disconnected(&self) {
        multirail::wait(self.peer.closed(), LIMIT).expect("disconnected");
    }
}

impl Drop for Refused {
    fn drop(&mut self) {
        self.fabric.close();
    }
}

/// The limit of waits.
pub const MTIME: Mtime = Mtime { seconds: 0, nanoseconds: 0 };

/// An entry that may be invalid.
pub fn raw(path: &[u8], kind: EntryKind) -> Vec<u8> {
    let mut table = Vec::new();
    encode(&(path, kind, 0o644_u16, MTIME), &mut table).expect("encoded");
    table
}

/// A file of this size.
pub fn file(size: u64) -> EntryKind {
    EntryKind::File { size, data: size }
}

/// A path for a command line.
pub fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8 path")
}

/// A server in `root/into`, next to a file that it must not change.
pub fn server(root: &TempDir) -> (std::path::PathBuf, RunningCommand, String) {
    let into = root.path().join("into");
    std::fs::create_dir(&into).unwrap();
    std::fs::write(root.path().join("secret"), "untouched").unwrap();
    let (server, address) = RunningCommand::server(&["serve", "--into", text(&into)]);
    (into, server, address)
}

/// The disk use of a server's directory in bytes.
pub fn on_disk(into: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let files = walkdir::WalkDir::new(into).into_iter().map(|entry| entry.expect("walk"));
    let blocks = |entry: walkdir::DirEntry| entry.metadata().expect("metadata").blocks();
    files.filter(|entry| !entry.file_type().is_dir()).map(blocks).sum::<u64>() * 512
}

/// Asserts that nothing was written outside the server's directory.
pub fn is_untouched(root: &TempDir) {
    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 2, "nothing beside the directory");
    assert_eq!(std::fs::read_to_string(root.path().join("secret")).unwrap(), "untouched");
}
