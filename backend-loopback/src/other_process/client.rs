//! The initiator's end of a connection to a target in another process.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use multirail_spi::{Error, ErrorKind, Result, WakeupHandle};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use super::process::Process;
use super::protocol::{self, Refusal, Reply, Request};
use super::timed_lock::TimedLock;
use crate::offer::Offer;
use crate::segment::Segment;
use crate::segment::staging_buffer::SharedStagingBuffer;

/// The longest time that a peer may take to answer while this side connects.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);

/// Answers to earlier questions, whose callers gave up, that are skipped before the right one.
const MAX_STALE_ANSWERS: usize = 64;

/// A connection to a target: its segment, the handle that wakes it, and a socket for questions.
pub(crate) struct TargetConnection {
    pub(crate) segment: Segment,
    pub(crate) wakeup: WakeupHandle,
    pub(crate) process: Process,
    /// For regions that only the peer can reach. Mapped at the first import of one.
    pub(crate) staging_buffer: OnceLock<Segment<SharedStagingBuffer>>,
    socket: OwnedFd,
    /// One question at a time is under way. Its lock's number is the question's.
    questions: TimedLock,
}

impl TargetConnection {
    /// Connects to the process that made `offer`.
    pub(crate) fn connect(offer: &Offer) -> Result<Self> {
        let fail = |context: &str| {
            let context = format!("{context}; is the peer's domain still open?");
            move |e: Errno| Error::os("connect", context, e)
        };
        let address =
            SocketAddrUnix::new_abstract_name(offer.socket.as_bytes()).map_err(fail("the socket's name"))?;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .map_err(fail("opening a socket"))?;
        let deadline = Instant::now() + CONNECT_LIMIT;
        within(&socket, deadline, || rustix::net::connect(&socket, &address))
            .map_err(fail("connecting to the peer's process"))?;
        let process = Process::behind(&socket)?;
        let hello = Request::Hello { version: protocol::VERSION, token: offer.token };
        within(&socket, deadline, || protocol::send(&socket, &hello, &[], SendFlags::empty()))
            .map_err(fail("sending the hello to the peer"))?;
        let (reply, files) = within(&socket, deadline, || protocol::receive(&socket, RecvFlags::empty()))
            .map_err(fail("waiting for the peer's answer"))?;
        match reply {
            Reply::Welcome => {}
            Reply::Refused { why: Refusal::Version, .. } => {
                let context = "the peer speaks another version: use one build";
                return Err(Error::new(ErrorKind::Version, "connect", context));
            }
            Reply::Refused { why: Refusal::Memory, .. } => return Err(short_of_memory("connect")),
            _ => {
                let context = "the peer's offer was used already or withdrawn: exchange new offers";
                return Err(Error::new(ErrorKind::Unreachable, "connect", context));
            }
        }
        let Ok([file, wakeup]) = <[OwnedFd; 2]>::try_from(files) else {
            let context = "the peer did not hand over its segment and wakeup handle: the peer breaks the protocol, disconnect it";
            return Err(Error::new(ErrorKind::Protocol, "connect", context));
        };
        let segment = Segment::map(file.as_fd())?;
        // The descriptor shares this flag with the peer's own descriptor, which has it set already.
        rustix::io::ioctl_fionbio(&wakeup, true).map_err(fail("preparing the peer's wakeup handle"))?;
        Ok(Self {
            segment,
            wakeup: wakeup.into(),
            process,
            staging_buffer: OnceLock::new(),
            socket,
            questions: TimedLock::default(),
        })
    }

    /// Asks one question and waits for its answer until `deadline`. `question` gets the number to send along. Returns
    /// `None` if the peer sends too many other answers.
    pub(crate) fn query(
        &self,
        deadline: Instant,
        question: impl Fn(u64) -> Request,
    ) -> Result<Option<(Reply, Vec<OwnedFd>)>> {
        let fail = |e: Errno| Error::os("import", "asking the peer for its region", e);
        let socket = &self.socket;
        let lock = self.questions.lock(deadline).ok_or(Errno::TIMEDOUT).map_err(fail)?;
        let request = question(lock.number);
        within(socket, deadline, || protocol::send(socket, &request, &[], SendFlags::empty()))
            .map_err(fail)?;
        for _ in 0..MAX_STALE_ANSWERS {
            let (reply, files) =
                within(socket, deadline, || protocol::receive::<Reply>(socket, RecvFlags::empty()))
                    .map_err(fail)?;
            if reply.number() == Some(lock.number) {
                return Ok(Some((reply, files)));
            }
        }
        Ok(None)
    }
}

/// The error for a peer that has no memory for what it would hand over.
pub(crate) fn short_of_memory(operation: &'static str) -> Error {
    let context = "the peer has no memory left to share with this process; its log says how much it needs: free some, \
                   or raise vm.overcommit_ratio where vm.overcommit_memory is 2";
    Error::new(ErrorKind::Exhausted, operation, context)
}

/// Runs `call`, which waits on `socket`, until `deadline` and no longer. Runs it again when a signal interrupts it.
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
        // A timeout that is rounded down to zero would mean that the call waits without limit.
        let left = Some(left.max(Duration::from_millis(1)));
        set_socket_timeout(socket, Timeout::Recv, left)?;
        set_socket_timeout(socket, Timeout::Send, left)?;
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}
