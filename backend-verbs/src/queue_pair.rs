//! The queue pair of a reliable connection, and its states.

use std::sync::Arc;

use multirail_spi::Result;
use rdma_sys as ib;

use crate::domain::PortQueues;
use crate::objects::{Object, last_errno, library};
use crate::status::{EINVAL, os_error};

/// The values that the other side needs to connect to a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct QueuePairAddress {
    pub number: u32,
    /// The number of the first packet that it sends.
    pub psn: u32,
}

/// The address of a port.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct PortAddress {
    /// The GIDs, the best one first.
    pub gids: Vec<[u8; 16]>,
    pub lid: u16,
    /// `enum ibv_mtu`.
    pub mtu: u8,
    pub is_ethernet: bool,
    /// Packets from and to the port have a GRH, also on InfiniBand.
    pub needs_grh: bool,
}

/// The kind of requests that a queue pair carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Carries {
    /// Writes and reads. An arriving imm takes a receive without a buffer.
    Accesses,
    /// Messages.
    Messages,
}

/// A queue pair. The fields are dropped in order: the queue pair before the objects that it was made from.
pub(crate) struct QueuePair {
    qp: Object<ib::ibv_qp>,
    psn: u32,
    inline: u32,
    card: Arc<PortQueues>,
}

/// The most bytes that go into the request itself, so that the card need not fetch them. Such a request takes two
/// blocks of 64 bytes on mlx5, instead of one.
const INLINE: u32 = 64;
/// The most routers between two hosts.
const HOPS: u8 = 64;
/// The time until this side sends again if the peer had no receive: 0.64 ms (IBTA 1.4, table 45).
const RNR_TIMER: u8 = 12;
/// The number of these retries: without limit. A peer without receives delays only requests to itself, which have
/// deadlines.
const RNR_RETRIES: u8 = 7;
/// Packet numbers have 24 bits.
pub(crate) const PSN_MASK: u32 = 0xff_ffff;

impl QueuePair {
    /// Creates a queue pair that is not connected.
    pub(crate) fn new(card: &Arc<PortQueues>, carries: Carries, psn: u32) -> Result<Self> {
        let library = library()?;
        let create = |inline: u32| {
            // SAFETY: zero is a value of the structures; all objects in them are open, and outlive the
            // queue pair.
            unsafe {
                let mut attr: ib::ibv_qp_init_attr = std::mem::zeroed();
                (attr.send_cq, attr.recv_cq) = (card.cq.as_ptr(), card.cq.as_ptr());
                attr.srq = match carries {
                    Carries::Accesses => card.imms.as_ptr(),
                    Carries::Messages => card.messages.as_ptr(),
                };
                (attr.cap.max_send_wr, attr.cap.max_inline_data) = (card.depth_of_pair, inline);
                (attr.cap.max_send_sge, attr.cap.max_recv_sge) = (1, 1);
                (attr.qp_type, attr.sq_sig_all) = (ib::IBV_QPT_RC, 0);
                library.create_qp(card.device.pd.as_ptr(), &raw mut attr)
            }
        };
        let (qp, inline) = match create(INLINE) {
            none if none.is_null() && last_errno() == EINVAL => (create(0), 0),
            qp => (qp, INLINE),
        };
        let this =
            Self { qp: Object::of(qp, "connect")?, psn: psn & PSN_MASK, inline, card: Arc::clone(card) };
        this.modify("to be initialised", |attr| {
            (attr.qp_state, attr.pkey_index) = (ib::IBV_QPS_INIT, this.card.config.pkey_index);
            attr.port_num = this.card.port;
            attr.qp_access_flags =
                ib::IBV_ACCESS_REMOTE_WRITE | ib::IBV_ACCESS_REMOTE_READ | ib::IBV_ACCESS_LOCAL_WRITE;
            ib::IBV_QP_STATE | ib::IBV_QP_PKEY_INDEX | ib::IBV_QP_PORT | ib::IBV_QP_ACCESS_FLAGS
        })?;
        Ok(this)
    }

    pub(crate) fn end(&self) -> QueuePairAddress {
        QueuePairAddress { number: self.number(), psn: self.psn }
    }

    #[inline]
    pub(crate) fn number(&self) -> u32 {
        // SAFETY: the queue pair is open.
        unsafe { (*self.qp.as_ptr()).qp_num }
    }

    /// The most bytes that a request may carry in itself.
    #[inline]
    pub(crate) fn inline(&self) -> u64 {
        self.inline.into()
    }

    #[inline]
    pub(crate) fn as_ptr(&self) -> *mut ib::ibv_qp {
        self.qp.as_ptr()
    }

    /// Connects the queue pair with `end` of the port `address`, from GID `ours` to GID `theirs`. It may then receive
    /// and send.
    pub(crate) fn connect(
        &self,
        address: &PortAddress,
        end: QueuePairAddress,
        (ours, theirs): (u8, [u8; 16]),
    ) -> Result<()> {
        let card = &self.card;
        self.modify("to receive", |attr| {
            attr.qp_state = ib::IBV_QPS_RTR;
            attr.path_mtu = u32::from(address.mtu.min(card.address.mtu)) as ib::ibv_mtu;
            (attr.dest_qp_num, attr.rq_psn) = (end.number, end.psn);
            (attr.max_dest_rd_atomic, attr.min_rnr_timer) = (card.reads_taken, RNR_TIMER);
            let path = &mut attr.ah_attr;
            (path.dlid, path.sl, path.port_num) = (address.lid, card.config.service_level, card.port);
            path.is_global = u8::from(address.needs_grh || card.address.needs_grh);
            path.grh.dgid.raw = theirs;
            (path.grh.sgid_index, path.grh.hop_limit) = (ours, HOPS);
            path.grh.traffic_class = card.config.traffic_class;
            ib::IBV_QP_STATE
                | ib::IBV_QP_AV
                | ib::IBV_QP_PATH_MTU
                | ib::IBV_QP_DEST_QPN
                | ib::IBV_QP_RQ_PSN
                | ib::IBV_QP_MAX_DEST_RD_ATOMIC
                | ib::IBV_QP_MIN_RNR_TIMER
        })?;
        self.modify("to send", |attr| {
            attr.qp_state = ib::IBV_QPS_RTS;
            (attr.timeout, attr.retry_cnt) = (card.config.timeout, card.config.retries);
            (attr.rnr_retry, attr.sq_psn, attr.max_rd_atomic) = (RNR_RETRIES, self.psn, card.reads_asked);
            ib::IBV_QP_STATE
                | ib::IBV_QP_TIMEOUT
                | ib::IBV_QP_RETRY_CNT
                | ib::IBV_QP_RNR_RETRY
                | ib::IBV_QP_SQ_PSN
                | ib::IBV_QP_MAX_QP_RD_ATOMIC
        })
    }

    /// Stops the queue pair: its posted requests complete as flushed, and it accepts no arrival any more.
    pub(crate) fn fail(&self) {
        if let Err(error) = self.stop() {
            tracing::warn!(%error, "a queue pair does not stop");
        }
    }

    /// As [`QueuePair::fail`], with the error if the card refuses that.
    pub(crate) fn stop(&self) -> Result<()> {
        self.modify("to stop", |attr| {
            attr.qp_state = ib::IBV_QPS_ERR;
            ib::IBV_QP_STATE
        })
    }

    /// Modifies the queue pair: `set` fills in the attributes and returns their mask.
    fn modify(
        &self,
        what: &str,
        set: impl FnOnce(&mut ib::ibv_qp_attr) -> ib::ibv_qp_attr_mask,
    ) -> Result<()> {
        let library = library()?;
        // SAFETY: zero is a value of the structure; the queue pair is open.
        let code = unsafe {
            let mut attr: ib::ibv_qp_attr = std::mem::zeroed();
            let mask = set(&mut attr);
            library.modify_qp(self.qp.as_ptr(), &raw mut attr, mask as i32)
        };
        match code {
            0 => Ok(()),
            code => Err(os_error("connect", &format!("a queue pair {what}"), code)),
        }
    }
}
