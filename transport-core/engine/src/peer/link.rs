//! The link to a peer over one rail group, and the direct path: small requests that run in the calling thread.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crossbeam_utils::CachePadded;

use super::LinkCounts;
use super::comeback::FIRST_SHARE;
use crate::copy::{self, CopyStrategy};
use crate::flow_control::{Backlog, SendCredit};
use crate::memory::{DirectPath, RegionInner, RemoteInner};
use crate::rail::FULL_SPEED;
use crate::spi::{
    Capabilities, Connector, Direct, Domain, Operations, Paths, PeerSlot, WorkKind, WorkRequest,
};
use crate::{Control, EngineHandle, Error, ErrorKind, Locality, Op, Outcome, Result, Work};

/// The link to a peer over one rail group of one transport.
pub struct Link {
    pub label: String,
    pub engine: Arc<EngineHandle>,
    /// The engine's index of the link.
    pub index: u32,
    /// The domain of the engine's first rail.
    pub domain: Arc<dyn Domain>,
    /// The rail pair that each rail of the engine sends over. `None` if its device was lost before the two sides
    /// connected, here or at the peer.
    pub rails: Vec<Option<PairedRail>>,
    /// Whether all devices worked, here and at the peer, when the two sides connected.
    pub is_whole: bool,
    /// The rail pairs over which only the peer sends, because it has more rails than this side; each with the index of
    /// the engine's rail.
    pub receiving: Vec<(usize, PairedRail)>,
    /// Why this transport does not reach the peer. Then all `rails` are `None`.
    pub refused: Option<String>,
    /// Runs small requests in the calling thread.
    pub direct: Option<Arc<dyn Direct>>,
    /// The peer's slot for `direct`.
    pub direct_slot: u32,
    /// The most bytes of a request for `direct`.
    pub max_direct: u64,
    /// What the peer has granted us.
    pub credit: Arc<SendCredit>,
    /// The operations that the worker has not ended. While there are any, small operations queue behind them.
    pub backlog: CachePadded<Backlog>,
    pub counts: CachePadded<LinkCounts>,
}

/// A rail pair: a local rail that is paired with a rail of the peer.
pub struct PairedRail {
    pub domain: Arc<dyn Domain>,
    pub slot: PeerSlot,
    /// The pair's number. Both sides use the same one.
    pub pair: u16,
    /// The peer's rail.
    pub remote: u16,
    /// The rail's share of the link's bytes, relative to the weights of the other rails.
    pub weight: u32,
    /// What the pair carries now, compared with other pairs: its weight times a constant, less if it is slow or has
    /// just come back, and 0 while its path is broken. The engine changes it.
    pub capacity: AtomicU64,
    /// The renewals of the slot's address that are under way.
    pub renewals: AddressRenewals,
}

/// What a pair of weight 1 carries at its full speed ([`PairedRail::capacity`]).
pub const FULL_CAPACITY: u64 = (FULL_SPEED * FIRST_SHARE) as u64;

impl PairedRail {
    /// The capacity of a pair of this weight at its full speed.
    pub fn full_capacity(weight: u32) -> AtomicU64 {
        AtomicU64::new(u64::from(weight) * FULL_CAPACITY)
    }
}

/// The calls of [`Connector::renew`] that are under way for a slot, after the peer's endpoint has got another address,
/// and whether the slot is to be disconnected once they have ended. Without this count, the
/// slot could be freed and given to another peer while a call of `renew` still changes it.
///
/// The value is twice the number of renewals under way, plus `DISCONNECT`.
#[derive(Default)]
pub struct AddressRenewals(AtomicU32);

/// The bit of [`AddressRenewals`] that says that the slot is to be disconnected.
const DISCONNECT: u32 = 1;
/// One renewal under way.
const ONE_RENEWAL: u32 = 2;

/// The rails that [`Link::capacity`] counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CountedRails {
    /// Those in service whose path works.
    InService,
    /// Also those that the user has taken out of service.
    Working,
    /// Also those that are lost, or whose path is broken.
    All,
}

/// Checked offsets into the local and the remote region, and the length in bytes.
#[derive(Debug, Clone, Copy)]
pub struct CheckedRange {
    pub local: u64,
    pub remote: u64,
    pub len: u64,
}

impl PairedRail {
    /// Runs `renew`, and keeps the slot from being disconnected meanwhile.
    ///
    /// # Errors
    /// `Closed` if the peer is gone, and the errors of `renew`.
    pub fn renew<T>(&self, renew: impl FnOnce(&dyn Connector) -> Result<T>) -> Result<T> {
        let begin = |state: u32| (state & DISCONNECT == 0).then(|| state + ONE_RENEWAL);
        if self.renewals.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, begin).is_err() {
            let why = "the peer left in the meantime";
            return Err(Error::new(ErrorKind::Closed, "renew a connection", why));
        }
        let _guard = RenewalGuard(self);
        renew(self.domain.connector())
    }

    /// Disconnects the slot: now, or when the last renewal under way ends.
    pub fn disconnect(&self) {
        if self.renewals.0.fetch_or(DISCONNECT, Ordering::AcqRel) == 0 {
            self.domain.connector().disconnect(self.slot);
        }
    }
}

/// Ends a renewal, also one that panics.
struct RenewalGuard<'a>(&'a PairedRail);

impl Drop for RenewalGuard<'_> {
    fn drop(&mut self) {
        let Self(rail) = self;
        if rail.renewals.0.fetch_sub(ONE_RENEWAL, Ordering::AcqRel) == ONE_RENEWAL | DISCONNECT {
            rail.domain.connector().disconnect(rail.slot);
        }
    }
}

impl Link {
    #[inline]
    pub fn is_up(&self) -> bool {
        self.refused.is_none()
    }

    /// All rail pairs, with the engine's rail.
    pub fn pairs(&self) -> impl Iterator<Item = (usize, &PairedRail)> {
        let sending = self.rails.iter().enumerate().filter_map(|(rail, pair)| Some((rail, pair.as_ref()?)));
        sending.chain(self.receiving.iter().map(|(rail, pair)| (*rail, pair)))
    }

    /// What those rails of the link that `counts` selects carry now, if they reach both regions of `work`. Relative to other
    /// links.
    pub fn capacity(&self, work: &Work, counts: CountedRails) -> u64 {
        let (transport, first) = (self.engine.transport, self.engine.first_rail);
        let reaches = |rail: usize| work.is_local_on(transport, rail) && work.is_remote_on(rail);
        let all = counts != CountedRails::InService;
        let rails = self.rails.iter().enumerate();
        let rails =
            rails.filter(|(rail, _)| reaches(first + rail) && (all || !self.engine.is_out_of_service(*rail)));
        let carries = |paired: &PairedRail| match counts {
            CountedRails::All => u64::from(paired.weight),
            _ => paired.capacity.load(Ordering::Relaxed),
        };
        rails.filter_map(|(_, paired)| paired.as_ref().map(carries)).sum()
    }

    /// The capabilities of the devices. `None` if the transport does not reach the peer.
    #[inline]
    pub fn capabilities(&self) -> Option<&Capabilities> {
        self.is_up().then(|| self.domain.capabilities())
    }

    /// Runs a small request in the calling thread, if the direct path is open.
    #[inline(always)]
    pub fn try_direct(
        &self,
        region: &RegionInner,
        remote: &RemoteInner,
        span: CheckedRange,
        kind: WorkKind,
        imm: Option<u32>,
        locality: Locality,
    ) -> Option<Op> {
        if imm.is_some() {
            return self.try_direct_with_imm(region, remote, span, kind, imm, locality);
        }
        let path = self.host_memory_path(region, remote, span)?;
        let result = self.run::<false>(path, region, span, kind, None, locality)?;
        Some(self.completed(result, span.len, remote.paths[0]))
    }

    /// As [`Link::try_direct`], for a local region in device memory.
    #[cold]
    #[inline(never)]
    pub fn try_direct_device_memory(
        &self,
        region: &RegionInner,
        remote: &RemoteInner,
        span: CheckedRange,
        kind: WorkKind,
        imm: Option<u32>,
    ) -> Option<Op> {
        let path = self.direct_path(remote, span.len).filter(|_| region.device_memory_mask != 0)?;
        if !self.take_credit(kind, imm) {
            return None;
        }
        let result = self.run::<true>(path, region, span, kind, imm, Locality::Auto);
        self.return_unused_credit(kind, imm, &result);
        Some(self.completed(result?, span.len, Paths::GPU_COPY))
    }

    /// As [`Link::try_direct`], for a request that takes credit of the peer's grant.
    #[inline(never)]
    fn try_direct_with_imm(
        &self,
        region: &RegionInner,
        remote: &RemoteInner,
        span: CheckedRange,
        kind: WorkKind,
        imm: Option<u32>,
        locality: Locality,
    ) -> Option<Op> {
        let path = self.host_memory_path(region, remote, span)?;
        if !self.take_credit(kind, imm) {
            return None;
        }
        let result = self.run::<false>(path, region, span, kind, imm, locality);
        self.return_unused_credit(kind, imm, &result);
        Some(self.completed(result?, span.len, remote.paths[0]))
    }

    /// Runs a request over the direct path. `DEVICE_MEMORY` says that the local region is memory that the CPU cannot
    /// address. Returns `None` if the backend leaves the request to the worker.
    #[inline(always)]
    fn run<const DEVICE_MEMORY: bool>(
        &self,
        path: &DirectPath,
        region: &RegionInner,
        span: CheckedRange,
        kind: WorkKind,
        imm: Option<u32>,
        locality: Locality,
    ) -> Option<Result<()>> {
        let request = WorkRequest {
            id: 0,
            peer: path.slot,
            kind,
            local: region.start().wrapping_add(span.local as usize),
            lkey: if DEVICE_MEMORY { region.id } else { 0 },
            len: span.len,
            remote: path.base.wrapping_add(span.remote),
            rkey: path.rkey,
            imm,
            strategy: copy::strategy(span.len, locality),
        };
        // SAFETY: the local range was checked and `region` lives through the call;
        // `path.import` is where `rkey` came from.
        unsafe {
            match DEVICE_MEMORY {
                true => path.direct.run_device_memory(&request, &*path.import),
                false => path.direct.run(&request, Some(&*path.import)),
            }
        }
    }

    /// The direct path, if it is open for these bytes and the local region is host memory.
    #[inline(always)]
    fn host_memory_path<'a>(
        &self,
        region: &RegionInner,
        remote: &'a RemoteInner,
        span: CheckedRange,
    ) -> Option<&'a DirectPath> {
        // `device_memory_mask` is all ones for device memory. So the limit refuses it, without a branch of its own.
        self.direct_path(remote, span.len | region.device_memory_mask)
    }

    /// The direct path to a remote region, if it is open for `len` bytes: the backend has one, and the worker has no
    /// operation of this peer.
    #[inline(always)]
    pub fn direct_path<'a>(&self, remote: &'a RemoteInner, len: u64) -> Option<&'a DirectPath> {
        remote.direct_path.as_ref().filter(|path| len <= path.max && self.backlog.is_empty())
    }

    /// The direct path for messages and for imms without bytes, if it is open for `len` bytes.
    #[inline]
    pub fn message_path(&self, len: u64) -> Option<&Arc<dyn Direct>> {
        self.direct.as_ref().filter(|_| len <= self.max_direct && self.backlog.is_empty())
    }

    /// Runs a request that addresses no remote region in the calling thread, if the direct path is open. `local` must be
    /// readable for `len` bytes until this returns.
    pub fn try_direct_message(
        &self,
        kind: WorkKind,
        local: *mut u8,
        len: u64,
        imm: Option<u32>,
    ) -> Option<Op> {
        let result = self.run_message(kind, local, len, imm)?;
        self.end_message(kind, len, imm, result)
    }

    /// The first half of [`Link::try_direct_message`]: takes the credit and runs the request. `None` if the direct path is
    /// closed or there is no credit; `Some(None)` if the backend did not take the request. Wakes no waiter.
    pub fn run_message(
        &self,
        kind: WorkKind,
        local: *mut u8,
        len: u64,
        imm: Option<u32>,
    ) -> Option<Option<Result<()>>> {
        let direct = self.message_path(len)?;
        if !self.take_credit(kind, imm) {
            return None;
        }
        let request = WorkRequest {
            id: 0,
            peer: PeerSlot(self.direct_slot),
            kind,
            local,
            lkey: 0,
            len,
            remote: 0,
            rkey: 0,
            imm,
            strategy: CopyStrategy::Plain,
        };
        // SAFETY: the caller passes `len` bytes that are readable during the call: of a region, or of its stack.
        Some(unsafe { direct.run(&request, None) })
    }

    /// The second half: gives unused credit back, which may wake waiters, and counts the request.
    pub fn end_message(
        &self,
        kind: WorkKind,
        len: u64,
        imm: Option<u32>,
        result: Option<Result<()>>,
    ) -> Option<Op> {
        self.return_unused_credit(kind, imm, &result);
        Some(self.completed(result?, len, Paths::MEMORY_COPY))
    }

    /// Takes the credit for one request. Without credit the request goes to the worker, where it waits.
    #[inline(never)]
    fn take_credit(&self, kind: WorkKind, imm: Option<u32>) -> bool {
        self.credit.counter(kind, imm).is_none_or(|counter| counter.take(1) == 1)
    }

    /// Gives the credit back if the request did not arrive.
    #[inline(never)]
    fn return_unused_credit(&self, kind: WorkKind, imm: Option<u32>, result: &Option<Result<()>>) {
        let arrived = matches!(result, Some(Ok(())));
        let counter = self.credit.counter(kind, imm).filter(|counter| !arrived && !counter.is_unlimited());
        if let Some(counter) = counter {
            counter.give_back(1);
            // An operation of another thread may have found no credit in the meantime: the engine tries it again.
            self.engine.control(Control::GrantReceived { link: self.index });
        }
    }

    /// The operation of a request that ran in the calling thread: its bytes took this path.
    #[inline]
    fn completed(&self, result: Result<()>, bytes: u64, path: Paths) -> Op {
        self.engine.counts[0].direct(1, bytes);
        if path.contains(Paths::GPU_COPY) && result.is_ok() {
            return Op::copied_by_gpu(bytes);
        }
        Op::ready(result.map(|()| Outcome::of_bytes(bytes)))
    }

    /// The capabilities of the transport, or an error if it does not support the operation or the imm.
    #[inline]
    pub fn capabilities_for(
        &self,
        operation: Operations,
        imm: Option<u32>,
        name: &'static str,
    ) -> Result<&Capabilities> {
        let Some(caps) = self.capabilities() else {
            return Err(Error::new(ErrorKind::Unreachable, name, "no rail reaches the peer"));
        };
        if !caps.operations.contains(operation) || (imm.is_some() && caps.imm_bytes < 4) {
            let why = format!(
                "transport {} does not support this: it offers {:?} and {} bytes of imm",
                self.label, caps.operations, caps.imm_bytes
            );
            return Err(Error::new(ErrorKind::Unsupported, name, why));
        }
        Ok(caps)
    }
}
