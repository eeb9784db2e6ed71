//! Notifications, imms and messages.

use std::time::Duration;

use multirail::{ErrorKind, SendOptions};

use crate::abi::*;
use crate::arguments::{Bytes, Input, Out, OutBytes};
use crate::failure::Failure;
use crate::handles::{FABRICS, PEERS, REGIONS};
use crate::op::{begun, submitted};
use crate::operation::Value;
use crate::transfer_options::{TransferOptions, limit};

entry_points! {
    fn mr_notify(peer: mr_peer, bytes: Bytes, len: usize, deadline_ns: u64, op: Out<mr_op>) {
        let (peer, bytes) = (PEERS.find(peer)?, bytes.read(len, "bytes")?);
        let mut options = SendOptions::new();
        if deadline_ns != 0 {
            options = options.deadline(limit(deadline_ns));
        }
        submitted(op, peer.notify_with(bytes, &options)?)
    }

    fn mr_fabric_next_notification(
        fabric: mr_fabric,
        timeout_ns: u64,
        buf: OutBytes,
        len: usize,
        needed: Out<usize>,
        peer_id: Out<u64>,
    ) {
        let fabric = FABRICS.find(fabric)?;
        let Some(next) = fabric.inbox.next(&fabric.fabric, limit(timeout_ns))? else { return Ok(MR_PENDING) };
        let written = buf.write(len, needed, &next.bytes);
        match written {
            Ok(_) => peer_id.set(next.peer.number()),
            Err(_) => fabric.inbox.put_back(next),
        }
        written
    }

    fn mr_imm_count(peer: mr_peer, imm: u32, count: Out<u64>) {
        count.check("count")?;
        count.set(PEERS.find(peer)?.imm(imm).count());
        Ok(MR_OK)
    }

    fn mr_imm_take(peer: mr_peer, imm: u32, count: u64) {
        match PEERS.find(peer)?.imm(imm).try_take(count) {
            true => Ok(MR_OK),
            false => Ok(MR_PENDING),
        }
    }

    fn mr_imm_wait(peer: mr_peer, imm: u32, count: u64, timeout_ns: u64) {
        let counter = PEERS.find(peer)?.imm(imm);
        match counter.expect(count).wait(limit(timeout_ns).max(Duration::from_nanos(1))) {
            Ok(()) => Ok(MR_OK),
            Err(error) if error.kind() == ErrorKind::DeadlineExceeded => Ok(MR_PENDING),
            Err(error) => Err(error.into()),
        }
    }

    fn mr_imm_expect(peer: mr_peer, imm: u32, count: u64, op: Out<mr_op>) {
        op.check("op")?;
        let expect = PEERS.find(peer)?.imm(imm).expect(count);
        begun(op, async move { expect.await.map(|()| Value::Nothing) })
    }

    fn mr_write_imm(peer: mr_peer, imm: u32, op: Out<mr_op>) {
        submitted(op, PEERS.find(peer)?.write_imm(imm)?)
    }

    fn mr_send(
        peer: mr_peer,
        region: mr_region,
        offset: usize,
        length: usize,
        options: Input<mr_transfer_options>,
        op: Out<mr_op>,
    ) {
        let (peer, region) = (PEERS.find(peer)?, REGIONS.find(region)?);
        let options = TransferOptions::read(options)?.map_or_else(|| Ok(SendOptions::new()), |given| given.send())?;
        submitted(op, peer.send_with(&region, offset..offset.saturating_add(length), &options)?)
    }

    fn mr_recv(fabric: mr_fabric, region: mr_region, offset: usize, length: usize, op: Out<mr_op>) {
        if op.is_null() {
            return Err(Failure::invalid("op is NULL, so nobody would learn of the message"));
        }
        op.check("op")?;
        let (fabric, region) = (FABRICS.find(fabric)?, REGIONS.find(region)?);
        submitted(op, fabric.fabric.recv(&region, offset..offset.saturating_add(length))?)
    }
}
