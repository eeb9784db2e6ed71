//! The initiator's end of a connection to another process.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use multirail_spi::{Access, Error, ErrorKind, Result, Staging, WakeupHandle};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use crate::domain::{refused, unstaged};
use crate::foreign;
use crate::gpu::share as gpu;
use crate::mapping;
use crate::offer::Offer;
use crate::process::Process;
use crate::refusal;
use crate::region::Key;
use crate::remote::{Answer, Place};
use crate::segment::Segment;
use crate::stage::Stage;
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
    pub(crate) bell: WakeupHandle,
    pub(crate) process: Process,
    /// For regions that only the peer can reach, once one was imported.
    pub(crate) stage: OnceLock<Segment<Stage>>,
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
        Reply::Refused { why: Refusal::Memory, .. } => return Err(short_of_memory("connect")),
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
    Ok(Line { segment, bell: bell.into(), process, stage: OnceLock::new(), socket, turns: Turns::default() })
}

impl Line {
    /// Asks what `key` names, and finds the way to it: maps it, or reaches it through the
    /// kernel, or stages it if the kernel refuses that and the user allows this. Waiting
    /// for others who ask counts: all together takes no longer than `limit`.
    pub(crate) fn import(&self, key: u64, limit: Duration, staging: Staging) -> Result<Answer> {
        let deadline = Instant::now() + limit.min(LONGEST);
        let (reply, files) = self.ask(deadline, |number| Request::Region { number, key })?;
        let answer = match reply {
            Reply::Shared { len, access, locked, .. } => {
                let access = Access::from_bits_truncate(access);
                if staging == Staging::Always {
                    answer_of(key, len, access, Place::Staged)?
                } else {
                    return shared(key, len, access, &files, locked);
                }
            }
            Reply::Foreign { len, access, address, guard, target, .. } => {
                let access = Access::from_bits_truncate(access);
                let there = answer_of(key, len, access, Place::There { base: address, guard })?;
                if staging == Staging::Always {
                    Answer { place: Place::Staged, ..there }
                } else if let Err((call, errno)) = foreign::probe(self.process.pid(), access) {
                    if !self.process.is_alive() {
                        return Err(refused(ErrorKind::PeerDied));
                    }
                    let why = refusal::explain(self.process.pid(), call, errno, &target);
                    if staging == Staging::Never {
                        return Err(refusal::error(&why));
                    }
                    tracing::info!(peer = %self.process.pid().as_raw_nonzero(), %why,
                        "loopback: a region of the peer is staged through shared memory");
                    Answer { place: Place::Staged, ..there }
                } else {
                    return Ok(there);
                }
            }
            Reply::Gpu { len, access, gpu, size, offset, handle, .. } => {
                let shared = gpu::open(files, gpu, size, offset, handle, len)?;
                let place = Place::Gpu { base: shared.address(), ordinal: shared.device().ordinal() };
                let answer = answer_of(key, len, Access::from_bits_truncate(access), place)?;
                return Ok(Answer { shared: Some(shared), ..answer });
            }
            _ => return Err(nonsense()),
        };
        self.open_stage(deadline)?;
        Ok(answer)
    }

    /// Maps the peer's bounce segment, once.
    fn open_stage(&self, deadline: Instant) -> Result<()> {
        if self.stage.get().is_some() {
            return Ok(());
        }
        let (reply, files) = self.ask(deadline, |number| Request::Stage { number })?;
        let (Reply::Stage { .. }, [file]) = (reply, &files[..]) else { return Err(nonsense()) };
        let stage = Segment::map(file.as_fd())?;
        // Whoever was first has mapped the same file.
        let _ = self.stage.set(stage);
        Ok(())
    }

    /// Asks one question and waits for its answer.
    fn ask(&self, deadline: Instant, question: impl Fn(u64) -> Request) -> Result<(Reply, Vec<OwnedFd>)> {
        let fail = |e: Errno| Error::os("import", "asking the peer for its region", e);
        let socket = &self.socket;
        let turn = self.turns.take(deadline).ok_or(Errno::TIMEDOUT).map_err(fail)?;
        let request = question(turn.number);
        within(socket, deadline, || wire::send(socket, &request, &[], SendFlags::empty())).map_err(fail)?;
        for _ in 0..STALE_ANSWERS {
            let (reply, files) =
                within(socket, deadline, || wire::receive::<Reply>(socket, RecvFlags::empty()))
                    .map_err(fail)?;
            match reply {
                Reply::Refused { number, why } if number == turn.number => {
                    return Err(match why {
                        Refusal::Stage => unstaged("a region of the peer cannot be reached but by staging"),
                        Refusal::Revoked => refused(ErrorKind::Revoked),
                        Refusal::Gpu => gpu::unshared(),
                        Refusal::Memory => short_of_memory("import"),
                        _ => refused(ErrorKind::RemoteAccess),
                    });
                }
                reply if reply.number() == Some(turn.number) => return Ok((reply, files)),
                _ => {}
            }
        }
        Err(nonsense())
    }
}

/// The error for a peer that found no memory for what it would hand over.
fn short_of_memory(operation: &'static str) -> Error {
    let context = "the peer has no memory for what both processes share: its log says how much; free some, or \
                   raise vm.overcommit_ratio where vm.overcommit_memory is 2";
    Error::new(ErrorKind::Exhausted, operation, context)
}

fn nonsense() -> Error {
    Error::new(ErrorKind::Protocol, "import", "the peer answers other questions: connect again")
}

fn shared(key: u64, len: u64, access: Access, files: &[OwnedFd], locked: bool) -> Result<Answer> {
    let ([file], Ok(size)) = (files, usize::try_from(len)) else {
        let context = "the peer did not hand over the region's file: do not trust this peer";
        return Err(Error::new(ErrorKind::Protocol, "import", context));
    };
    let mapping = mapping::map("import", file.as_fd(), size, access.contains(Access::REMOTE_WRITE))?;
    // Whose owner wants GPUs to copy it at their speed; here they do if this process uses any.
    let lock = if locked { gpu::lock(mapping.start(), size) } else { None };
    let answer = answer_of(key, len, access, Place::Here(mapping.start()))?;
    Ok(Answer { mapping: Some(mapping), lock, ..answer })
}

fn answer_of(key: u64, len: u64, access: Access, place: Place) -> Result<Answer> {
    let key = Key::from_wire(key).ok_or_else(|| refused(ErrorKind::RemoteAccess))?;
    Ok(Answer { key, len, access, place, mapping: None, shared: None, lock: None })
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
