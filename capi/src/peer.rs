//! Peers: connecting, their regions, and what is known of them.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use multirail::{Descriptor, Error, Fabric, PathPolicy, Peer, wait};

use crate::abi::*;
use crate::arguments::{Bytes, Out, OutText, Text};
use crate::failure::{Answer, Failure};
use crate::handles::{FABRICS, PEERS, REMOTES};
use crate::metadata::Metadata;
use crate::op::{begun, submitted};
use crate::operation::{NewPeer, Value};
use crate::region::access_bits;
use crate::transfer_options::limit;

/// Connects to an address.
fn connecting(fabric: &Fabric, address: &str) -> impl Future<Output = Result<Value, Error>> + Send + 'static {
    let connecting = fabric.connect(address);
    async move { Ok(Value::Peer(NewPeer::new(connecting.await?))) }
}

/// Waits for a connection, and makes a handle of the peer.
fn connected(peer: Out<mr_peer>, span: Duration, task: impl Future<Output = Result<Value, Error>>) -> Answer {
    let Value::Peer(new) = wait(task, span)?? else {
        return Err(Failure::new(MR_ERROR_OTHER, "there is no peer"));
    };
    if let Some(new) = new.take() {
        peer.set(PEERS.insert(new)?);
    }
    Ok(MR_OK)
}

entry_points! {
    fn mr_peer_connect(fabric: mr_fabric, address: Text, timeout_ns: u64, peer: Out<mr_peer>) {
        peer.check("peer")?;
        let fabric = FABRICS.find(fabric)?;
        connected(peer, limit(timeout_ns), connecting(&fabric.fabric, address.read("address")?))
    }

    fn mr_peer_connect_metadata(
        fabric: mr_fabric,
        metadata: Bytes,
        len: usize,
        timeout_ns: u64,
        peer: Out<mr_peer>,
    ) {
        peer.check("peer")?;
        let fabric = FABRICS.find(fabric)?;
        let metadata = Metadata::from_bytes(metadata.read(len, "metadata")?)?;
        connected(peer, limit(timeout_ns), metadata.connect(fabric.fabric.clone()))
    }

    fn mr_peer_connect_start(fabric: mr_fabric, address: Text, op: Out<mr_op>) {
        op.check("op")?;
        let fabric = FABRICS.find(fabric)?;
        begun(op, connecting(&fabric.fabric, address.read("address")?))
    }

    fn mr_peer_connect_metadata_start(fabric: mr_fabric, metadata: Bytes, len: usize, op: Out<mr_op>) {
        op.check("op")?;
        let fabric = FABRICS.find(fabric)?;
        let metadata = Metadata::from_bytes(metadata.read(len, "metadata")?)?;
        begun(op, metadata.connect(fabric.fabric.clone()))
    }

    fn mr_peer_connect_local(fabric: mr_fabric, other: mr_fabric, there: Out<mr_peer>, here: Out<mr_peer>) {
        there.check("there")?;
        if !here.is_null() {
            here.check("here")?;
        }
        let (fabric, other) = (FABRICS.find(fabric)?, FABRICS.find(other)?);
        let (to_other, to_fabric) = fabric.fabric.connect_local(&other.fabric)?;
        if !here.is_null() {
            here.set(PEERS.insert(to_fabric)?);
        }
        there.set(PEERS.insert(to_other)?);
        Ok(MR_OK)
    }

    fn mr_peer_id(peer: mr_peer, id: Out<u64>) {
        id.check("id")?;
        id.set(PEERS.find(peer)?.id().number());
        Ok(MR_OK)
    }

    fn mr_peer_incarnation(peer: mr_peer, incarnation: Out<u64>) {
        incarnation.check("incarnation")?;
        incarnation.set(PEERS.find(peer)?.incarnation());
        Ok(MR_OK)
    }

    fn mr_peer_check(peer: mr_peer) {
        let peer = PEERS.find(peer)?;
        match peer.is_alive() {
            true => Ok(MR_OK),
            false => Err(reason(&peer)),
        }
    }

    fn mr_peer_explain(peer: mr_peer, buf: OutText, len: usize, needed: Out<usize>) {
        buf.write(len, needed, &PEERS.find(peer)?.explain())
    }

    fn mr_peer_set_path_policy(peer: mr_peer, paths: Text) {
        let paths = paths.read("paths")?.parse()?;
        PEERS.find(peer)?.set_path_policy(PathPolicy::only(paths));
        Ok(MR_OK)
    }

    fn mr_peer_import(peer: mr_peer, descriptor: Bytes, len: usize, remote: Out<mr_remote>) {
        remote.check("remote")?;
        let peer = PEERS.find(peer)?;
        let descriptor = Descriptor::from_bytes(descriptor.read(len, "descriptor")?)?;
        remote.set(REMOTES.insert(peer.import(&descriptor)?)?);
        Ok(MR_OK)
    }

    fn mr_peer_lookup(peer: mr_peer, name: Text, op: Out<mr_op>) {
        op.check("op")?;
        let found = PEERS.find(peer)?.region(name.read("name")?);
        begun(op, async move { Ok(Value::Remote(found.await?)) })
    }

    fn mr_peer_drain(peer: mr_peer, op: Out<mr_op>) {
        op.check("op")?;
        let drain = PEERS.find(peer)?.drain()?;
        begun(op, async move { drain.await.map(|()| Value::Nothing) })
    }

    fn mr_peer_warm_up(peer: mr_peer, op: Out<mr_op>) {
        submitted(op, PEERS.find(peer)?.warm_up()?)
    }

    fn mr_peer_disconnect(peer: mr_peer) {
        PEERS.find(peer)?.disconnect();
        Ok(MR_OK)
    }

    fn mr_peer_release(peer: mr_peer) {
        drop(PEERS.take(peer)?);
        Ok(MR_OK)
    }

    fn mr_remote_info(remote: mr_remote, length: Out<u64>, access: Out<u32>) {
        let remote = REMOTES.find(remote)?;
        length.set(remote.len() as u64);
        access.set(access_bits(remote.access()));
        Ok(MR_OK)
    }

    fn mr_remote_release(remote: mr_remote) {
        drop(REMOTES.take(remote)?);
        Ok(MR_OK)
    }
}

/// Why a peer is gone.
#[cold]
fn reason(peer: &Peer) -> Failure {
    match pin!(peer.closed()).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(error) => error.into(),
        // It is being taken down at this moment.
        Poll::Pending => Failure::new(MR_ERROR_CLOSED, "the connection is ending"),
    }
}
