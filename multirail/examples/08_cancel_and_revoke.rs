//! Giving up, on either side, without late bytes in memory that is used again.
//!
//! A write that is under way can be ended by its initiator (cancel one operation, or
//! drop it and drain the peer) and by the owner of its target (revoke the region). All
//! three resolve only when no byte can move any more. Loopback is made slow here by a
//! link model, or the writes would be over before anyone could change their mind.
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

/// At half a Gbps it takes a quarter of a second.
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

/// The future is kept, so that the operation can be cancelled after the time is up.
async fn cancel(peer: &Peer, source: &Region, target: &Region) -> Result<(), Box<dyn Error>> {
    let remote = peer.import(&target.descriptor())?;
    source.copy_in(0, &vec![1; LEN])?;
    let mut write = peer.write(source, 0..LEN, &remote, 0)?;
    assert!(timeout(PATIENCE, &mut write).await.is_err(), "the write was faster");
    // What was posted is awaited, what was not is dropped: the target may have a part.
    let ended = write.cancel().await;
    assert_eq!(ended.err().map(|error| error.kind()), Some(ErrorKind::Cancelled));
    assert!(count(target, 1)? < LEN, "everything was written");

    reuse(source, target).await?;
    println!("cancelled: nothing landed afterwards");
    Ok(())
}

/// The future is gone, as in a `select!` or an aborted task: the peer can be asked.
async fn drop_and_drain(peer: &Peer, source: &Region, target: &Region) -> Result<(), Box<dyn Error>> {
    let remote = peer.import(&target.descriptor())?;
    source.copy_in(0, &vec![2; LEN])?;
    tokio::select! {
        written = peer.write(source, 0..LEN, &remote, 0)? => panic!("the write was faster: {written:?}"),
        () = tokio::time::sleep(PATIENCE) => {}
    }
    peer.drain()?.await?;
    assert!(count(target, 2)? < LEN, "everything was written");

    reuse(source, target).await?;
    println!("dropped and drained: nothing landed afterwards");
    Ok(())
}

/// The owner of the target takes it back, whatever the initiator does.
async fn revoke(peer: &Peer, source: &Region, target: &Region) -> Result<(), Box<dyn Error>> {
    let remote = peer.import(&target.descriptor())?;
    source.copy_in(0, &vec![3; LEN])?;
    let mut write = peer.write(source, 0..LEN, &remote, 0)?;
    assert!(timeout(PATIENCE, &mut write).await.is_err(), "the write was faster");
    target.revoke()?.await?;
    // From here on the memory is its owner's, although the initiator has not heard yet.
    reuse(source, target).await?;
    let refused = write.await.err().ok_or("written to a revoked region")?;
    assert!([ErrorKind::Revoked, ErrorKind::RemoteAccess].contains(&refused.kind()), "{refused}");
    println!("revoked: nothing landed afterwards, and the write ended with: {refused}");
    Ok(())
}

/// Uses the target for something else; fails if a late byte lands in it.
async fn reuse(source: &Region, target: &Region) -> Result<(), Box<dyn Error>> {
    source.copy_in(0, &vec![8; LEN])?;
    target.copy_in(0, &vec![9; LEN])?;
    // More than all posted requests take on this link.
    tokio::time::sleep(5 * PATIENCE).await;
    assert_eq!(count(target, 9)?, LEN, "late bytes");
    Ok(())
}

/// How many bytes of the region have this value.
fn count(region: &Region, value: u8) -> multirail::Result<usize> {
    let mut bytes = vec![0; LEN];
    region.copy_out(0, &mut bytes)?;
    Ok(bytes.into_iter().filter(|byte| *byte == value).count())
}

/// A device of half a Gbps that holds four requests at a time.
fn slow_fabric() -> multirail::Result<Fabric> {
    let link = LinkModel { bits_per_s: Some(500_000_000), send_depth: Some(4), ..LinkModel::default() };
    let loopback = Loopback::with(LoopbackConfig::default().link(link));
    FabricBuilder::new().transport(TransportConfig::new("slow", Arc::new(loopback))).open()
}
