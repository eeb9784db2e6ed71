//! What a local process gets that knows of a domain's socket and not of an offer.
#![cfg(target_os = "linux")]

mod common;

use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::Duration;

use backend_loopback::LoopbackConfig;
use common::*;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use transport_core::ErrorKind;

/// Tells this test executable that it is the stranger, and whom to call.
const CHILD: &str = "MULTIRAIL_LOOPBACK_STRANGER";

/// `Request::Hello` of version 1 and `Request::Region`, as they travel.
fn hello(token: [u8; 16]) -> Vec<u8> {
    [&[0, 1][..], &token].concat()
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

/// The name of the socket, which any process can read in /proc/net/unix.
fn socket_of(offer: &[u8]) -> String {
    let start = offer.windows(12).position(|bytes| bytes == b"multirail-lo").unwrap();
    String::from_utf8(offer[start..].to_vec()).unwrap()
}

fn call(name: &str) -> OwnedFd {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap()).unwrap();
    set_socket_timeout(&socket, Timeout::Recv, Some(Duration::from_secs(10))).unwrap();
    socket
}

/// All packets until the other end closes.
fn packets(socket: &OwnedFd) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    loop {
        let mut packet = [0; 256];
        match rustix::net::recv(socket, &mut packet, RecvFlags::empty()) {
            Ok((1.., len)) => all.push(packet[..len].to_vec()),
            // An end, or a reset because something was sent that nobody read.
            Ok((0, _)) | Err(rustix::io::Errno::CONNRESET | rustix::io::Errno::PIPE) => return all,
            Err(error) => panic!("neither an answer nor an end: {error}"),
        }
    }
}

#[test]
fn without_the_secret_of_an_offer_there_is_a_refusal_and_no_file() {
    let target = node(LoopbackConfig::default(), 1);
    let held = target.held(8192, BOTH);
    let (_slot, offer) = target.domain.connector().prepare().unwrap();
    let name = socket_of(&offer);
    let refused: &[u8] = &[3, 0, 0];
    let key = held.region.key().key;
    let talks: [&[Vec<u8>]; 5] = [
        &[hello([0; 16])],
        &[hello([0xff; 16]), region(key)],
        &[region(key)],
        &[vec![0xff; 100]],
        &[vec![0; 1000]],
    ];
    for (at, says) in talks.into_iter().enumerate() {
        let socket = call(&name);
        for packet in says {
            let _ = rustix::net::send(&socket, packet, SendFlags::NOSIGNAL);
        }
        let heard = packets(&socket);
        // What is sent behind a refused hello resets the connection, and may undo the refusal.
        assert!(heard.iter().all(|packet| packet == refused) && heard.len() <= 1, "{says:?}: {heard:?}");
        assert_eq!(heard.len() == 1, at == 0 || (at == 1 && !heard.is_empty()), "{says:?}");
    }
    // The offer is not used up by that: its owner still gets in.
    let mut peer = node(LoopbackConfig::default(), 2);
    let (to_target, _) = peer.domain.connector().prepare().unwrap();
    peer.domain.connector().complete(to_target, &offer).unwrap();
    let import = peer.import(to_target, &*held.region);
    let source = peer.held(8192, BOTH);
    source.fill(9);
    assert_eq!(peer.run(write(1, to_target, &source, Some(&import))), done(1, 1));
    assert_eq!(held.byte(8191), 9);
    // It is good once.
    let (again, _) = peer.domain.connector().prepare().unwrap();
    let error = peer.domain.connector().complete(again, &offer).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unreachable);
}

#[test]
#[ignore = "the other process of the test below"]
fn stranger() {
    if let Some(name) = std::env::var_os(CHILD) {
        let socket = call(name.to_str().unwrap());
        let _ = rustix::net::send(&socket, &hello([0; 16]), SendFlags::NOSIGNAL);
        println!("\n@{:?}", packets(&socket));
    }
}

#[test]
fn another_user_does_not_even_get_a_refusal() {
    const NOBODY: u32 = 65534;
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can start a process of another user");
    }
    let target = node(LoopbackConfig::default(), 1);
    let (_slot, offer) = target.domain.connector().prepare().unwrap();
    // Where the build lies, another user may not reach: a copy is run instead.
    let copy = std::env::temp_dir().join(format!("multirail-stranger-{}", std::process::id()));
    std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    let mut command = Command::new(&copy);
    command.args(["--exact", "stranger", "--ignored", "--nocapture"]).env(CHILD, socket_of(&offer));
    let output = command.current_dir("/").uid(NOBODY).gid(NOBODY).output();
    std::fs::remove_file(&copy).unwrap();
    let said = String::from_utf8(output.unwrap().stdout).unwrap();
    assert!(said.contains("@[]"), "{said}");
}
