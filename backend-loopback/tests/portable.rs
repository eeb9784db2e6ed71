//! The portable path on Linux: what it leaves behind, and targets that break its protocol. Each test is run by
//! [`over_the_portable_path`], in a process of its own with a directory for temporary files of its own.
#![cfg(target_os = "linux")]

mod common;
#[path = "common/stranger.rs"]
mod stranger;

use std::io::{BufRead, BufReader, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use common::*;
use limit::Limit;
use multirail_loopback::LoopbackConfig;
use multirail_spi::{Error, ErrorKind, HostBuffer};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use stranger::socket_of;

/// Chooses the portable path.
const PORTABLE: &str = "MULTIRAIL_LOOPBACK_PORTABLE";

/// Tells [`holder`] what to do: `socket` or `buffers`.
const HOLDER: &str = "MULTIRAIL_LOOPBACK_HOLDER";

/// This test executable, as the test of that name, over the portable path.
fn command(test: &str, directory: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", test, "--nocapture"]).env(PORTABLE, "1").env("TMPDIR", directory);
    command
}

#[test]
fn over_the_portable_path() {
    for test in [
        "buffers_and_domains_leave_no_name",
        "the_name_of_a_killed_processs_socket_is_removed_by_the_next",
        "processes_killed_while_they_allocate_leave_at_most_one_name",
        "targets_that_break_the_protocol_are_refused",
        "a_directory_with_a_long_name_is_refused",
    ] {
        let directory = PathBuf::from(format!("/tmp/multirail-test-{}-{}", std::process::id(), test.len()));
        std::fs::create_dir(&directory).unwrap();
        let output = command(test, &directory).env_remove(HOLDER).output().unwrap();
        let left = names_in(&directory);
        std::fs::remove_dir_all(&directory).unwrap();
        let (said, errors) =
            (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success() && said.contains("1 passed"), "{test}: {said}{errors}");
        assert_eq!(left, [""; 0], "{test}");
    }
}

/// The names in a directory.
fn names_in(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

/// The names of this user's shared memory objects.
fn shared_names() -> Vec<String> {
    let start = format!("multirail-{}-", rustix::process::geteuid().as_raw());
    names_in(Path::new("/dev/shm")).into_iter().filter(|name| name.starts_with(&start)).collect()
}

/// Waits until no shared memory object has a name. Tests that run at the same time have one for a moment.
fn assert_nothing_shared() {
    let mut limit = Limit::of(TIME_LIMIT);
    while !shared_names().is_empty() {
        assert!(!limit.is_over(), "{:?}", shared_names());
        std::thread::yield_now();
    }
}

/// Waits until the directory is empty. The server's thread has a name for a moment longer than the offer.
fn assert_names_go(directory: &Path) {
    let mut limit = Limit::of(TIME_LIMIT);
    while !names_in(directory).is_empty() {
        assert!(!limit.is_over(), "{:?}", names_in(directory));
        std::thread::yield_now();
    }
}

#[test]
#[ignore = "run by over_the_portable_path"]
fn buffers_and_domains_leave_no_name() {
    for round in 0..10_000 {
        let buffer = HostBuffer::new(1 + round % 9000).unwrap();
        assert!(multirail_spi::Memory::shared_file(&buffer).is_some());
    }
    let directory = std::env::temp_dir();
    for _ in 0..500 {
        let a = node(LoopbackConfig::default(), 1);
        let (_, offer) = a.domain.connector().prepare().unwrap();
        let name = PathBuf::from(socket_of(&offer));
        assert_eq!(name.parent(), Some(&*directory));
        assert!(name.exists());
    }
    assert_eq!(names_in(&directory), [""; 0]);
    // Two offers have one name, which is gone once both are used or withdrawn. The next offer has another.
    let (a, b) = (node(LoopbackConfig::default(), 1), node(LoopbackConfig::default(), 2));
    let mut names = Vec::new();
    for round in 0..100 {
        let [(used, offer), (withdrawn, _)] = [(); 2].map(|()| a.domain.connector().prepare().unwrap());
        names.push(socket_of(&offer));
        assert_eq!(names_in(&directory).len(), 1, "round {round}");
        let (slot, ours) = b.domain.connector().prepare_local().unwrap();
        b.domain.connector().complete(slot, &offer).unwrap();
        a.domain.connector().complete(used, &ours).unwrap();
        assert_eq!(names_in(&directory).len(), 1, "round {round}");
        a.domain.connector().disconnect(withdrawn);
        assert_names_go(&directory);
    }
    names.dedup();
    assert_eq!(names.len(), 100);
    assert_nothing_shared();
}

/// The process that other tests kill.
#[test]
#[ignore = "started by others"]
fn holder() {
    match std::env::var(HOLDER).as_deref() {
        Ok("socket") => {
            let a = node(LoopbackConfig::default(), 1);
            let (_, offer) = a.domain.connector().prepare().unwrap();
            println!("\n@{}", socket_of(&offer));
            std::io::stdin().lines().for_each(drop);
        }
        Ok("buffers") => {
            println!("\n@begun");
            loop {
                drop(HostBuffer::sparse(5000).unwrap());
            }
        }
        _ => {}
    }
}

/// Starts [`holder`]. Returns it and the line that it says.
fn start_holder(what: &str) -> (Child, String) {
    let mut command = command("holder", &std::env::temp_dir());
    command.env(HOLDER, what).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let said = lines.filter_map(|line| Some(line.strip_prefix('@')?.to_owned())).next();
    (child, said.expect("the holder says a line"))
}

#[test]
#[ignore = "run by over_the_portable_path"]
fn the_name_of_a_killed_processs_socket_is_removed_by_the_next() {
    let (mut killed, name) = start_holder("socket");
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert!(Path::new(&name).exists(), "nothing removes it before");
    let (mut alive, second) = start_holder("socket");
    assert!(!Path::new(&name).exists() && Path::new(&second).exists());
    // The name of a living process stays.
    let (mut third, _) = start_holder("socket");
    assert!(Path::new(&second).exists());
    for child in [&mut alive, &mut third] {
        drop(child.stdin.take());
        child.wait().unwrap();
    }
}

#[test]
#[ignore = "run by over_the_portable_path"]
fn processes_killed_while_they_allocate_leave_at_most_one_name() {
    for _ in 0..20 {
        let (mut child, _) = start_holder("buffers");
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert!(shared_names().len() <= 1, "{:?}", shared_names());
    drop(HostBuffer::new(1).unwrap());
    assert_nothing_shared();
}

/// An offer of a domain of another process whose socket has the name `socket`.
fn offer_of(socket: &str) -> Vec<u8> {
    let (_, mut offer) = node(LoopbackConfig::default(), 1).domain.connector().prepare().unwrap();
    let own = socket_of(&offer);
    offer.truncate(offer.len() - own.len() - 1);
    offer.push(socket.len() as u8);
    offer.extend(socket.as_bytes());
    // A header of eight bytes, of which the last two are the length of the rest.
    let length = (offer.len() - 8) as u16;
    offer[6..8].copy_from_slice(&length.to_le_bytes());
    offer
}

/// Answers the hello of an initiator. The connection stays open until the answer is dropped.
type Answer = fn(&mut UnixStream) -> Box<dyn Send>;

/// Connects to a target that answers the hello by `answer`. Returns the error.
fn connect_to(answer: Answer) -> Error {
    let path = std::env::temp_dir().join("target");
    let listener = UnixListener::bind(&path).unwrap();
    let offer = offer_of(path.to_str().unwrap());
    let a = node(LoopbackConfig::default(), 2);
    let (slot, _) = a.domain.connector().prepare().unwrap();
    let error = std::thread::scope(|scope| {
        let target = scope.spawn(|| {
            let (mut stream, _) = listener.accept().unwrap();
            let answered = answer(&mut stream);
            (stream, answered)
        });
        let error = a.domain.connector().complete(slot, &offer).unwrap_err();
        // The target waits for nobody, even if this side has not connected.
        let _ = UnixStream::connect(&path);
        drop(target.join().unwrap());
        error
    });
    std::fs::remove_file(&path).unwrap();
    error
}

/// Sends a welcome with `files`.
fn welcome(stream: &UnixStream, files: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(5))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(files)));
    rustix::net::sendmsg(stream, &[IoSlice::new(&[1, 0, 0])], &mut control, SendFlags::empty()).unwrap();
}

#[test]
#[ignore = "run by over_the_portable_path"]
fn targets_that_break_the_protocol_are_refused() {
    let handed_over = |error: Error| {
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        assert!(error.context().contains("hand over"), "{error}");
    };
    let no_memory = |error: Error, why: &str| {
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        assert!(error.context().contains(why), "{error}");
    };
    // Says nothing, and then nothing for as long as this side waits.
    connect_to(|_| Box::new(()));
    let late = connect_to(|stream| {
        stream.write_all(&[9, 0, 0]).unwrap();
        let mut until_closed = stream.try_clone().unwrap();
        let mut sink = [0; 64];
        while std::io::Read::read(&mut until_closed, &mut sink).is_ok_and(|len| len > 0) {}
        Box::new(())
    });
    assert_eq!(late.kind(), ErrorKind::DeadlineExceeded, "{late}");
    // A length that no packet has, and a packet that is no reply.
    for garbage in [
        |stream: &mut UnixStream| -> Box<dyn Send> {
            stream.write_all(&[0xff; 300]).unwrap();
            Box::new(())
        },
        |stream: &mut UnixStream| -> Box<dyn Send> {
            stream.write_all(&[3, 0, 0xff, 0xff, 0xff]).unwrap();
            Box::new(())
        },
    ] {
        connect_to(garbage);
    }
    handed_over(connect_to(|stream| {
        stream.write_all(&[1, 0, 0]).unwrap();
        Box::new(())
    }));
    // A segment, a wakeup handle and a ready set, and no liveness socket, or something else in its place.
    handed_over(connect_to(|stream| {
        let buffer = HostBuffer::new(4096).unwrap();
        let segment = multirail_spi::Memory::shared_file(&buffer).unwrap();
        welcome(stream, &[segment, stream.as_fd(), segment]);
        Box::new(())
    }));
    handed_over(connect_to(|stream| {
        let file = std::fs::File::open("/").unwrap();
        welcome(stream, &[file.as_fd(), stream.as_fd(), file.as_fd(), file.as_fd()]);
        Box::new(())
    }));
    // A file on a disk, and one of another size.
    let on_disk = connect_to(|stream| {
        let file = std::fs::File::open(std::env::current_exe().unwrap()).unwrap();
        welcome(stream, &[file.as_fd(), stream.as_fd(), file.as_fd(), stream.as_fd()]);
        Box::new(())
    });
    no_memory(on_disk, "lies on a disk");
    let short = connect_to(|stream| {
        let buffer = HostBuffer::new(4096).unwrap();
        let segment = multirail_spi::Memory::shared_file(&buffer).unwrap();
        welcome(stream, &[segment, stream.as_fd(), segment, stream.as_fd()]);
        Box::new(())
    });
    no_memory(short, "another size");
    // More files than a packet has.
    connect_to(|stream| {
        welcome(stream, &[stream.as_fd(); 5]);
        Box::new(())
    });
}

#[test]
#[ignore = "run by over_the_portable_path"]
fn a_directory_with_a_long_name_is_refused() {
    let long = std::env::temp_dir().join("long".repeat(20));
    std::fs::create_dir(&long).unwrap();
    let mut command = command("holder", &long);
    let output = command.env(HOLDER, "socket").stdin(Stdio::null()).output().unwrap();
    let said =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success() && said.contains("set TMPDIR to another directory"), "{said}");
    std::fs::remove_dir(&long).unwrap();
}
