//! How an operation went: what each device moved of it, by which path, and in what time.

use std::time::Duration;

use super::{OpId, Outcome};
use crate::spi::Paths;
use crate::{EngineHandle, Time};

/// How a successful operation went: [`Op::receipt`](super::Op::receipt). The library notes it for every operation.
///
/// Both durations begin with the submission, and include the time that the operation waited for its trigger or for the
/// peer's grant. The engine reads the clock once per step, so they are exact to one step of the engine: some
/// microseconds while it is busy. They are zero if the calling thread moved the bytes itself, because the submission
/// returned after the bytes had arrived.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Receipt {
    /// The bytes that were moved.
    pub bytes: u64,
    /// As [`Outcome::work_requests`].
    pub work_requests: u32,
    /// As [`Outcome::merged`].
    pub merged: u32,
    /// The time until the devices had accepted the last work request.
    pub post: Duration,
    /// The time until all bytes were delivered, and the engine had noticed it.
    pub transfer: Duration,
    /// What each rail carried. The bytes of all rails add up to `bytes`. Rails that carried nothing are left out; one
    /// that carried only an imm has no bytes.
    pub rails: Vec<RailReceipt>,
}

/// What one rail carried of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RailReceipt {
    /// The label of the transport, as in [`RailCounters`](crate::RailCounters). `None` if the calling thread moved the
    /// bytes itself.
    pub transport: Option<String>,
    /// The rail's position in its transport, from 0 on.
    pub rail: u32,
    /// The name of the rail's device.
    pub device: String,
    /// The bytes that the rail carried.
    pub bytes: u64,
    /// The paths that these bytes took. For a list of many regions, the paths of all its entries.
    pub path: Paths,
}

impl Receipt {
    /// The name of the device in the receipt of an operation that the calling thread carried out itself.
    pub const CALLING_THREAD: &'static str = "the calling thread";

    /// The receipt of an operation that the calling thread carried out.
    pub(super) fn of_calling_thread(bytes: u64, path: Paths) -> Self {
        let device = Self::CALLING_THREAD.to_owned();
        Self {
            bytes,
            rails: vec![RailReceipt { transport: None, rail: 0, device, bytes, path }],
            ..Self::default()
        }
    }

    /// Adds the receipt of another part of the same operation. The parts were submitted at the same time.
    pub(super) fn add(&mut self, part: Self) {
        self.bytes += part.bytes;
        self.work_requests = self.work_requests.saturating_add(part.work_requests);
        self.merged = self.merged.saturating_add(part.merged);
        self.post = self.post.max(part.post);
        self.transfer = self.transfer.max(part.transfer);
        self.add_rails(part.rails);
    }

    fn add_rails(&mut self, rails: Vec<RailReceipt>) {
        for rail in rails {
            let is_same = |known: &&mut RailReceipt| {
                (&known.transport, known.rail, known.path) == (&rail.transport, rail.rail, rail.path)
            };
            match self.rails.iter_mut().find(is_same) {
                Some(known) => known.bytes += rail.bytes,
                None => self.rails.push(rail),
            }
        }
    }
}

/// What an engine notes of an operation that has succeeded. The op table keeps it until the operation is dropped.
pub(crate) struct TransferNotes {
    /// Whether the engine has noted anything: not for a receive, a revocation, or an operation that failed.
    pub is_noted: bool,
    pub submitted_at: Time,
    /// When the last work request was posted.
    pub posted_at: Time,
    pub ended_at: Time,
    /// The path of all bytes.
    pub path: Paths,
    first: RailShare,
    /// The shares of the other rails. It has room for all of the engine's, so that no operation allocates.
    others: Vec<RailShare>,
    /// The receipt of the rest that another rail group has carried, and the generation of its operation. Those of earlier
    /// operations in the slot may still be here.
    pub continued: Option<(u32, Box<Receipt>)>,
}

/// The bytes that a rail of the engine carried.
#[derive(Clone, Copy)]
struct RailShare {
    rail: u32,
    bytes: u64,
}

impl TransferNotes {
    /// Nothing is noted. There is room for the shares of so many rails.
    pub fn with_room(rails: usize) -> Self {
        Self {
            is_noted: false,
            submitted_at: Time::ZERO,
            posted_at: Time::ZERO,
            ended_at: Time::ZERO,
            path: Paths::empty(),
            first: RailShare { rail: 0, bytes: 0 },
            others: Vec::with_capacity(rails.saturating_sub(1)),
            continued: None,
        }
    }

    /// Notes which of the engine's rails have carried something, and how many bytes: `bytes_of` returns `None` for the
    /// others.
    #[inline]
    pub fn set_shares<T>(&mut self, rails: &[T], bytes_of: impl Fn(&T) -> Option<u64>) {
        self.others.clear();
        // The usual case, in fewer instructions.
        if let [only] = rails {
            self.first = RailShare { rail: 0, bytes: bytes_of(only).unwrap_or(0) };
            return;
        }
        let share = |(rail, of)| Some(RailShare { rail: rail as u32, bytes: bytes_of(of)? });
        let mut shares = rails.iter().enumerate().filter_map(share);
        self.first = shares.next().unwrap_or(RailShare { rail: 0, bytes: 0 });
        self.others.extend(shares);
    }

    /// The receipt of an operation of `engine`.
    pub fn receipt(&self, id: OpId, outcome: &Outcome, engine: &EngineHandle) -> Receipt {
        let rail = |share: &RailShare| RailReceipt {
            transport: Some(engine.transport_label.clone()),
            rail: engine.first_rail as u32 + share.rail,
            device: engine.devices[share.rail as usize].clone(),
            bytes: share.bytes,
            path: self.path,
        };
        let mut receipt = Receipt {
            bytes: outcome.bytes,
            work_requests: outcome.work_requests,
            merged: outcome.merged,
            post: self.posted_at.since(self.submitted_at),
            transfer: self.ended_at.since(self.submitted_at),
            rails: std::iter::once(&self.first).chain(&self.others).map(rail).collect(),
        };
        if let Some((generation, rest)) = &self.continued
            && *generation == id.generation
        {
            receipt.rails.retain(|rail| rail.bytes > 0);
            receipt.post = receipt.post.max(rest.post);
            receipt.add_rails(rest.rails.clone());
        }
        receipt
    }
}
