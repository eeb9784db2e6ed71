//! A thousand clients that connect and do nothing do not keep honest clients out.

use std::net::TcpStream;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::raw::Raw;
use super::{builder, gets_through, served, token};
use crate::FabricBuilder;

const CROWD: usize = 1000;

/// Held by the crowd that is there. Several at once could need more descriptors than the process may have.
static ALONE: Mutex<()> = Mutex::new(());

/// Raises the limit of open files for both ends of all connections. Returns false if the system does not allow it.
fn descriptors() -> bool {
    let limit = getrlimit(Resource::Nofile);
    let wanted = 3 * CROWD as u64;
    if limit.current.is_none_or(|current| current >= wanted) {
        return true;
    }
    let raised = Rlimit { current: Some(wanted), maximum: limit.maximum };
    setrlimit(Resource::Nofile, raised).is_ok()
}

/// Longer than any test waits, so that an admitted client did not wait for the crowd's timeouts.
fn patient(builder: FabricBuilder) -> FabricBuilder {
    builder.handshake_limit(Duration::from_secs(600))
}

/// Checks that honest clients connect after `act` was done to every member of a crowd.
fn survives(builder: impl Fn() -> FabricBuilder, act: impl Fn(&mut Raw)) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    if !descriptors() {
        return println!("skipped: fewer than {} descriptors: raise `ulimit -Hn`", 3 * CROWD);
    }
    let (server, listener, address) = served(patient(builder()));
    let client = builder().open().unwrap();
    let mut crowd = Vec::new();
    for member in 0..CROWD {
        let mut raw = Raw::of(TcpStream::connect(&address).unwrap());
        act(&mut raw);
        crowd.push(raw);
        if member % 250 == 249 {
            let (there, _here) = gets_through(&client, &listener);
            there.disconnect();
        }
    }
    // The first clients were dropped without a frame; the last ones are still connected.
    let mut first = crowd.remove(0);
    while let Some(frame) = first.recv_bytes() {
        assert!(frame.starts_with(b"mrailctl"), "{frame:?}");
    }
    let last = crowd.pop().unwrap();
    last.0.set_nonblocking(true).unwrap();
    let mut seen = [0; 1 << 10];
    while let Ok(len) = std::io::Read::read(&mut &last.0, &mut seen) {
        assert_ne!(len, 0, "the last of the crowd was dropped");
    }
    let (_there, here) = gets_through(&client, &listener);
    assert!(here.is_alive());
    server.close();
}

#[test]
fn of_silent_clients() {
    survives(|| builder("null"), |_| ());
}

#[test]
fn of_silent_clients_where_a_token_is_asked_for() {
    survives(|| builder("null").token(token("all")), |_| ());
}

#[test]
fn of_clients_that_say_hello_and_no_more() {
    let hello = |raw: &mut Raw| assert!(!raw.hello().token);
    survives(|| builder("null"), hello);
}

#[test]
fn of_clients_that_say_hello_where_a_token_is_asked_for() {
    survives(|| builder("null").token(token("all")), |raw| drop(raw.greet(true)));
}

#[test]
fn of_clients_that_stop_in_the_middle_of_a_frame() {
    let cut = |raw: &mut Raw| {
        std::io::Write::write_all(&mut raw.0, &[200, 0, 0, 0, b'm']).unwrap();
    };
    survives(|| builder("null").token(token("all")), cut);
}
