//! The locations of devices in the machine determine rail groups, and the rails of a GPU's memory.

use std::sync::Arc;
use std::time::Duration;

use multirail_loopback::{Loopback, LoopbackConfig};
use multirail_spi::{Access, Backend, ErrorKind, HostBuffer, Memory};
use topology::{Address, Description};
use transport_core::{Fabric, FabricBuilder, RailGroups, TransportConfig, Workers};

const LIMIT: Duration = limit::HANG;
/// So large that a write is not copied in the calling thread.
const LEN: usize = 8 << 20;
/// Two cards of a p5's GPU 0, and one of GPU 4's.
const CARDS: [&str; 3] = ["0000:4f:00.0", "0000:50:00.0", "0000:93:00.0"];

/// A fabric whose loopback devices have the PCI addresses of cards.
fn builder() -> FabricBuilder {
    let backend = Arc::new(Loopback::with(LoopbackConfig::default().devices(3)));
    let mut devices = backend.probe().unwrap();
    for (device, card) in devices.iter_mut().zip(CARDS) {
        (device.address, device.group) = (Some(card.parse().unwrap()), None);
    }
    FabricBuilder::new()
        .transport(TransportConfig::new("cards", backend).devices(devices))
        .topology(Description::p5().machine().unwrap())
}

/// Host memory that claims to be near a GPU.
struct NearGpu(HostBuffer, Address);

// SAFETY: as the buffer.
unsafe impl Memory for NearGpu {
    fn as_ptr(&self) -> *mut u8 {
        self.0.as_ptr()
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn near(&self) -> Option<Address> {
        Some(self.1)
    }
}

fn bytes(fabric: &Fabric) -> Vec<u64> {
    fabric.counters().iter().map(|rail| rail.bytes).collect()
}

#[test]
fn groups_are_those_of_the_machine() {
    let fabric = builder().open().unwrap();
    let transport = &fabric.transports()[0];
    assert_eq!(transport.groups, [0..2, 2..3]);
    let gpus: Vec<_> = transport.locations.iter().map(|location| location.gpus.len()).collect();
    assert_eq!(gpus, [4, 4]);
    for (location, node) in transport.locations.iter().zip([0, 1]) {
        assert_eq!((location.node, location.cores.len()), (Some(node), 48));
        assert!(location.core.is_some_and(|core| core != 0 && location.cores.contains(&core)));
    }
}

#[test]
fn workers_of_other_fabrics_keep_to_other_cores() {
    let fabrics: Vec<_> = (0..3).map(|_| builder().open().unwrap()).collect();
    let locations = fabrics.iter().flat_map(|fabric| fabric.transports().remove(0).locations);
    let mut cores: Vec<u32> = locations.map(|location| location.core.unwrap()).collect();
    cores.sort_unstable();
    cores.dedup();
    assert_eq!(cores.len(), 6, "{cores:?}");
    // Without worker threads no core is reserved. With one worker, both groups have its core.
    let driven = builder().caller_driven().open().unwrap();
    assert!(driven.transports()[0].locations.iter().all(|location| location.core.is_none()));
    let single = builder().workers(Workers::at_most(1)).open().unwrap();
    let locations = &single.transports()[0].locations;
    assert_eq!(locations[0].core, locations[1].core);
}

/// The groups of two GPUs are not paired. The error says how to register.
#[test]
fn memory_near_groups_that_are_not_paired_is_unreachable() {
    let (a, b) = (builder().open().unwrap(), builder().open().unwrap());
    let (to_b, _) = a.connect_local(&b).unwrap();
    let of = |gpu: &str| Arc::new(NearGpu(HostBuffer::new(LEN).unwrap(), gpu.parse().unwrap()));
    // SAFETY: nobody else has the memory.
    let (source, target) = unsafe {
        let source = a.register(of("0000:53:00.0"), Access::LOCAL).unwrap();
        (source, b.register(of("0000:97:00.0"), Access::REMOTE_WRITE).unwrap())
    };
    let refused = to_b.import(&target.descriptor()).and_then(|far| to_b.write(&source, 0..LEN, &far, 0));
    let refused = refused.err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Unreachable, "{refused}");
    assert!(refused.context().contains("register one of them on all rails"), "{refused}");
    // SAFETY: as above.
    let everywhere = unsafe { b.register_everywhere(of("0000:97:00.0"), Access::REMOTE_WRITE) }.unwrap();
    let far = to_b.import(&everywhere.descriptor()).unwrap();
    to_b.write(&source, 0..LEN, &far, 0).unwrap().wait(LIMIT).unwrap();
}

#[test]
fn memory_of_a_gpu_takes_the_rails_of_its_group() {
    let (a, b) = (builder().open().unwrap(), builder().open().unwrap());
    let (to_b, _) = a.connect_local(&b).unwrap();
    let target = b.alloc(LEN, Access::REMOTE_WRITE).unwrap();
    let remote = to_b.import(&target.descriptor()).unwrap();
    let of = |gpu: &str| Arc::new(NearGpu(HostBuffer::new(LEN).unwrap(), gpu.parse().unwrap()));
    let mut expected = [0, 0, 0];
    // GPU 6 shares the card of GPU 4.
    for (gpu, rails) in [("0000:b9:00.0", 2..3), ("0000:53:00.0", 0..2)] {
        // SAFETY: nobody else has the memory.
        let source = unsafe { a.register(of(gpu), Access::LOCAL) }.unwrap();
        to_b.write(&source, 0..LEN, &remote, 0).unwrap().wait(LIMIT).unwrap();
        let per_rail = LEN / rails.len();
        rails.for_each(|rail| expected[rail] += per_rail as u64);
        assert_eq!(bytes(&a), expected, "{gpu}");
    }
    // SAFETY: nobody else has the memory.
    let everywhere = unsafe { a.register_everywhere(of("0000:b9:00.0"), Access::LOCAL) }.unwrap();
    for _ in 0..8 {
        to_b.write(&everywhere, 0..LEN, &remote, 0).unwrap().wait(LIMIT).unwrap();
    }
    assert_eq!(bytes(&a).iter().sum::<u64>(), 10 * LEN as u64);
}

#[test]
fn groups_can_be_listed() {
    let names: Vec<String> =
        builder().open().unwrap().transports()[0].devices.iter().map(|device| device.name.clone()).collect();
    let text = format!("{},{}@0;{}", names[2], names[0], names[1]);
    let fabric = builder().rail_groups(text.parse().unwrap()).open().unwrap();
    let transport = &fabric.transports()[0];
    assert_eq!(transport.groups, [0..2, 2..3]);
    assert_eq!(transport.locations[0].core, Some(0));
    let unknown: RailGroups = "no such card".parse().unwrap();
    let refused = builder().rail_groups(unknown).open().err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::InvalidRequest);
    assert!(refused.context().contains("no such card") && refused.context().contains(&names[0]), "{refused}");
}
