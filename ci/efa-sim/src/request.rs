//! A request, and what the card does with it.

use std::time::Instant;

use rdma_sys as ib;

use crate::device::{INLINE, MAX_RDMA, MTU};
use crate::host::Host;
use crate::page::{Arrival, Buffer, Kind, QUEUES, Queue, Receive};
use crate::remote::{Lost, Remote, Way};
use crate::status::Status;

/// Buffers of a request (p5: 2).
pub(crate) const BUFFERS: usize = 2;

/// What is asked for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    Send,
    Write { key: u32, addr: u64 },
    Read { key: u32, addr: u64 },
}

/// Where the bytes are.
#[derive(Clone, Copy)]
pub(crate) enum Source {
    /// So many buffers, with their keys.
    Memory(usize, [(Buffer, u32); BUFFERS]),
    /// In the request itself.
    Inline(usize, [u8; INLINE]),
    /// There are more than a request takes.
    TooMuch,
}

/// A request as it was posted.
pub(crate) struct Request {
    pub(crate) id: u64,
    pub(crate) what: What,
    pub(crate) imm: Option<u32>,
    pub(crate) is_signaled: bool,
    pub(crate) remote: Option<Remote>,
    pub(crate) queue: u32,
    pub(crate) secret: u32,
    /// The pair that it was posted to.
    pub(crate) from: u32,
    pub(crate) source: Source,
    /// What it ends with instead of being executed.
    pub(crate) fault: Option<Status>,
    /// It finds no receive, whatever there is.
    pub(crate) starves: bool,
    /// When the link has carried it.
    pub(crate) due: Option<Instant>,
}

impl Request {
    /// What verbs calls its completion.
    pub(crate) fn opcode(&self) -> ib::ibv_wc_opcode {
        match self.what {
            What::Send => ib::IBV_WC_SEND,
            What::Write { .. } => ib::IBV_WC_RDMA_WRITE,
            What::Read { .. } => ib::IBV_WC_RDMA_READ,
        }
    }

    /// Bytes that it moves.
    pub(crate) fn len(&self) -> u64 {
        match &self.source {
            Source::Memory(count, buffers) => buffers[..*count].iter().map(|(buffer, _)| buffer.len).sum(),
            Source::Inline(len, _) => *len as u64,
            Source::TooMuch => 0,
        }
    }

    /// Tells how it ended.
    pub(crate) fn tell(&self, card: usize, status: Status) {
        let what = match self.what {
            What::Send => "send".to_owned(),
            What::Write { key, addr } => format!("write {key:#x}+{addr:#x}"),
            What::Read { key, addr } => format!("read {key:#x}+{addr:#x}"),
        };
        let (from, to, len, imm) = (self.from, self.queue, self.len(), self.imm);
        eprintln!("efa-sim: card {card} pair {from} to {to}: {what}, {len} bytes, imm {imm:?}: {status:?}");
    }

    /// Executes it for card `card`: how it ends, unless the peer has no receive for it yet.
    pub(crate) fn execute(&self, host: &Host, card: usize) -> Option<Status> {
        if self.fault.is_some() {
            return self.fault;
        }
        let most = if self.what == What::Send { MTU } else { MAX_RDMA };
        if self.len() > most.into() {
            return Some(Status::BadLength);
        }
        // What a read brings must be writable here.
        let right = if matches!(self.what, What::Read { .. }) { ib::IBV_ACCESS_LOCAL_WRITE } else { 0 };
        let mut here = [Buffer::default(); BUFFERS];
        let here = match &self.source {
            Source::Memory(count, buffers) => {
                for (place, (buffer, key)) in buffers[..*count].iter().enumerate() {
                    if buffer.len > 0 && !host.card(card).allows(*key, buffer.addr, buffer.len, right) {
                        return Some(Status::InvalidLkey);
                    }
                    here[place] = *buffer;
                }
                &here[..*count]
            }
            Source::Inline(len, bytes) => {
                here[0] = Buffer { addr: bytes.as_ptr() as u64, len: *len as u64 };
                &here[..1]
            }
            Source::TooMuch => return Some(Status::BadLength),
        };
        // A host that does not answer and one that never was look the same.
        let Some(remote) = self.remote.as_ref().filter(|remote| remote.is_alive()) else {
            return Some(Status::Unresponsive);
        };
        if host.config.faults.freeze && remote.is_stopped() || host.is_cut() {
            return None;
        }
        let queue = &remote.card().queues[self.queue as usize % QUEUES];
        if !queue.is(self.queue, self.secret) {
            return Some(Status::RemoteBadQpn);
        }
        match self.what {
            What::Send if self.starves => Some(Status::RemoteRnr),
            What::Send => self.send(host, card, remote, queue, here),
            What::Write { key, addr } => self.write(host, card, (remote, queue), here, (key, addr)),
            What::Read { key, addr } => {
                Some(self.access(remote, here, (key, addr), Way::Here, ib::IBV_ACCESS_REMOTE_READ))
            }
        }
    }

    fn arrival(&self, host: &Host, card: usize) -> Arrival {
        Arrival {
            len: self.len() as u32,
            imm: self.imm.unwrap_or(0),
            from: host.process.gid(card),
            from_queue: self.from,
            ..Arrival::default()
        }
    }

    /// Delivers to the pair that it is for, if that is still there.
    fn deliver(
        &self,
        queue: &Queue,
        act: impl FnOnce(Option<Receive>) -> (bool, Option<Arrival>, Option<Status>),
    ) -> Option<Status> {
        let delivered = queue.deliver(|receive| match queue.is(self.queue, self.secret) {
            true => act(receive),
            false => (false, None, Some(Status::RemoteBadQpn)),
        });
        delivered.flatten()
    }

    fn send(
        &self,
        host: &Host,
        card: usize,
        remote: &Remote,
        queue: &Queue,
        here: &[Buffer],
    ) -> Option<Status> {
        let kind = if self.imm.is_some() { Kind::MessageWithImm } else { Kind::Message };
        let arrival = Arrival { kind, ..self.arrival(host, card) };
        self.deliver(queue, |receive| {
            let Some(receive) = receive else { return (false, None, None) };
            let room: u64 = receive.buffers.iter().map(|buffer| buffer.len).sum();
            let status = match room >= self.len() {
                true => Self::ending(remote.copy(here, &receive.buffers, Way::There)),
                false => Status::RemoteBadLength,
            };
            // A message that is too long spoils the receive.
            let (is_taken, theirs) = match status {
                Status::Ok => (true, Status::Ok),
                Status::RemoteBadLength => (true, Status::BadLength),
                _ => (false, Status::Ok),
            };
            let arrival = Arrival { id: receive.id, status: theirs as u32, ..arrival };
            (is_taken, is_taken.then_some(arrival), Some(status))
        })
    }

    fn write(
        &self,
        host: &Host,
        card: usize,
        (remote, queue): (&Remote, &Queue),
        here: &[Buffer],
        there: (u32, u64),
    ) -> Option<Status> {
        let write = || self.access(remote, here, there, Way::There, ib::IBV_ACCESS_REMOTE_WRITE);
        if self.imm.is_none() {
            return Some(write());
        }
        let is_unsolicited = queue.is_unsolicited.load(std::sync::atomic::Ordering::Acquire) != 0;
        let arrival = self.arrival(host, card);
        self.deliver(queue, |receive| {
            let (kind, id) = match receive {
                _ if is_unsolicited => (Kind::Unsolicited, 0),
                Some(receive) => (Kind::Write, receive.id),
                None => return (false, None, None),
            };
            let status = write();
            let arrived = (status == Status::Ok).then_some(Arrival { kind, id, ..arrival });
            (arrived.is_some() && !is_unsolicited, arrived, Some(status))
        })
    }

    fn access(
        &self,
        remote: &Remote,
        here: &[Buffer],
        (key, addr): (u32, u64),
        way: Way,
        right: ib::ibv_access_flags,
    ) -> Status {
        let len = self.len();
        // Whoever takes the key away waits for this.
        remote.card().lock.with(|| {
            if len > 0 && !remote.card().allows(key, addr, len, right) {
                return Status::RemoteBadAddress;
            }
            Self::ending(remote.copy(here, &[Buffer { addr, len }], way))
        })
    }

    fn ending(copied: Result<(), Lost>) -> Status {
        match copied {
            Ok(()) => Status::Ok,
            Err(Lost::Gone) => Status::Unresponsive,
            Err(Lost::Address) => Status::RemoteBadAddress,
        }
    }
}
