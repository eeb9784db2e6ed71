//! A card that is lost, played by a soft-RoCE device whose completions cannot be read any more. As root, on
//! `rxe0` and `rxe1`: `ci/rdma-vm/suite` runs it.

use std::ptr::null_mut;
use std::sync::Arc;
use std::time::{Duration, Instant};

use transport_core::copy::Way;
use transport_core::spi::{
    Armed, Batch, Completions, Domain, DomainSetup, Endpoint, EndpointConfig, MemoryRegion, PeerSlot,
    ReceiveRequest, WorkKind, WorkRequest,
};
use transport_core::{Access, HostBuffer, Memory, SystemClock};

use super::*;
use crate::VerbsConfig;
use crate::device::Device;
use crate::domain::VerbsDomain;
use crate::port::Port;

/// Every wait ends by then.
const LIMIT: Duration = Duration::from_secs(20);
const LEN: usize = 4096;

/// A device with its endpoint, a peer's slot, and memory that the peer may write.
struct Side {
    domain: VerbsDomain,
    device: Arc<Device>,
    endpoint: Box<dyn Endpoint>,
    slot: PeerSlot,
    offer: Vec<u8>,
    memory: Arc<HostBuffer>,
    region: Arc<dyn MemoryRegion>,
}

impl Side {
    fn open(name: &str) -> Self {
        let device = Device::open(name).expect("soft-RoCE devices are there");
        let port = Port::query(&device, 1).unwrap();
        // The queue pair gives up soon on a peer that does not answer.
        let config = VerbsConfig { timeout: 14, retries: 3, ..VerbsConfig::default() };
        let setup =
            DomainSetup { clock: Arc::new(SystemClock::default()), seed: 1, incarnation: 1, sleeps: true };
        let domain = VerbsDomain::open(Arc::clone(&device), port, &config, &setup).unwrap();
        let endpoint = domain.endpoint(EndpointConfig::default()).unwrap();
        let (slot, offer) = domain.connector().prepare().unwrap();
        let memory = Arc::new(HostBuffer::sparse(LEN).unwrap());
        // SAFETY: nobody holds references into the memory.
        let region = unsafe { domain.register(memory.clone(), Access::REMOTE_WRITE) }.unwrap();
        Self { domain, device, endpoint, slot, offer, memory, region }
    }

    fn complete(&self, other: &Self) {
        self.domain.connector().complete(self.slot, &other.offer).unwrap();
    }

    /// Writes all its memory, full of `byte`, to the peer's; how that ends.
    fn write(&mut self, byte: u8, other: &Self) -> Event {
        // SAFETY: the whole memory; no request of it is under way.
        unsafe { self.memory.as_ptr().write_bytes(byte, LEN) };
        let request = WorkRequest {
            id: u64::from(byte),
            peer: self.slot,
            kind: WorkKind::Write,
            local: self.memory.as_ptr(),
            lkey: self.region.lkey(),
            len: LEN as u64,
            remote: other.region.key().base,
            rkey: other.region.key().key,
            imm: None,
            way: Way::Plain,
        };
        // SAFETY: the memory stays until the request has ended, below.
        let posted = unsafe { self.endpoint.post(&Batch::from_iter([request])) };
        assert_eq!(posted.accepted, 1, "{posted:?}");
        let of_it = |event: &Event| {
            matches!(event, Event::Done { .. } | Event::Failed { .. } | Event::Doubted { .. })
        };
        self.until(of_it)
    }

    /// Polls until there is an event of that sort.
    fn until(&mut self, is_wanted: impl Fn(&Event) -> bool) -> Event {
        let (mut events, end) = (Completions::with_room(16), Instant::now() + LIMIT);
        loop {
            events.clear();
            self.endpoint.poll(&mut events);
            if let Some(event) = events.as_slice().iter().find(|event| is_wanted(event)) {
                return *event;
            }
            assert!(Instant::now() < end, "no such event");
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; LEN];
        // SAFETY: in bounds of both; the test waits for the end of what the card writes.
        unsafe { self.memory.as_ptr().copy_to(bytes.as_mut_ptr(), LEN) };
        bytes
    }
}

unsafe extern "C" fn unreadable(_: *mut ib::ibv_cq, _: c_int, _: *mut ib::ibv_wc) -> c_int {
    -1
}

#[test]
#[ignore = "needs soft-RoCE: ci/rdma-vm/suite"]
fn nothing_lands_once_the_loss_of_the_device_is_told() {
    let (mut near, mut far) = (Side::open("rxe0"), Side::open("rxe1"));
    near.complete(&far);
    far.complete(&near);
    assert!(matches!(far.write(1, &near), Event::Done { .. }));
    assert!(near.bytes() == [1; LEN]);
    let receive = |id| ReceiveRequest { id, local: null_mut(), lkey: 0, len: 0 };
    // SAFETY: no message comes for it.
    assert_eq!(unsafe { near.endpoint.post_recv(&[receive(7)]) }.accepted, 1);

    // SAFETY: the device is open, and this thread alone polls it.
    unsafe { (*near.device.context.as_ptr()).ops.poll_cq = Some(unreadable) };
    let mut told = Completions::with_room(16);
    near.endpoint.poll(&mut told);
    let status = Status { kind: ErrorKind::DeviceLost, code: -1 };
    assert_eq!(told.as_slice(), [Event::ReceiveFailed { id: 7, status }, Event::DeviceLost { status }]);

    // The user may use the memory for something else from now on.
    let late = far.write(2, &near);
    assert!(near.bytes() == [1; LEN], "a late byte has landed; its write ended as {late:?}");
    assert!(!matches!(late, Event::Done { .. }), "{late:?}");

    // Nothing is posted or connected any more, and the peer's end is told.
    // SAFETY: it is refused.
    let refused = unsafe { near.endpoint.post_recv(&[receive(8)]) };
    assert_eq!((refused.accepted, refused.error.map(|why| why.kind)), (0, Some(ErrorKind::DeviceLost)));
    let refused = near.domain.connector().prepare().err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::DeviceLost);
    assert!(matches!(near.endpoint.arm(), Armed::Unsupported));
    near.domain.connector().disconnect(near.slot);
    let gone = Event::PeerGone { peer: near.slot };
    assert_eq!(near.until(|event| *event == gone), gone);
}
