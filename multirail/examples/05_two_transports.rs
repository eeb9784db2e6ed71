//! A fabric with two transports: each peer is reached over the first that both sides have.
//!
//! In a cluster these are, for example, shared memory for peers on this host and network cards
//! for other peers. Here both are loopback, with the labels `near` and `far`. A peer with both is
//! reached over the first one, and a peer with `far` only over `far`. Connecting to a peer with
//! neither is an error that lists both sides' transports.
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

    // One registration works for both transports.
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

    // The counters show which transport moved which bytes.
    assert_eq!(bytes_over(&here, "near"), 1 << 20);
    assert_eq!(bytes_over(&here, "far"), 1 << 20);

    // There is no fallback for a missing transport.
    let unrelated = open(&["elsewhere"])?;
    let refused = here.connect_local(&unrelated).err().ok_or("connected without a common transport")?;
    assert_eq!(refused.kind(), ErrorKind::Unreachable);
    println!("a peer without a common transport: {refused}");
    Ok(())
}

fn open(labels: &[&str]) -> multirail::Result<Fabric> {
    let registry = Registry::standard();
    let loopback = registry.find("loopback")?;
    let transport = |label: &&str| TransportConfig::new(*label, Arc::clone(loopback));
    labels.iter().map(transport).fold(FabricBuilder::new(), FabricBuilder::transport).open()
}

/// The bytes that the rails of one transport have moved, in workers or in this thread.
fn bytes_over(fabric: &Fabric, label: &str) -> u64 {
    let of_transport = fabric.counters().into_iter().filter(|rail| rail.transport == label);
    of_transport.map(|rail| rail.bytes + rail.direct_bytes).sum()
}
