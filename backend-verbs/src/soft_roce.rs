//! Endpoints on soft-RoCE devices, for this crate's tests. These run as root on `rxe0` and `rxe1`, by
//! `ci/rdma-vm/suite`.

use std::collections::VecDeque;
use std::ffi::c_int;
use std::sync::Arc;
use std::time::{Duration, Instant};

use multirail_spi::{
    Access, Batch, Completions, Domain, DomainSetup, Endpoint, EndpointConfig, Event, HostBuffer, Memory,
    MemoryRegion, PeerSlot, SystemClock, WorkKind, WorkRequest, copy::CopyStrategy,
};
use rdma_sys as ib;

use crate::VerbsConfig;
use crate::device::Device;
use crate::domain::VerbsDomain;
use crate::port::Port;

/// The limit of every wait.
const LIMIT: Duration = Duration::from_secs(20);
pub(crate) const LEN: usize = 4096;

/// A device with its endpoint, a peer's slot, and memory that the peer may write.
pub(crate) struct TestEndpoint {
    pub(crate) domain: VerbsDomain,
    device: Arc<Device>,
    pub(crate) endpoint: Box<dyn Endpoint>,
    pub(crate) slot: PeerSlot,
    pub(crate) offer: Vec<u8>,
    pub(crate) memory: Arc<HostBuffer>,
    region: Arc<dyn MemoryRegion>,
    /// Polled events that no wait has taken.
    pub(crate) events: VecDeque<Event>,
}

impl TestEndpoint {
    /// Opens an endpoint whose queue pairs soon give up on a peer that does not acknowledge.
    pub(crate) fn open(name: &str) -> Self {
        Self::with_retries(name, 3)
    }

    /// Opens an endpoint whose queue pairs repeat a request this often; 7 means without limit.
    pub(crate) fn with_retries(name: &str, retries: u8) -> Self {
        let device = Device::open(name).expect("soft-RoCE devices exist");
        let port = Port::query(&device, 1).unwrap();
        let config = VerbsConfig { timeout: 14, retries, ..VerbsConfig::default() };
        let setup = DomainSetup {
            clock: Arc::new(SystemClock::default()),
            seed: 1,
            incarnation: 1,
            worker_sleeps: true,
        };
        let domain = VerbsDomain::open(Arc::clone(&device), port, &config, &setup).unwrap();
        let endpoint = domain.endpoint(EndpointConfig::default()).unwrap();
        let (slot, offer) = domain.connector().prepare().unwrap();
        let memory = Arc::new(HostBuffer::sparse(LEN).unwrap());
        // SAFETY: no code holds references into the memory.
        let region = unsafe { domain.register(memory.clone(), Access::REMOTE_WRITE) }.unwrap();
        Self { domain, device, endpoint, slot, offer, memory, region, events: VecDeque::new() }
    }

    pub(crate) fn complete(&self, other: &Self) {
        self.domain.connector().complete(self.slot, &other.offer).unwrap();
    }

    /// Fills its memory with `byte` and writes all of it to the peer's. Returns the final event.
    pub(crate) fn write(&mut self, byte: u8, other: &Self) -> Event {
        self.post(WorkKind::Write, byte, None, other)
    }

    /// Fills its memory with `byte` and writes or sends all of it to the peer. Returns the final event.
    pub(crate) fn post(&mut self, kind: WorkKind, byte: u8, imm: Option<u32>, other: &Self) -> Event {
        self.begin(kind, byte, imm, other);
        self.end()
    }

    /// Posts the request of [`TestEndpoint::post`]. The caller waits for the [`TestEndpoint::end`].
    pub(crate) fn begin(&mut self, kind: WorkKind, byte: u8, imm: Option<u32>, other: &Self) {
        // SAFETY: the range is the whole memory, and no request uses it now.
        unsafe { self.memory.as_ptr().write_bytes(byte, LEN) };
        let request = WorkRequest {
            id: u64::from(byte),
            peer: self.slot,
            kind,
            local: self.memory.as_ptr(),
            lkey: self.region.lkey(),
            len: LEN as u64,
            remote: other.region.key().base,
            rkey: other.region.key().key,
            imm,
            strategy: CopyStrategy::Plain,
        };
        // SAFETY: the memory stays until the request has ended, as the caller waits for it.
        let posted = unsafe { self.endpoint.post(&Batch::from_iter([request])) };
        assert_eq!(posted.accepted, 1, "{posted:?}");
    }

    /// Waits for the end of the last posted request. Returns its final event.
    pub(crate) fn end(&mut self) -> Event {
        let of_it = |event: &Event| {
            matches!(event, Event::Done { .. } | Event::Failed { .. } | Event::FailedUnconfirmed { .. })
        };
        self.until(of_it)
    }

    /// Polls until there is such an event. Removes and returns it.
    pub(crate) fn until(&mut self, is_wanted: impl Fn(&Event) -> bool) -> Event {
        let (mut events, end) = (Completions::with_room(16), Instant::now() + LIMIT);
        loop {
            events.clear();
            self.endpoint.poll(&mut events);
            self.events.extend(events.as_slice());
            if let Some(index) = self.events.iter().position(&is_wanted) {
                return self.events.remove(index).expect("it is there");
            }
            assert!(Instant::now() < end, "no such event");
        }
    }

    /// Polls for so long, and at least once. Keeps the events.
    pub(crate) fn poll_for(&mut self, span: Duration) {
        let (mut events, end) = (Completions::with_room(16), Instant::now() + span);
        loop {
            events.clear();
            self.endpoint.poll(&mut events);
            self.events.extend(events.as_slice());
            if Instant::now() >= end {
                return;
            }
        }
    }

    /// Makes the device's completions unreadable from now on.
    pub(crate) fn lose(&mut self) {
        // SAFETY: the device is open, and this thread alone polls it.
        unsafe { (*self.device.context.as_ptr()).ops.poll_cq = Some(unreadable) };
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        // SAFETY: the range is in bounds of both, and the test waits for the end of the card's writes.
        unsafe { self.memory.as_ptr().copy_to(bytes.as_mut_ptr(), LEN) };
        bytes
    }
}

/// Reads completions of a lost card: returns an error.
unsafe extern "C" fn unreadable(_: *mut ib::ibv_cq, _: c_int, _: *mut ib::ibv_wc) -> c_int {
    -1
}
