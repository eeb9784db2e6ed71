//! One task per admitted peer: heartbeats, lookups, revocations, moves, the end.

pub(crate) mod close;
pub(crate) mod liveness;
pub(crate) mod lookups;
pub(crate) mod relocations;

use std::future::Future;
use std::sync::Weak;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep_until, timeout};

use crate::errors::{closed, refused};
use crate::frame::{Frame, MAX_DESCRIPTOR, MAX_NAME};
use crate::framed_channel::{CLOSE_LIMIT, FramedChannel};
use crate::host::{SessionHost, SessionPeer};
use crate::runtime::Spawner;
use crate::session::close::CloseReason;
use crate::session::liveness::Liveness;
use crate::session::lookups::{Answer, Asker, Lookups, OUTSTANDING, ProbeGuard};
use crate::session::relocations::Relocations;
use multirail_spi::Allowance;
use multirail_spi::{Error, ErrorKind, Result};

/// Answers that may wait while the peer does not read: all it may ask for, twice.
const MAX_QUEUED: usize = 2 * OUTSTANDING * MAX_DESCRIPTOR;
/// After the limit of silence, time for what has arrived to be read.
const LAST_CHANCE: Duration = Duration::from_millis(10);

/// What the rest of the fabric asks of a session.
pub(crate) enum Command {
    Lookup { name: String, answer: Answer },
    Probe(ProbeGuard),
    Revoked { region: u64 },
    Grant { transport: String, allowance: Allowance },
    Reached { barrier: String },
    Moved { transport: String, pair: u16, offer: Vec<u8> },
    Goodbye,
}

/// Speaks to a session from any thread; never blocks.
#[derive(Clone)]
pub struct SessionHandle(Option<mpsc::UnboundedSender<Command>>);

impl SessionHandle {
    /// A handle, and what its session receives.
    pub(crate) fn new() -> (Self, mpsc::UnboundedReceiver<Command>) {
        let (commands, received) = mpsc::unbounded_channel();
        (Self(Some(commands)), received)
    }

    /// The handle of a peer in this process, which has no session.
    pub fn detached() -> Self {
        Self(None)
    }

    /// Asks the peer for the descriptor published as `name`. Ends within the
    /// handshake limit; needs no runtime.
    pub fn lookup(&self, name: &str) -> impl Future<Output = Result<Vec<u8>>> + Send + use<> {
        let fail = |kind, why: &str| Error::new(kind, "region", why);
        let over = move || fail(ErrorKind::Closed, "the connection to the peer has ended");
        let (answer, outcome) = oneshot::channel();
        let asked = match &self.0 {
            None => Err(fail(
                ErrorKind::Unsupported,
                "a peer in this process has no session: pass it the descriptor",
            )),
            Some(_) if name.len() > MAX_NAME => Err(fail(
                ErrorKind::InvalidRequest,
                &format!("a name of {} bytes; the limit is {MAX_NAME}", name.len()),
            )),
            Some(commands) => {
                commands.send(Command::Lookup { name: name.to_owned(), answer }).map_err(|_| over())
            }
        };
        async move {
            asked?;
            outcome.await.unwrap_or_else(|_| Err(over()))
        }
    }

    /// Asks the peer whether it lives. Drops `guard` once the peer has answered, after the limit of a lookup, or when
    /// the session ends.
    pub fn probe(&self, guard: ProbeGuard) {
        self.command(Command::Probe(guard));
    }

    /// Tells the peer that a region of ours was taken back.
    pub fn revoked(&self, region: u64) {
        self.command(Command::Revoked { region });
    }

    /// Tells the peer what it may send.
    pub fn grant(&self, transport: &str, allowance: Allowance) {
        self.command(Command::Grant { transport: transport.to_owned(), allowance });
    }

    /// Tells the peer that we have reached a barrier.
    pub fn reached(&self, barrier: &str) {
        if self.0.is_some() {
            self.command(Command::Reached { barrier: barrier.to_owned() });
        }
    }

    /// Tells the peer that our end of a pair of rails has moved.
    pub fn moved(&self, transport: &str, pair: u16, offer: Vec<u8>) {
        self.command(Command::Moved { transport: transport.to_owned(), pair, offer });
    }

    /// Ends the session in order.
    pub fn goodbye(&self) {
        self.command(Command::Goodbye);
    }

    fn command(&self, command: Command) {
        if let Some(commands) = &self.0 {
            let _ = commands.send(command);
        }
    }
}

/// The state of a session; [`Session::run`] is its task.
pub(crate) struct Session<H: SessionHost> {
    pub wire: FramedChannel,
    pub peer: H::Peer,
    /// Weak, so that a connection keeps no fabric open.
    pub host: Weak<H>,
    pub spawner: Spawner,
    pub commands: mpsc::UnboundedReceiver<Command>,
    /// Our own, which revocations carry.
    pub incarnation: u64,
    pub liveness: Liveness,
    pub lookups: Lookups,
    pub moves: Relocations,
}

impl<H: SessionHost> Session<H> {
    /// Serves the peer until one side ends.
    pub async fn run(mut self) {
        let CloseReason { error, final_frame } = self.serve().await;
        if final_frame == Some(Frame::Goodbye) {
            self.flush_commands(&error);
        }
        if let Some(final_frame) = &final_frame
            && let Err(error) = self.wire.push(final_frame)
        {
            tracing::debug!(%error, "no final_frame");
        }
        if final_frame == Some(Frame::Goodbye) {
            // Said before the links go down, or the peer might take their end for our death.
            self.wire.flush(CLOSE_LIMIT).await;
        }
        self.peer.fail(error.clone());
        self.lookups.fail(&error);
        self.commands.close();
        while let Ok(command) = self.commands.try_recv() {
            if let Command::Lookup { answer, .. } = command {
                let _ = answer.send(Err(error.clone()));
            }
        }
        self.wire.close().await;
    }

    /// What was asked before the end is said before it: a barrier that we have passed, others
    /// may still wait at.
    fn flush_commands(&mut self, error: &Error) {
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::Lookup { answer, .. } => drop(answer.send(Err(error.clone()))),
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
        let mut failed = peer.closed();
        // A frame under way stays in the wire's buffers and a send in its send_queue:
        // every branch may be dropped.
        loop {
            let wake = self.lookups.next_deadline().into_iter().fold(self.liveness.wake(), Instant::min);
            let turn = tokio::select! {
                frame = self.wire.recv() => self.receive(frame),
                Some(command) = self.commands.recv() => self.handle_command(command),
                () = spawner.closing() => Err(CloseReason::by_us(closed("this fabric was closed"))),
                error = &mut failed => Err(CloseReason::by_us(error)),
                followed = self.moves.act(&peer, &spawner) => self.follows(followed),
                () = sleep_until(wake.into()) => self.tick().await,
            };
            if let Err(end) = turn.and_then(|()| self.ask()) {
                return end;
            }
        }
    }

    fn receive(&mut self, frame: Result<Frame>) -> Result<(), CloseReason> {
        let frame = frame.map_err(CloseReason::unreadable)?;
        let now = Instant::now();
        self.liveness.heard(now);
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
            Frame::Grant { transport, allowance } => {
                self.peer.note_grant(&transport, &allowance).map_err(CloseReason::by_us)?;
            }
            Frame::Barrier { name } => self.peer.note_barrier(&name).map_err(CloseReason::breach)?,
            Frame::Moved { transport, pair, offer } => self.moves.moved(transport, pair, offer)?,
            Frame::Followed { transport, pair, answer } => self.moves.followed(transport, pair, answer)?,
            Frame::Goodbye => return Err(CloseReason::by_peer(closed("peer closed the connection"))),
            Frame::Refuse { cause, reason } => return Err(CloseReason::by_peer(refused(cause, &reason))),
            Frame::Proof { .. } | Frame::Offers { .. } | Frame::Report { .. } | Frame::Ready => {
                return Err(CloseReason::breach(format!("{} after the handshake", frame.name())));
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
                "a descriptor too large to be looked up"
            );
        }
        fits.then_some(descriptor)
    }

    fn handle_command(&mut self, command: Command) -> Result<(), CloseReason> {
        match command {
            Command::Lookup { name, answer } => self.lookups.add(name, Asker::Name(answer), Instant::now()),
            // Any lookup will do, and every version answers one.
            Command::Probe(guard) => self.lookups.add(String::new(), Asker::Probe(guard), Instant::now()),
            Command::Revoked { region } => {
                self.send(&Frame::Revoked { incarnation: self.incarnation, region })?
            }
            Command::Grant { transport, allowance } => self.send(&Frame::Grant { transport, allowance })?,
            Command::Reached { barrier } => self.send(&Frame::Barrier { name: barrier })?,
            Command::Moved { transport, pair, offer } => {
                self.moves.told();
                self.send(&Frame::Moved { transport, pair, offer })?
            }
            Command::Goodbye => return Err(CloseReason::by_us(closed("this side ended the connection"))),
        }
        Ok(())
    }

    async fn tick(&mut self) -> Result<(), CloseReason> {
        let now = Instant::now();
        self.lookups.expire(now);
        let due = self.liveness.tick(now);
        if due.dead {
            // The timer may be served before the socket: what has come still counts.
            match timeout(LAST_CHANCE, self.wire.recv()).await {
                Ok(frame) => self.receive(frame)?,
                Err(_) => return Err(CloseReason::dead("no heartbeat for", self.liveness.timeout())),
            }
        }
        if due.beat {
            let send_queue = self.wire.send_queue();
            if self.liveness.stuck((!send_queue.is_empty()).then_some(send_queue.sent())) {
                return Err(CloseReason::dead("the peer reads nothing for", self.liveness.timeout()));
            }
            // What waits to be sent is as good as a heartbeat.
            if send_queue.is_empty() {
                self.send(&Frame::Heartbeat { seq: send_queue.sent() })?;
            }
        }
        Ok(())
    }

    /// Sends the questions that the peer has room for.
    fn ask(&mut self) -> Result<(), CloseReason> {
        while let Some(question) = self.lookups.next_question() {
            self.send(&question)?;
        }
        Ok(())
    }

    /// News of a moved rail was acted on: the peer may have to be answered.
    fn follows(&mut self, acted: Result<Option<Frame>>) -> Result<(), CloseReason> {
        acted.map_err(CloseReason::by_us)?.map_or(Ok(()), |answer| self.answer(&answer))
    }

    /// Sends what the peer has asked for, as long as it reads.
    fn answer(&mut self, frame: &Frame) -> Result<(), CloseReason> {
        self.send(frame)?;
        if self.wire.send_queue().queued_bytes() > MAX_QUEUED {
            return Err(CloseReason::breach("it asks for more than agreed, and reads no answers"));
        }
        Ok(())
    }

    fn send(&mut self, frame: &Frame) -> Result<(), CloseReason> {
        self.wire.push(frame).map_err(CloseReason::by_us)
    }
}
