//! Peers in other processes of this host: the initiator's end of a connection to such a peer.
//!
//! A [`TargetConnection`] asks a target's server by the [`protocol`], and gets files. [`process`] identifies the
//! process at the other end of a socket. [`gpu_memory`] shares memory of GPUs between processes.
//!
//! What Linux does by calls of its own, every Unix does by others. Two modules make the sockets: `linux`, and
//! [`portable`] for the portable path ([`HostSharing`]). On Linux, `vm_call` has the kernel's calls on memory of
//! another process; a `guard_page` makes sure that a call reaches the right process, `ptrace_permission` permits the
//! calls, and `ptrace_diagnosis` finds out why the kernel refuses. The portable path stages such memory.

pub(crate) mod gpu_memory;
#[cfg(target_os = "linux")]
mod guard_page;
#[cfg(target_os = "linux")]
mod linux;
mod packet_socket;
mod portable;
pub(crate) mod process;
pub(crate) mod protocol;
#[cfg(target_os = "linux")]
pub(crate) mod ptrace_diagnosis;
#[cfg(target_os = "linux")]
pub(crate) mod ptrace_permission;
mod server_socket;
mod timed_lock;
#[cfg(target_os = "linux")]
pub(crate) mod vm_call;
mod wait_set;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use multirail_spi::{Error, ErrorKind, HostSharing, Result, WakeupHandle};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags};

use crate::offer::LoopbackOffer;
use crate::segment::Segment;
use crate::segment::ready_set::ReadySet;
use crate::segment::staging_buffer::SharedStagingBuffer;
#[cfg(target_os = "linux")]
pub(crate) use guard_page::GuardPage;
pub(crate) use packet_socket::PacketSocket;
pub(crate) use process::PeerProcess;
use protocol::{RefusalReason, ServerReply, ServerRequest};
pub(crate) use server_socket::{ListeningSocket, OfferedSocket, ServerSocket};
use timed_lock::TimedLock;
pub(crate) use wait_set::WaitSet;

/// Initiators that wait to be accepted, at most.
const BACKLOG: i32 = 128;

/// The longest time that a peer may take to answer while this side connects.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);

/// The most replies to earlier requests that are skipped before the right one. The callers of those requests have given
/// up.
const MAX_STALE_REPLIES: usize = 64;

/// A connection to a target: its segment, the handle that wakes it, and a socket for requests to its server.
pub(crate) struct TargetConnection {
    pub(crate) segment: Segment,
    pub(crate) wakeup: WakeupHandle,
    /// The ready set of the peer's domain.
    ready: Segment<ReadySet>,
    pub(crate) process: PeerProcess,
    /// For regions that only the peer can reach. Mapped at the first import of one.
    pub(crate) staging_buffer: OnceLock<Segment<SharedStagingBuffer>>,
    socket: PacketSocket,
    /// Held while a request to the server is under way. The number of the holder is the number of its request.
    request_lock: TimedLock,
}

impl TargetConnection {
    /// Connects to the process that made `offer`.
    pub(crate) fn connect(offer: &LoopbackOffer) -> Result<Self> {
        let sharing = HostSharing::of_this_process()?;
        let fail = |context: &'static str| {
            move |why: Errno| match why {
                // The target stopped listening before it took this connection.
                Errno::PIPE | Errno::CONNRESET if sharing.is_portable() => portable::offer_gone(),
                _ => connect_error(context, why),
            }
        };
        if let Some(obstacle) = ServerSocket::obstacle(sharing, &offer.socket) {
            return Err(Error::new(ErrorKind::Unreachable, "connect", obstacle));
        }
        let deadline = Instant::now() + CONNECT_LIMIT;
        let socket = ServerSocket::connect(sharing, &offer.socket, deadline)?;
        let mut process = PeerProcess::behind(&socket, sharing)?;
        let hello = ServerRequest::Hello { version: protocol::VERSION, token: offer.token };
        within(&socket, deadline, || socket.send(&hello, &[], SendFlags::empty()))
            .map_err(fail("sending the hello to the peer"))?;
        let (reply, files) = receive(&socket, deadline).map_err(fail("waiting for the peer's answer"))?;
        match reply {
            ServerReply::Welcome => {}
            ServerReply::Refused { why: RefusalReason::Version, .. } => {
                let context = "the peer speaks another version: use one build";
                return Err(Error::new(ErrorKind::Version, "connect", context));
            }
            ServerReply::Refused { why: RefusalReason::Memory, .. } => {
                return Err(short_of_memory("connect"));
            }
            _ => {
                let context = "the peer's offer was used already or withdrawn: exchange new offers";
                return Err(Error::new(ErrorKind::Unreachable, "connect", context));
            }
        }
        let mut files = files.into_iter();
        let (Some(file), Some(wakeup), Some(ready), true, None) = (
            files.next(),
            files.next(),
            files.next(),
            process.take_liveness_socket(files.next()),
            files.next(),
        ) else {
            let context = "the peer did not hand over its segment, its wakeup handle and its ready set: the peer \
                           breaks the protocol, disconnect it";
            return Err(Error::new(ErrorKind::Protocol, "connect", context));
        };
        let (segment, ready) = (Segment::map(file.as_fd())?, Segment::map(ready.as_fd())?);
        // The descriptor shares this flag with the peer's own descriptor, which has it set already.
        rustix::io::ioctl_fionbio(&wakeup, true).map_err(fail("preparing the peer's wakeup handle"))?;
        #[cfg(target_vendor = "apple")]
        rustix::net::sockopt::set_socket_nosigpipe(&wakeup, true)
            .map_err(fail("preparing the peer's wakeup handle"))?;
        if sharing.is_portable() {
            within(&socket, deadline, || socket.send(&ServerRequest::Received, &[], SendFlags::empty()))
                .map_err(fail("telling the peer that its files have arrived"))?;
        }
        Ok(Self {
            segment,
            wakeup: wakeup.into(),
            ready,
            process,
            staging_buffer: OnceLock::new(),
            socket,
            request_lock: TimedLock::default(),
        })
    }

    /// Tells the peer's endpoint that this side has written into its armed ring.
    pub(crate) fn mark_ready(&self) {
        self.ready.content().mark(self.segment.content().flags.slot.load(Ordering::Relaxed));
        self.wakeup.wake();
    }

    /// Sends one request to the server and waits for the reply until `deadline`. `request` makes the request from its
    /// number. Returns `None` if the peer sends too many replies to other requests.
    pub(crate) fn query(
        &self,
        deadline: Instant,
        request: impl Fn(u64) -> ServerRequest,
    ) -> Result<Option<(ServerReply, Vec<OwnedFd>)>> {
        let fail = |e: Errno| Error::os("import", "asking the peer for its region", e);
        let socket = &self.socket;
        let lock = self.request_lock.lock(deadline).ok_or(Errno::TIMEDOUT).map_err(fail)?;
        let request = request(lock.number);
        within(socket, deadline, || socket.send(&request, &[], SendFlags::empty())).map_err(fail)?;
        for _ in 0..MAX_STALE_REPLIES {
            let (reply, files) = receive(socket, deadline).map_err(fail)?;
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

/// The error of a connect that failed at `context`.
fn connect_error(context: &str, why: Errno) -> Error {
    Error::os("connect", format!("{context}; is the peer's domain still open?"), why)
}

/// The error of a server's socket that could not be opened.
fn listen_error(why: Errno) -> Error {
    Error::os("prepare", "opening the socket to which peers connect", why)
}

/// Waits for a reply until `deadline`.
fn receive(socket: &PacketSocket, deadline: Instant) -> rustix::io::Result<(ServerReply, Vec<OwnedFd>)> {
    loop {
        if let Some(packet) = within(socket, deadline, || socket.receive(RecvFlags::empty()))? {
            return Ok(packet);
        }
    }
}

/// Runs `call`, which waits on `socket`, for no longer than until `deadline`. Runs it again if a signal interrupts it.
fn within<T>(
    socket: impl AsFd,
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
        let set = set_socket_timeout(&socket, Timeout::Recv, left)
            .and_then(|()| set_socket_timeout(&socket, Timeout::Send, left));
        match set {
            // macOS refuses to set options of a socket whose other end is closed (`sosetoptlock` in XNU's
            // bsd/kern/uipc_socket.c).
            Err(Errno::INVAL) => return Err(Errno::PIPE),
            set => set?,
        }
        match call() {
            Err(Errno::INTR) => {}
            other => return other,
        }
    }
}
