//! One sender: its windows, its messages, its files.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::files::{Layout, PROTOCOL, ToSender, ToServer, VERDICTS, VERSION, decode_entries, decode_items};
use multirail::{Access, Peer, Region};

use super::Server;
use super::directory::Clash;
use super::judge::judge;
use super::report::Report;
use super::store::Store;
use super::window::Bytes;
use crate::failure::{Done, Failure, printable};
use crate::wait::let_go;
use crate::wire::{Outbox, PROMPT};

/// How often a silent sender is looked after.
const LOOK: Duration = Duration::from_millis(50);

/// The conversation with one sender.
pub struct Session<'a> {
    server: &'a Server,
    peer: &'a Peer,
    inbox: Receiver<Vec<u8>>,
    outbox: Outbox,
    region: Region,
    part: Vec<u8>,
    /// The next window.
    next: u64,
    report: Report,
}

impl<'a> Session<'a> {
    /// Serves a sender until it says goodbye, and has left or had time to.
    pub fn run(server: &'a Server, peer: &'a Peer, inbox: Receiver<Vec<u8>>) -> Done {
        let region = server.fabric.alloc(Layout::OFFERED.total() as usize, Access::REMOTE_WRITE)?;
        let outbox = Outbox::new(&server.fabric, peer)?;
        let (part, report) = (Vec::new(), Report::new(server.json));
        let mut session = Self { server, peer, inbox, outbox, region, part, next: 0, report };
        let served = session.serve();
        if let Err(failure) = &served
            && peer.is_alive()
        {
            // The sender may be gone by now; our own sentence is printed anyway.
            let _ = session.outbox.say(&ToSender::Refused(printable(failure.sentence())));
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
            silence_ms: self.server.silence.as_millis() as u64,
        })?;
        let unfinished = |failure: Failure| failure.within("a sender did not finish");
        // A sender has nothing to do before it says hello.
        let resume = match self.hear_within(self.server.silence.min(PROMPT)).map_err(unfinished)? {
            ToServer::Hello { total, resume } => {
                // With these, less may be needed: each group is asked for its room.
                let directory = &self.server.directory;
                if resume {
                    self.server.senders.await_dead(self.peer);
                } else if directory.clash != Clash::Skip {
                    let checked = directory.staging.quota.check(total);
                    checked.map_err(|failure| failure.within("nothing was stored"))?;
                }
                resume
            }
            other => return Err(out_of_turn(&other)),
        };
        self.outbox.say(&ToSender::Ready)?;
        loop {
            match self.hear().map_err(unfinished)? {
                ToServer::Offer { sequence, table } => self.group(sequence, table, resume)?,
                ToServer::Working => {}
                ToServer::Bye => {
                    // The sender may have read it and left before we see it taken.
                    let _ = self.outbox.say(&ToSender::Farewell);
                    return Ok(());
                }
                other => return Err(out_of_turn(&other)),
            }
        }
    }

    fn group(&mut self, sequence: u64, table: u32, resume: bool) -> Done {
        if sequence != self.next {
            return Err(not_free(sequence));
        }
        let entries = decode_entries(&self.table(sequence, table)?).map_err(Failure::new)?;
        let (directory, peer) = (&self.server.directory, self.peer);
        let (mut store, verdicts) = judge(directory, entries, resume, &|| peer.is_alive())?;
        self.next += 1;
        self.outbox.say(&ToSender::Free { sequence })?;
        for (some, first) in verdicts.chunks(VERDICTS).zip((0..).step_by(VERDICTS)) {
            self.outbox.say(&ToSender::Verdicts { first, verdicts: some.to_vec() })?;
        }
        let whole = self.windows(&mut store).and_then(|entries| store.commit().map(|()| entries));
        let entries = match whole {
            Ok(entries) => entries,
            Err(failure) => {
                let failure = failure.within(format!("{} was not stored", store.current()));
                // What is whole gets its name all the same.
                if let Err(also) = store.commit() {
                    tracing::warn!(reason = also.sentence(), "whole files were not kept");
                }
                return Err(failure);
            }
        };
        let stored = store.finish(entries)?;
        self.outbox.say(&ToSender::Stored)?;
        stored.iter().for_each(|stored| self.report.add(stored));
        Ok(())
    }

    /// Stores windows until the group is complete; how many of its entries are done.
    fn windows(&mut self, store: &mut Store<'_>) -> Done<u32> {
        let layout = Layout::OFFERED;
        // Which of the next windows are filled; a message may overtake another.
        let mut filled = vec![None; layout.windows as usize];
        // The first window that waits for the store to commit; the rest is free.
        let mut held = self.next;
        let mut commit = None;
        loop {
            while let Some((table, data)) = filled[layout.slot(self.next)].take() {
                self.window(store, table, data)?;
                self.next += 1;
                if !store.is_pending() {
                    self.free(&mut held)?;
                }
            }
            if let Some((next, entries)) = commit
                && next == self.next
            {
                return self.free(&mut held).map(|()| entries);
            }
            let message = match self.inbox.try_recv() {
                Ok(bytes) => ToServer::decode(&bytes).map_err(Failure::new)?,
                // Nothing is under way: the time to sync, once for all that came.
                Err(_) if store.is_pending() || held < self.next => {
                    store.commit()?;
                    self.free(&mut held)?;
                    continue;
                }
                Err(_) => self.hear()?,
            };
            match message {
                ToServer::Filled { sequence, table, data } => {
                    let ahead = sequence.checked_sub(held).ok_or_else(|| not_free(sequence))?;
                    let slot = &mut filled[layout.slot(sequence)];
                    if sequence < self.next || ahead >= u64::from(layout.windows) || slot.is_some() {
                        return Err(not_free(sequence));
                    }
                    *slot = Some((table, data));
                }
                ToServer::Working => {}
                ToServer::Resume { index, first } => {
                    let (pieces, last, bytes) = store.have(index, first)?;
                    self.outbox.say(&ToSender::Have { pieces, last, bytes })?;
                }
                ToServer::Commit { next, entries } if next >= self.next && commit.is_none() => {
                    commit = Some((next, entries));
                }
                other => return Err(out_of_turn(&other)),
            }
        }
    }

    /// Frees all windows from `held` to the next.
    fn free(&mut self, held: &mut u64) -> Done {
        while *held < self.next {
            self.outbox.say(&ToSender::Free { sequence: *held })?;
            *held += 1;
        }
        Ok(())
    }

    fn window(&mut self, store: &mut Store<'_>, table: u32, data: u32) -> Done {
        let items = decode_items(&self.table(self.next, table)?).map_err(Failure::new)?;
        if data > Layout::OFFERED.data {
            return Err(Failure::new("the sender filled more than a window"));
        }
        let at = Layout::OFFERED.data_at(self.next);
        let mut bytes = Bytes::new(&self.region, &mut self.part, at, data as usize);
        items.iter().try_for_each(|item| store.item(item, &mut bytes))
    }

    /// The table of a window: copied first, since the sender may write it meanwhile.
    fn table(&self, sequence: u64, len: u32) -> Done<Vec<u8>> {
        if len > Layout::OFFERED.table {
            return Err(Failure::new("the sender's table is too long"));
        }
        let mut table = vec![0; len as usize];
        self.region.copy_out(Layout::OFFERED.table_at(sequence), &mut table)?;
        Ok(table)
    }

    /// The next message, or why there will be none.
    fn hear(&mut self) -> Done<ToServer> {
        self.hear_within(self.server.silence)
    }

    /// The same, from a sender that is silent for less than `limit`.
    fn hear_within(&mut self, limit: Duration) -> Done<ToServer> {
        let until = Instant::now() + limit;
        loop {
            // Asked before the wait: what a peer said before it died is heard first.
            let alive = self.peer.is_alive();
            match self.inbox.recv_timeout(LOOK.min(limit)) {
                Ok(bytes) => return ToServer::decode(&bytes).map_err(Failure::new),
                Err(RecvTimeoutError::Timeout) if !alive => return Err(gone(self.peer)),
                Err(RecvTimeoutError::Timeout) if Instant::now() < until => {}
                Err(RecvTimeoutError::Timeout) => {
                    return Err(Failure::new(format!(
                        "the sender said nothing for {} s, see --silence of the server",
                        limit.as_secs_f64()
                    )));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Failure::new("the sender sent more messages than were agreed"));
                }
            }
        }
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

fn not_free(sequence: u64) -> Failure {
    Failure::new(format!("the sender filled window {sequence}, which was not free"))
}
