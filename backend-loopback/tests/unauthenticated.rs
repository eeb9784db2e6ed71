//! What a local process can get that knows the name of a domain's socket and has no offer.
#![cfg(target_os = "linux")]

mod common;
#[path = "common/stranger.rs"]
mod stranger;

use std::os::unix::process::CommandExt;
use std::process::Command;

use common::*;
use multirail_loopback::LoopbackConfig;
use multirail_spi::ErrorKind;
use stranger::{Stranger, secret_of, socket_of};

/// Tells this test executable that it is the other user's process, and the name of the socket.
const CHILD: &str = "MULTIRAIL_LOOPBACK_UNAUTHENTICATED";

/// The version of the protocol: `other_process::protocol::VERSION`.
const VERSION: u8 = 6;

/// The bytes of `Request::Hello`. [`region`] has those of `Request::Region`.
fn hello(token: [u8; 16]) -> Vec<u8> {
    hello_of(VERSION, token)
}

fn hello_of(version: u8, token: [u8; 16]) -> Vec<u8> {
    [&[0, version][..], &token].concat()
}

fn region(key: u64) -> Vec<u8> {
    let mut bytes = vec![1, 7];
    let mut left = key;
    while left >= 0x80 {
        bytes.push(left as u8 | 0x80);
        left >>= 7;
    }
    bytes.push(left as u8);
    bytes
}

fn connect_to(name: &str) -> Stranger {
    Stranger::connect(name).unwrap()
}

#[test]
fn without_the_secret_of_an_offer_there_is_a_refusal_and_no_file() {
    let target = node(LoopbackConfig::default(), 1);
    let registered = target.register(8192, BOTH);
    let (_slot, offer) = target.domain.connector().prepare().unwrap();
    let name = socket_of(&offer);
    // `Reply::Refused` with number 0, for `Refusal::Token`, since the version is right.
    let refused: &[u8] = &[4, 0, 0];
    let key = registered.region.key().key;
    let talks: [&[Vec<u8>]; 5] = [
        &[hello([0; 16])],
        &[hello([0xff; 16]), region(key)],
        &[region(key)],
        &[vec![0xff; 100]],
        &[vec![0; 1000]],
    ];
    for (at, says) in talks.into_iter().enumerate() {
        let socket = connect_to(&name);
        for packet in says {
            let _ = socket.send(packet);
        }
        let heard = socket.receive_all();
        // A packet after a refused hello resets the connection, and the refusal may be lost.
        assert!(heard.iter().all(|packet| packet == refused) && heard.len() <= 1, "{says:?}: {heard:?}");
        assert_eq!(heard.len() == 1, at == 0 || (at == 1 && !heard.is_empty()), "{says:?}");
    }
    // A hello with another version is refused for the version. So the refusals above were for the secret.
    let other = connect_to(&name);
    other.send(&hello_of(VERSION - 1, [0; 16])).unwrap();
    assert_eq!(other.receive_all(), [[4, 0, 1]]);
    // None of this has used the offer: its owner is still admitted.
    let mut peer = node(LoopbackConfig::default(), 2);
    let (to_target, _) = peer.domain.connector().prepare().unwrap();
    peer.domain.connector().complete(to_target, &offer).unwrap();
    let import = peer.import(to_target, &*registered.region);
    let source = peer.register(8192, BOTH);
    source.fill(9);
    assert_eq!(peer.run(write(1, to_target, &source, Some(&import))), done(1, 1));
    assert_eq!(registered.byte(8191), 9);
    // An offer admits once.
    let (again, _) = peer.domain.connector().prepare().unwrap();
    let error = peer.domain.connector().complete(again, &offer).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
}

#[test]
fn more_connections_and_requests_than_a_round_takes_are_all_answered() {
    let target = node(LoopbackConfig::default(), 1);
    let (_slot, offer) = target.domain.connector().prepare().unwrap();
    let name = socket_of(&offer);
    let callers: Vec<_> = (0..100).map(|_| connect_to(&name)).collect();
    for caller in &callers {
        caller.send(&hello([0; 16])).unwrap();
    }
    assert!(callers.iter().all(|caller| caller.receive_all() == [[4, 0, 0]]));
    let peer = connect_to(&name);
    peer.send(&hello(secret_of(&offer))).unwrap();
    // No region has this key. All questions are sent before an answer is read.
    for _ in 0..150 {
        peer.send(&region(u64::MAX)).unwrap();
    }
    for answer in 0..151 {
        let expected: &[u8] = if answer == 0 { &[0] } else { &[4, 7, 2] };
        assert_eq!(peer.receive().unwrap(), expected, "answer {answer}");
    }
}

#[test]
fn processes_that_connect_in_a_loop_keep_no_domain_open() {
    let target = node(LoopbackConfig::default(), 1);
    let (_slot, offer) = target.domain.connector().prepare().unwrap();
    let (name, (called, heard)) = (socket_of(&offer), std::sync::mpsc::channel());
    let callers: Vec<_> = (0..4)
        .map(|_| {
            let (name, called) = (name.clone(), called.clone());
            // The loop ends when the socket is gone.
            std::thread::spawn(
                move || while Stranger::connect(&name).is_ok_and(|_| called.send(()).is_ok()) {},
            )
        })
        .collect();
    drop(called);
    assert_eq!(heard.iter().take(1000).count(), 1000);
    drop(target);
    callers.into_iter().for_each(|caller| caller.join().unwrap());
}

#[test]
#[ignore = "the other process of the test below"]
fn unauthenticated_process() {
    let Some(name) = std::env::var_os(CHILD) else { return };
    // The kernel itself refuses the connection where the socket's name is a path.
    let heard = Stranger::connect(name.to_str().unwrap()).map_or_else(
        |why| {
            assert_eq!(why, rustix::io::Errno::ACCESS);
            Vec::new()
        },
        |socket| {
            let _ = socket.send(&hello([0; 16]));
            socket.receive_all()
        },
    );
    println!("\n@{heard:?}");
}

#[test]
fn another_user_gets_not_even_a_refusal() {
    const NOBODY: u32 = 65534;
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can start a process of another user");
    }
    let target = node(LoopbackConfig::default(), 1);
    let (_slot, offer) = target.domain.connector().prepare().unwrap();
    // Another user may have no access to the build folder, so the child runs a copy.
    let copy = std::env::temp_dir().join(format!("multirail-unauthenticated-{}", std::process::id()));
    std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    let mut command = Command::new(&copy);
    command
        .args(["--exact", "unauthenticated_process", "--ignored", "--nocapture"])
        .env(CHILD, socket_of(&offer));
    let output = command.current_dir("/").uid(NOBODY).gid(NOBODY).output();
    std::fs::remove_file(&copy).unwrap();
    let said = String::from_utf8(output.unwrap().stdout).unwrap();
    assert!(said.contains("@[]"), "{said}");
}
