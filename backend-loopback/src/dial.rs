//! The initiator's end of a connection to another process.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Mutex;
use std::time::Duration;

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
use crate::wire::{self, Refusal, Reply, Request};

/// How long a peer may take to answer while connecting.
const PATIENCE: Duration = Duration::from_secs(2);

/// Answers to questions given up earlier that are skipped before the right one.
const STALE_ANSWERS: usize = 64;

/// An open line to a target: its segment, its bell, and a socket for questions.
pub(crate) struct Line {
    pub(crate) segment: Segment,
    pub(crate) bell: Bell,
    pub(crate) process: Process,
    socket: OwnedFd,
    /// Counts questions; held while one is asked.
    asked: Mutex<u64>,
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
    set_limit(&socket, PATIENCE).map_err(fail("setting a time limit"))?;
    rustix::net::connect(&socket, &address).map_err(fail("calling the peer's process"))?;
    let process = Process::behind(&socket)?;
    let hello = Request::Hello { version: wire::VERSION, token: offer.token };
    wire::send(&socket, &hello, &[], SendFlags::empty()).map_err(fail("greeting the peer"))?;
    let (reply, files) =
        wire::receive(&socket, RecvFlags::empty()).map_err(fail("waiting for the peer's answer"))?;
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
    Ok(Line { segment, bell: bell.into(), process, socket, asked: Mutex::new(0) })
}

impl Line {
    /// Asks what `key` names, and maps it if it can be mapped.
    pub(crate) fn ask(&self, key: u64, limit: Duration) -> Result<Answer> {
        let fail = |e: Errno| Error::os("import", "asking the peer for its region", e);
        let mut asked = self.asked.lock().expect("line");
        *asked += 1;
        set_limit(&self.socket, limit).map_err(fail)?;
        let request = Request::Region { number: *asked, key };
        wire::send(&self.socket, &request, &[], SendFlags::empty()).map_err(fail)?;
        for _ in 0..STALE_ANSWERS {
            let (reply, files) = wire::receive::<Reply>(&self.socket, RecvFlags::empty()).map_err(fail)?;
            match reply {
                Reply::Shared { number, len, access } if number == *asked => {
                    return shared(key, len, Access::from_bits_truncate(access), &files);
                }
                Reply::Foreign { number, len, access, address } if number == *asked => {
                    let place = Place::There(address);
                    let access = Access::from_bits_truncate(access);
                    return Ok(Answer { key: parse(key)?, len, access, place, mapping: None });
                }
                Reply::Refused { number, why } if number == *asked => {
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

fn set_limit(socket: &OwnedFd, limit: Duration) -> rustix::io::Result<()> {
    // Zero would mean for ever.
    let limit = Some(limit.max(Duration::from_millis(1)));
    set_socket_timeout(socket, Timeout::Recv, limit)?;
    set_socket_timeout(socket, Timeout::Send, limit)
}
