//! Both sides of a connection in one thread, for tests and the fuzzer: an initiator, a target, and between them memory
//! copies in any order instead of a device.

use std::collections::VecDeque;
use std::sync::Arc;

use multirail_spi::{
    Event, Paths, PeerSlot, RemoteKey, RemoteMemory, Result, Status, WorkKind, WorkRequest, copy,
};

use crate::connection::{Connection, Connections, EndpointContext};
use crate::copies::{Copies, CopyTag};
use crate::gpu_memory::RegisteredGpuMemory;
use crate::initiator::SlotInitiator;
use crate::offer::StagingOffer;
use crate::region::StagedRegions;
use crate::staging_buffer::{BUFFER_LEN, StagingBuffer};
use crate::target::SlotTarget;
use crate::wire::{SlotImm, SlotImmKind};
use crate::wr_id::{InternalWrId, WrRole};

/// One side of a connection.
pub(crate) struct Side {
    pub connection: Arc<Connection>,
    pub initiator: SlotInitiator,
    pub target: SlotTarget,
    pub regions: Arc<StagedRegions>,
    pub events: VecDeque<Event>,
    pub outbox: VecDeque<WorkRequest>,
    gpu_memory: RegisteredGpuMemory,
    copies: Copies,
    made_progress: bool,
    needs_flush: bool,
}

/// The address of a staging buffer, as an import.
struct BufferAddress(u64);

impl RemoteMemory for BufferAddress {
    fn rkey(&self) -> u64 {
        0
    }

    fn base(&self) -> u64 {
        self.0
    }

    fn paths(&self, _: bool) -> Paths {
        Paths::MEMORY_COPY
    }
}

impl Side {
    /// Two sides that are connected, and whether their connection uses imms.
    pub(crate) fn pair(uses_imms: bool) -> Result<(Self, Self)> {
        let (here, there) = (Self::new(uses_imms)?, Self::new(uses_imms)?);
        here.connect(&there);
        there.connect(&here);
        Ok((here, there))
    }

    fn new(uses_imms: bool) -> Result<Self> {
        let buffer = StagingBuffer::unregistered()?;
        let connection = Connections::default().insert(PeerSlot(0), buffer, u64::from(uses_imms));
        Ok(Self {
            initiator: SlotInitiator::new(Arc::clone(&connection)),
            target: SlotTarget::new(Arc::clone(&connection)),
            connection,
            regions: Arc::default(),
            events: VecDeque::new(),
            outbox: VecDeque::new(),
            gpu_memory: RegisteredGpuMemory::default(),
            copies: Copies::default(),
            made_progress: false,
            needs_flush: false,
        })
    }

    fn connect(&self, peer: &Self) {
        let import = Arc::new(BufferAddress(peer.connection.buffer.address() as u64));
        let buffer = RemoteKey { base: 0, key: 0, len: BUFFER_LEN as u64 };
        let imms = peer.connection.imms;
        let offer = StagingOffer { buffer, imms, is_woken: imms.is_some(), coalesces: true };
        self.connection.connect(import, offer, true);
    }

    /// Calls `act` with both roles of this side.
    pub(crate) fn with<T>(
        &mut self,
        act: impl FnOnce(&mut SlotInitiator, &mut SlotTarget, &mut EndpointContext<'_>) -> T,
    ) -> T {
        let mut context = EndpointContext {
            copies: &mut self.copies,
            regions: &self.regions,
            gpu_memory: &self.gpu_memory,
            outbox: &mut self.outbox,
            events: &mut self.events,
            made_progress: &mut self.made_progress,
            needs_flush: &mut self.needs_flush,
        };
        act(&mut self.initiator, &mut self.target, &mut context)
    }

    /// Queues the pieces of a run, as far as there is room, and returns how many.
    #[cfg(test)]
    pub(crate) fn post(&mut self, run: &WorkRequest, pieces: &[multirail_spi::Piece]) -> usize {
        let local = self.regions.by_lkey(run.lkey);
        self.initiator.push(run, pieces, local.as_ref(), None)
    }

    /// Advances both roles, as a poll does.
    pub(crate) fn advance(&mut self) {
        self.with(|initiator, target, context| {
            target.advance(context);
            initiator.advance(false, context);
        });
        self.copies.make_room();
        while let Some((tag, result)) = self.copies.take_completed() {
            self.with(|initiator, target, context| match tag {
                CopyTag::Initiator { slot, page, count, .. } => {
                    initiator.on_copied(slot, page..page + count, result, context)
                }
                CopyTag::Target { slot, copy, count, .. } => {
                    target.on_copied(slot, copy..copy + count, result, context)
                }
                CopyTag::Receive { .. } => {}
            });
        }
    }

    /// Takes an imm that the other side has sent.
    pub(crate) fn on_imm(&mut self, imm: u32) {
        let Some(imm) = SlotImm::decode(imm) else { return };
        self.with(|initiator, target, context| match imm.kind {
            SlotImmKind::Request => target.on_announced(imm),
            SlotImmKind::Data => initiator.on_data_arrived(imm, context),
        });
    }

    /// Carries out the posted request with this index, or lets it fail. Returns the imm that arrives at the other side.
    pub(crate) fn complete(&mut self, index: usize, result: Result<(), Status>) -> Option<u32> {
        let work = *self.outbox.get(index)?;
        if result.is_ok() {
            carry_out(&work);
        }
        self.end(index, result);
        work.imm.filter(|_| result.is_ok())
    }

    /// Ends the posted request with this index.
    pub(crate) fn end(&mut self, index: usize, result: Result<(), Status>) {
        let Some(work) = self.outbox.remove(index) else { return };
        let Some(id) = InternalWrId::decode(work.id) else { return };
        self.with(|initiator, target, context| match id.role {
            WrRole::InitiatorData | WrRole::Request => initiator.on_completed(id, result, true, context),
            WrRole::TargetData | WrRole::Response => target.on_completed(id, result, context),
        });
    }
}

/// Moves the bytes of a posted request.
pub(crate) fn carry_out(work: &WorkRequest) {
    let (to, from) = match work.kind {
        WorkKind::Read => (work.local, work.remote as *const u8),
        _ => (work.remote as *mut u8, work.local.cast_const()),
    };
    // SAFETY: the requests of both roles name bytes of the two staging buffers and of regions that the caller keeps, and
    // nothing else runs meanwhile.
    unsafe { copy::copy(copy::CopyStrategy::Plain, to, from, work.len as usize) };
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use multirail_spi::copy::CopyStrategy;
    use multirail_spi::{Access, ErrorKind, HostBuffer, Memory, Piece};
    use proptest::prelude::*;

    use super::*;
    use crate::staging_buffer::SLOT_BYTES;

    const REGION: usize = 1 << 20;

    /// A request of the engine.
    #[derive(Debug, Clone)]
    struct Request {
        is_read: bool,
        len: u64,
        has_imm: bool,
        /// Whether its key is wrong.
        is_forged: bool,
    }

    fn requests() -> impl Strategy<Value = Vec<Request>> {
        let len = prop_oneof![
            8 => prop::sample::select(vec![1_u64, 64, 100, 1024, 4096, 16384]),
            1 => 0..=3 * SLOT_BYTES as u64,
        ];
        let request = (prop::bool::weighted(0.3), len, any::<bool>(), prop::bool::weighted(0.1)).prop_map(
            |(is_read, len, has_imm, is_forged)| Request {
                is_read,
                len,
                has_imm: has_imm && !is_read,
                is_forged,
            },
        );
        prop::collection::vec(request, 1..400)
    }

    fn memory(len: usize, fill: impl Fn(usize) -> u8) -> Arc<HostBuffer> {
        let memory = Arc::new(HostBuffer::new(len).unwrap());
        let bytes: Vec<_> = (0..len).map(fill).collect();
        // SAFETY: nothing else uses the memory.
        unsafe { bytes.as_ptr().copy_to_nonoverlapping(memory.as_ptr(), len) };
        memory
    }

    fn bytes_of(memory: &HostBuffer, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: the caller's range is within the memory, and nothing else uses it.
        unsafe { memory.as_ptr().add(at).copy_to_nonoverlapping(bytes.as_mut_ptr(), len) };
        bytes
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// Requests of any size, in both directions, over a device that carries them out in any order, with and without
        /// imms. The device is interrupted now and then, and then does not tell whether a request has arrived. Each page
        /// arrives once, each imm once and after its page, and only the requests with a wrong key fail.
        #[test]
        fn every_page_arrives_once(
            requests in requests(), seed: u64, capacity in 1_usize..600, uses_imms: bool, is_interrupted: bool,
        ) {
            let mut random = Lcg(seed);
            let (mut here, mut there) = Side::pair(uses_imms).unwrap();
            // The imms of slots that are under way to each side.
            let mut coming = [Vec::new(), Vec::new()];
            let total: usize = requests.iter().map(|request| request.len as usize).sum();
            let near = memory(total.max(REGION), |at| (at * 7 % 251) as u8);
            let far = memory(total.max(REGION), |at| (at * 11 % 241) as u8);
            let registration = there.regions.add(far.clone(), Access::REMOTE_WRITE | Access::REMOTE_READ, "a test").unwrap();
            let local = here.regions.add(near.clone(), Access::LOCAL, "a test").unwrap();
            let lkey = multirail_spi::MemoryRegion::lkey(&local);
            let key = multirail_spi::MemoryRegion::key(&registration);
            let mut expected = (bytes_of(&near, 0, total), bytes_of(&far, 0, total));
            let (mut at, mut next, mut offset) = (Vec::new(), 0, 0);
            for request in &requests {
                at.push(offset);
                offset += request.len as usize;
                let range = offset - request.len as usize..offset;
                if !request.is_forged {
                    match request.is_read {
                        true => { let from = expected.1[range.clone()].to_vec(); expected.0[range].copy_from_slice(&from) }
                        false => { let from = expected.0[range.clone()].to_vec(); expected.1[range].copy_from_slice(&from) }
                    }
                }
            }
            let (mut ended, mut imms) = (HashMap::new(), HashMap::new());
            for _ in 0..200_000 {
                while next < requests.len() && next - ended.len() < capacity {
                    let Request { is_read, len, has_imm, is_forged } = requests[next];
                    // Requests that differ only in their bytes are one run.
                    let is_alike = |other: &&Request| {
                        (other.is_read, other.is_forged) == (is_read, is_forged) && !other.has_imm && !has_imm
                    };
                    let alike = requests[next + 1..].iter().take_while(is_alike).count();
                    let run = next..(next + 1 + alike).min(ended.len() + capacity);
                    let work = WorkRequest {
                        id: next as u64, peer: PeerSlot(0), kind: if is_read { WorkKind::Read } else { WorkKind::Write },
                        local: near.as_ptr().wrapping_add(at[next]), lkey, len, remote: RemoteKey::STAGED + at[next] as u64,
                        rkey: key.key ^ u64::from(is_forged), imm: has_imm.then_some(next as u32),
                        strategy: CopyStrategy::Plain,
                    };
                    let pieces: Vec<_> = run.clone().map(|index| Piece {
                        local: near.as_ptr().wrapping_add(at[index]), remote: RemoteKey::STAGED + at[index] as u64,
                        len: requests[index].len,
                    }).collect();
                    let taken = here.post(&work, &pieces);
                    next += taken;
                    if taken < run.len() { break }
                }
                here.advance();
                there.advance();
                let [to_here, to_there] = &mut coming;
                for (side, imms) in [(&mut here, &mut *to_there), (&mut there, &mut *to_here)] {
                    if side.outbox.is_empty() || random.next().is_multiple_of(4) {
                        continue;
                    }
                    let index = random.next() as usize % side.outbox.len();
                    let may_fail = !is_data_of_initiator(&side.outbox[index]) && is_interrupted;
                    match random.next() % 8 {
                        0 if may_fail => side.end(index, INTERRUPTED),
                        1 if may_fail => {
                            carry_out(&side.outbox[index]);
                            imms.extend(side.outbox[index].imm);
                            side.end(index, INTERRUPTED);
                        }
                        // The words of a slot request are in memory before the bytes that follow them.
                        2 => carry_out(&first_bytes(&side.outbox[index])),
                        _ => imms.extend(side.complete(index, Ok(()))),
                    }
                }
                for (side, imms) in [(&mut here, to_here), (&mut there, to_there)] {
                    if !imms.is_empty() && random.next().is_multiple_of(2) {
                        side.on_imm(imms.swap_remove(random.next() as usize % imms.len()));
                    }
                }
                for event in there.events.drain(..) {
                    let Event::Imm { imm, .. } = event else { panic!("{event:?}") };
                    let Request { len, .. } = requests[imm as usize];
                    let range = at[imm as usize]..at[imm as usize] + len as usize;
                    prop_assert_eq!(bytes_of(&far, range.start, range.len()), &expected.1[range], "an imm before its bytes");
                    *imms.entry(imm).or_insert(0) += 1;
                }
                for event in here.events.drain(..) {
                    match event {
                        Event::Done { first, count } => (first..first + u64::from(count)).for_each(|id| assert!(ended.insert(id, true).is_none())),
                        Event::Failed { id, status } | Event::FailedUnconfirmed { id, status, .. } => {
                            prop_assert_eq!(status.kind, ErrorKind::RemoteAccess);
                            prop_assert!(ended.insert(id, false).is_none());
                        }
                        other => panic!("{other:?}"),
                    }
                }
                if ended.len() == requests.len() { break }
            }
            for (id, request) in requests.iter().enumerate() {
                // A request of no bytes is checked too.
                prop_assert_eq!(ended.get(&(id as u64)), Some(&!request.is_forged), "request {}", id);
                let has_imm = request.has_imm && !request.is_forged;
                prop_assert_eq!(imms.get(&(id as u32)).copied(), has_imm.then_some(1), "imm {}", id);
            }
            prop_assert_eq!(bytes_of(&near, 0, total), expected.0);
            prop_assert_eq!(bytes_of(&far, 0, total), expected.1);
        }
    }

    /// The failure of an interrupted connection.
    const INTERRUPTED: std::result::Result<(), Status> =
        Err(Status { kind: ErrorKind::Unreachable, code: 0 });

    fn is_data_of_initiator(work: &WorkRequest) -> bool {
        InternalWrId::decode(work.id).is_some_and(|id| id.role == WrRole::InitiatorData)
    }

    /// The part of a write that has the words of a slot request, if the write has one.
    fn first_bytes(work: &WorkRequest) -> WorkRequest {
        WorkRequest { len: work.len.min(StagingBuffer::REQUEST_LEN), ..*work }
    }

    /// Two sides with a staged region each, for requests of two pages.
    struct Pages {
        here: Side,
        there: Side,
        near: Arc<HostBuffer>,
        far: Arc<HostBuffer>,
        key: u64,
        lkey: u64,
        _registrations: Vec<Box<dyn multirail_spi::MemoryRegion>>,
    }

    impl Pages {
        fn new(uses_imms: bool) -> Self {
            let (here, there) = Side::pair(uses_imms).unwrap();
            let (near, far) = (memory(8192, |_| 1), memory(8192, |_| 2));
            let open = Access::REMOTE_WRITE | Access::REMOTE_READ;
            let remote = there.regions.add(far.clone(), open, "a test").unwrap();
            let local = here.regions.add(near.clone(), Access::LOCAL, "a test").unwrap();
            let key = multirail_spi::MemoryRegion::key(&remote).key;
            let lkey = multirail_spi::MemoryRegion::lkey(&local);
            Self {
                here,
                there,
                near,
                far,
                key,
                lkey,
                _registrations: vec![Box::new(remote), Box::new(local)],
            }
        }

        /// Posts two requests that share a slot, and advances this side.
        fn post(&mut self, kind: WorkKind) {
            for page in 0..2 {
                let work = WorkRequest {
                    id: page,
                    peer: PeerSlot(0),
                    kind,
                    local: self.near.as_ptr().wrapping_add(4096 * page as usize),
                    lkey: self.lkey,
                    len: 4096,
                    remote: RemoteKey::STAGED + 4096 * page,
                    rkey: self.key,
                    imm: None,
                    strategy: CopyStrategy::Plain,
                };
                let piece = Piece { local: work.local, remote: work.remote, len: work.len };
                assert_eq!(self.here.post(&work, &[piece]), 1);
            }
            (0..3).for_each(|_| self.here.advance());
        }

        /// Carries out all that both sides post, until they post no more. Returns how many messages these are.
        fn run(&mut self) -> usize {
            let mut messages = 0;
            for _ in 0..20 {
                self.here.advance();
                self.there.advance();
                while !self.here.outbox.is_empty() {
                    messages += 1;
                    self.here.complete(0, Ok(())).into_iter().for_each(|imm| self.there.on_imm(imm));
                }
                while !self.there.outbox.is_empty() {
                    messages += 1;
                    self.there.complete(0, Ok(())).into_iter().for_each(|imm| self.here.on_imm(imm));
                }
            }
            messages
        }

        /// Whether the two requests have succeeded.
        fn have_succeeded(&mut self) -> bool {
            self.here.events.drain(..).eq([Event::Done { first: 0, count: 2 }])
        }
    }

    #[test]
    fn a_slot_takes_two_messages_if_imms_announce_them() {
        for (uses_imms, kind, messages) in [
            (true, WorkKind::Write, 2),
            (true, WorkKind::Read, 2),
            (false, WorkKind::Write, 3),
            (false, WorkKind::Read, 4),
        ] {
            let mut pages = Pages::new(uses_imms);
            pages.post(kind);
            assert_eq!(pages.run(), messages, "{kind:?} {uses_imms}");
            assert!(pages.have_succeeded(), "{kind:?} {uses_imms}");
            let (to, from) = match kind {
                WorkKind::Read => (&pages.near, &pages.far),
                _ => (&pages.far, &pages.near),
            };
            assert_eq!(bytes_of(to, 0, 8192), bytes_of(from, 0, 8192));
        }
    }

    /// The engine posts batches of 64 pages. While the peer is busy with a slot, small pages of several batches share
    /// the next one.
    #[test]
    fn pages_of_several_batches_share_a_slot() {
        let mut pages = Pages::new(true);
        let mut slots = Vec::new();
        for batch in 0..6 {
            let list: Vec<_> = (0..64)
                .map(|page| Piece {
                    local: pages.near.as_ptr().wrapping_add(8 * page),
                    remote: RemoteKey::STAGED + 8 * page as u64,
                    len: 8,
                })
                .collect();
            let run = WorkRequest {
                id: 64 * batch,
                peer: PeerSlot(0),
                kind: WorkKind::Write,
                local: list[0].local,
                lkey: pages.lkey,
                len: 8,
                remote: list[0].remote,
                rkey: pages.key,
                imm: None,
                strategy: CopyStrategy::Plain,
            };
            assert_eq!(pages.here.post(&run, &list), 64);
            pages.here.with(|initiator, _, context| initiator.advance(true, context));
            pages.here.advance();
            slots.push(pages.here.outbox.len());
        }
        // The first slot does not wait, the second one is full, and the third one has the rest.
        assert_eq!(slots, [1, 1, 1, 1, 2, 2]);
        pages.here.advance();
        assert_eq!(pages.here.outbox.len(), 3);
        pages.run();
        assert!(pages.here.events.drain(..).eq([Event::Done { first: 0, count: 6 * 64 }]));
    }

    #[test]
    fn a_slot_request_waits_for_the_imm_of_its_bytes() {
        let mut pages = Pages::new(true);
        pages.post(WorkKind::Write);
        carry_out(&first_bytes(&pages.here.outbox[0]));
        pages.there.advance();
        carry_out(&pages.here.outbox[0].clone());
        // The imm of an earlier slot request.
        let tag = pages.there.connection.imms.unwrap();
        pages.there.on_imm(SlotImm::new(SlotImmKind::Request, 0, tag, 0).encode());
        pages.there.advance();
        assert_eq!((pages.there.outbox.len(), bytes_of(&pages.far, 0, 8192)), (0, vec![2; 8192]));
        assert_eq!(pages.run(), 2);
        assert!(pages.have_succeeded() && bytes_of(&pages.far, 0, 8192) == vec![1; 8192]);
    }

    /// A cancel that fails a slot request on its way does not end before the target has answered: the request may have
    /// arrived.
    #[test]
    fn a_cancel_waits_for_the_target() {
        let aborted = Err(Status { kind: ErrorKind::Cancelled, code: 0 });
        for has_arrived in [true, false] {
            let mut pages = Pages::new(true);
            pages.post(WorkKind::Write);
            let request = pages.here.outbox[0];
            if has_arrived {
                carry_out(&request);
                pages.there.on_imm(request.imm.expect("an imm"));
            }
            pages.here.with(|initiator, _, context| {
                // The device has it already.
                let posted = std::mem::take(context.outbox);
                initiator.stop(ErrorKind::Cancelled, context);
                context.outbox.extend(posted);
            });
            pages.here.end(0, aborted);
            assert!(pages.here.events.is_empty(), "the target may be serving the request");
            if has_arrived {
                pages.there.advance();
            }
            assert_eq!(pages.run(), 2, "a request to cancel, and a response");
            assert!(pages.here.events.drain(..).all(|event| matches!(event, Event::Failed { .. })));
            assert_eq!(bytes_of(&pages.far, 0, 8192), vec![if has_arrived { 1 } else { 2 }; 8192]);
            pages.post(WorkKind::Write);
            assert_eq!(pages.run(), 2);
            assert!(pages.have_succeeded());
        }
    }

    /// A slot request that was written twice has two imms. The second one may come after that of the next slot request,
    /// which has not been taken yet.
    #[test]
    fn a_late_imm_hides_no_later_one() {
        let mut pages = Pages::new(true);
        pages.post(WorkKind::Write);
        let late = pages.here.outbox[0].imm.expect("an imm");
        assert_eq!(pages.run(), 2);
        assert!(pages.have_succeeded());
        pages.post(WorkKind::Write);
        let imm = pages.here.complete(0, Ok(())).expect("an imm");
        pages.there.on_imm(imm);
        pages.there.on_imm(late);
        assert_eq!(pages.run(), 1, "the response");
        assert!(pages.have_succeeded());
    }

    /// The imm of a slot request that a fence has stopped may come after the fence is lifted.
    #[test]
    fn a_late_imm_serves_no_request_from_before_a_fence() {
        let mut pages = Pages::new(true);
        pages.post(WorkKind::Write);
        let late = pages.here.complete(0, Ok(())).expect("an imm");
        assert!(!pages.there.connection.fence());
        pages.there.advance();
        assert!(pages.there.connection.fence());
        pages.here.with(|initiator, _, context| initiator.on_peer_fenced(context));
        assert!(pages.here.events.drain(..).all(|event| matches!(event, Event::Failed { .. })));
        pages.there.connection.lift_fence();
        pages.there.advance();
        pages.there.on_imm(late);
        pages.there.advance();
        assert_eq!((pages.there.outbox.len(), bytes_of(&pages.far, 0, 8192)), (0, vec![2; 8192]));
        // The next slot request uses the same slot.
        pages.post(WorkKind::Write);
        pages.there.on_imm(late);
        assert_eq!(pages.run(), 2);
        assert!(pages.have_succeeded() && bytes_of(&pages.far, 0, 8192) == vec![1; 8192]);
    }

    /// The bytes of a read arrive, but the target is told that they may not have: it must not send them again into a slot
    /// that the initiator uses for something else by now.
    #[test]
    fn bytes_of_a_read_are_not_sent_twice() {
        for has_arrived in [true, false] {
            let mut pages = Pages::new(true);
            pages.post(WorkKind::Read);
            let imm = pages.here.complete(0, Ok(())).expect("an imm");
            pages.there.on_imm(imm);
            (0..3).for_each(|_| pages.there.advance());
            let data = pages.there.outbox[0];
            if has_arrived {
                carry_out(&data);
                pages.here.on_imm(data.imm.expect("an imm"));
                (0..3).for_each(|_| pages.here.advance());
                assert!(pages.have_succeeded());
                pages.post(WorkKind::Write);
            }
            pages.there.end(0, INTERRUPTED);
            assert!(pages.there.outbox.iter().all(|work| work.len == 8), "only a response");
            // The imm of a read that is over is nobody's.
            let imm = SlotImm::decode(data.imm.expect("an imm")).expect("a slot imm");
            pages.here.on_imm(SlotImm { sequence: imm.sequence.next(), ..imm }.encode());
            assert_eq!(pages.run(), 3, "{has_arrived}");
            assert!(pages.have_succeeded());
            assert_eq!(bytes_of(&pages.near, 0, 8192), vec![2; 8192]);
        }
    }

    /// A worker that hears of progress polls again instead of sleeping.
    #[test]
    fn an_initiator_without_work_makes_no_progress() {
        let (mut here, _there) = Side::pair(false).unwrap();
        here.with(|initiator, _, context| initiator.advance(true, context));
        assert!(!here.made_progress);
    }

    /// A sequence that looks random (Knuth's MMIX).
    struct Lcg(u64);

    impl Lcg {
        fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            self.0 >> 33
        }
    }
}
