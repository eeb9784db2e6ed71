//! One trainer sends new weights to several inference servers at once.
//!
//! Every server registers the memory of its model and waits for an imm, the version's number. The
//! trainer scatters to all servers in one operation. A server that uses the new version enters
//! the version's barrier. The trainer overwrites the memory again only after the barrier.
//!
//! ```console
//! $ cargo run --example 07_weight_broadcast
//! ```

use std::error::Error;
use std::time::Duration;

use multirail::{Access, PeerGroup, Result, ScatterPart, WriteOptions, wait};

const SERVERS: usize = 4;
const WEIGHTS: usize = 8 << 20;
const VERSIONS: u32 = 3;
const LIMIT: Duration = Duration::from_secs(20);

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let trainer = multirail::open()?;
    let listener = wait(trainer.listen("127.0.0.1:0"), LIMIT)??;
    let address = listener.local_addr();
    // Each server is a thread here; on a cluster, a process on another machine.
    let servers: Vec<_> = (0..SERVERS)
        .map(|_| {
            let address = address.clone();
            std::thread::spawn(move || pollster::block_on(serve(&address)))
        })
        .collect();

    let (mut peers, mut models) = (Vec::new(), Vec::new());
    for _ in 0..SERVERS {
        let peer = wait(listener.accept(), LIMIT)??;
        // The server published its memory before it connected.
        models.push(wait(peer.region("model"), LIMIT)??);
        // Warming up makes the first version as fast as the others.
        peer.warm_up()?.wait(LIMIT)?;
        peers.push(peer);
    }
    let group = PeerGroup::new(peers)?;
    let parts: Vec<_> = models.iter().map(|model| ScatterPart::new(model, 0..WEIGHTS, 0)).collect();

    let weights = trainer.alloc(WEIGHTS, Access::LOCAL)?;
    for version in 1..=VERSIONS {
        weights.copy_in(0, &trained(version))?;
        let options = WriteOptions::new().imm(version).cold();
        let outcome = group.scatter(&weights, &parts, &options)?.wait(LIMIT)?;
        assert_eq!(outcome.bytes, (SERVERS * WEIGHTS) as u64);
        group.barrier(version, LIMIT)?.wait()?;
        println!("version {version} is in use on {SERVERS} servers");
    }

    group.peers().iter().for_each(multirail::Peer::disconnect);
    for server in servers {
        let seen = server.join().map_err(|_| "a server panicked")??;
        assert_eq!(seen, VERSIONS);
    }
    Ok(())
}

/// Waits for every version and verifies it. Returns the number of verified versions.
async fn serve(address: &str) -> Result<u32> {
    let fabric = multirail::open()?;
    let model = fabric.alloc(WEIGHTS, Access::REMOTE_WRITE)?;
    fabric.publish("model", &model)?;
    let trainer = fabric.connect(address).await?;
    let everyone_else = PeerGroup::new([trainer.clone()])?;
    let mut weights = vec![0; WEIGHTS];
    for version in 1..=VERSIONS {
        trainer.imm(version).expect(1).await?;
        model.copy_out(0, &mut weights)?;
        assert!(weights == trained(version), "version {version} has wrong weights");
        everyone_else.barrier(version, LIMIT)?.await?;
    }
    trainer.closed().await;
    Ok(VERSIONS)
}

/// Stands for the weights of a version.
fn trained(version: u32) -> Vec<u8> {
    (0..WEIGHTS).map(|byte| (byte ^ (byte >> 11)) as u8 ^ version as u8).collect()
}
