//! The server thread of a domain: sends files to peers in other processes, and notices when those processes die.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use multirail_spi::{
    Error, ErrorKind, HostSharing, Memory, MemoryKind, Result, SharedRange, StagingPolicy, WakeupPipe,
};
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
use crate::other_process::{ListeningSocket, OfferedSocket, PacketSocket, ServerSocket, WaitSet, gpu_memory};
use crate::outbound::{Outbound, PeerLocation};
use crate::segment::{Segment, mapping};

/// Connections at once that have not shown a token. At this number they are dropped.
const MAX_STRANGERS: usize = 1024;

/// The numbers under which the thread waits for its wakeup, its listener, and the end of a target's process. Smaller
/// ones than [`PROCESS`] are those of connections.
const WAKEUP: u64 = 0;
const LISTENER: u64 = 1;
const FIRST_CONNECTION: u64 = 2;
const PROCESS: u64 = 1 << 63;

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
    changes: Arc<Mutex<Vec<PeerChange>>>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread must know of the peers.
enum PeerChange {
    /// This side has connected to a target. The thread watches the target's process.
    Connected(Arc<Outbound>),
    /// This side has disconnected a peer, after it has closed both halves. The connection to the target, if there was
    /// one: its slot may be another peer's by now.
    Left(Option<Arc<Outbound>>),
}

impl DomainServer {
    /// Starts a thread that serves `state`.
    pub(super) fn start(state: &Arc<DomainState>) -> Result<Self> {
        let mut server = ServerLoop::new(state)?;
        let (listening, wakeup) = (server.listening.clone(), server.wakeup.clone());
        let (stop, changes) = (server.stop.clone(), server.changes.clone());
        let thread = std::thread::Builder::new().name("multirail-lo".into()).spawn(move || server.run());
        let thread =
            thread.map_err(|e| Error::os("prepare", "starting a thread; raise the limit (ulimit -u)", e))?;
        Ok(Self { listening, wakeup, stop, changes, thread: Some(thread) })
    }

    /// Listens for the initiator of one offer more.
    pub(super) fn offer(&self) -> Result<OfferedSocket> {
        self.listening.offer()
    }

    /// This side has connected to a target. The thread watches for the death of the target's process.
    pub(super) fn watch(&self, outbound: Arc<Outbound>) {
        self.change(PeerChange::Connected(outbound));
    }

    /// This side has disconnected a peer, to which `outbound` was the connection.
    pub(super) fn forget(&self, outbound: Option<Arc<Outbound>>) {
        self.change(PeerChange::Left(outbound));
    }

    fn change(&self, change: PeerChange) {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner).push(change);
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
    changes: Arc<Mutex<Vec<PeerChange>>>,
    /// The descriptors that the thread waits for, by number.
    waits: WaitSet,
    /// The name of the socket in `waits`.
    listens_at: Option<String>,
    /// The number of the next connection.
    next_connection: u64,
    connections: HashMap<u64, ClientConnection>,
    /// Connections that have not shown a token.
    strangers: usize,
    /// Connections to targets in other processes, by the number of the process. The thread waits for each process once.
    targets: HashMap<u64, TargetProcess>,
}

/// A process with targets.
#[derive(Default)]
struct TargetProcess {
    /// Whether the thread waits for its end.
    is_watched: bool,
    connections: Vec<Arc<Outbound>>,
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
    /// A server of `state`, which does not run yet.
    fn new(state: &Arc<DomainState>) -> Result<Self> {
        let sharing = HostSharing::of_this_process()?;
        let wakeup = Arc::new(WakeupPipe::new()?);
        let listening = Arc::new(ListeningSocket::new(sharing, wakeup.clone())?);
        let wait_error = |e| {
            Error::os("prepare", "waiting for peer processes; raise the limit of open files (ulimit -n)", e)
        };
        let mut waits = WaitSet::new().map_err(wait_error)?;
        waits.add(wakeup.as_fd(), WAKEUP).map_err(wait_error)?;
        Ok(Self {
            state: state.clone(),
            wakeup,
            stop: Arc::default(),
            sharing,
            listening,
            changes: Arc::default(),
            waits,
            listens_at: None,
            next_connection: FIRST_CONNECTION,
            connections: HashMap::new(),
            strangers: 0,
            targets: HashMap::new(),
        })
    }

    fn run(&mut self) {
        let mut ready = Vec::new();
        while !self.stop.load(Ordering::Acquire) {
            self.apply_changes();
            let listener = self.listening.current();
            self.listen(listener.as_deref());
            self.waits.wait(&mut ready);
            for number in ready.drain(..) {
                match number {
                    WAKEUP => self.wakeup.clear(),
                    LISTENER => listener.iter().for_each(|listener| self.accept(listener)),
                    number if number & PROCESS != 0 => self.end_process(number),
                    number => self.serve(number),
                }
                if self.stop.load(Ordering::Acquire) {
                    return;
                }
            }
        }
    }

    /// Watches the processes of the peers that have connected, and forgets the peers that have left.
    fn apply_changes(&mut self) {
        let changes = std::mem::take(&mut *self.changes.lock().unwrap_or_else(PoisonError::into_inner));
        for change in changes {
            match change {
                PeerChange::Connected(outbound) => self.watch(outbound),
                PeerChange::Left(outbound) => {
                    outbound.iter().for_each(|outbound| self.forget_target(outbound));
                    let waits = &mut self.waits;
                    let strangers = &mut self.strangers;
                    let closed = self.connections.extract_if(|_, connection| connection.is_closed());
                    closed.for_each(|(_, connection)| connection.leave(waits, strangers));
                }
            }
        }
    }

    /// Watches for the death of a target's process.
    fn watch(&mut self, outbound: Arc<Outbound>) {
        // A peer that is disconnected while it connects may have left before it is to be watched.
        if outbound.is_closed() {
            return;
        }
        let Some((number, end)) = process_of(&outbound) else { return };
        let process = self.targets.entry(number).or_default();
        if !process.is_watched {
            match self.waits.add(end, number) {
                Ok(()) => process.is_watched = true,
                // The next connection tries again.
                Err(error) => {
                    tracing::warn!(%error, "loopback: the process of a peer cannot be watched; free memory");
                }
            }
        }
        process.connections.push(outbound);
    }

    /// A process has ended.
    fn end_process(&mut self, number: u64) {
        let Some(TargetProcess { connections, .. }) = self.targets.remove(&number) else { return };
        if let Some((_, end)) = connections.first().and_then(|first| process_of(first)) {
            self.waits.remove(end);
        }
        connections.iter().for_each(|outbound| outbound.close());
        self.state.wakeup.wake();
    }

    fn forget_target(&mut self, outbound: &Arc<Outbound>) {
        let Some((number, end)) = process_of(outbound) else { return };
        let Some(TargetProcess { connections, .. }) = self.targets.get_mut(&number) else { return };
        connections.retain(|target| !Arc::ptr_eq(target, outbound));
        if connections.is_empty() {
            self.targets.remove(&number);
            self.waits.remove(end);
        }
    }

    /// Waits for initiators at `listener`, the socket that is open now.
    fn listen(&mut self, listener: Option<&ServerSocket>) {
        if self.listens_at.as_deref() == listener.map(ServerSocket::name) {
            return;
        }
        // The earlier socket is closed.
        self.waits.remove_closed(LISTENER);
        self.listens_at = None;
        if let Some(listener) = listener {
            match self.waits.add(listener.as_fd(), LISTENER) {
                Ok(()) => self.listens_at = Some(listener.name().into()),
                Err(error) => tracing::warn!(%error, "loopback: cannot wait for peer processes; free memory"),
            }
        }
    }

    /// Answers the requests of a connection.
    fn serve(&mut self, number: u64) {
        let Some(connection) = self.connections.get_mut(&number) else { return };
        let was_admitted = connection.inbound.is_some();
        let goes_on = !connection.is_closed() && connection.serve(&self.state);
        if !was_admitted && connection.inbound.is_some() {
            self.strangers -= 1;
        }
        if !goes_on && let Some(connection) = self.connections.remove(&number) {
            connection.leave(&mut self.waits, &mut self.strangers);
        }
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
                    self.drop_strangers();
                    return std::thread::sleep(ACCEPT_PAUSE);
                }
            };
            if self.strangers >= MAX_STRANGERS {
                self.drop_strangers();
            }
            match PeerProcess::behind(&socket, self.sharing) {
                Ok(process) => {
                    let number = self.next_connection;
                    if let Err(error) = self.waits.add(socket.as_fd(), number) {
                        tracing::warn!(%error, "loopback: a peer process was refused; free memory");
                        continue;
                    }
                    self.next_connection += 1;
                    self.strangers += 1;
                    let connection =
                        ClientConnection { socket, process: Some(process), inbound: None, under_way: None };
                    self.connections.insert(number, connection);
                }
                Err(error) => tracing::warn!(%error, "loopback: a process that connected was refused"),
            }
        }
    }

    /// Ends the connections that have not shown a token.
    fn drop_strangers(&mut self) {
        let strangers = self.connections.extract_if(|_, connection| connection.inbound.is_none());
        strangers.for_each(|(_, connection)| connection.leave(&mut self.waits, &mut self.strangers));
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
            let files: Vec<_> =
                files.all().into_iter().chain(self.under_way.as_ref().map(AsFd::as_fd)).collect();
            self.reply(&ServerReply::Welcome, &files)
        });
        if was_sent {
            inbound.close_file();
        }
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
        let shared = if found.is_shareable { found.memory.shared_range() } else { None };
        // Before the lease is opened: if the peer leaves meanwhile, either it gets no file, or the owner knows of it
        // then.
        shared.inspect(SharedRange::hand_out);
        let opened = self.inbound.as_ref().map(|inbound| state.regions.open(inbound, key));
        if let Some(Err(error)) = opened {
            let why = if error.kind() == ErrorKind::Exhausted {
                tracing::warn!(%error, "loopback: a region could not be shared with a peer process");
                RefusalReason::Memory
            } else {
                RefusalReason::Revoked
            };
            return self.reply(&ServerReply::Refused { number, why }, &[]);
        }
        let (len, access) = (found.memory.len() as u64, found.access.bits());
        if let MemoryKind::Cuda { .. } = found.memory.kind() {
            return self.describe_gpu_region(number, &*found.memory, access);
        }
        if let Some(SharedRange { file, offset, file_len, .. }) = shared {
            // A range of a larger file has its memory.
            if file_len == len
                && let Err(error) = mapping::commit("import", file, found.memory.len())
            {
                tracing::warn!(%error, "loopback: a region could not be shared with a peer process");
                return self.reply(&ServerReply::Refused { number, why: RefusalReason::Memory }, &[]);
            }
            let locked = cuda::Reach::of_host(found.memory.as_ptr() as u64, found.memory.len() as u64)
                == cuda::Reach::Kernel;
            return self
                .reply(&ServerReply::Shared { number, len, access, locked, offset, file_len }, &[file]);
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
                let file = file.as_fd();
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

    /// Ends the connection, which is no longer among those of the thread.
    fn leave(self, waits: &mut WaitSet, strangers: &mut usize) {
        *strangers -= usize::from(self.inbound.is_none());
        waits.remove(self.socket.as_fd());
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

/// The descriptor that shows the end of a peer's process, and the number under which the thread waits for it. The
/// number is the process's own as long as a connection to it is open. A target that closes in order says so in its
/// segment, so this side has to watch only for its death.
fn process_of(outbound: &Outbound) -> Option<(u64, BorrowedFd<'_>)> {
    let PeerLocation::OtherProcess(connection) = &outbound.location else { return None };
    let end = connection.process.end()?;
    Some((PROCESS | end.as_raw_fd() as u64, end))
}

#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests;
