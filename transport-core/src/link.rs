//! The way to a peer over one rail group, and the shortcut past its worker.

use std::sync::Arc;

use crossbeam_utils::CachePadded;

use crate::backlog::Backlog;
use crate::copy::{self, CopyStrategy};
use crate::engine::{Control, EngineHandle};
use crate::grant::Credit;
use crate::options::WriteOptions;
use crate::peer::Renewals;
use crate::remote::{RemoteInner, Shortcut};
use crate::spi::{Capabilities, Direct, Domain, Operations, PeerSlot, WorkKind, WorkRequest};
use crate::{Error, ErrorKind, Locality, Op, Outcome, Region, Result};

/// The way to a peer over one rail group of one transport.
pub(crate) struct Link {
    pub label: String,
    pub engine: Arc<EngineHandle>,
    /// The engine's number for it.
    pub index: u32,
    /// One per rail of the engine: the pair it sends over; `None` where nothing is paired.
    pub rails: Vec<Option<PairedRail>>,
    /// Pairs that only receive, with the engine's rail.
    pub receiving: Vec<(usize, PairedRail)>,
    /// Why this transport does not reach the peer; then all rails are `None`.
    pub refused: Option<String>,
    /// Runs small requests in the calling thread.
    pub direct: Option<Arc<dyn Direct>>,
    /// The peer's slot for it.
    pub direct_slot: u32,
    /// Largest operation for `direct`.
    pub max_direct: u64,
    /// What the peer allows us.
    pub credit: Arc<Credit>,
    /// What the worker has to do: while there is any, small operations queue behind it.
    pub backlog: CachePadded<Backlog>,
}

pub(crate) struct PairedRail {
    pub domain: Arc<dyn Domain>,
    pub slot: PeerSlot,
    /// The pair's number, which is the same on both sides.
    pub pair: u16,
    /// The peer's rail.
    pub remote: u16,
    /// Its share of what the link carries, relative to the others'.
    pub weight: u32,
    /// Under way, of its slot.
    pub renewals: Renewals,
}

/// Offsets into both regions, checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    pub local: u64,
    pub remote: u64,
    pub len: u64,
}

impl Link {
    pub fn is_up(&self) -> bool {
        self.refused.is_none()
    }

    /// Every pair, with the engine's rail.
    pub fn pairs(&self) -> impl Iterator<Item = (usize, &PairedRail)> {
        let sending = self.rails.iter().enumerate().filter_map(|(rail, pair)| Some((rail, pair.as_ref()?)));
        sending.chain(self.receiving.iter().map(|(rail, pair)| (*rail, pair)))
    }

    pub fn capabilities(&self) -> Option<&Capabilities> {
        self.rails.iter().flatten().next().map(|rail| rail.domain.capabilities())
    }
}

impl Link {
    /// Runs a small request in this thread, if nothing of the peer's is queued and it need not wait.
    #[inline(always)]
    pub fn run_now(
        &self,
        region: &Region,
        remote: &RemoteInner,
        span: Span,
        kind: WorkKind,
        options: &WriteOptions,
    ) -> Option<Op> {
        if options.trigger.is_some() {
            return None;
        }
        if options.imm.is_some() {
            return self.run_with_imm(region, remote, span, kind, options);
        }
        let way = self.shortcut(region, remote, span)?;
        let result = self.run::<false>(way, region, span, kind, None, options.locality)?;
        Some(self.ran(result, span.len))
    }

    /// As [`Link::run_now`], for a local region that the processor cannot follow the address of.
    #[cold]
    #[inline(never)]
    pub fn run_device_memory(
        &self,
        region: &Region,
        remote: &RemoteInner,
        span: Span,
        kind: WorkKind,
        imm: Option<u32>,
    ) -> Option<Op> {
        let way = self.way(remote, span.len).filter(|_| region.0.far != 0)?;
        if !self.takes(kind, imm) {
            return None;
        }
        let result = self.run::<true>(way, region, span, kind, imm, Locality::Auto);
        self.settles(kind, imm, &result);
        Some(self.ran(result?, span.len))
    }

    /// The same for a request that takes part of the peer's grant.
    #[inline(never)]
    fn run_with_imm(
        &self,
        region: &Region,
        remote: &RemoteInner,
        span: Span,
        kind: WorkKind,
        options: &WriteOptions,
    ) -> Option<Op> {
        let way = self.shortcut(region, remote, span)?;
        if !self.takes(kind, options.imm) {
            return None;
        }
        let result = self.run::<false>(way, region, span, kind, options.imm, options.locality);
        self.settles(kind, options.imm, &result);
        Some(self.ran(result?, span.len))
    }

    /// Runs a request by the way past the worker; `FAR` says that the processor cannot follow the address of
    /// the local region.
    #[inline(always)]
    fn run<const FAR: bool>(
        &self,
        way: &Shortcut,
        region: &Region,
        span: Span,
        kind: WorkKind,
        imm: Option<u32>,
        locality: Locality,
    ) -> Option<Result<()>> {
        let request = WorkRequest {
            id: 0,
            peer: way.slot,
            kind,
            local: region.0.start.wrapping_add(span.local as usize),
            lkey: if FAR { region.0.id } else { 0 },
            len: span.len,
            remote: way.base.wrapping_add(span.remote),
            rkey: way.rkey,
            imm,
            strategy: copy::strategy(span.len, locality),
        };
        // SAFETY: the local range was checked and `region` lives through the call;
        // `way.import` is where `rkey` came from.
        unsafe {
            match FAR {
                true => way.direct.run_device_memory(&request, &*way.import),
                false => way.direct.run(&request, Some(&*way.import)),
            }
        }
    }

    /// The way past the worker, if it is open for bytes of that region.
    #[inline(always)]
    pub fn shortcut<'a>(&self, region: &Region, remote: &'a RemoteInner, span: Span) -> Option<&'a Shortcut> {
        self.way(remote, span.len | region.0.far)
    }

    /// The way past the worker, if it is open for `len` bytes, whatever the local region.
    #[inline(always)]
    pub fn way<'a>(&self, remote: &'a RemoteInner, len: u64) -> Option<&'a Shortcut> {
        remote.shortcut.as_ref().filter(|way| len <= way.max && self.backlog.is_empty())
    }

    /// The same for messages and imms without bytes.
    #[inline]
    pub fn message_shortcut(&self, len: u64) -> Option<&Arc<dyn Direct>> {
        self.direct.as_ref().filter(|_| len <= self.max_direct && self.backlog.is_empty())
    }

    /// Runs what addresses no region in this thread, if nothing of the peer's is queued.
    pub fn run_message(&self, kind: WorkKind, local: *mut u8, len: u64, imm: Option<u32>) -> Option<Op> {
        let direct = self.message_shortcut(len)?;
        if !self.takes(kind, imm) {
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
        // SAFETY: `local` is valid for `len` bytes: checked by the caller against a
        // region that lives through the call.
        let result = unsafe { direct.run(&request, None) };
        self.settles(kind, imm, &result);
        Some(self.ran(result?, len))
    }

    /// Takes a request's part of the peer's grant; without room the worker has it wait.
    #[inline(never)]
    fn takes(&self, kind: WorkKind, imm: Option<u32>) -> bool {
        self.credit.unit(kind, imm).is_none_or(|unit| unit.take(1) == 1)
    }

    /// Gives that back if the request did not arrive.
    #[inline(never)]
    fn settles(&self, kind: WorkKind, imm: Option<u32>, result: &Option<Result<()>>) {
        let arrived = matches!(result, Some(Ok(())));
        let unit = self.credit.unit(kind, imm).filter(|unit| !arrived && !unit.is_unlimited());
        if let Some(unit) = unit {
            unit.give_back(1);
            // Another thread's operation may have found nothing left meanwhile.
            self.engine.control(Control::Granted { link: self.index });
        }
    }

    #[inline]
    fn ran(&self, result: Result<()>, bytes: u64) -> Op {
        self.engine.counts[0].direct(1, bytes);
        Op::ready(result.map(|()| Outcome { bytes, ..Outcome::default() }))
    }

    /// Refuses what the transport cannot do.
    pub fn require(
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
                "transport {} cannot: it offers {:?} and {} bytes of imm",
                self.label, caps.operations, caps.imm_bytes
            );
            return Err(Error::new(ErrorKind::Unsupported, name, why));
        }
        Ok(caps)
    }
}
