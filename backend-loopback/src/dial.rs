//! The initiator's end of a connection to another process.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};
use transport_core::{Access, Bell, Error, ErrorKind, Result};

use crate::domain::refused;
use crate::mapping::Mapping;
use crate::offer::Offer;
use crate::process::Process;
use crate::region::Key;
use crate::remote::{Answer, Place};
use crate::segment::Segment;
use crate::turn::Turns;
use crate::wire::{self, Refusal, Reply, Request};

/// How long a peer may take to answer while connecting.
const PATIENCE: Duration = Duration::from_secs(2);

/// Nobody waits longer; more could overflow the system's clocks.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// Answers to questions given up earlier that are skipped before the right one.
const STALE_ANSWERS: usize = 64;

/// An open line to a target: its segment, its bell, and a socket for questions.
pub(crate) struct Line {
    pub(crate) segment: Segment,
    pub(crate) bell: Bell,
    pub(crate) process: Process,
    socket: OwnedFd,
    /// One question at a time; its turn's number names it.
    turns: Turns,
}

/// Calls the process that made `offer`.
pub(crate) fn dial(offer: &Offer) -> Result<Line> {
    let fail = |context: &str| {
        let context = format!("{context}; is the peer's domain still open?");
        move |e: Errno| Error::os("connect", context, e)
    };
    let address =
        SocketAddrUnix::new_abstract_name(offer.socket.as_bytes()).map_err(fail("the socket's name"))?;
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .map_err(fail("opening a socket"))?;
    let deadline = Instant::now() + PATIENCE;
    within(&socket, deadline, || rustix::net::connect(&socket, &address))
        .map_err(fail("calling the peer's process"))?;
    let process = Process::behind(&socket)?;
    let hello = Request::Hello { version: wire::VERSION, token: offer.token };
    within(&socket, deadline, || wire::send(&socket, &hello, &[], SendFlags::empty()))
        .map_err(fail("greeting the peer"))?;
    let (reply, files) = within(&socket, deadline, || wire::receive(&socket, RecvFlags::empty()))
        .map_err(fail("waiting for the peer's answer"))?;
    match reply {
        Reply::Welcome => {}
        Reply::Refused { why: Refusal::Version, .. } => {
            let context = "the peer speaks another version: use one build";
            return Err(Error::new(ErrorKind::Version, "connect", context));
        }
        _ => {
            let context = "the peer's offer was used already or withdrawn: exchange new offers";
            return Err(Error::new(ErrorKind::Unreachable, "connect", context));
        }
    }
    let Ok([file, bell]) = <[OwnedFd; 2]>::try_from(files) else {
        let context = "the peer did not hand over its segment and bell: do not trust this peer";
        return Err(Error::new(ErrorKind::Protocol, "connect", context));
    };
    let segment = Segment::map(file.as_fd())?;
    // The descriptor shares its flags with the peer's own; setting this one twice does no harm.
    rustix::io::ioctl_fionbio(&bell, true).map_err(fail("preparing the peer's bell"))?;
    Ok(Line { segment, bell: bell.into(), process, socket, turns: Turns::default() })
}

impl Line {
    /// Asks what `key` names, and maps it if it can be mapped. Waiting for others
    /// who ask counts: all together takes no longer than `limit`.
    pub(crate) fn ask(&self, key: u64, limit: Duration) -> Result<Answer> {
        let fail = |e: Errno| Error::os("import", "asking the peer for its region", e);
        let (socket, deadline) = (&self.socket, Instant::now() + limit.min(LONGEST));
        let turn = self.turns.take(deadline).ok_or(Errno::TIMEDOUT).map_err(fail)?;
        let asked = turn.number;
        let request = Request::Region { number: asked, key };
        within(socket, deadline, || wire::send(socket, &request, &[], SendFlags::empty())).map_err(fail)?;
        for _ in 0..STALE_ANSWERS {
            let (reply, files) =
                within(socket, deadline, || wire::receive::<Reply>(socket, RecvFlags::empty()))
                    .map_err(fail)?;
            match reply {
                Reply::Shared { number, len, access } if number == asked => {
                    return shared(key, len, Access::from_bits_truncate(access), &files);
                }
                Reply::Foreign { number, len, access, address } if number == asked => {
                    let place = Place::There(address);
                    let access = Access::from_bits_truncate(access);
                    return Ok(Answer { key: parse(key)?, len, access, place, mapping: None });
                }
                Reply::Refused { number, why } if number == asked => {
                    let revoked = why == Refusal::Revoked;
                    return Err(refused(if revoked { ErrorKind::Revoked } else { ErrorKind::RemoteAccess }));
                }
                _ => {}
            }
        }
        Err(Error::new(ErrorKind::Protocol, "import", "the peer answers other questions: connect again"))
    }
}

fn shared(key: u64, len: u64, access: Access, files: &[OwnedFd]) -> Result<Answer> {
    let ([file], Ok(size)) = (files, usize::try_from(len)) else {
        let context = "the peer did not hand over the region's file: do not trust this peer";
        return Err(Error::new(ErrorKind::Protocol, "import", context));
    };
    let mapping = Mapping::new("import", file.as_fd(), size, access.contains(Access::REMOTE_WRITE))?;
    Ok(Answer { key: parse(key)?, len, access, place: Place::Here(mapping.start()), mapping: Some(mapping) })
}

fn parse(key: u64) -> Result<Key> {
    Key::from_wire(key).ok_or_else(|| refused(ErrorKind::RemoteAccess))
}

/// Has `call` wait on `socket` until `deadline` and no longer; again when a signal interrupts it.
fn within<T>(
    socket: &OwnedFd,
    deadline: Instant,
    call: impl Fn() -> rustix::io::Result<T>,
) -> rustix::io::Result<T> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Errno::TIMEDOUT);
        }
        // Rounded down to zero it would mean for ever.
        let left = Some(left.max(Duration::from_millis(1)));
        set_socket_timeout(socket, Timeout::Recv, left)?;
        set_socket_timeout(socket, Timeout::Send, left)?;
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}
