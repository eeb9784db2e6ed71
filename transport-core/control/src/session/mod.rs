//! The task of an admitted peer: heartbeats, lookups, revocations, relocations and the close.

pub(crate) mod close;
pub(crate) mod fences;
pub(crate) mod liveness;
pub(crate) mod lookups;
pub(crate) mod relocations;

use std::future::Future;
use std::sync::Weak;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep_until, timeout};

use crate::frame::{Frame, MAX_DESCRIPTOR, MAX_NAME, refused};
use crate::framed_channel::{CLOSE_LIMIT, FramedChannel};
use crate::host::{SessionHost, SessionPeer};
use crate::runtime::{Spawner, closed};
use crate::session::close::CloseReason;
use crate::session::fences::Fences;
use crate::session::liveness::Liveness;
use crate::session::lookups::{AnswerSender, Lookups, MAX_OUTSTANDING, ProbeGuard, Requester};
use crate::session::relocations::Relocations;
use multirail_spi::{Error, ErrorKind, FenceKind, FenceReply, FenceReport, Result, WireGrant};

/// The most bytes of answers that wait while the peer does not read: twice the answers to all lookups that it may have
/// outstanding.
const MAX_QUEUED_BYTES: usize = 2 * MAX_OUTSTANDING * MAX_DESCRIPTOR;
/// After the timeout of a silent peer, the time to read a frame that has already arrived.
const FINAL_RECEIVE: Duration = Duration::from_millis(10);

/// A command of the fabric to a session.
pub(crate) enum SessionCommand {
    Lookup { name: String, answer: AnswerSender },
    Probe(ProbeGuard),
    Revoked { region: u64 },
    Grant { transport: String, grant: WireGrant },
    BarrierReached { barrier: String },
    Relocated { transport: String, pair: u16, offer: Vec<u8> },
    RequestFence { transport: String, pair: u16, kind: FenceKind, reply: FenceReply },
    AnswerFence { id: u64, result: Result<FenceReport> },
    MessagesPosted { transport: String, pair: u16, count: u64 },
    Goodbye,
}

/// Sends commands to a session, from any thread. Never blocks.
#[derive(Clone)]
pub struct SessionHandle(Option<mpsc::UnboundedSender<SessionCommand>>);

impl SessionHandle {
    /// Creates a handle and the receiver of its commands.
    pub(crate) fn new() -> (Self, mpsc::UnboundedReceiver<SessionCommand>) {
        let (commands, received) = mpsc::unbounded_channel();
        (Self(Some(commands)), received)
    }

    /// The handle of a peer in this process, which has no session.
    pub fn detached() -> Self {
        Self(None)
    }

    /// Asks the peer for the descriptor published as `name`. The future ends within the
    /// handshake limit; it needs no runtime.
    pub fn lookup(&self, name: &str) -> impl Future<Output = Result<Vec<u8>>> + Send + use<> {
        let fail = |kind, why: &str| Error::new(kind, "region", why);
        let ended = move || fail(ErrorKind::Closed, "the connection to the peer has ended");
        let (answer, outcome) = oneshot::channel();
        let asked = match &self.0 {
            None => Err(fail(
                ErrorKind::Unsupported,
                "a peer in this process has no session: pass it the descriptor",
            )),
            Some(_) if name.len() > MAX_NAME => Err(fail(
                ErrorKind::InvalidRequest,
                &format!("the name has {} bytes; the limit is {MAX_NAME}", name.len()),
            )),
            Some(commands) => {
                commands.send(SessionCommand::Lookup { name: name.to_owned(), answer }).map_err(|_| ended())
            }
        };
        async move {
            asked?;
            outcome.await.unwrap_or_else(|_| Err(ended()))
        }
    }

    /// Asks the peer whether it is alive. The session drops `guard` when the peer has answered, when the limit of a
    /// lookup has passed, or when the session ends.
    pub fn probe(&self, guard: ProbeGuard) {
        self.command(SessionCommand::Probe(guard));
    }

    /// Tells the peer that this side has revoked a region.
    pub fn revoked(&self, region: u64) {
        self.command(SessionCommand::Revoked { region });
    }

    /// Grants the peer `grant` over `transport`.
    pub fn grant(&self, transport: &str, grant: WireGrant) {
        self.command(SessionCommand::Grant { transport: transport.to_owned(), grant });
    }

    /// Tells the peer that this side has reached a barrier.
    pub fn reached(&self, barrier: &str) {
        if self.0.is_some() {
            self.command(SessionCommand::BarrierReached { barrier: barrier.to_owned() });
        }
    }

    /// Tells the peer that our endpoint of a pair of rails has a new address, described by `offer`.
    pub fn moved(&self, transport: &str, pair: u16, offer: Vec<u8>) {
        self.command(SessionCommand::Relocated { transport: transport.to_owned(), pair, offer });
    }

    /// Asks the peer to fence a pair of rails, or to lift the fence. The session drops `reply` if it ends before the peer
    /// has answered.
    pub fn request_fence(&self, transport: &str, pair: u16, kind: FenceKind, reply: FenceReply) {
        self.command(SessionCommand::RequestFence { transport: transport.to_owned(), pair, kind, reply });
    }

    /// Tells the peer how many messages this side has posted over a pair of rails.
    pub fn messages_posted(&self, transport: &str, pair: u16, count: u64) {
        self.command(SessionCommand::MessagesPosted { transport: transport.to_owned(), pair, count });
    }

    /// Ends the session with a `Goodbye`.
    pub fn goodbye(&self) {
        self.command(SessionCommand::Goodbye);
    }

    fn command(&self, command: SessionCommand) {
        if let Some(commands) = &self.0 {
            let _ = commands.send(command);
        }
    }
}

/// The state of a session; [`Session::run`] is its task.
pub(crate) struct Session<H: SessionHost> {
    pub channel: FramedChannel,
    pub peer: H::Peer,
    /// Weak, so that a connection does not keep the fabric open.
    pub host: Weak<H>,
    pub spawner: Spawner,
    pub commands: mpsc::UnboundedReceiver<SessionCommand>,
    /// The incarnation of this side's fabric; `Revoked` frames carry it.
    pub incarnation: u64,
    pub liveness: Liveness,
    pub lookups: Lookups,
    pub relocations: Relocations,
    pub fences: Fences,
    /// Sends commands to this session.
    pub handle: SessionHandle,
}

impl<H: SessionHost> Session<H> {
    /// Serves the peer until one side ends.
    pub async fn run(mut self) {
        let CloseReason { error, final_frame } = self.serve().await;
        if final_frame == Some(Frame::Goodbye) {
            self.flush_commands(&error);
        }
        if let Some(final_frame) = &final_frame
            && let Err(error) = self.channel.push(final_frame)
        {
            tracing::debug!(%error, "cannot send the final frame");
        }
        if final_frame == Some(Frame::Goodbye) {
            // The session sends the `Goodbye` before the links go down. Otherwise the peer could see the links fail
            // first and take this side for dead.
            self.channel.flush(CLOSE_LIMIT).await;
        }
        self.peer.fail(error.clone());
        self.lookups.fail(&error);
        self.commands.close();
        while let Ok(command) = self.commands.try_recv() {
            if let SessionCommand::Lookup { answer, .. } = command {
                let _ = answer.send(Err(error.clone()));
            }
        }
        self.channel.close().await;
    }

    /// Sends the commands that were given before the close, ahead of the final frame. For example, peers may
    /// still wait at a barrier that this side has reached.
    fn flush_commands(&mut self, error: &Error) {
        while let Ok(command) = self.commands.try_recv() {
            match command {
                SessionCommand::Lookup { answer, .. } => drop(answer.send(Err(error.clone()))),
                command => {
                    if self.handle_command(command).is_err() {
                        break;
                    }
                }
            }
        }
    }

    async fn serve(&mut self) -> CloseReason {
        let (peer, spawner) = (self.peer.clone(), self.spawner.clone());
        let mut peer_closed = peer.closed();
        // The channel keeps a partly received frame in its buffer and a send in its queue, so
        // `select!` may drop every branch.
        loop {
            let next_tick =
                self.lookups.next_deadline().into_iter().fold(self.liveness.next_tick(), Instant::min);
            let handled = tokio::select! {
                frame = self.channel.recv() => self.receive(frame),
                Some(command) = self.commands.recv() => self.handle_command(command),
                () = spawner.closing() => Err(CloseReason::by_us(closed("this fabric was closed"))),
                error = &mut peer_closed => Err(CloseReason::by_us(error)),
                handled = self.relocations.next_frame(&peer, &spawner) => self.answer_relocation(handled),
                () = sleep_until(next_tick.into()) => self.tick().await,
            };
            if let Err(reason) = handled.and_then(|()| self.send_lookups()) {
                return reason;
            }
        }
    }

    fn receive(&mut self, frame: Result<Frame>) -> Result<(), CloseReason> {
        let frame = frame.map_err(CloseReason::receive_failed)?;
        let now = Instant::now();
        self.liveness.note_heard(now);
        self.peer.heard(now);
        match frame {
            Frame::Heartbeat { seq } => tracing::trace!(seq, "heartbeat"),
            Frame::Lookup { id, name } => {
                let descriptor = self.published(&name);
                self.answer(&Frame::Found { id, descriptor })?;
            }
            Frame::Found { id, descriptor } => {
                self.lookups.found(id, descriptor).map_err(CloseReason::by_us)?
            }
            Frame::Revoked { incarnation, region } => self.peer.note_revoked(incarnation, region),
            Frame::Grant { transport, grant } => {
                self.peer.note_grant(&transport, &grant).map_err(CloseReason::by_us)?;
            }
            Frame::Barrier { name } => {
                self.peer.note_barrier(&name).map_err(CloseReason::protocol_violation)?
            }
            Frame::Moved { transport, pair, offer } => self.relocations.push_offer(transport, pair, offer)?,
            Frame::Followed { transport, pair, answer } => {
                self.relocations.push_answer(transport, pair, answer)?
            }
            Frame::Fence { id, transport, pair, kind } => {
                self.fences.note_request(id, &transport, pair, kind)?;
                let session = self.handle.clone();
                let reply =
                    Box::new(move |result| session.command(SessionCommand::AnswerFence { id, result }));
                self.peer.fence(&transport, pair, kind, reply).map_err(CloseReason::by_us)?;
            }
            Frame::Fenced { id, report, reason } => {
                self.fences.fenced(id, report, reason).map_err(CloseReason::by_us)?
            }
            Frame::MessagesPosted { transport, pair, count } => {
                self.peer.note_messages_posted(&transport, pair, count).map_err(CloseReason::by_us)?
            }
            Frame::Goodbye => return Err(CloseReason::by_peer(closed("peer closed the connection"))),
            Frame::Refuse { cause, reason } => return Err(CloseReason::by_peer(refused(cause, &reason))),
            Frame::Proof { .. } | Frame::Offers { .. } | Frame::Report { .. } | Frame::Ready => {
                return Err(CloseReason::protocol_violation(format!("{} after the handshake", frame.name())));
            }
        }
        Ok(())
    }

    fn published(&self, name: &str) -> Option<Vec<u8>> {
        let descriptor = self.host.upgrade()?.published(name)?;
        let fits = descriptor.len() <= MAX_DESCRIPTOR;
        if !fits {
            tracing::warn!(
                name,
                bytes = descriptor.len(),
                MAX_DESCRIPTOR,
                "the descriptor is too large for a lookup"
            );
        }
        fits.then_some(descriptor)
    }

    fn handle_command(&mut self, command: SessionCommand) -> Result<(), CloseReason> {
        match command {
            SessionCommand::Lookup { name, answer } => {
                self.lookups.add(name, Requester::Caller(answer), Instant::now())
            }
            // A lookup serves as the probe, because every protocol version answers lookups.
            SessionCommand::Probe(guard) => {
                self.lookups.add(String::new(), Requester::Probe(guard), Instant::now())
            }
            SessionCommand::Revoked { region } => {
                self.send(&Frame::Revoked { incarnation: self.incarnation, region })?
            }
            SessionCommand::Grant { transport, grant } => self.send(&Frame::Grant { transport, grant })?,
            SessionCommand::BarrierReached { barrier } => self.send(&Frame::Barrier { name: barrier })?,
            SessionCommand::Relocated { transport, pair, offer } => {
                self.relocations.note_offer_sent();
                self.send(&Frame::Moved { transport, pair, offer })?
            }
            SessionCommand::RequestFence { transport, pair, kind, reply } => {
                let frame = self.fences.request(transport, pair, kind, reply);
                self.send(&frame)?
            }
            SessionCommand::AnswerFence { id, result } => {
                self.fences.note_answer(id);
                self.answer(&Frame::fenced(id, result))?
            }
            SessionCommand::MessagesPosted { transport, pair, count } => {
                self.send(&Frame::MessagesPosted { transport, pair, count })?
            }
            SessionCommand::Goodbye => {
                return Err(CloseReason::by_us(closed("this side ended the connection")));
            }
        }
        Ok(())
    }

    async fn tick(&mut self) -> Result<(), CloseReason> {
        let now = Instant::now();
        self.lookups.expire(now);
        let due = self.liveness.tick(now);
        if due.dead {
            // The timer may fire before the socket is read: a frame that has already arrived still counts.
            match timeout(FINAL_RECEIVE, self.channel.recv()).await {
                Ok(frame) => self.receive(frame)?,
                Err(_) => return Err(CloseReason::peer_dead("no heartbeat for", self.liveness.timeout())),
            }
        }
        if due.heartbeat {
            let frame_queue = self.channel.frame_queue();
            if self.liveness.is_send_stuck((!frame_queue.is_empty()).then_some(frame_queue.sent())) {
                return Err(CloseReason::peer_dead("the peer reads nothing for", self.liveness.timeout()));
            }
            // Any queued frame shows the peer that this side is alive, so no heartbeat is needed.
            if frame_queue.is_empty() {
                self.send(&Frame::Heartbeat { seq: frame_queue.sent() })?;
            }
        }
        Ok(())
    }

    /// Sends queued lookups, up to the limit of outstanding ones.
    fn send_lookups(&mut self) -> Result<(), CloseReason> {
        while let Some(lookup) = self.lookups.next_request() {
            self.send(&lookup)?;
        }
        Ok(())
    }

    /// A relocation message was handled. Sends the answer, if there is one.
    fn answer_relocation(&mut self, handled: Result<Option<Frame>>) -> Result<(), CloseReason> {
        handled.map_err(CloseReason::by_us)?.map_or(Ok(()), |answer| self.answer(&answer))
    }

    /// Sends an answer to the peer. Fails if the peer does not read its answers.
    fn answer(&mut self, frame: &Frame) -> Result<(), CloseReason> {
        self.send(frame)?;
        if self.channel.frame_queue().queued_bytes() > MAX_QUEUED_BYTES {
            return Err(CloseReason::protocol_violation(
                "the peer sends more requests than agreed, and reads no answers",
            ));
        }
        Ok(())
    }

    fn send(&mut self, frame: &Frame) -> Result<(), CloseReason> {
        self.channel.push(frame).map_err(CloseReason::by_us)
    }
}
