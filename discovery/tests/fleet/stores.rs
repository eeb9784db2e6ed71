//! What the real servers' stores promise about single entries.

use std::io::{Read, Write};
use std::net::TcpStream;

use multirail::wait;
use multirail_discovery::{Directory, Member, open};

use crate::servers::Server;
use crate::{LEASE, LIMIT};

fn now<T>(future: impl Future<Output = T>) -> T {
    wait(future, LIMIT).expect("an answer")
}

fn member(name: &str) -> Member {
    Member::new(name, 1).address("127.0.0.1:1")
}

fn names(directory: &dyn Directory) -> Vec<String> {
    now(directory.members()).unwrap().into_iter().map(|member| member.name).collect()
}

/// The end of a former membership removes nothing of a later one of the same member.
fn joins_twice(url: &str) {
    let directory = open(url).unwrap();
    let first = now(directory.join(member("twice"), LEASE)).unwrap();
    let second = now(directory.join(member("twice"), LEASE)).unwrap();
    now(first.leave()).unwrap();
    assert_eq!(names(&*directory), ["twice"]);
    now(second.leave()).unwrap();
    assert!(names(&*directory).is_empty());
}

#[test]
fn etcd_entries() {
    let Some(server) = Server::etcd() else { return };
    joins_twice(&server.url());
}

#[test]
fn redis_entries() {
    let Some(server) = Server::redis() else { return };
    joins_twice(&server.url());

    // Directories within one another, and a key of something else under a member's name.
    let (outer, inner) = (open(&server.url()).unwrap(), open(&format!("{}/a", server.url())).unwrap());
    let _a = now(outer.join(member("a"), LEASE)).unwrap();
    let _b = now(inner.join(member("b"), LEASE)).unwrap();
    let _nested = now(outer.join(member("a/b"), LEASE)).unwrap();
    let prefix = server.url().split_once("/0/").unwrap().1.to_owned();
    redis(&server, &format!("LPUSH {prefix}//list 1"));
    redis(&server, &format!("SADD {prefix} list"));
    assert_eq!(names(&*outer), ["a", "a/b"]);
    assert_eq!(names(&*inner), ["b"]);
    now(outer.join(member("list"), LEASE)).unwrap();
}

/// Sends a command to Redis.
fn redis(server: &Server, command: &str) {
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.write_all(format!("{command}\r\n").as_bytes()).unwrap();
    let mut answer = [0; 64];
    let len = stream.read(&mut answer).unwrap();
    assert!(len > 0 && answer[0] == b':', "{}", String::from_utf8_lossy(&answer[..len]));
}
