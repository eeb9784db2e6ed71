//! A fabric with two transports: which one reaches a peer is found out per peer.
//!
//! In a cluster these are, say, shared memory for peers of this host and network cards
//! for the others. Here both are loopback, under the labels `near` and `far`. A peer
//! that has both is reached by the one that comes first; a peer that has only `far` is
//! reached by that; one that has neither is an error that says so.
//!
//! ```console
//! $ cargo run --example 05_two_transports
//! ```

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use multirail::{Access, ErrorKind, Fabric, FabricBuilder, Registry, TransportConfig};

const LIMIT: Duration = Duration::from_secs(5);

fn main() -> Result<(), Box<dyn Error>> {
    let here = open(&["near", "far"])?;
    let (neighbour, distant) = (open(&["near", "far"])?, open(&["far"])?);

    let (to_neighbour, _) = here.connect_local(&neighbour)?;
    let (to_distant, _) = here.connect_local(&distant)?;
    println!("{}\n{}", to_neighbour.explain(), to_distant.explain());

    // One registration serves both ways.
    let source = here.alloc(1 << 20, Access::LOCAL)?;
    source.copy_in(0, &[7; 1 << 20])?;
    for (peer, fabric) in [(&to_neighbour, &neighbour), (&to_distant, &distant)] {
        let target = fabric.alloc(1 << 20, Access::REMOTE_WRITE)?;
        let remote = peer.import(&target.descriptor())?;
        peer.write(&source, 0..1 << 20, &remote, 0)?.wait(LIMIT)?;
        let mut last = [0];
        target.copy_out((1 << 20) - 1, &mut last)?;
        assert_eq!(last, [7]);
    }

    // The counters say who carried what.
    assert_eq!(bytes_over(&here, "near"), 1 << 20);
    assert_eq!(bytes_over(&here, "far"), 1 << 20);

    // Nothing is put in place of a transport that is not there.
    let stranger = open(&["elsewhere"])?;
    let refused = here.connect_local(&stranger).err().ok_or("connected without a common transport")?;
    assert_eq!(refused.kind(), ErrorKind::Unreachable);
    println!("a stranger: {refused}");
    Ok(())
}

fn open(labels: &[&str]) -> multirail::Result<Fabric> {
    let registry = Registry::standard();
    let loopback = registry.find("loopback")?;
    let transport = |label: &&str| TransportConfig::new(*label, Arc::clone(loopback));
    labels.iter().map(transport).fold(FabricBuilder::new(), FabricBuilder::transport).open()
}

/// Bytes that the rails of one transport have moved, in workers or in this thread.
fn bytes_over(fabric: &Fabric, label: &str) -> u64 {
    let of_transport = fabric.counters().into_iter().filter(|rail| rail.transport == label);
    of_transport.map(|rail| rail.bytes + rail.direct_bytes).sum()
}
