//! The target's end: hands files to peers of other processes, and sees them die.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use multirail_spi::{Error, ErrorKind, Memory, MemoryKind, Result, Staging, WakeupPipe};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use crate::domain::{Core, random};
use crate::gpu;
use crate::guard::GuardPage;
use crate::peer::{Inbound, Outbound, Reach};
use crate::process::{self, Process};
use crate::segment::Segment;
use crate::wire::{self, Refusal, Reply, Request};

/// Connections at once. Strangers that only take up room are dropped beyond it.
const CLIENTS: usize = 1024;

/// Callers taken per turn, so that nobody who calls in a loop keeps the thread from
/// its clients or its end; poll(2) tells of those left.
const CALLS: usize = 32;

/// Requests of one client answered per turn, for the same reason.
const REQUESTS: usize = 64;

/// Pause after a failed accept.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);

/// A domain's thread. Dropping it ends the thread and every connection.
pub(crate) struct Server {
    name: String,
    door: Arc<WakeupPipe>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts serving `core`.
    pub(crate) fn start(core: &Arc<Core>) -> Result<Self> {
        let fail = |e: Errno| Error::os("prepare", "opening the socket that peers call", e);
        let name = format!("multirail-lo-{:016x}-{:016x}", core.id, u64::from_ne_bytes(random()?));
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
        let listener = listener.map_err(fail)?;
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(fail)?;
        rustix::net::bind(&listener, &address).map_err(fail)?;
        rustix::net::listen(&listener, 128).map_err(fail)?;
        let door = Arc::new(WakeupPipe::new()?);
        let stop = Arc::new(AtomicBool::new(false));
        let mut service = Service {
            core: core.clone(),
            door: door.clone(),
            stop: stop.clone(),
            listener,
            clients: Vec::new(),
        };
        let thread = std::thread::Builder::new().name("multirail-lo".into()).spawn(move || service.run());
        let thread =
            thread.map_err(|e| Error::os("prepare", "starting a thread; raise the limit (ulimit -u)", e))?;
        Ok(Self { name, door, stop, thread: Some(thread) })
    }

    /// The abstract name peers call.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Peers came or went: watch the right ones.
    pub(crate) fn look_again(&self) {
        self.door.handle().wake();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.door.handle().wake();
        // The owner of some memory may hold its domain and be dropped by the server itself.
        let other = self.thread.take().filter(|thread| thread.thread().id() != std::thread::current().id());
        if let Some(Err(_)) = other.map(JoinHandle::join) {
            tracing::error!("loopback: the server thread panicked");
        }
    }
}

struct Service {
    core: Arc<Core>,
    door: Arc<WakeupPipe>,
    stop: Arc<AtomicBool>,
    listener: OwnedFd,
    clients: Vec<Client>,
}

/// An initiator in another process.
struct Client {
    socket: OwnedFd,
    /// Taken by `inbound` once it has shown its token.
    process: Option<Process>,
    inbound: Option<Arc<Inbound>>,
}

impl Service {
    fn run(&mut self) {
        while !self.stop.load(Ordering::Acquire) {
            let targets = self.targets();
            let mut fds: Vec<BorrowedFd<'_>> = vec![self.listener.as_fd()];
            fds.extend(self.clients.iter().map(|client| client.socket.as_fd()));
            fds.extend(targets.iter().filter_map(|outbound| process_of(outbound)).map(Process::pidfd));
            self.door.sleep(&fds, None);
            self.door.clear();
            let ready = ready(&fds);
            drop(fds);
            for outbound in
                targets.iter().filter(|outbound| process_of(outbound).is_some_and(|p| !p.is_alive()))
            {
                outbound.hang_up();
                self.core.door.ring();
            }
            let mut at = 0;
            let core = &self.core;
            let stop = &self.stop;
            self.clients.retain_mut(|client| {
                at += 1;
                !client.is_closed() && (!ready[at] || stop.load(Ordering::Acquire) || client.serve(core))
            });
            if ready[0] {
                self.accept();
            }
        }
    }

    /// The connections to other processes that are worth watching.
    fn targets(&self) -> Vec<Arc<Outbound>> {
        let peers = self.core.peers.all().into_iter();
        let live = peers.filter(|(_, peer)| !peer.leaving).filter_map(|(_, peer)| peer.outbound);
        live.filter(|outbound| outbound.is_alive() && matches!(outbound.reach, Reach::Process(_))).collect()
    }

    fn accept(&mut self) {
        for _ in 0..CALLS {
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = match rustix::net::accept_with(&self.listener, flags) {
                Ok(socket) => socket,
                Err(Errno::AGAIN) => return,
                Err(error) => {
                    // Out of descriptors, most likely; the caller keeps waiting, so do not spin.
                    // Strangers give theirs back.
                    tracing::warn!(%error, "loopback: cannot accept a peer; raise the limit of open files");
                    self.clients.retain(|client| client.inbound.is_some());
                    return std::thread::sleep(ACCEPT_PAUSE);
                }
            };
            if self.clients.len() >= CLIENTS {
                self.clients.retain(|client| client.inbound.is_some());
            }
            match Process::behind(&socket) {
                Ok(process) if self.clients.len() < CLIENTS => {
                    self.clients.push(Client { socket, process: Some(process), inbound: None });
                }
                Ok(_) => {
                    tracing::warn!("loopback: {CLIENTS} peer processes are connected; one more was refused")
                }
                Err(error) => tracing::warn!(%error, "loopback: a caller was refused"),
            }
        }
    }
}

impl Client {
    /// Answers what has come in, or as much of it as one turn bears. `false` ends the
    /// connection.
    fn serve(&mut self, core: &Core) -> bool {
        for _ in 0..REQUESTS {
            if self.is_closed() {
                return false;
            }
            let answered = match wire::receive::<Request>(&self.socket, RecvFlags::DONTWAIT) {
                Err(Errno::AGAIN | Errno::INTR) => return true,
                Err(_) => false,
                Ok((Request::Hello { version, token }, _)) => self.greet(core, version, token),
                Ok((Request::Region { number, key }, _)) => self.describe(core, number, key),
                Ok((Request::Stage { number }, _)) => self.stage(core, number),
            };
            if !answered {
                return false;
            }
        }
        true
    }

    fn greet(&mut self, core: &Core, version: u16, token: crate::offer::Token) -> bool {
        if version != wire::VERSION {
            return self.turn_away(Refusal::Version);
        }
        // The first hello takes it: a second one finds none.
        let Some(process) = self.process.take() else { return self.turn_away(Refusal::Token) };
        let inbound = match core.admit(&token) {
            Ok(Some(inbound)) => inbound,
            Ok(None) => return self.turn_away(Refusal::Token),
            Err(error) => {
                tracing::warn!(%error, "loopback: a peer process was refused");
                return self.turn_away(Refusal::Memory);
            }
        };
        let _ = inbound.initiator.set(process);
        let welcomed = inbound.files().is_some_and(|files| self.reply(&Reply::Welcome, &files));
        self.inbound = Some(inbound);
        welcomed
    }

    /// Answers a hello that is refused; the connection ends.
    fn turn_away(&self, why: Refusal) -> bool {
        self.reply(&Reply::Refused { number: 0, why }, &[]);
        false
    }

    fn describe(&self, core: &Core, number: u64, key: u64) -> bool {
        let Some(inbound) = &self.inbound else { return false };
        let found = match core.regions.find(key) {
            Ok(found) => found,
            Err(kind) => {
                let why = if kind == ErrorKind::Revoked { Refusal::Revoked } else { Refusal::Key };
                return self.reply(&Reply::Refused { number, why }, &[]);
            }
        };
        let (len, access) = (found.memory.len() as u64, found.access.bits());
        if let MemoryKind::Cuda { .. } = found.memory.kind() {
            return self.describe_gpu(number, &*found.memory, access);
        }
        if let (true, Some(file)) = (found.shared, found.memory.shared_file()) {
            if let Err(error) = crate::mapping::commit("import", file, found.memory.len()) {
                tracing::warn!(%error, "loopback: a region was not handed to a peer process");
                return self.reply(&Reply::Refused { number, why: Refusal::Memory }, &[]);
            }
            let locked = cuda::Reach::of_host(found.memory.as_ptr() as u64, found.memory.len() as u64)
                == cuda::Reach::Kernel;
            return self.reply(&Reply::Shared { number, len, access, locked }, &[file]);
        }
        let guard = match GuardPage::ours() {
            Ok(guard) => guard,
            Err(error) => {
                tracing::warn!(%error, "loopback: a region was not handed to a peer process");
                return self.reply(&Reply::Refused { number, why: Refusal::Memory }, &[]);
            }
        };
        let permitted = inbound.initiator.get().map_or(0, process::permit);
        let address = found.memory.as_ptr() as u64;
        let target = process::hints(permitted);
        self.reply(&Reply::Foreign { number, len, access, address, guard, target }, &[])
    }

    fn describe_gpu(&self, number: u64, memory: &dyn Memory, access: u32) -> bool {
        let said = gpu::share::say(number, memory, access);
        self.reply(&said.reply, &said.files())
    }

    fn stage(&self, core: &Core, number: u64) -> bool {
        let Some(inbound) = &self.inbound else { return false };
        let staged = if core.staging == Staging::Never { None } else { inbound.staged().ok() };
        match staged.and_then(Segment::file) {
            Some(file) => {
                tracing::info!("loopback: a peer's bytes go through shared memory and this worker");
                self.reply(&Reply::Stage { number }, &[file])
            }
            None => self.reply(&Reply::Refused { number, why: Refusal::Stage }, &[]),
        }
    }

    fn reply(&self, reply: &Reply, files: &[BorrowedFd<'_>]) -> bool {
        wire::send(&self.socket, reply, files, SendFlags::DONTWAIT).is_ok()
    }

    fn is_closed(&self) -> bool {
        self.inbound.as_ref().is_some_and(|inbound| inbound.is_closed())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // The other end closes its socket after its last access, or has died. If
        // it is we who close, the lease words and the pidfd tell when it is out.
        if let Some(inbound) = self.inbound.as_ref().filter(|_| process::is_hung_up(self.socket.as_fd())) {
            inbound.depart();
        }
    }
}

// A target that closes in order says so in its segment; only death needs watching.
fn process_of(outbound: &Outbound) -> Option<&Process> {
    match &outbound.reach {
        Reach::Process(line) => Some(&line.process),
        Reach::Local { .. } => None,
    }
}

fn ready(fds: &[BorrowedFd<'_>]) -> Vec<bool> {
    let mut fds: Vec<_> = fds.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
    let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
    let _ = rustix::event::poll(&mut fds, Some(&at_once));
    fds.iter().map(|fd| !fd.revents().is_empty()).collect()
}
