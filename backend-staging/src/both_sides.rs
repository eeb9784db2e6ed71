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
    /// Two sides that are connected.
    pub(crate) fn pair() -> Result<(Self, Self)> {
        let (here, there) = (Self::new()?, Self::new()?);
        here.connect(&there);
        there.connect(&here);
        Ok((here, there))
    }

    fn new() -> Result<Self> {
        let connection = Connections::default().insert(PeerSlot(0), StagingBuffer::unregistered()?, 0);
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
        self.connection.connect(import, StagingOffer { buffer, wake_imm: false, coalesces: true }, true);
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

    /// Advances both roles, as a poll does.
    pub(crate) fn advance(&mut self) {
        self.with(|initiator, target, context| {
            target.advance(context);
            initiator.advance(false, context);
        });
        while let Some((tag, result)) = self.copies.take_completed() {
            self.with(|initiator, target, context| match tag {
                CopyTag::Initiator { slot, page, .. } => initiator.on_copied((slot, page), result, context),
                CopyTag::Target { slot, page, .. } => target.on_copied((slot, page), result, context),
                CopyTag::Receive { .. } => {}
            });
        }
    }

    /// Carries out the posted request with this index, or lets it fail.
    pub(crate) fn complete(&mut self, index: usize, result: Result<(), Status>) {
        let Some(work) = self.outbox.remove(index) else { return };
        let (to, from) = match work.kind {
            WorkKind::Read => (work.local, work.remote as *const u8),
            _ => (work.remote as *mut u8, work.local.cast_const()),
        };
        if result.is_ok() {
            // SAFETY: the requests of both roles name bytes of the two staging buffers and of regions that the caller
            // keeps, and nothing else runs meanwhile.
            unsafe { copy::copy(copy::CopyStrategy::Plain, to, from, work.len as usize) };
        }
        let Some(id) = InternalWrId::decode(work.id) else { return };
        self.with(|initiator, target, context| match id.role {
            WrRole::InitiatorData | WrRole::Request => initiator.on_completed(id, result, false, context),
            WrRole::TargetData | WrRole::Response => target.on_completed(id, result, context),
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use multirail_spi::copy::CopyStrategy;
    use multirail_spi::{Access, ErrorKind, HostBuffer, Memory};
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

        /// Requests of any size, in both directions, over a device that carries them out in any order: each page
        /// arrives once, each imm once and after its page, and only the requests with a wrong key fail.
        #[test]
        fn every_page_arrives_once(requests in requests(), seed: u64, capacity in 1_usize..600) {
            let mut random = Lcg(seed);
            let (mut here, mut there) = Side::pair().unwrap();
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
                while next < requests.len() && here.initiator.has_room(WorkKind::Write) && next - ended.len() < capacity {
                    let Request { is_read, len, has_imm, is_forged } = requests[next];
                    let work = WorkRequest {
                        id: next as u64, peer: PeerSlot(0), kind: if is_read { WorkKind::Read } else { WorkKind::Write },
                        local: near.as_ptr().wrapping_add(at[next]), lkey, len, remote: RemoteKey::STAGED + at[next] as u64,
                        rkey: key.key ^ u64::from(is_forged), imm: has_imm.then_some(next as u32),
                        strategy: CopyStrategy::Plain,
                    };
                    here.initiator.push(&work, here.regions.by_lkey(lkey), None);
                    next += 1;
                }
                here.advance();
                there.advance();
                for side in [&mut here, &mut there] {
                    if !side.outbox.is_empty() && !random.next().is_multiple_of(4) {
                        side.complete(random.next() as usize % side.outbox.len(), Ok(()));
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
                        Event::Failed { id, status } => {
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

    /// A worker that hears of progress polls again instead of sleeping.
    #[test]
    fn an_initiator_without_work_makes_no_progress() {
        let (mut here, _there) = Side::pair().unwrap();
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
