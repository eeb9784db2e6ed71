//! The server thread of a domain: sends files to peers in other processes, and notices when those processes die.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use multirail_spi::{Error, ErrorKind, HostSharing, Memory, MemoryKind, Result, StagingPolicy, WakeupPipe};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use crate::domain_state::DomainState;
use crate::inbound::Inbound;
use crate::offer::OfferToken;
#[cfg(target_os = "linux")]
use crate::other_process::GuardPage;
use crate::other_process::process::{self, PeerProcess};
use crate::other_process::protocol::{self, RefusalReason, ServerReply, ServerRequest};
#[cfg(target_os = "linux")]
use crate::other_process::ptrace_permission;
use crate::other_process::{ListeningSocket, OfferedSocket, PacketSocket, ServerSocket, gpu_memory};
use crate::outbound::{Outbound, PeerLocation};
use crate::segment::{Segment, mapping};

/// Connections at once. At this number, connections that have not shown a token are dropped.
const MAX_CONNECTIONS: usize = 1024;

/// Connections accepted per round, so that a process that connects in a loop cannot keep the thread from its other
/// work or from its end. poll(2) reports the connections that are left.
const ACCEPTS_PER_ROUND: usize = 32;

/// Requests of one connection that are answered per round, for the same reason.
const REQUESTS_PER_ROUND: usize = 64;

/// The pause after an accept that failed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// The handle of the thread. Dropping it ends the thread and every connection.
pub(super) struct DomainServer {
    listening: Arc<ListeningSocket>,
    wakeup: Arc<WakeupPipe>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl DomainServer {
    /// Starts a thread that serves `state`.
    pub(super) fn start(state: &Arc<DomainState>) -> Result<Self> {
        let sharing = HostSharing::of_this_process()?;
        let wakeup = Arc::new(WakeupPipe::new()?);
        let listening = Arc::new(ListeningSocket::new(sharing, wakeup.clone())?);
        let stop = Arc::new(AtomicBool::new(false));
        let mut server = ServerLoop {
            state: state.clone(),
            wakeup: wakeup.clone(),
            stop: stop.clone(),
            sharing,
            listening: listening.clone(),
            connections: Vec::new(),
        };
        let thread = std::thread::Builder::new().name("multirail-lo".into()).spawn(move || server.run());
        let thread =
            thread.map_err(|e| Error::os("prepare", "starting a thread; raise the limit (ulimit -u)", e))?;
        Ok(Self { listening, wakeup, stop, thread: Some(thread) })
    }

    /// Listens for the initiator of one offer more.
    pub(super) fn offer(&self) -> Result<OfferedSocket> {
        self.listening.offer()
    }

    /// Makes the thread read the peer table again. The thread watches the processes of the peers in it.
    pub(super) fn update_watched_peers(&self) {
        self.wakeup.handle().wake();
    }
}

impl Drop for DomainServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.wakeup.handle().wake();
        // A region's owner may keep its domain open, and the server thread may drop the owner. The thread cannot join
        // itself.
        let other = self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id());
        if let Some(Err(_)) = other.map(JoinHandle::join) {
            tracing::error!("loopback: the server thread panicked");
        }
    }
}

/// The state of the thread.
struct ServerLoop {
    state: Arc<DomainState>,
    wakeup: Arc<WakeupPipe>,
    stop: Arc<AtomicBool>,
    sharing: HostSharing,
    listening: Arc<ListeningSocket>,
    connections: Vec<ClientConnection>,
}

/// A connection to an initiator in another process.
struct ClientConnection {
    socket: PacketSocket,
    /// The initiator's process, until `inbound` takes it when the initiator has shown its token.
    process: Option<PeerProcess>,
    inbound: Option<Arc<Inbound>>,
    /// The initiator's end of the liveness socket, until the initiator has received it: on macOS, a socket that only a
    /// packet under way refers to may be lost.
    under_way: Option<OwnedFd>,
}

impl ServerLoop {
    fn run(&mut self) {
        while !self.stop.load(Ordering::Acquire) {
            let targets = self.targets();
            let listener = self.listening.current();
            let connections = self.connections.len();
            let mut fds: Vec<BorrowedFd<'_>> = Vec::with_capacity(connections + 1 + targets.len());
            fds.extend(self.connections.iter().map(|connection| connection.socket.as_fd()));
            fds.extend(listener.iter().map(|listener| listener.as_fd()));
            fds.extend(
                targets.iter().filter_map(|outbound| process_of(outbound)).filter_map(PeerProcess::end),
            );
            self.wakeup.sleep(&fds, None);
            self.wakeup.clear();
            let ready = ready(&fds);
            drop(fds);
            for outbound in
                targets.iter().filter(|outbound| process_of(outbound).is_some_and(|p| !p.is_alive()))
            {
                outbound.close();
                self.state.wakeup.wake();
            }
            let mut at = 0;
            let state = &self.state;
            let stop = &self.stop;
            self.connections.retain_mut(|connection| {
                at += 1;
                !connection.is_closed()
                    && (!ready[at - 1] || stop.load(Ordering::Acquire) || connection.serve(state))
            });
            if let Some(listener) = listener.filter(|_| ready[connections]) {
                self.accept(&listener);
            }
        }
    }

    /// The live peers in other processes. The thread watches for their deaths.
    fn targets(&self) -> Vec<Arc<Outbound>> {
        let peers = self.state.peers.all().into_iter();
        let live = peers.filter(|(_, peer)| !peer.leaving).filter_map(|(_, peer)| peer.outbound);
        live.filter(|outbound| {
            outbound.is_alive() && matches!(outbound.location, PeerLocation::OtherProcess(_))
        })
        .collect()
    }

    fn accept(&mut self, listener: &ServerSocket) {
        for _ in 0..ACCEPTS_PER_ROUND {
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            let socket = match listener.accept() {
                Ok(socket) => socket,
                Err(Errno::AGAIN) => return,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(error) => {
                    // Most likely the process is out of descriptors. The connection keeps waiting in the queue, so
                    // the thread must pause. Connections that have not shown a token give their descriptors
                    // back.
                    tracing::warn!(%error, "loopback: cannot accept a peer process; raise the limit of open files (ulimit -n)");
                    self.connections.retain(|connection| connection.inbound.is_some());
                    return std::thread::sleep(ACCEPT_PAUSE);
                }
            };
            if self.connections.len() >= MAX_CONNECTIONS {
                self.connections.retain(|connection| connection.inbound.is_some());
            }
            match PeerProcess::behind(&socket, self.sharing) {
                Ok(process) if self.connections.len() < MAX_CONNECTIONS => {
                    self.connections.push(ClientConnection {
                        socket,
                        process: Some(process),
                        inbound: None,
                        under_way: None,
                    });
                }
                Ok(_) => {
                    tracing::warn!(
                        "loopback: {MAX_CONNECTIONS} peer processes are connected, which is the limit; one more was refused"
                    )
                }
                Err(error) => tracing::warn!(%error, "loopback: a process that connected was refused"),
            }
        }
    }
}

impl ClientConnection {
    /// Answers the requests that have arrived, up to [`REQUESTS_PER_ROUND`]. Returns false if the connection must
    /// end.
    fn serve(&mut self, state: &DomainState) -> bool {
        for _ in 0..REQUESTS_PER_ROUND {
            if self.is_closed() {
                return false;
            }
            let request = match self.socket.receive(RecvFlags::DONTWAIT) {
                Err(Errno::AGAIN | Errno::INTR) => return true,
                Err(_) => return false,
                Ok(None) => continue,
                Ok(Some((request, _))) => request,
            };
            self.under_way = None;
            let answered = match request {
                ServerRequest::Received => true,
                ServerRequest::Hello { version, token } => self.admit(state, version, token),
                ServerRequest::Region { number, key } => self.describe_region(state, number, key),
                ServerRequest::StagingBuffer { number } => self.open_staging_buffer(state, number),
            };
            if !answered {
                return false;
            }
        }
        true
    }

    /// Answers a hello.
    fn admit(&mut self, state: &DomainState, version: u16, token: OfferToken) -> bool {
        if version != protocol::VERSION {
            return self.refuse_hello(RefusalReason::Version);
        }
        // The first hello takes the process. A second hello finds none.
        let Some(mut process) = self.process.take() else { return self.refuse_hello(RefusalReason::Token) };
        let inbound = match state.admit(&token) {
            Ok(Some(inbound)) => inbound,
            Ok(None) => return self.refuse_hello(RefusalReason::Token),
            Err(error) => {
                tracing::warn!(%error, "loopback: a peer process was refused");
                return self.refuse_hello(RefusalReason::Memory);
            }
        };
        match process.open_liveness_socket() {
            Ok(end) => self.under_way = end,
            Err(error) => {
                tracing::warn!(%error, "loopback: a peer process was refused; raise the limit of open files (ulimit -n)");
                return self.refuse_hello(RefusalReason::Memory);
            }
        }
        let _ = inbound.initiator.set(process);
        let was_sent = inbound.files().is_some_and(|files| {
            let files: Vec<_> = files.into_iter().chain(self.under_way.as_ref().map(AsFd::as_fd)).collect();
            self.reply(&ServerReply::Welcome, &files)
        });
        self.inbound = Some(inbound);
        was_sent
    }

    /// Refuses a hello, and ends the connection.
    fn refuse_hello(&self, why: RefusalReason) -> bool {
        self.reply(&ServerReply::Refused { number: 0, why }, &[]);
        false
    }

    /// Answers a request for the region of a key.
    fn describe_region(&self, state: &DomainState, number: u64, key: u64) -> bool {
        if self.inbound.is_none() {
            return false;
        }
        let found = match state.regions.find(key) {
            Ok(found) => found,
            Err(kind) => {
                let why =
                    if kind == ErrorKind::Revoked { RefusalReason::Revoked } else { RefusalReason::Key };
                return self.reply(&ServerReply::Refused { number, why }, &[]);
            }
        };
        let (len, access) = (found.memory.len() as u64, found.access.bits());
        if let MemoryKind::Cuda { .. } = found.memory.kind() {
            return self.describe_gpu_region(number, &*found.memory, access);
        }
        if let (true, Some(file)) = (found.is_shareable, found.memory.shared_file()) {
            if let Err(error) = mapping::commit("import", file, found.memory.len()) {
                tracing::warn!(%error, "loopback: a region could not be shared with a peer process");
                return self.reply(&ServerReply::Refused { number, why: RefusalReason::Memory }, &[]);
            }
            let locked = cuda::Reach::of_host(found.memory.as_ptr() as u64, found.memory.len() as u64)
                == cuda::Reach::Kernel;
            return self.reply(&ServerReply::Shared { number, len, access, locked }, &[file]);
        }
        #[cfg(target_os = "linux")]
        if let Some(pid) = self.inbound.as_ref().and_then(|inbound| inbound.initiator.get()?.pid()) {
            let guard = match GuardPage::own() {
                Ok(guard) => guard,
                Err(error) => {
                    tracing::warn!(%error, "loopback: a region could not be shared with a peer process");
                    return self.reply(&ServerReply::Refused { number, why: RefusalReason::Memory }, &[]);
                }
            };
            let target = ptrace_permission::hints(ptrace_permission::permit(pid));
            let address = found.memory.as_ptr() as u64;
            return self.reply(&ServerReply::Foreign { number, len, access, address, guard, target }, &[]);
        }
        self.reply(&ServerReply::OwnerOnly { number, len, access }, &[])
    }

    fn describe_gpu_region(&self, number: u64, memory: &dyn Memory, access: u32) -> bool {
        let answer = gpu_memory::describe(number, memory, access);
        self.reply(&answer.reply, &answer.files())
    }

    /// Answers a request for the staging buffer.
    fn open_staging_buffer(&self, state: &DomainState, number: u64) -> bool {
        let Some(inbound) = &self.inbound else { return false };
        let buffer =
            if state.staging == StagingPolicy::Never { None } else { inbound.open_staging_buffer().ok() };
        match buffer.and_then(Segment::file) {
            Some(file) => {
                tracing::info!(
                    "loopback: requests of a peer process are staged: they go through shared memory and this worker"
                );
                self.reply(&ServerReply::StagingBuffer { number }, &[file])
            }
            None => self.reply(&ServerReply::Refused { number, why: RefusalReason::Staging }, &[]),
        }
    }

    fn reply(&self, reply: &ServerReply, files: &[BorrowedFd<'_>]) -> bool {
        self.socket.send(reply, files, SendFlags::DONTWAIT).is_ok()
    }

    fn is_closed(&self) -> bool {
        self.inbound.as_ref().is_some_and(|inbound| inbound.is_closed())
    }
}

impl Drop for ClientConnection {
    fn drop(&mut self) {
        // If the other end has closed its socket, it has made its last access before, or it is dead. If this side
        // closes the connection, the leases and the process's end show when the initiator has left.
        if let Some(inbound) = self.inbound.as_ref().filter(|_| process::is_hung_up(self.socket.as_fd())) {
            inbound.mark_initiator_gone();
        }
    }
}

/// The process of a peer. A target that closes in order says so in its segment, so this side has to watch only for its
/// death.
fn process_of(outbound: &Outbound) -> Option<&PeerProcess> {
    match &outbound.location {
        PeerLocation::OtherProcess(connection) => Some(&connection.process),
        PeerLocation::ThisProcess { .. } => None,
    }
}

/// Returns true for each descriptor that is readable or closed.
fn ready(fds: &[BorrowedFd<'_>]) -> Vec<bool> {
    let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    let _ = rustix::event::poll(&mut fds, Some(&at_once));
    fds.iter().map(|fd| !fd.revents().is_empty()).collect()
}
