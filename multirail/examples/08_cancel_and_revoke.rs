//! Ending writes on either side, without late bytes in reused memory.
//!
//! The initiator can end an outstanding write: it cancels the operation, or drops it and drains
//! the peer. The owner of the target can end it too, by revoking the region. All three complete
//! only when no byte can move any more. A link model makes loopback slow here, because otherwise
//! the writes would complete too early.
//!
//! ```console
//! $ cargo run --example 08_cancel_and_revoke
//! ```

use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use backend_loopback::{LinkModel, Loopback, LoopbackConfig};
use multirail::{Access, ErrorKind, Fabric, FabricBuilder, Peer, Region, TransportConfig};
use tokio::time::timeout;

/// At half a Gbps a write takes a quarter of a second.
const LEN: usize = 16 << 20;
const PATIENCE: Duration = Duration::from_millis(20);

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let (sender, receiver) = (slow_fabric()?, slow_fabric()?);
    let (to_receiver, _) = sender.connect_local(&receiver)?;
    let source = sender.alloc(LEN, Access::LOCAL)?;
    let target = receiver.alloc(LEN, Access::REMOTE_WRITE)?;
    cancel(&to_receiver, &source, &target).await?;
    drop_and_drain(&to_receiver, &source, &target).await?;
    revoke(&to_receiver, &source, &target).await
}

/// Keeps the future, so that the operation can be cancelled after a timeout.
async fn cancel(peer: &Peer, source: &Region, target: &Region) -> Result<(), Box<dyn Error>> {
    let remote = peer.import(&target.descriptor())?;
    source.copy_in(0, &vec![1; LEN])?;
    let mut write = peer.write(source, 0..LEN, &remote, 0)?;
    assert!(timeout(PATIENCE, &mut write).await.is_err(), "the write completed before the timeout");
    // The cancel waits for posted requests and drops the others, so a part of the bytes may have arrived.
    let ended = write.cancel().await;
    assert_eq!(ended.err().map(|error| error.kind()), Some(ErrorKind::Cancelled));
    assert!(count(target, 1)? < LEN, "all bytes were written");

    reuse(source, target).await?;
    println!("cancelled: no byte landed afterwards");
    Ok(())
}

/// Drops the future, as a `select!` or an aborted task does, and drains the peer.
async fn drop_and_drain(peer: &Peer, source: &Region, target: &Region) -> Result<(), Box<dyn Error>> {
    let remote = peer.import(&target.descriptor())?;
    source.copy_in(0, &vec![2; LEN])?;
    tokio::select! {
        written = peer.write(source, 0..LEN, &remote, 0)? => panic!("the write completed first: {written:?}"),
        () = tokio::time::sleep(PATIENCE) => {}
    }
    peer.drain()?.await?;
    assert!(count(target, 2)? < LEN, "all bytes were written");

    reuse(source, target).await?;
    println!("dropped and drained: no byte landed afterwards");
    Ok(())
}

/// The owner of the target revokes it while the initiator writes.
async fn revoke(peer: &Peer, source: &Region, target: &Region) -> Result<(), Box<dyn Error>> {
    let remote = peer.import(&target.descriptor())?;
    source.copy_in(0, &vec![3; LEN])?;
    let mut write = peer.write(source, 0..LEN, &remote, 0)?;
    assert!(timeout(PATIENCE, &mut write).await.is_err(), "the write completed before the timeout");
    target.revoke()?.await?;
    // From here on only the owner writes the memory, although the initiator does not know it yet.
    reuse(source, target).await?;
    let refused = write.await.err().ok_or("the write to a revoked region succeeded")?;
    assert!([ErrorKind::Revoked, ErrorKind::RemoteAccess].contains(&refused.kind()), "{refused}");
    println!("revoked: no byte landed afterwards, and the write ended with: {refused}");
    Ok(())
}

/// Reuses the target. Fails if a late byte lands in it.
async fn reuse(source: &Region, target: &Region) -> Result<(), Box<dyn Error>> {
    source.copy_in(0, &vec![8; LEN])?;
    target.copy_in(0, &vec![9; LEN])?;
    // Longer than all posted requests take on this link.
    tokio::time::sleep(5 * PATIENCE).await;
    assert_eq!(count(target, 9)?, LEN, "late bytes");
    Ok(())
}

/// Counts the bytes of the region with this value.
fn count(region: &Region, value: u8) -> multirail::Result<usize> {
    let mut bytes = vec![0; LEN];
    region.copy_out(0, &mut bytes)?;
    Ok(bytes.into_iter().filter(|byte| *byte == value).count())
}

/// A fabric with a device of half a Gbps that holds four requests at a time.
fn slow_fabric() -> multirail::Result<Fabric> {
    let link = LinkModel { bits_per_s: Some(500_000_000), send_depth: Some(4), ..LinkModel::default() };
    let loopback = Loopback::with(LoopbackConfig::default().link(link));
    FabricBuilder::new().transport(TransportConfig::new("slow", Arc::new(loopback))).open()
}
