//! The sender's side of a session, group by group.

use std::ops::Range;
use std::sync::mpsc;
use std::time::Duration;

use crate::files::{
    CHUNK, EntryAction, EntryKind, FileHash, OfferedEntry, PROTOCOL, PieceHash, ReceiverMessage,
    SenderMessage, TableItem, VERSION,
};
use multirail::{Access, Descriptor, Fabric, Peer, Region};

use super::list::List;
use super::progress::SendProgress;
use super::server_channel::{KeepAliveTimer, SendError, ServerChannel, refused, unexpected};
use super::source::SourceFile;
use super::window_packer::{Filled, WindowPacker};
use super::window_writer::{FilledWindow, WindowWriter};
use crate::entry_counts::EntryResult;
use crate::failure::{CommandFailure, CommandResult, printable};
use crate::output;
use crate::wire::{MessageSender, RESPONSE_LIMIT};

/// How long to wait for the server's reason after a failure.
const REASON_LIMIT: Duration = Duration::from_millis(300);

/// How long the server may take to respond when the sender gives up.
const GIVE_UP_LIMIT: Duration = Duration::from_secs(2);

/// How often an entry is offered that changes while it is sent.
const MAX_OFFERS: u32 = 4;

/// The maximum number of entries in a group, and of bytes of files, unless one file has more.
const GROUP: (usize, u64) = (4096, 256 << 20);

/// A sender in a session with a server.
pub struct FileSender<'a> {
    peer: Peer,
    pub(super) outgoing: MessageSender,
    keep_alive: KeepAliveTimer,
    pub(super) channel: &'a mut ServerChannel,
    region: Region,
    window_writer: WindowWriter,
    /// True if holes are not sent.
    pub(super) sparse: bool,
    /// The current entry, for error messages.
    at: usize,
    /// The last entry that changed.
    changed: ChangedEntry,
}

/// An entry that changed while it was sent.
#[derive(Default)]
struct ChangedEntry {
    /// The index in the list.
    index: usize,
    /// How often it changed in a row.
    times: u32,
    /// Its bytes that were sent in vain.
    sent: u64,
}

/// The result of sending a group.
#[derive(Default)]
struct Packed {
    /// The outcomes of the complete entries, from the first on.
    outcomes: Vec<SendOutcome>,
    /// The sent bytes of the next entry, if it has changed.
    changed: Option<u64>,
}

/// The outcome of sending an entry.
#[derive(Debug, Default, Clone, Copy)]
pub struct SendOutcome {
    /// The bytes sent.
    pub sent: u64,
    /// The sent bytes that the server had already stored in an earlier attempt.
    pub again: u64,
    /// Whether the entry was stored.
    pub entry_result: EntryResult,
    /// The BLAKE3 of a file without holes.
    pub hash: Option<blake3::Hash>,
}

/// The plan for an entry.
pub enum Plan {
    /// The server keeps another file with its name.
    Skip,
    /// The server has the entry already.
    Have,
    /// The server has the same content, but needs mode and time.
    Same,
    /// The server creates the entry, which is not a file.
    Make,
    /// A file that is sent as one item.
    Whole,
    /// A file that is sent in pieces.
    Pieces(PieceState),
}

/// The continuation of a file in pieces.
#[derive(Default)]
pub struct PieceState {
    /// The number of pieces that the server keeps.
    pub keep: u64,
    /// The bytes of these pieces.
    pub kept: u64,
    /// The end of these pieces.
    pub end: u64,
    /// The bytes that the server stored before but that are sent again.
    pub again: u64,
    /// The hash of the kept pieces.
    pub hash: FileHash,
}

impl<'a> FileSender<'a> {
    /// Waits for the server's welcome on `channel`, and announces what will be sent.
    pub fn connect(
        fabric: &Fabric,
        peer: &Peer,
        channel: &'a mut ServerChannel,
        list: &List,
        resume: bool,
        sparse: bool,
    ) -> Result<Self, SendError> {
        let mut outgoing = MessageSender::new(fabric, peer)?;
        let (layout, descriptor, keep_alive) = match channel.receive_within(RESPONSE_LIMIT)? {
            ReceiverMessage::Welcome { protocol: PROTOCOL, version: VERSION, layout, region, silence_ms } => {
                (layout, region, Duration::from_millis(silence_ms) / 4)
            }
            ReceiverMessage::Welcome { protocol: PROTOCOL, version, .. } => {
                return Err(SendError::ServerRefused(CommandFailure::new(format!(
                    "the server uses protocol version {version}, this sender {VERSION}; run the same multirail version on both sides"
                ))));
            }
            ReceiverMessage::Refused(reason) => return Err(SendError::ServerRefused(refused(&reason))),
            _ => {
                let why = CommandFailure::new("no `multirail serve` listens on that address");
                return Err(SendError::ServerRefused(why));
            }
        };
        let remote = peer.import(&Descriptor::from_bytes(&descriptor)?)?;
        if !layout.is_valid() || (remote.len() as u64) < layout.total() {
            return Err(SendError::ServerRefused(CommandFailure::new(
                "the server's layout is invalid; run the same multirail version on both sides",
            )));
        }
        channel.set_layout(layout);
        outgoing.send(&SenderMessage::Hello { total: list.total, resume })?;
        match channel.receive()? {
            ReceiverMessage::Ready => {}
            other => return Err(SendError::ServerRefused(unexpected(other))),
        }
        let region = fabric.alloc(layout.total() as usize, Access::LOCAL)?;
        let window_writer = WindowWriter::new(peer, &region, remote, layout);
        Ok(Self {
            peer: peer.clone(),
            outgoing,
            keep_alive: KeepAliveTimer::new(keep_alive),
            channel,
            region,
            window_writer,
            sparse,
            at: 0,
            changed: ChangedEntry::default(),
        })
    }

    /// Sends the next group of `list` from entry `first` on, up to an entry that changes. A changed entry is listed
    /// again. On return the server has made the sent entries durable.
    pub fn group(
        &mut self,
        list: &mut List,
        first: usize,
        progress: &mut SendProgress,
    ) -> Result<Vec<SendOutcome>, SendError> {
        self.at = first;
        let sent = self.whole_group(list, first, progress).and_then(|packed| {
            let mut outcomes = packed.outcomes;
            if let Some(resent) = self.changed.index.checked_sub(first).and_then(|at| outcomes.get_mut(at)) {
                resent.sent += self.changed.sent;
                resent.again += self.changed.sent;
                self.changed = ChangedEntry::default();
            }
            if let Some(sent) = packed.changed {
                self.at = first + outcomes.len();
                self.offer_again(list, sent, progress)?;
            }
            Ok(outcomes)
        });
        sent.map_err(|stop| {
            let stop = self.give_up(stop);
            stop.context(format!("{} was not sent", list.entries[self.at].path))
        })
    }

    /// Lists the current entry again, which changed after `sent` bytes of it were sent.
    fn offer_again(&mut self, list: &mut List, sent: u64, progress: &mut SendProgress) -> CommandResult {
        if self.changed.index != self.at || self.changed.times == 0 {
            self.changed = ChangedEntry { index: self.at, ..ChangedEntry::default() };
        }
        self.changed.times += 1;
        self.changed.sent += sent;
        let path = list.path(self.at);
        if self.changed.times == MAX_OFFERS {
            return Err(CommandFailure::new(format!(
                "{} changed each of the {MAX_OFFERS} times it was sent; send it when no program writes to it",
                path.display()
            )));
        }
        list.refresh(self.at)?;
        progress.waste(sent, list.total);
        progress.print_without_bar(|| {
            output::print_error(&format!("{} changed while it was sent, and is sent again", path.display()));
            Ok(())
        })
    }

    fn whole_group(
        &mut self,
        list: &List,
        first: usize,
        progress: &mut SendProgress,
    ) -> Result<Packed, SendError> {
        let (range, actions) = self.offer(list, first)?;
        let mut plans = Vec::with_capacity(range.len());
        for ((index, at), action) in (0..).zip(range.clone()).zip(actions) {
            self.at = at;
            let entry = &list.entries[at];
            self.working()?;
            match self.plan(index, entry, action, || open(list, at)) {
                Err(SendError::FileChanged) => break,
                plan => plans.push(plan?),
            }
        }
        self.at = first;
        let (planned, all) = (plans.len(), range.len());
        let mut packed = self.windows(list, range, plans, progress)?;
        if planned < all && packed.changed.is_none() {
            packed.changed = Some(0);
        }
        progress.set_message("the server syncs the files to disk");
        let entries = packed.outcomes.len() as u32;
        self.outgoing.send(&SenderMessage::Commit { next: self.channel.next, entries })?;
        match self.channel.receive()? {
            ReceiverMessage::Stored => Ok(packed),
            other => Err(SendError::ServerRefused(unexpected(other))),
        }
    }

    /// Plans one entry, by comparing it with what the server has.
    pub fn plan(
        &mut self,
        index: u32,
        entry: &OfferedEntry,
        action: EntryAction,
        source: impl Fn() -> Result<SourceFile, SendError>,
    ) -> Result<Plan, SendError> {
        let EntryKind::File { size, data } = entry.kind else {
            return Ok(match action {
                EntryAction::Skip => Plan::Skip,
                EntryAction::Have => Plan::Have,
                _ => Plan::Make,
            });
        };
        match action {
            EntryAction::Skip => return Ok(Plan::Skip),
            EntryAction::Have => return Ok(Plan::Have),
            EntryAction::Compare { digest, skip } => {
                let source = source()?;
                let same = source.digest(|| self.working())? == digest;
                source.ensure_unchanged()?;
                if same {
                    return Ok(Plan::Same);
                }
                if skip {
                    return Ok(Plan::Skip);
                }
                let found = self.continue_partial(index, &source)?;
                if found.keep > 0 || found.again > 0 {
                    return Ok(Plan::Pieces(found));
                }
            }
            EntryAction::Partial => return self.continue_partial(index, &source()?).map(Plan::Pieces),
            EntryAction::Send => {}
        }
        let whole = size <= CHUNK && data == size;
        Ok(if whole { Plan::Whole } else { Plan::Pieces(PieceState::default()) })
    }

    /// Finds the pieces of the server's partial file that are equal to the source.
    fn continue_partial(&mut self, index: u32, source: &SourceFile) -> Result<PieceState, SendError> {
        let (mut found, mut ours, mut part) = (PieceState::default(), source.pieces(self.sparse), Vec::new());
        loop {
            self.outgoing.send(&SenderMessage::Resume { index, first: found.keep })?;
            let (pieces, last, bytes) = match self.channel.receive()? {
                ReceiverMessage::Have { pieces, last, bytes } => (pieces, last, bytes),
                other => return Err(SendError::ServerRefused(unexpected(other))),
            };
            let done = last || pieces.is_empty();
            for piece in pieces {
                let range = ours.next().map_err(|error| source.unreadable(&error))?;
                found.again = bytes.saturating_sub(found.kept);
                if range != Some(piece.offset..piece.end()) {
                    return Ok(found);
                }
                self.working()?;
                let mut hash = PieceHash::new(piece.offset);
                source.read(piece.offset, piece.len as usize, &mut part, |bytes| {
                    hash.update(bytes);
                    Ok(())
                })?;
                if hash.finish() != piece.hash {
                    return Ok(found);
                }
                found.hash.push(&piece);
                found.keep += 1;
                found.kept += u64::from(piece.len);
                found.end = piece.end();
            }
            found.again = bytes.saturating_sub(found.kept);
            if done {
                return Ok(found);
            }
        }
    }

    /// Tells the server from time to time that the sender is alive.
    pub(super) fn working(&mut self) -> CommandResult {
        if self.keep_alive.is_due() { self.outgoing.send(&SenderMessage::Working) } else { Ok(()) }
    }

    /// Offers the entries of a group. Returns the server's action for each.
    fn offer(&mut self, list: &List, first: usize) -> Result<(Range<usize>, Vec<EntryAction>), SendError> {
        let (mut table, mut end, mut bytes) = (Vec::new(), first, 0_u64);
        for entry in &list.entries[first..] {
            let len = table.len();
            entry.encode(&mut table).map_err(CommandFailure::new)?;
            bytes = bytes.saturating_add(entry.data());
            let full = table.len() > self.channel.layout.table as usize || end - first == GROUP.0;
            if end > first && (full || bytes > GROUP.1) {
                table.truncate(len);
                break;
            }
            end += 1;
        }
        self.channel.wait_until_free()?;
        let (sequence, len) = (self.channel.next, table.len() as u32);
        self.region.copy_in(self.channel.layout.table_at(sequence), &table).map_err(CommandFailure::from)?;
        self.channel.take_window();
        self.window_writer.write_window(FilledWindow { sequence, table: len, data: 0 })?;
        self.outgoing.send(&SenderMessage::Offer { sequence, table: len })?;
        let mut actions = vec![None; end - first];
        let mut missing = actions.len();
        while missing > 0 {
            match self.channel.receive()? {
                ReceiverMessage::Actions { first, actions: some } => {
                    for (at, action) in (first as usize..).zip(some) {
                        let slot = actions.get_mut(at).filter(|slot| slot.is_none());
                        let slot = slot.ok_or_else(|| {
                            CommandFailure::new("the server sent actions for other entries")
                        })?;
                        *slot = Some(action);
                        missing -= 1;
                    }
                }
                other => return Err(SendError::ServerRefused(unexpected(other))),
            }
        }
        Ok((first..end, actions.into_iter().flatten().collect()))
    }

    /// Fills windows in this thread while another thread writes the earlier windows.
    fn windows(
        &mut self,
        list: &List,
        range: Range<usize>,
        plans: Vec<Plan>,
        progress: &mut SendProgress,
    ) -> Result<Packed, SendError> {
        let (region, sparse, at) = (&self.region, self.sparse, &mut self.at);
        let keep_alive = &mut self.keep_alive;
        let (channel, outgoing, window_writer, peer) =
            (&mut *self.channel, &mut self.outgoing, &self.window_writer, &self.peer);
        std::thread::scope(|scope| {
            let (filled, to_write) = mpsc::sync_channel::<Filled>(channel.layout.windows as usize);
            let writing = scope.spawn(move || {
                let written = to_write.iter().try_for_each(|filled| {
                    let Filled::Window(window) = filled else {
                        return outgoing.send(&SenderMessage::Working);
                    };
                    let FilledWindow { sequence, table, data } = window;
                    progress.add_sent(data.into())?;
                    window_writer.write_window(window)?;
                    outgoing.send(&SenderMessage::Filled { sequence, table, data })
                });
                if written.is_err() {
                    // The filling thread may wait for a window that will never be free again, so the connection is
                    // closed. Before that, it may still receive the server's reason.
                    let _ = multirail::wait(peer.closed(), REASON_LIMIT);
                    peer.disconnect();
                }
                written
            });
            let read =
                pack(list, range, plans, WindowPacker::new(channel, region, filled, keep_alive), sparse, at);
            let written = writing
                .join()
                .unwrap_or_else(|_| Err(CommandFailure::new("the thread that writes windows panicked")));
            match (read, written) {
                (Err(SendError::ServerRefused(failure)), _) => Err(SendError::ServerRefused(failure)),
                (_, Err(failure)) => Err(SendError::Failed(failure)),
                (read, Ok(())) => read,
            }
        })
    }

    /// Ends the session after a failure. Returns the server's reason if there is one, because it explains the failure
    /// better than the closed connection.
    fn give_up(&mut self, stop: SendError) -> SendError {
        let failure = match stop {
            SendError::ServerRefused(_) | SendError::ServerLost(_) => return stop,
            SendError::Failed(failure) => failure,
            SendError::FileChanged => stop.into(),
        };
        if let Some(reason) = self.channel.refusal(REASON_LIMIT) {
            return SendError::ServerRefused(refused(&reason));
        }
        if !self.peer.is_alive() {
            return SendError::ServerLost(failure);
        }
        // If the server does not take this message, it sees the disconnect.
        if self.outgoing.send(&SenderMessage::Abandon(printable(failure.message()))).is_ok() {
            // The server responds with a refusal. Disconnecting earlier could drop the message unread.
            self.channel.refusal(GIVE_UP_LIMIT);
        }
        SendError::Failed(failure)
    }

    /// Ends the session in good order.
    pub fn finish(mut self) -> Result<(), SendError> {
        self.outgoing.send(&SenderMessage::Bye)?;
        match self.channel.receive_within(RESPONSE_LIMIT)? {
            ReceiverMessage::Farewell => {
                self.peer.disconnect();
                Ok(())
            }
            other => Err(SendError::ServerRefused(unexpected(other))),
        }
    }
}

fn open(list: &List, at: usize) -> Result<SourceFile, SendError> {
    SourceFile::open(list.path(at), &list.entries[at])
}

/// Packs the entries of a group as planned, up to the first that changed. `at` is the current entry.
fn pack(
    list: &List,
    range: Range<usize>,
    plans: Vec<Plan>,
    mut packer: WindowPacker<'_>,
    sparse: bool,
    at: &mut usize,
) -> Result<Packed, SendError> {
    let mut packed = Packed::default();
    for ((index, number), plan) in (0..).zip(range).zip(plans) {
        *at = number;
        let mut outcome = SendOutcome::default();
        match pack_one(list, (index, number), plan, &mut packer, sparse, &mut outcome) {
            Ok(()) => packed.outcomes.push(outcome),
            Err(SendError::FileChanged) => {
                packed.changed = Some(outcome.sent);
                break;
            }
            Err(stop) => return Err(stop),
        }
    }
    packer.finish()?;
    Ok(packed)
}

/// Packs entry `number` of the list, which is entry `index` of its group.
fn pack_one(
    list: &List,
    (index, number): (u32, usize),
    plan: Plan,
    packer: &mut WindowPacker<'_>,
    sparse: bool,
    outcome: &mut SendOutcome,
) -> Result<(), SendError> {
    let entry = &list.entries[number];
    match plan {
        Plan::Skip => outcome.entry_result = EntryResult::Skipped,
        Plan::Have => outcome.entry_result = EntryResult::Same,
        Plan::Same => {
            outcome.entry_result = EntryResult::Same;
            packer.item(&TableItem::Same { index })?;
        }
        Plan::Make => packer.item(&TableItem::Make { index })?,
        Plan::Whole => {
            let source = open(list, number)?;
            outcome.hash = Some(packer.whole(index, &source, entry.size() as usize)?);
            outcome.sent = entry.size();
        }
        Plan::Pieces(mut plan) => {
            let source = open(list, number)?;
            let mut pieces = source.pieces(sparse);
            let unreadable = |error| source.unreadable(&error);
            if !pieces.skip(plan.keep, plan.kept, plan.end).map_err(unreadable)? {
                return Err(SendError::FileChanged);
            }
            packer.item(&TableItem::Begin { index, keep: plan.keep })?;
            while let Some(range) = pieces.next().map_err(unreadable)? {
                outcome.sent += range.end - range.start;
                plan.hash.push(&packer.piece(&source, range)?);
            }
            source.ensure_unchanged()?;
            packer.item(&TableItem::End)?;
            outcome.again = plan.again;
            outcome.hash = plan.hash.finish(entry.size());
        }
    }
    debug_assert!(outcome.sent == 0 || matches!(entry.kind, EntryKind::File { .. }));
    Ok(())
}
