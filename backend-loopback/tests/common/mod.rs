//! A domain with an endpoint, driven through the SPI.
#![allow(dead_code, reason = "every test binary uses its own part")]

use std::sync::Arc;
use std::time::Duration;

use limit::Limit;
use multirail_loopback::{Loopback, LoopbackConfig};
use multirail_spi::{Access, Error, HostBuffer, Memory, VirtualClock, copy::CopyStrategy, *};

pub const BOTH: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);
pub const TIME_LIMIT: Duration = limit::HANG;

/// Returns true if this run is over the portable path (MULTIRAIL_LOOPBACK_PORTABLE=1).
pub fn is_portable() -> bool {
    HostSharing::of_this_process().unwrap().is_portable()
}

pub struct TestNode {
    pub domain: Arc<dyn Domain>,
    pub endpoint: Box<dyn Endpoint>,
    pub clock: VirtualClock,
}

pub fn node(config: LoopbackConfig, seed: u64) -> TestNode {
    let clock = VirtualClock::default();
    let setup = DomainSetup { clock: Arc::new(clock.clone()), seed, incarnation: 1, worker_sleeps: true };
    let backend = Loopback::with(config);
    let device = backend.probe().unwrap().remove(0);
    let domain = backend.open(&device, &setup).unwrap();
    let endpoint = domain.endpoint(EndpointConfig::default()).unwrap();
    TestNode { domain, endpoint, clock }
}

/// Two connected nodes without a link model. Returns a's slot for b and b's slot for a too.
pub fn pair() -> (TestNode, TestNode, PeerSlot, PeerSlot) {
    let (a, b) = (node(LoopbackConfig::default(), 1), node(LoopbackConfig::default(), 2));
    let (to_b, to_a) = connect(&a, &b);
    (a, b, to_b, to_a)
}

pub fn connect(a: &TestNode, b: &TestNode) -> (PeerSlot, PeerSlot) {
    let (to_b, offer_a) = a.domain.connector().prepare().unwrap();
    let (to_a, offer_b) = b.domain.connector().prepare().unwrap();
    a.domain.connector().complete(to_b, &offer_b).unwrap();
    b.domain.connector().complete(to_a, &offer_a).unwrap();
    (to_b, to_a)
}

/// A registered buffer.
pub struct RegisteredBuffer {
    pub buffer: Arc<HostBuffer>,
    pub region: Arc<dyn MemoryRegion>,
}

impl RegisteredBuffer {
    pub fn fill(&self, byte: u8) {
        // SAFETY: the buffer's own bytes; tests do not read them meanwhile.
        unsafe { self.buffer.as_ptr().write_bytes(byte, self.buffer.len()) };
    }

    pub fn byte(&self, at: usize) -> u8 {
        assert!(at < self.buffer.len());
        // SAFETY: in bounds; a volatile read tolerates a peer's write.
        unsafe { self.buffer.as_ptr().add(at).read_volatile() }
    }
}

impl TestNode {
    pub fn register(&self, len: usize, access: Access) -> RegisteredBuffer {
        let buffer = Arc::new(HostBuffer::new(len).unwrap());
        // SAFETY: `RegisteredBuffer` hands out no references into the buffer.
        let region = unsafe { self.domain.register(buffer.clone(), access) }.unwrap();
        RegisteredBuffer { buffer, region }
    }

    pub fn import(&self, peer: PeerSlot, region: &dyn MemoryRegion) -> Arc<dyn RemoteMemory> {
        self.try_import(peer, region.key()).unwrap()
    }

    pub fn try_import(&self, peer: PeerSlot, key: RemoteKey) -> Result<Arc<dyn RemoteMemory>, Error> {
        self.domain.import(peer, &key, TIME_LIMIT)
    }

    pub fn post(&mut self, batch: &[WorkRequest]) -> PostResult {
        // SAFETY: tests keep buffers and imports until they have polled the end.
        unsafe { self.endpoint.post(&batch.iter().copied().collect()) }
    }

    pub fn poll(&mut self) -> Vec<Event> {
        let mut events = Completions::with_room(4096);
        self.endpoint.poll(&mut events);
        events.as_slice().to_vec()
    }

    /// Polls until there are `count` events. Each request that is done counts as one.
    pub fn wait(&mut self, count: usize) -> Vec<Event> {
        let (mut events, mut limit) = (Vec::new(), Limit::of(TIME_LIMIT));
        while total(&events) < count {
            events.extend(self.poll());
            assert!(!limit.is_over(), "got only {events:?}");
        }
        events
    }

    /// Posts one request and waits for its completion.
    pub fn run(&mut self, request: WorkRequest) -> Event {
        assert_eq!(self.post(&[request]), PostResult { accepted: 1, error: None });
        self.wait(1)[0]
    }

    pub fn recv(&mut self, id: u64, into: &RegisteredBuffer) {
        let (local, len) = (into.buffer.as_ptr(), into.buffer.len() as u64);
        // SAFETY: tests keep the buffer until the receive has ended.
        let posted = unsafe {
            self.endpoint.post_recv(&[ReceiveRequest { id, local, lkey: into.region.lkey(), len }])
        };
        assert_eq!(posted.accepted, 1);
    }
}

/// A write of the whole of `from` to the beginning of `to`.
pub fn write(
    id: u64,
    peer: PeerSlot,
    from: &RegisteredBuffer,
    to: Option<&Arc<dyn RemoteMemory>>,
) -> WorkRequest {
    let len = from.buffer.len() as u64;
    WorkRequest {
        id,
        peer,
        kind: WorkKind::Write,
        local: from.buffer.as_ptr(),
        lkey: from.region.lkey(),
        len,
        remote: to.map_or(0, |to| to.base()),
        rkey: to.map_or(0, |to| to.rkey()),
        imm: None,
        strategy: CopyStrategy::Plain,
    }
}

/// The number of events, where each request that is done counts as one.
pub fn total(events: &[Event]) -> usize {
    let one = |event: &Event| if let Event::Done { count, .. } = event { *count as usize } else { 1 };
    events.iter().map(one).sum()
}

/// The event that `count` requests from `first` on are done.
pub fn done(first: u64, count: u32) -> Event {
    Event::Done { first, count }
}

pub fn failed(event: Event) -> multirail_spi::ErrorKind {
    match event {
        Event::Failed { status, .. } | Event::ReceiveFailed { status, .. } => status.kind,
        other => panic!("{other:?} is no failure"),
    }
}
