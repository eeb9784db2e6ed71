//! The session with one sender: its windows, its messages, and its files.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::files::{
    MAX_ACTIONS, PROTOCOL, ReceiverMessage, SenderMessage, VERSION, WindowLayout, decode_entries,
    decode_items,
};
use multirail::{Access, Peer, Region};

use super::FileServer;
use super::decide::decide;
use super::directory::NameClash;
use super::group_writer::{GroupWriter, WindowBytes};
use super::report::TreeReport;
use crate::connection::wait_until_closed;
use crate::failure::{CommandFailure, CommandResult, printable};
use crate::wire::{MessageSender, RESPONSE_LIMIT};

/// How often the session checks whether a silent sender is alive.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The session with one sender.
pub struct SenderSession<'a> {
    server: &'a FileServer,
    peer: &'a Peer,
    incoming: Receiver<Vec<u8>>,
    outgoing: MessageSender,
    region: Region,
    part: Vec<u8>,
    /// The next window.
    next: u64,
    report: TreeReport,
}

impl<'a> SenderSession<'a> {
    /// Serves a sender until the end of its session. Then waits until it has disconnected, for a limited time.
    pub fn run(server: &'a FileServer, peer: &'a Peer, incoming: Receiver<Vec<u8>>) -> CommandResult {
        let region = server.fabric.alloc(WindowLayout::OFFERED.total() as usize, Access::REMOTE_WRITE)?;
        let outgoing = MessageSender::new(&server.fabric, peer)?;
        let (part, report) = (Vec::new(), TreeReport::new(server.json));
        let mut session = Self { server, peer, incoming, outgoing, region, part, next: 0, report };
        let served = session.serve();
        if let Err(failure) = &served
            && peer.is_alive()
        {
            // The sender may be gone. The failure is printed here anyway.
            let _ = session.outgoing.send(&ReceiverMessage::Refused(printable(failure.message())));
        }
        // The windows outlive the session, because a refused sender writes until it has received the refusal.
        wait_until_closed(peer);
        served
    }

    fn serve(&mut self) -> CommandResult {
        self.outgoing.send(&ReceiverMessage::Welcome {
            protocol: PROTOCOL,
            version: VERSION,
            layout: WindowLayout::OFFERED,
            region: self.region.descriptor().to_bytes(),
            silence_ms: self.server.silence.as_millis() as u64,
        })?;
        let unfinished = |failure: CommandFailure| failure.context("a sender did not finish");
        // A sender has no work to do before its first message.
        let resume = match self.receive_within(self.server.silence.min(RESPONSE_LIMIT)).map_err(unfinished)? {
            SenderMessage::Hello { total, resume } => {
                // With --resume or the rule skip, fewer bytes may be needed. Then each group is checked separately.
                let directory = &self.server.directory;
                if resume {
                    self.server.senders.wait_for_dead_sessions(self.peer);
                } else if directory.on_clash != NameClash::Skip {
                    let checked = directory.staging.quota.check(total);
                    checked.map_err(|failure| failure.context("nothing was stored"))?;
                }
                resume
            }
            other => return Err(unexpected_message(&other)),
        };
        self.outgoing.send(&ReceiverMessage::Ready)?;
        loop {
            match self.receive().map_err(unfinished)? {
                SenderMessage::Offer { sequence, table } => self.group(sequence, table, resume)?,
                SenderMessage::Working => {}
                SenderMessage::Bye => {
                    // The sender may have disconnected before the send completes here.
                    let _ = self.outgoing.send(&ReceiverMessage::Farewell);
                    return Ok(());
                }
                other => return Err(unexpected_message(&other)),
            }
        }
    }

    fn group(&mut self, sequence: u64, table: u32, resume: bool) -> CommandResult {
        if sequence != self.next {
            return Err(window_not_free(sequence));
        }
        let entries = decode_entries(&self.table(sequence, table)?).map_err(CommandFailure::new)?;
        let (directory, peer) = (&self.server.directory, self.peer);
        let (mut store, actions) = decide(directory, entries, resume, &|| peer.is_alive())?;
        self.next += 1;
        self.outgoing.send(&ReceiverMessage::Free { sequence })?;
        for (some, first) in actions.chunks(MAX_ACTIONS).zip((0..).step_by(MAX_ACTIONS)) {
            self.outgoing.send(&ReceiverMessage::Actions { first, actions: some.to_vec() })?;
        }
        let whole = self.windows(&mut store).and_then(|entries| store.commit().map(|()| entries));
        let entries = match whole {
            Ok(entries) => entries,
            Err(failure) => {
                let failure = failure.context(format!("{} was not stored", store.current()));
                // Complete files get their names all the same.
                if let Err(also) = store.commit() {
                    tracing::warn!(reason = also.message(), "cannot keep complete files");
                }
                return Err(failure);
            }
        };
        let stored = store.finish(entries)?;
        self.outgoing.send(&ReceiverMessage::Stored)?;
        stored.iter().for_each(|stored| self.report.add(stored));
        Ok(())
    }

    /// Stores windows until the group is complete. Returns the number of complete entries.
    fn windows(&mut self, store: &mut GroupWriter<'_>) -> CommandResult<u32> {
        let layout = WindowLayout::OFFERED;
        // The next windows that are filled. A message may overtake another.
        let mut filled = vec![None; layout.windows as usize];
        // The first window that is not free before the next commit.
        let mut first_held = self.next;
        let mut commit = None;
        loop {
            while let Some((table, data)) = filled[layout.slot(self.next)].take() {
                self.window(store, table, data)?;
                self.next += 1;
                if !store.is_pending() {
                    self.free(&mut first_held)?;
                }
            }
            if let Some((next, entries)) = commit
                && next == self.next
            {
                return self.free(&mut first_held).map(|()| entries);
            }
            let message = match self.incoming.try_recv() {
                Ok(bytes) => SenderMessage::decode(&bytes).map_err(CommandFailure::new)?,
                // No message is outstanding, so this is the time to sync all received files at once.
                Err(_) if store.is_pending() || first_held < self.next => {
                    store.commit()?;
                    self.free(&mut first_held)?;
                    continue;
                }
                Err(_) => self.receive()?,
            };
            match message {
                SenderMessage::Filled { sequence, table, data } => {
                    let ahead = sequence.checked_sub(first_held).ok_or_else(|| window_not_free(sequence))?;
                    let slot = &mut filled[layout.slot(sequence)];
                    if sequence < self.next || ahead >= u64::from(layout.windows) || slot.is_some() {
                        return Err(window_not_free(sequence));
                    }
                    *slot = Some((table, data));
                }
                SenderMessage::Working => {}
                SenderMessage::Resume { index, first } => {
                    let (pieces, last, bytes) = store.have(index, first)?;
                    self.outgoing.send(&ReceiverMessage::Have { pieces, last, bytes })?;
                }
                SenderMessage::Commit { next, entries } if next >= self.next && commit.is_none() => {
                    commit = Some((next, entries));
                }
                other => return Err(unexpected_message(&other)),
            }
        }
    }

    /// Frees all windows from `first_held` to the next.
    fn free(&mut self, first_held: &mut u64) -> CommandResult {
        while *first_held < self.next {
            self.outgoing.send(&ReceiverMessage::Free { sequence: *first_held })?;
            *first_held += 1;
        }
        Ok(())
    }

    fn window(&mut self, store: &mut GroupWriter<'_>, table: u32, data: u32) -> CommandResult {
        let items = decode_items(&self.table(self.next, table)?).map_err(CommandFailure::new)?;
        if data > WindowLayout::OFFERED.data {
            return Err(CommandFailure::new("the sender filled more than a window"));
        }
        let at = WindowLayout::OFFERED.data_at(self.next);
        let mut bytes = WindowBytes::new(&self.region, &mut self.part, at, data as usize);
        items.iter().try_for_each(|item| store.item(item, &mut bytes))
    }

    /// The table of a window. It is copied first, because the sender may still write it.
    fn table(&self, sequence: u64, len: u32) -> CommandResult<Vec<u8>> {
        if len > WindowLayout::OFFERED.table {
            return Err(CommandFailure::new("the sender's table is too long"));
        }
        let mut table = vec![0; len as usize];
        self.region.copy_out(WindowLayout::OFFERED.table_at(sequence), &mut table)?;
        Ok(table)
    }

    /// Waits for the next message. Fails if the sender is gone or silent.
    fn receive(&mut self) -> CommandResult<SenderMessage> {
        self.receive_within(self.server.silence)
    }

    /// The same, with a limit of silence.
    fn receive_within(&mut self, limit: Duration) -> CommandResult<SenderMessage> {
        let until = Instant::now() + limit;
        loop {
            // Read before the wait, so that the last messages of a dead peer are received first.
            let alive = self.peer.is_alive();
            match self.incoming.recv_timeout(POLL_INTERVAL.min(limit)) {
                Ok(bytes) => return SenderMessage::decode(&bytes).map_err(CommandFailure::new),
                Err(RecvTimeoutError::Timeout) if !alive => return Err(sender_gone(self.peer)),
                Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
                Err(RecvTimeoutError::Timeout) => {
                    return Err(CommandFailure::new(format!(
                        "the sender sent no message for {} s (the server's --silence)",
                        limit.as_secs_f64()
                    )));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(CommandFailure::new("the sender sent too many messages at once"));
                }
            }
        }
    }
}

fn sender_gone(peer: &Peer) -> CommandFailure {
    match wait_until_closed(peer) {
        Some(error) => error.into(),
        None => CommandFailure::new("the sender is gone"),
    }
}

fn unexpected_message(message: &SenderMessage) -> CommandFailure {
    match message {
        SenderMessage::Abandon(reason) => {
            CommandFailure::new(format!("the sender gave up: {}", printable(reason)))
        }
        _ => CommandFailure::new(
            "the sender sent an unexpected message; run the same multirail version on both sides",
        ),
    }
}

fn window_not_free(sequence: u64) -> CommandFailure {
    CommandFailure::new(format!("the sender filled window {sequence}, which was not free"))
}
