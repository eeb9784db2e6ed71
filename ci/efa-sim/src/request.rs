//! A request of the program, and its execution by the card.

use std::sync::atomic::Ordering;
use std::time::Instant;

use rdma_sys as ib;

use crate::device::{INLINE, MAX_RDMA, MTU};
use crate::host::SimHost;
use crate::page::{ArrivalRecord, PostedReceive, QUEUES, ReceiveBuffer, ReceiveQueue, ReceivedKind};
use crate::post::IS_OLD_PROVIDER;
use crate::remote::{Direction, RemoteCard, TransferError};
use crate::status::CompletionStatus;

/// The most buffers of a request (p5: 2).
pub(crate) const BUFFERS: usize = 2;

/// The operation of a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequestOperation {
    Send,
    Write { key: u32, addr: u64 },
    Read { key: u32, addr: u64 },
}

/// The location of a request's bytes.
#[derive(Clone, Copy)]
pub(crate) enum RequestBytes {
    /// The number of buffers, and the buffers with their keys.
    Memory(usize, [(ReceiveBuffer, u32); BUFFERS]),
    /// The bytes are in the request itself.
    Inline(usize, [u8; INLINE]),
    /// The program gave more bytes or buffers than a request takes.
    TooMuch,
}

/// A request as it was posted.
pub(crate) struct SendRequest {
    pub(crate) id: u64,
    pub(crate) operation: RequestOperation,
    pub(crate) imm: Option<u32>,
    pub(crate) is_signaled: bool,
    pub(crate) remote: Option<RemoteCard>,
    pub(crate) queue: u32,
    pub(crate) secret: u32,
    /// The number of the pair that it was posted to.
    pub(crate) from: u32,
    pub(crate) source: RequestBytes,
    /// The status that it ends with instead of being executed, by a fault.
    pub(crate) fault: Option<CompletionStatus>,
    /// True if it ends as if the peer had no receive, by a fault.
    pub(crate) finds_no_receive: bool,
    /// The time when the link has carried its bytes.
    pub(crate) due: Option<Instant>,
}

impl SendRequest {
    /// The opcode of its completion in verbs.
    pub(crate) fn opcode(&self) -> ib::ibv_wc_opcode {
        match self.operation {
            _ if IS_OLD_PROVIDER.load(Ordering::Relaxed) => ib::IBV_WC_SEND,
            RequestOperation::Send => ib::IBV_WC_SEND,
            RequestOperation::Write { .. } => ib::IBV_WC_RDMA_WRITE,
            RequestOperation::Read { .. } => ib::IBV_WC_RDMA_READ,
        }
    }

    /// The number of its bytes.
    pub(crate) fn len(&self) -> u64 {
        match &self.source {
            RequestBytes::Memory(count, buffers) => {
                buffers[..*count].iter().map(|(buffer, _)| buffer.len).sum()
            }
            RequestBytes::Inline(len, _) => *len as u64,
            RequestBytes::TooMuch => 0,
        }
    }

    /// Prints the end of the request.
    pub(crate) fn trace(&self, card: usize, status: CompletionStatus) {
        let operation = match self.operation {
            RequestOperation::Send => "send".to_owned(),
            RequestOperation::Write { key, addr } => format!("write {key:#x}+{addr:#x}"),
            RequestOperation::Read { key, addr } => format!("read {key:#x}+{addr:#x}"),
        };
        let (from, to, len, imm) = (self.from, self.queue, self.len(), self.imm);
        eprintln!(
            "efa-sim: card {card} pair {from} to {to}: {operation}, {len} bytes, imm {imm:?}: {status:?}"
        );
    }

    /// Executes the request for card `card`. Returns its status, or `None` if the peer has no receive for it yet.
    pub(crate) fn execute(&self, host: &SimHost, card: usize) -> Option<CompletionStatus> {
        if self.fault.is_some() {
            return self.fault;
        }
        let most = if self.operation == RequestOperation::Send { MTU } else { MAX_RDMA };
        if self.len() > most.into() {
            return Some(CompletionStatus::BadLength);
        }
        // The bytes of a read must be writable here.
        let right = if matches!(self.operation, RequestOperation::Read { .. }) {
            ib::IBV_ACCESS_LOCAL_WRITE
        } else {
            0
        };
        let mut here = [ReceiveBuffer::default(); BUFFERS];
        let here = match &self.source {
            RequestBytes::Memory(count, buffers) => {
                for (index, (buffer, key)) in buffers[..*count].iter().enumerate() {
                    if buffer.len > 0 && !host.card(card).allows(*key, buffer.addr, buffer.len, right) {
                        return Some(CompletionStatus::InvalidLkey);
                    }
                    here[index] = *buffer;
                }
                &here[..*count]
            }
            RequestBytes::Inline(len, bytes) => {
                here[0] = ReceiveBuffer { addr: bytes.as_ptr() as u64, len: *len as u64 };
                &here[..1]
            }
            RequestBytes::TooMuch => return Some(CompletionStatus::BadLength),
        };
        // A host that does not answer looks like one that never existed.
        let Some(remote) = self.remote.as_ref().filter(|remote| remote.is_alive()) else {
            return Some(CompletionStatus::Unresponsive);
        };
        if host.config.faults.freeze && remote.is_stopped() || host.is_cut() {
            return None;
        }
        let queue = &remote.card().queues[self.queue as usize % QUEUES];
        if !queue.belongs_to(self.queue, self.secret) {
            return Some(CompletionStatus::RemoteBadQpn);
        }
        match self.operation {
            RequestOperation::Send if self.finds_no_receive => Some(CompletionStatus::RemoteRnr),
            RequestOperation::Send => self.send(host, card, remote, queue, here),
            RequestOperation::Write { key, addr } => {
                self.write(host, card, (remote, queue), here, (key, addr))
            }
            RequestOperation::Read { key, addr } => {
                Some(self.access(remote, here, (key, addr), Direction::FromPeer, ib::IBV_ACCESS_REMOTE_READ))
            }
        }
    }

    fn arrival(&self, host: &SimHost, card: usize) -> ArrivalRecord {
        ArrivalRecord {
            len: self.len() as u32,
            imm: self.imm.unwrap_or(0),
            from: host.process.gid(card),
            from_queue: self.from,
            ..ArrivalRecord::default()
        }
    }

    /// Delivers to the target pair, if it still exists.
    fn deliver(
        &self,
        queue: &ReceiveQueue,
        act: impl FnOnce(Option<PostedReceive>) -> (bool, Option<ArrivalRecord>, Option<CompletionStatus>),
    ) -> Option<CompletionStatus> {
        let delivered = queue.deliver(|receive| match queue.belongs_to(self.queue, self.secret) {
            true => act(receive),
            false => (false, None, Some(CompletionStatus::RemoteBadQpn)),
        });
        delivered.flatten()
    }

    fn send(
        &self,
        host: &SimHost,
        card: usize,
        remote: &RemoteCard,
        queue: &ReceiveQueue,
        here: &[ReceiveBuffer],
    ) -> Option<CompletionStatus> {
        let kind = if self.imm.is_some() { ReceivedKind::MessageWithImm } else { ReceivedKind::Message };
        let arrival = ArrivalRecord { kind, ..self.arrival(host, card) };
        self.deliver(queue, |receive| {
            let Some(receive) = receive else { return (false, None, None) };
            let room: u64 = receive.buffers.iter().map(|buffer| buffer.len).sum();
            let status = match room >= self.len() {
                true => Self::status_of(remote.copy(here, &receive.buffers, Direction::ToPeer)),
                false => CompletionStatus::RemoteBadLength,
            };
            // A message that is too long uses up the receive.
            let (is_taken, receive_status) = match status {
                CompletionStatus::Ok => (true, CompletionStatus::Ok),
                CompletionStatus::RemoteBadLength => (true, CompletionStatus::BadLength),
                _ => (false, CompletionStatus::Ok),
            };
            let arrival = ArrivalRecord { id: receive.id, status: receive_status as u32, ..arrival };
            (is_taken, is_taken.then_some(arrival), Some(status))
        })
    }

    fn write(
        &self,
        host: &SimHost,
        card: usize,
        (remote, queue): (&RemoteCard, &ReceiveQueue),
        here: &[ReceiveBuffer],
        there: (u32, u64),
    ) -> Option<CompletionStatus> {
        let write = || self.access(remote, here, there, Direction::ToPeer, ib::IBV_ACCESS_REMOTE_WRITE);
        if self.imm.is_none() {
            return Some(write());
        }
        let is_unsolicited = queue.is_unsolicited.load(std::sync::atomic::Ordering::Acquire) != 0;
        let arrival = self.arrival(host, card);
        self.deliver(queue, |receive| {
            let (kind, id) = match receive {
                _ if is_unsolicited => (ReceivedKind::Unsolicited, 0),
                Some(receive) => (ReceivedKind::Write, receive.id),
                None => return (false, None, None),
            };
            let status = write();
            let arrived = (status == CompletionStatus::Ok).then_some(ArrivalRecord { kind, id, ..arrival });
            (arrived.is_some() && !is_unsolicited, arrived, Some(status))
        })
    }

    fn access(
        &self,
        remote: &RemoteCard,
        here: &[ReceiveBuffer],
        (key, addr): (u32, u64),
        direction: Direction,
        right: ib::ibv_access_flags,
    ) -> CompletionStatus {
        let len = self.len();
        // Deregistering the region waits for this lock.
        remote.card().lock.with(|| {
            if len > 0 && !remote.card().allows(key, addr, len, right) {
                return CompletionStatus::RemoteBadAddress;
            }
            Self::status_of(remote.copy(here, &[ReceiveBuffer { addr, len }], direction))
        })
    }

    fn status_of(copied: Result<(), TransferError>) -> CompletionStatus {
        match copied {
            Ok(()) => CompletionStatus::Ok,
            Err(TransferError::Gone) => CompletionStatus::Unresponsive,
            Err(TransferError::Address) => CompletionStatus::RemoteBadAddress,
        }
    }
}
