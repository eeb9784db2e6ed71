//! A sender that breaks the rules of `multirail serve`: refused, and nothing is
//! written anywhere but in the directory.
#![cfg(target_os = "linux")]

mod process;

use std::time::Duration;

use multirail::{Access, ErrorKind, Fabric, Peer, RecvPool, Region};
use process::{Running, run};
use tempfile::TempDir;

const LIMIT: Duration = Duration::from_secs(20);

/// The server's `Refused`, as postcard numbers it.
const REFUSED: u8 = 4;
const ACCEPTED: u8 = 1;

struct Hostile {
    fabric: Fabric,
    peer: Peer,
    pool: RecvPool,
    buffer: Region,
}

impl Hostile {
    fn connect(address: &str) -> Self {
        let fabric = multirail::open().expect("open");
        let pool = fabric.recv_pool(8, 16 << 10).expect("receives");
        let peer = pollster::block_on(fabric.connect(address)).expect("connect");
        let buffer = fabric.alloc(32 << 10, Access::LOCAL).expect("memory");
        let hostile = Self { fabric, peer, pool, buffer };
        assert_eq!(hostile.hear()[0], 0, "a welcome");
        hostile
    }

    fn say(&self, bytes: &[u8]) -> Result<(), ErrorKind> {
        self.buffer.copy_in(0, bytes).expect("copy");
        let sent = self.peer.send(&self.buffer, 0..bytes.len()).and_then(|mut op| op.wait(LIMIT));
        sent.map(|_| ()).map_err(|e| e.kind())
    }

    fn hear(&self) -> Vec<u8> {
        self.pool.next().wait(LIMIT).expect("an answer").to_vec()
    }

    fn begin(name: &[u8], size: u8) -> Vec<u8> {
        assert!(name.len() < 128 && size < 128, "one byte each, as postcard has it");
        [&[0, name.len() as u8], name, &[size]].concat()
    }
}

impl Drop for Hostile {
    fn drop(&mut self) {
        self.fabric.close();
    }
}

#[test]
fn rules_are_kept_by_the_server() {
    let (root, from) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let into = root.path().join("into");
    std::fs::create_dir(&into).unwrap();
    let (server, address) = Running::server(&["serve", "--into", into.to_str().unwrap()]);

    for name in [&b""[..], b".", b"..", b"../evil", b"/evil", b"a/b", b"a\0b"] {
        let hostile = Hostile::connect(&address);
        hostile.say(&Hostile::begin(name, 1)).expect("sent");
        assert_eq!(hostile.hear()[0], REFUSED, "{name:?}");
        drop(hostile);
        server.await_error("name");
    }
    // Nonsense, a message with a tail, an unknown word.
    for bytes in [&[0xff; 40][..], &[0, 1, b'a', 1, 9, 9], &[77]] {
        let hostile = Hostile::connect(&address);
        hostile.say(bytes).expect("sent");
        assert_eq!(hostile.hear()[0], REFUSED);
        drop(hostile);
        server.await_error("protocol");
    }
    // A window that is not its turn, and a checksum of something else.
    for word in [[&[1, 50][..]].concat(), [&[2][..], &[7; 32]].concat()] {
        let hostile = Hostile::connect(&address);
        let size = if word[0] == 2 { 0 } else { 1 };
        hostile.say(&Hostile::begin(b"file", size)).expect("sent");
        assert_eq!(hostile.hear()[0], ACCEPTED);
        hostile.say(&word).expect("sent");
        assert_eq!(hostile.hear()[0], REFUSED);
        drop(hostile);
        server.await_error("file was not stored");
    }
    // A message too long for the server's receives.
    let hostile = Hostile::connect(&address);
    let _ = hostile.say(&[0; 20 << 10]);
    drop(hostile);

    assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 1, "nothing beside the directory");
    let file = from.path().join("good");
    std::fs::write(&file, "content").unwrap();
    let (done, _, said) = run(&["send", file.to_str().unwrap(), "--to", &address]);
    assert!(done, "{said}");
    let names: Vec<_> = std::fs::read_dir(&into).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["good"]);
}

#[test]
fn a_stranger_is_told_so() {
    let into = TempDir::new().unwrap();
    let (_server, address) = Running::server(&["serve", "--into", into.path().to_str().unwrap()]);
    let (done, _, said) = run(&["bench", "client", &address]);
    assert!(!done);
    assert_eq!(said.lines().count(), 1, "{said}");
}
