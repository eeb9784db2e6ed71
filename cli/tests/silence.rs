//! Silent senders of `multirail serve`, and more senders than it serves.
#![cfg(target_os = "linux")]

mod process;
mod wire;

use std::fs;
use std::time::Duration;

use multirail::{Access, Peer, RecvPool, Region};
use multirail_cli::files::{
    EntryAction, PROTOCOL, ReceiverMessage, SenderMessage, TableItem, VERSION, WindowLayout, decode_entries,
    decode_items,
};
use process::{LIMIT, RunningCommand, eventually, run};
use tempfile::TempDir;
use wire::{Hostile, Refused, file, raw, text};

#[test]
fn silent_senders_are_dropped_for_others() {
    let (from, into) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (server, address) =
        RunningCommand::server(&["serve", "--into", text(into.path()), "--silence", "5s"]);
    // Some have sent no message yet, others are in the middle of a group.
    let silent: Vec<_> = (0..6)
        .map(|n| match n % 3 {
            0 => Hostile::connect(&address),
            1 => Hostile::ready(&address),
            _ => {
                let sender = Hostile::ready(&address);
                sender.offer(&raw(b"file", file(1)));
                assert!(matches!(sender.answer(), ReceiverMessage::Actions { .. }));
                sender
            }
        })
        .collect();
    for sender in silent {
        sender.ends_refused("sent no message for 5 s");
        server.await_error("sent no message for 5 s");
    }
    let good = from.path().join("good");
    fs::write(&good, "content").unwrap();
    let (done, _, said) = run(&["send", text(&good), "--to", &address]);
    assert!(done, "{said}");
    assert_eq!(fs::read(into.path().join("good")).unwrap(), b"content");
}

#[test]
fn a_working_sender_is_not_silent() {
    let into = TempDir::new().unwrap();
    let (server, address) =
        RunningCommand::server(&["serve", "--into", text(into.path()), "--silence", "4s"]);
    let sender = Hostile::ready(&address);
    // The sender works for longer than the limit, before and in a group.
    let work = || {
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(250));
            sender.say(&SenderMessage::Working);
        }
    };
    work();
    sender.offer(&raw(b"name", file(4)));
    assert!(matches!(sender.answer(), ReceiverMessage::Actions { .. }));
    work();
    sender.fill(&[TableItem::Whole { index: 0, hash: blake3::hash(b"good").into() }], b"good");
    sender.say(&SenderMessage::Commit { next: 2, entries: 1 });
    assert_eq!(sender.answer(), ReceiverMessage::Stored);
    assert_eq!(server.errors(), [""; 0]);
}

#[test]
fn refused_senders_take_no_thread() {
    let into = TempDir::new().unwrap();
    let (server, address) = RunningCommand::server(&["serve", "--into", text(into.path())]);
    let busy: Vec<_> = (0..6).map(|_| Hostile::ready(&address)).collect();
    let tasks = format!("/proc/{}/task", server.id());
    // Counts the command's own threads. The library's threads have other names.
    let threads = || {
        let names = fs::read_dir(&tasks).unwrap().map(|task| task.unwrap().path().join("comm"));
        names.filter(|name| fs::read_to_string(name).is_ok_and(|name| name == "multirail\n")).count()
    };
    let before = threads();
    // None of them disconnects.
    let refused: Vec<_> = (0..10)
        .map(|_| {
            let sender = Refused::connect(&address, "try again later");
            assert_eq!(threads(), before);
            server.await_error("try again later");
            sender
        })
        .collect();
    // The server closes the connections.
    for sender in &refused {
        sender.is_disconnected();
    }
    drop(busy);
    eventually(LIMIT, "there is room again", || {
        server.errors();
        Hostile::try_ready(&address)
    });
}

/// A hand-written server.
struct ScriptedServer {
    peer: Peer,
    pool: RecvPool,
    buffer: Region,
    windows: Region,
}

impl ScriptedServer {
    fn say(&self, message: &ReceiverMessage) {
        let bytes = postcard::to_stdvec(message).expect("encoded");
        self.buffer.copy_in(0, &bytes).expect("copy");
        self.peer.send(&self.buffer, 0..bytes.len()).expect("send").wait(LIMIT).expect("taken");
    }

    fn hear(&self) -> SenderMessage {
        SenderMessage::decode(&self.pool.next().wait(LIMIT).expect("a message").to_vec()).expect("decoded")
    }

    /// The next message that is not `Working`, and the number of `Working` before it.
    fn hear_work(&self) -> (usize, SenderMessage) {
        let mut working = 0;
        loop {
            match self.hear() {
                SenderMessage::Working => working += 1,
                message => return (working, message),
            }
        }
    }

    fn table(&self, sequence: u64, len: u32) -> Vec<u8> {
        let mut table = vec![0; len as usize];
        self.windows.copy_out(WindowLayout::OFFERED.table_at(sequence), &mut table).expect("copy");
        table
    }
}

#[test]
fn a_working_sender_sends_signs_of_life() {
    const MIB: usize = 1 << 20;
    let from = TempDir::new().unwrap();
    let path = from.path().join("large");
    fs::write(&path, vec![1; 3 * MIB]).unwrap();
    let fabric = multirail::open().unwrap();
    let pool = fabric.recv_pool(32, 16 << 10).unwrap();
    let windows = fabric.alloc(WindowLayout::OFFERED.total() as usize, Access::REMOTE_WRITE).unwrap();
    let listener = multirail::wait(fabric.listen("127.0.0.1:0"), LIMIT).unwrap().unwrap();
    let mut sender =
        RunningCommand::start(&["send", text(&path), "--resume", "--to", &listener.local_addr().to_string()]);
    let peer = multirail::wait(listener.accept(), LIMIT).unwrap().unwrap();
    let buffer = fabric.alloc(16 << 10, Access::LOCAL).unwrap();
    let server = ScriptedServer { peer, pool, buffer, windows };
    // No silence is allowed, so the sender sends a sign of life whenever it can.
    server.say(&ReceiverMessage::Welcome {
        protocol: PROTOCOL,
        version: VERSION,
        layout: WindowLayout::OFFERED,
        region: server.windows.descriptor().to_bytes(),
        silence_ms: 0,
    });
    assert!(matches!(server.hear(), SenderMessage::Hello { resume: true, .. }));
    server.say(&ReceiverMessage::Ready);
    let (_, SenderMessage::Offer { sequence: 0, table }) = server.hear_work() else { panic!("no offer") };
    assert_eq!(decode_entries(&server.table(0, table)).unwrap().len(), 1);
    server.say(&ReceiverMessage::Free { sequence: 0 });
    // It reads the file in three chunks, to compare it and then to send it.
    let digest = EntryAction::Compare { digest: [0; 32], skip: false };
    server.say(&ReceiverMessage::Actions { first: 0, actions: vec![digest] });
    let (working, SenderMessage::Resume { index: 0, first: 0 }) = server.hear_work() else {
        panic!("no question")
    };
    assert!(working >= 3, "{working}");
    server.say(&ReceiverMessage::Have { pieces: Vec::new(), last: true, bytes: 0 });
    let mut items = 0;
    loop {
        match server.hear_work().1 {
            SenderMessage::Filled { sequence, table, .. } => {
                items += decode_items(&server.table(sequence, table)).unwrap().len();
                server.say(&ReceiverMessage::Free { sequence });
            }
            SenderMessage::Commit { entries: 1, .. } => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(items, 5, "begin, three pieces, end");
    server.say(&ReceiverMessage::Stored);
    assert_eq!(server.hear_work().1, SenderMessage::Bye);
    server.say(&ReceiverMessage::Farewell);
    sender.succeeds();
}
