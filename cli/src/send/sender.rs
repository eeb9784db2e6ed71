//! The conversation with a server, group by group.

use std::ops::Range;
use std::sync::mpsc;
use std::time::Duration;

use crate::files::{Item, Kind, PROTOCOL, ToSender, ToServer, VERSION, Verdict};
use multirail::{Access, Descriptor, Fabric, Peer, Region};

use super::list::List;
use super::mover::{Mover, Window};
use super::packer::{Filled, Packer};
use super::plan::Plan;
use super::progress::Progress;
use super::pulse::Pulse;
use super::source::Source;
use super::talk::{Stop, Talk, refused, unexpected};
use crate::failure::{Done, Failure, printable};
use crate::output;
use crate::tally::Became;
use crate::wire::{Inbox, MESSAGE_BYTES, Outbox, PROMPT, RECEIVES};

/// How long to look for the server's reason once something broke.
const AUTOPSY: Duration = Duration::from_millis(300);

/// How long the server may take to answer that we give up.
const FAREWELL: Duration = Duration::from_secs(2);

/// How often an entry is offered that changes each time while it is sent.
const OFFERS: u32 = 4;

/// Most entries in a group, and bytes of files unless one file has more.
const GROUP: (usize, u64) = (4096, 256 << 20);

/// A sender that a server has welcomed.
pub struct Sender {
    peer: Peer,
    pub(super) outbox: Outbox,
    pulse: Pulse,
    pub(super) talk: Talk,
    region: Region,
    mover: Mover,
    /// Holes are not sent.
    pub(super) sparse: bool,
    /// The entry at hand, for the sentence if it ends there.
    at: usize,
    /// The entry that changed last.
    changed: Changed,
    /// Bytes of entries that changed, which went over the wire for nothing.
    wasted: u64,
}

/// An entry that changed while it was sent.
#[derive(Default)]
struct Changed {
    /// Its number in the list.
    index: usize,
    /// How often in a row.
    times: u32,
    /// Bytes of it that went over the wire for nothing.
    sent: u64,
}

/// What was sent of a group.
#[derive(Default)]
struct Packed {
    /// Of the entries that are done, from the first on.
    outcomes: Vec<Outcome>,
    /// Bytes of the next entry, if that has changed.
    changed: Option<u64>,
}

/// What became of an entry.
#[derive(Debug, Default, Clone, Copy)]
pub struct Outcome {
    /// Bytes that went over the wire.
    pub sent: u64,
    /// Of these, bytes that the server had stored from an earlier attempt.
    pub again: u64,
    /// Whether it was stored.
    pub became: Became,
    /// Of a file without holes.
    pub hash: Option<blake3::Hash>,
}

impl Sender {
    /// Hears the server's welcome, and says what will come.
    pub fn greet(fabric: &Fabric, peer: &Peer, list: &List, resume: bool, sparse: bool) -> Done<Self> {
        let inbox = Inbox::new(fabric.recv_pool(RECEIVES, MESSAGE_BYTES)?, peer);
        let mut outbox = Outbox::new(fabric, peer)?;
        let mut talk = Talk::new(inbox, crate::files::Layout::OFFERED);
        let (layout, descriptor, pulse) = match talk.hear_within(PROMPT)? {
            ToSender::Welcome { protocol: PROTOCOL, version: VERSION, layout, region, silence_ms } => {
                (layout, region, Duration::from_millis(silence_ms) / 4)
            }
            ToSender::Welcome { protocol: PROTOCOL, version, .. } => {
                return Err(Failure::new(format!(
                    "the server speaks version {version}, this sender {VERSION}; run the same multirail on both sides"
                )));
            }
            ToSender::Refused(reason) => return Err(refused(&reason)),
            _ => return Err(Failure::new("that address is no `multirail serve`")),
        };
        let remote = peer.import(&Descriptor::from_bytes(&descriptor)?)?;
        if !layout.is_sound() || (remote.len() as u64) < layout.total() {
            return Err(Failure::new(
                "the server's windows make no sense; run the same multirail on both sides",
            ));
        }
        talk.divide(layout);
        outbox.say(&ToServer::Hello { total: list.total, resume })?;
        match talk.hear()? {
            ToSender::Ready => {}
            other => return Err(unexpected(other)),
        }
        let region = fabric.alloc(layout.total() as usize, Access::LOCAL)?;
        let mover = Mover::new(peer, &region, remote, layout);
        Ok(Self {
            peer: peer.clone(),
            outbox,
            pulse: Pulse::new(pulse),
            talk,
            region,
            mover,
            sparse,
            at: 0,
            changed: Changed::default(),
            wasted: 0,
        })
    }

    /// Sends the next group of `list`, from entry `first` on, as far as no entry changes
    /// meanwhile: that one is listed anew. What was sent is durable at the server on return.
    pub fn group(&mut self, list: &mut List, first: usize, progress: &mut Progress) -> Done<Vec<Outcome>> {
        self.at = first;
        let sent = self.whole_group(list, first, progress).and_then(|packed| {
            let mut outcomes = packed.outcomes;
            if let Some(resent) = self.changed.index.checked_sub(first).and_then(|at| outcomes.get_mut(at)) {
                resent.sent += self.changed.sent;
                resent.again += self.changed.sent;
                self.changed = Changed::default();
            }
            if let Some(sent) = packed.changed {
                self.at = first + outcomes.len();
                self.offer_again(list, sent, progress)?;
            }
            Ok(outcomes)
        });
        sent.map_err(|stop| {
            let failure = self.give_up(stop);
            failure.within(format!("{} was not sent", list.entries[self.at].path))
        })
    }

    /// Lists the entry at hand anew, which changed when `sent` bytes of it were sent.
    fn offer_again(&mut self, list: &mut List, sent: u64, progress: &mut Progress) -> Done {
        if self.changed.index != self.at || self.changed.times == 0 {
            self.changed = Changed { index: self.at, ..Changed::default() };
        }
        self.changed.times += 1;
        self.changed.sent += sent;
        self.wasted += sent;
        let path = list.path(self.at);
        if self.changed.times == OFFERS {
            return Err(Failure::new(format!(
                "{} changed each of the {OFFERS} times it was sent; send it when nothing writes to it",
                path.display()
            )));
        }
        list.renew(self.at)?;
        progress.resize(list.total + self.wasted);
        progress.aside(|| {
            output::complain(&format!("{} changed while it was sent; it is sent again", path.display()));
            Ok(())
        })
    }

    fn whole_group(&mut self, list: &List, first: usize, progress: &mut Progress) -> Result<Packed, Stop> {
        let (range, verdicts) = self.offer(list, first)?;
        let mut plans = Vec::with_capacity(range.len());
        for ((index, at), verdict) in (0..).zip(range.clone()).zip(verdicts) {
            self.at = at;
            let entry = &list.entries[at];
            self.working()?;
            match self.plan(index, entry, verdict, || open(list, at)) {
                Err(Stop::Changed) => break,
                plan => plans.push(plan?),
            }
        }
        self.at = first;
        let (planned, all) = (plans.len(), range.len());
        let mut packed = self.windows(list, range, plans, progress)?;
        if planned < all && packed.changed.is_none() {
            packed.changed = Some(0);
        }
        progress.now("the server syncs it to disk");
        let entries = packed.outcomes.len() as u32;
        self.outbox.say(&ToServer::Commit { next: self.talk.next, entries })?;
        match self.talk.hear()? {
            ToSender::Stored => Ok(packed),
            other => Err(Stop::Answered(unexpected(other))),
        }
    }

    /// Tells the server from time to time that we are at work.
    pub(super) fn working(&mut self) -> Done {
        if self.pulse.is_due() { self.outbox.say(&ToServer::Working) } else { Ok(()) }
    }

    /// Offers as many entries as make a group; the server's verdict on each.
    fn offer(&mut self, list: &List, first: usize) -> Result<(Range<usize>, Vec<Verdict>), Stop> {
        let (mut table, mut end, mut bytes) = (Vec::new(), first, 0_u64);
        for entry in &list.entries[first..] {
            let len = table.len();
            entry.encode(&mut table).map_err(Failure::new)?;
            bytes = bytes.saturating_add(entry.data());
            let full = table.len() > self.talk.layout.table as usize || end - first == GROUP.0;
            if end > first && (full || bytes > GROUP.1) {
                table.truncate(len);
                break;
            }
            end += 1;
        }
        self.talk.await_free()?;
        let (sequence, len) = (self.talk.next, table.len() as u32);
        self.region.copy_in(self.talk.layout.table_at(sequence), &table).map_err(Failure::from)?;
        self.talk.take_window();
        self.mover.move_window(Window { sequence, table: len, data: 0 })?;
        self.outbox.say(&ToServer::Offer { sequence, table: len })?;
        let mut verdicts = vec![None; end - first];
        let mut missing = verdicts.len();
        while missing > 0 {
            match self.talk.hear()? {
                ToSender::Verdicts { first, verdicts: some } => {
                    for (at, verdict) in (first as usize..).zip(some) {
                        let place = verdicts.get_mut(at).filter(|place| place.is_none());
                        let place = place.ok_or_else(|| Failure::new("the server judged something else"))?;
                        *place = Some(verdict);
                        missing -= 1;
                    }
                }
                other => return Err(Stop::Answered(unexpected(other))),
            }
        }
        Ok((first..end, verdicts.into_iter().flatten().collect()))
    }

    /// Reads and hashes windows here while a thread moves those before.
    fn windows(
        &mut self,
        list: &List,
        range: Range<usize>,
        plans: Vec<Plan>,
        progress: &mut Progress,
    ) -> Result<Packed, Stop> {
        let (region, sparse, at) = (&self.region, self.sparse, &mut self.at);
        let pulse = &mut self.pulse;
        let (talk, outbox, mover, peer) = (&mut self.talk, &mut self.outbox, &self.mover, &self.peer);
        std::thread::scope(|scope| {
            let (filled, to_move) = mpsc::sync_channel::<Filled>(talk.layout.windows as usize);
            let moving = scope.spawn(move || {
                let moved = to_move.iter().try_for_each(|filled| {
                    let Filled::Window(window) = filled else {
                        return outbox.say(&ToServer::Working);
                    };
                    let Window { sequence, table, data } = window;
                    progress.moving(data.into())?;
                    mover.move_window(window)?;
                    outbox.say(&ToServer::Filled { sequence, table, data })
                });
                if moved.is_err() {
                    // The reader may wait for a window that will never be free again.
                    // First it may hear the server's reason, if there is one.
                    let _ = multirail::wait(peer.closed(), AUTOPSY);
                    peer.disconnect();
                }
                moved
            });
            let read = pack(list, range, plans, Packer::new(talk, region, filled, pulse), sparse, at);
            let moved = moving.join().unwrap_or_else(|_| Err(Failure::new("the moving thread panicked")));
            match (read, moved) {
                (Err(Stop::Answered(failure)), _) => Err(Stop::Answered(failure)),
                (_, Err(failure)) => Err(Stop::Broken(failure)),
                (read, Ok(())) => read,
            }
        })
    }

    /// Ends the conversation, or rather gives the server's reason if it gave one: that
    /// says more than the broken connection that follows it.
    fn give_up(&mut self, stop: Stop) -> Failure {
        let failure = match stop {
            Stop::Answered(failure) => return failure,
            Stop::Broken(failure) => failure,
            Stop::Changed => stop.into(),
        };
        if let Some(reason) = self.talk.refusal(AUTOPSY) {
            return refused(&reason);
        }
        if !self.peer.is_alive() {
            return Failure::new(format!("{}; once it is back, go on with --resume", failure.sentence()));
        }
        // If this is not taken, the server sees us leave instead.
        if self.outbox.say(&ToServer::Abandon(printable(failure.sentence()))).is_ok() {
            // It answers with a refusal; leaving earlier might drop our word unread.
            self.talk.refusal(FAREWELL);
        }
        failure
    }

    /// Says goodbye.
    pub fn leave(mut self) -> Done {
        self.outbox.say(&ToServer::Bye)?;
        match self.talk.hear_within(PROMPT)? {
            ToSender::Farewell => {
                self.peer.disconnect();
                Ok(())
            }
            other => Err(unexpected(other)),
        }
    }
}

fn open(list: &List, at: usize) -> Result<Source, Stop> {
    Source::open(list.path(at), &list.entries[at])
}

/// Packs the entries of a group as planned, up to the first that changed; `at` is the one at
/// hand.
fn pack(
    list: &List,
    range: Range<usize>,
    plans: Vec<Plan>,
    mut packer: Packer<'_>,
    sparse: bool,
    at: &mut usize,
) -> Result<Packed, Stop> {
    let mut packed = Packed::default();
    for ((index, number), plan) in (0..).zip(range).zip(plans) {
        *at = number;
        let mut outcome = Outcome::default();
        match pack_one(list, (index, number), plan, &mut packer, sparse, &mut outcome) {
            Ok(()) => packed.outcomes.push(outcome),
            Err(Stop::Changed) => {
                packed.changed = Some(outcome.sent);
                break;
            }
            Err(stop) => return Err(stop),
        }
    }
    packer.finish()?;
    Ok(packed)
}

/// Packs the entry `number` of the list, which is the `index`th of its group.
fn pack_one(
    list: &List,
    (index, number): (u32, usize),
    plan: Plan,
    packer: &mut Packer<'_>,
    sparse: bool,
    outcome: &mut Outcome,
) -> Result<(), Stop> {
    let entry = &list.entries[number];
    match plan {
        Plan::Skip => outcome.became = Became::Skipped,
        Plan::Have => outcome.became = Became::Same,
        Plan::Same => {
            outcome.became = Became::Same;
            packer.item(&Item::Same { index })?;
        }
        Plan::Make => packer.item(&Item::Make { index })?,
        Plan::Whole => {
            let source = open(list, number)?;
            outcome.hash = Some(packer.whole(index, &source, entry.size() as usize)?);
            outcome.sent = entry.size();
        }
        Plan::Pieces(mut plan) => {
            let source = open(list, number)?;
            let mut pieces = source.pieces(sparse);
            let unreadable = |error| source.unreadable(&error);
            if !pieces.pass(plan.keep, plan.kept, plan.end).map_err(unreadable)? {
                return Err(Stop::Changed);
            }
            packer.item(&Item::Begin { index, keep: plan.keep })?;
            while let Some(range) = pieces.next().map_err(unreadable)? {
                outcome.sent += range.end - range.start;
                plan.hash.push(&packer.piece(&source, range)?);
            }
            source.is_unchanged()?;
            packer.item(&Item::End)?;
            outcome.again = plan.again;
            outcome.hash = plan.hash.finish(entry.size());
        }
    }
    debug_assert!(outcome.sent == 0 || matches!(entry.kind, Kind::File { .. }));
    Ok(())
}
