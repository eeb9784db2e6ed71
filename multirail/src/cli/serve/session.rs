//! One sender: its windows, its messages, its files.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use multirail::{Access, Fabric, Peer, Region};
use serde::Serialize;

use super::store::{Directory, Incoming};
use crate::cli::failure::{Done, Failure, printable};
use crate::cli::files::{FileName, Layout, PROTOCOL, ToSender, ToServer, VERSION};
use crate::cli::output;
use crate::cli::units::{Size, gbytes_per_s};
use crate::cli::wait::let_go;
use crate::cli::wire::{self, Outbox};

/// How long a sender that is alive may be silent, reading a slow disk.
const PATIENCE: Duration = Duration::from_secs(600);

/// How often a silent sender is looked after.
const LOOK: Duration = Duration::from_millis(50);

/// Bytes taken out of a window at a time: they stay in a core's cache while they
/// are hashed and written.
const PIECE: usize = 256 << 10;

/// The conversation with one sender.
pub struct Session<'a> {
    peer: &'a Peer,
    directory: &'a Directory,
    inbox: Receiver<Vec<u8>>,
    outbox: Outbox,
    region: Region,
    piece: Vec<u8>,
    json: bool,
}

#[derive(Serialize)]
struct StoredRow {
    stored: String,
    bytes: u64,
    seconds: f64,
    gbytes_per_s: f64,
    blake3: String,
}

impl<'a> Session<'a> {
    /// Serves a sender until it says goodbye, and has left or had time to.
    pub fn run(
        fabric: &Fabric,
        peer: &'a Peer,
        inbox: Receiver<Vec<u8>>,
        directory: &'a Directory,
        json: bool,
    ) -> Done {
        let region = fabric.alloc(Layout::OFFERED.total() as usize, Access::REMOTE_WRITE)?;
        let outbox = Outbox::new(fabric, peer)?;
        let mut session = Self { peer, directory, inbox, outbox, region, piece: vec![0; PIECE], json };
        let served = session.serve();
        if let Err(failure) = &served
            && peer.is_alive()
        {
            // The sender may be gone by now; our own sentence is printed anyway.
            let _ = session.outbox.say(&ToSender::Refused(failure.sentence().to_owned()));
        }
        // The windows outlive the conversation: a sender that is refused goes on
        // writing until it has heard so.
        let_go(peer);
        served
    }

    fn serve(&mut self) -> Done {
        self.outbox.say(&ToSender::Welcome {
            protocol: PROTOCOL,
            version: VERSION,
            layout: Layout::OFFERED,
            region: self.region.descriptor().to_bytes(),
        })?;
        loop {
            match self.hear().map_err(|failure| failure.within("a sender did not finish"))? {
                ToServer::Begin { name, size } => {
                    let name = FileName::new(&name).map_err(Failure::new)?;
                    self.receive(&name, size)
                        .map_err(|failure| failure.within(format!("{name} was not stored")))?;
                }
                ToServer::Bye => {
                    // The sender may have read it and left before we see it taken.
                    let _ = self.outbox.say(&ToSender::Farewell);
                    return Ok(());
                }
                other => return Err(out_of_turn(&other)),
            }
        }
    }

    fn receive(&mut self, name: &FileName, size: u64) -> Done {
        let begun = Instant::now();
        let mut incoming = Incoming::create(self.directory, name)?;
        self.outbox.say(&ToSender::Accepted)?;
        let layout = Layout::OFFERED;
        let count = layout.count(size);
        // Which of the next windows are written; a message may overtake another.
        let mut filled = vec![false; layout.windows as usize];
        let mut next = 0;
        while next < count {
            let slot = (next % u64::from(layout.windows)) as usize;
            while !filled[slot] {
                let sequence = self.filled()?;
                if sequence < next || sequence >= count || sequence - next >= u64::from(layout.windows) {
                    return Err(Failure::new(format!(
                        "the sender filled window {sequence}, which was not free"
                    )));
                }
                filled[(sequence % u64::from(layout.windows)) as usize] = true;
            }
            filled[slot] = false;
            self.store(&mut incoming, layout.offset(next), layout.len(next, size))?;
            self.outbox.say(&ToSender::Free { sequence: next })?;
            next += 1;
        }
        let hash = match self.hear()? {
            ToServer::End { hash } => hash,
            other => return Err(out_of_turn(&other)),
        };
        let hash = incoming.keep(hash)?;
        self.outbox.say(&ToSender::Stored)?;
        self.announce(name, size, begun.elapsed(), hash)
    }

    fn filled(&mut self) -> Done<u64> {
        match self.hear()? {
            ToServer::Filled { sequence } => Ok(sequence),
            other => Err(out_of_turn(&other)),
        }
    }

    fn store(&mut self, incoming: &mut Incoming<'_>, offset: usize, len: usize) -> Done {
        for at in (0..len).step_by(PIECE) {
            let piece = &mut self.piece[..PIECE.min(len - at)];
            self.region.copy_out(offset + at, piece)?;
            incoming.append(piece)?;
        }
        Ok(())
    }

    /// The next message, or why there will be none.
    fn hear(&mut self) -> Done<ToServer> {
        let until = Instant::now() + PATIENCE;
        loop {
            // Asked before the wait: what a peer said before it died is heard first.
            let alive = self.peer.is_alive();
            match self.inbox.recv_timeout(LOOK) {
                Ok(bytes) => return wire::decode(&bytes),
                Err(RecvTimeoutError::Timeout) if !alive => return Err(gone(self.peer)),
                Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
                Err(RecvTimeoutError::Timeout) => {
                    return Err(Failure::new(format!(
                        "the sender said nothing for {} s",
                        PATIENCE.as_secs()
                    )));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::new("the sender sent more messages than were agreed"));
                }
            }
        }
    }

    fn announce(&self, name: &FileName, size: u64, took: Duration, hash: blake3::Hash) -> Done {
        let speed = gbytes_per_s(size, took);
        if self.json {
            return output::json(&StoredRow {
                stored: name.to_string(),
                bytes: size,
                seconds: took.as_secs_f64(),
                gbytes_per_s: speed,
                blake3: hash.to_string(),
            });
        }
        output::line(&format!(
            "stored {name}: {} in {:.2} s, {speed:.2} GB/s",
            Size(size),
            took.as_secs_f64()
        ))
    }
}

fn gone(peer: &Peer) -> Failure {
    match let_go(peer) {
        Some(error) => error.into(),
        None => Failure::new("the sender is gone"),
    }
}

fn out_of_turn(message: &ToServer) -> Failure {
    match message {
        ToServer::Abandon(reason) => Failure::new(format!("the sender gave up: {}", printable(reason))),
        _ => Failure::new("the sender spoke out of turn; run the same multirail version on both sides"),
    }
}
