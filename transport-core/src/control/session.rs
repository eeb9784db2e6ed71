//! One task per admitted peer: heartbeats, lookups, revocations, moves, the end.

use std::future::Future;
use std::sync::Weak;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot};
use tokio::time::{sleep_until, timeout};

use super::ending::{End, closed, refused};
use super::frame::{Frame, MAX_DESCRIPTOR, MAX_NAME};
use super::liveness::Liveness;
use super::lookups::{Answer, Asker, Lookups, OUTSTANDING};
use super::moves::Moves;
use super::thread::Spawner;
use super::wire::{FAREWELL, Wire};
use crate::engine::PeerProbe;
use crate::engine::flow_control::Allowance;
use crate::fabric::FabricInner;
use crate::{Error, ErrorKind, Peer, Result};

/// Answers that may wait while the peer does not read: all it may ask for, twice.
const MAX_QUEUED: usize = 2 * OUTSTANDING * MAX_DESCRIPTOR;
/// After the limit of silence, time for what has arrived to be read.
const LAST_CHANCE: Duration = Duration::from_millis(10);

/// What the rest of the fabric asks of a session.
pub(crate) enum Command {
    Lookup { name: String, answer: Answer },
    Ask(PeerProbe),
    Revoked { region: u64 },
    Grant { transport: String, allowance: Allowance },
    Reached { barrier: String },
    Moved { transport: String, pair: u16, offer: Vec<u8> },
    Goodbye,
}

/// Speaks to a session from any thread; never blocks.
#[derive(Clone)]
pub(crate) struct SessionHandle(Option<mpsc::UnboundedSender<Command>>);

impl SessionHandle {
    /// A handle, and what its session receives.
    pub fn new() -> (Self, mpsc::UnboundedReceiver<Command>) {
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

    /// Asks the peer whether it lives; the question ends as a lookup does.
    pub fn ask(&self, question: PeerProbe) {
        self.command(Command::Ask(question));
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
pub(crate) struct Session {
    pub wire: Wire,
    pub peer: Peer,
    /// Weak, so that a connection keeps no fabric open.
    pub fabric: Weak<FabricInner>,
    pub spawner: Spawner,
    pub commands: mpsc::UnboundedReceiver<Command>,
    /// Our own, which revocations carry.
    pub incarnation: u64,
    pub liveness: Liveness,
    pub lookups: Lookups,
    pub moves: Moves,
}

impl Session {
    /// Serves the peer until one side ends.
    pub async fn run(mut self) {
        let End { error, farewell } = self.serve().await;
        if farewell == Some(Frame::Goodbye) {
            self.say_the_rest(&error);
        }
        if let Some(farewell) = &farewell
            && let Err(error) = self.wire.push(farewell)
        {
            tracing::debug!(%error, "no farewell");
        }
        if farewell == Some(Frame::Goodbye) {
            // Said before the links go down, or the peer might take their end for our death.
            self.wire.flush(FAREWELL).await;
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
    fn say_the_rest(&mut self, error: &Error) {
        while let Ok(command) = self.commands.try_recv() {
            match command {
                Command::Lookup { answer, .. } => drop(answer.send(Err(error.clone()))),
                command => {
                    if self.obey(command).is_err() {
                        break;
                    }
                }
            }
        }
    }

    async fn serve(&mut self) -> End {
        let (peer, spawner) = (self.peer.clone(), self.spawner.clone());
        let mut failed = peer.closed();
        // A frame under way stays in the wire's buffers and a send in its outbox:
        // every branch may be dropped.
        loop {
            let wake = self.lookups.next_deadline().into_iter().fold(self.liveness.wake(), Instant::min);
            let turn = tokio::select! {
                frame = self.wire.recv() => self.receive(frame),
                Some(command) = self.commands.recv() => self.obey(command),
                () = spawner.closing() => Err(End::by_us(closed("this fabric was closed"))),
                error = &mut failed => Err(End::by_us(error)),
                followed = self.moves.act(&peer, &spawner) => self.follows(followed),
                () = sleep_until(wake.into()) => self.tick().await,
            };
            if let Err(end) = turn.and_then(|()| self.ask()) {
                return end;
            }
        }
    }

    fn receive(&mut self, frame: Result<Frame>) -> Result<(), End> {
        let frame = frame.map_err(End::unreadable)?;
        let now = Instant::now();
        self.liveness.heard(now);
        self.peer.0.is_heard(now);
        match frame {
            Frame::Heartbeat { seq } => tracing::trace!(seq, "heartbeat"),
            Frame::Lookup { id, name } => {
                let descriptor = self.published(&name);
                self.answer(&Frame::Found { id, descriptor })?;
            }
            Frame::Found { id, descriptor } => self.lookups.found(id, descriptor).map_err(End::by_us)?,
            Frame::Revoked { incarnation, region } => self.peer.note_revoked(incarnation, region),
            Frame::Grant { transport, allowance } => {
                self.peer.note_grant(&transport, &allowance).map_err(End::by_us)?;
            }
            Frame::Barrier { name } => self.peer.0.barriers.arrived(&name).map_err(End::breach)?,
            Frame::Moved { transport, pair, offer } => self.moves.moved(transport, pair, offer)?,
            Frame::Followed { transport, pair, answer } => self.moves.followed(transport, pair, answer)?,
            Frame::Goodbye => return Err(End::by_peer(closed("peer closed the connection"))),
            Frame::Refuse { cause, reason } => return Err(End::by_peer(refused(cause, &reason))),
            Frame::Proof { .. } | Frame::Offers { .. } | Frame::Report { .. } | Frame::Ready => {
                return Err(End::breach(format!("{} after the handshake", frame.name())));
            }
        }
        Ok(())
    }

    fn published(&self, name: &str) -> Option<Vec<u8>> {
        let descriptor = self.fabric.upgrade()?.published(name)?;
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

    fn obey(&mut self, command: Command) -> Result<(), End> {
        match command {
            Command::Lookup { name, answer } => self.lookups.add(name, Asker::Name(answer), Instant::now()),
            // Any lookup will do, and every version answers one.
            Command::Ask(question) => self.lookups.add(String::new(), Asker::Life(question), Instant::now()),
            Command::Revoked { region } => {
                self.send(&Frame::Revoked { incarnation: self.incarnation, region })?
            }
            Command::Grant { transport, allowance } => self.send(&Frame::Grant { transport, allowance })?,
            Command::Reached { barrier } => self.send(&Frame::Barrier { name: barrier })?,
            Command::Moved { transport, pair, offer } => {
                self.moves.told();
                self.send(&Frame::Moved { transport, pair, offer })?
            }
            Command::Goodbye => return Err(End::by_us(closed("this side ended the connection"))),
        }
        Ok(())
    }

    async fn tick(&mut self) -> Result<(), End> {
        let now = Instant::now();
        self.lookups.expire(now);
        let due = self.liveness.tick(now);
        if due.dead {
            // The timer may be served before the socket: what has come still counts.
            match timeout(LAST_CHANCE, self.wire.recv()).await {
                Ok(frame) => self.receive(frame)?,
                Err(_) => return Err(End::dead("no heartbeat for", self.liveness.timeout())),
            }
        }
        if due.beat {
            let outbox = self.wire.outbox();
            if self.liveness.stuck((!outbox.is_empty()).then_some(outbox.sent())) {
                return Err(End::dead("the peer reads nothing for", self.liveness.timeout()));
            }
            // What waits to be sent is as good as a heartbeat.
            if outbox.is_empty() {
                self.send(&Frame::Heartbeat { seq: outbox.sent() })?;
            }
        }
        Ok(())
    }

    /// Sends the questions that the peer has room for.
    fn ask(&mut self) -> Result<(), End> {
        while let Some(question) = self.lookups.next_question() {
            self.send(&question)?;
        }
        Ok(())
    }

    /// News of a moved rail was acted on: the peer may have to be answered.
    fn follows(&mut self, acted: Result<Option<Frame>>) -> Result<(), End> {
        acted.map_err(End::by_us)?.map_or(Ok(()), |answer| self.answer(&answer))
    }

    /// Sends what the peer has asked for, as long as it reads.
    fn answer(&mut self, frame: &Frame) -> Result<(), End> {
        self.send(frame)?;
        if self.wire.outbox().queued_bytes() > MAX_QUEUED {
            return Err(End::breach("it asks for more than agreed, and reads no answers"));
        }
        Ok(())
    }

    fn send(&mut self, frame: &Frame) -> Result<(), End> {
        self.wire.push(frame).map_err(End::by_us)
    }
}
