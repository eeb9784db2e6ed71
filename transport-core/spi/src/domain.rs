//! An opened device: any thread registers memory and connects, while another one posts.

use std::any::Any;
use std::sync::Arc;
use std::task::Poll;

use crate::{
    Access, Capabilities, Endpoint, EndpointConfig, Error, ErrorKind, FenceKind, Memory, Paths, PeerSlot,
    Result, WorkRequest,
};

/// An opened device. Any thread may call these methods while requests are posted.
pub trait Domain: Send + Sync {
    /// The device's facts and limits. They do not change while the domain is open.
    fn capabilities(&self) -> &Capabilities;

    /// A number that no other domain of this host has, now or later.
    fn id(&self) -> u64;

    /// Registers `memory` so that the device, and peers as `access` allows, may touch it.
    ///
    /// # Safety
    /// The caller holds no reference into the bytes until the region is dropped and its last request has ended: the
    /// device and peers may change them at any time.
    unsafe fn register(&self, memory: Arc<dyn Memory>, access: Access) -> Result<Arc<dyn MemoryRegion>>;

    /// Imports a peer's region, so that work requests can address it. The backend may wait for the peer's process at
    /// most for the time `limit`, for example to get a mapping.
    ///
    /// # Errors
    /// A malformed key is refused. A key that the peer has revoked may be refused here, or fail the requests that use
    /// it.
    fn import(
        &self,
        peer: PeerSlot,
        key: &RemoteKey,
        limit: std::time::Duration,
    ) -> Result<Arc<dyn RemoteMemory>>;

    /// The control object for connecting.
    fn connector(&self) -> &dyn Connector;

    /// Opens the domain's endpoint, which one thread at a time uses from then on. A domain has at most one endpoint at a time.
    ///
    /// # Errors
    /// `Busy` if the previous endpoint was not dropped.
    fn endpoint(&self, config: EndpointConfig) -> Result<Box<dyn Endpoint>>;

    /// The number of endpoints that were dropped, but that the device's library has not closed. The backend keeps the
    /// memory that such an endpoint may still touch, and closes the endpoint later if it can.
    fn unclosed_endpoints(&self) -> usize {
        0
    }

    /// The direct path to `peer`, which runs small requests in the calling thread; `None` if the backend has none.
    fn direct(&self, peer: PeerSlot) -> Option<Arc<dyn Direct>> {
        let _ = peer;
        None
    }
}

/// Connects peers in two steps. Any thread may call these methods, while another one posts.
pub trait Connector: Send + Sync {
    /// Reserves a peer slot. Returns the slot, and the offer: bytes that tell the peer how to reach this domain.
    fn prepare(&self) -> Result<(PeerSlot, Vec<u8>)>;

    /// As [`Connector::prepare`], for a peer of this process. The offer may leave out what only other processes need.
    fn prepare_local(&self) -> Result<(PeerSlot, Vec<u8>)> {
        self.prepare()
    }

    /// Connects the slot with the peer's offer. The backend parses these bytes and does not trust them.
    ///
    /// # Errors
    /// `Unreachable` says why this domain cannot reach that peer.
    fn complete(&self, slot: PeerSlot, offer: &[u8]) -> Result<()>;

    /// The next offer for the peer of a connected slot, if this side's endpoint has changed since the last offer.
    /// `None` if the peer has the current one.
    fn next_offer(&self, slot: PeerSlot) -> Result<Option<Vec<u8>>> {
        let _ = slot;
        Ok(None)
    }

    /// Takes the peer's next offer, after the peer's endpoint has changed. Requests that the peer posted before may
    /// still arrive from its former endpoint. The offer is not trusted.
    ///
    /// Returns an answer, which the peer's backend takes by [`Connector::finish_renewal`]. The backend chooses its
    /// bytes: efa sends the offer back, so that the peer knows which offer this was; verbs sends an offer of this side,
    /// or no bytes.
    fn renew(&self, slot: PeerSlot, offer: &[u8]) -> Result<Vec<u8>> {
        let _ = (slot, offer);
        Err(Error::new(ErrorKind::Protocol, "renew a connection", "this backend's endpoints do not change"))
    }

    /// Takes the peer's answer to the offer of [`Connector::next_offer`]. The answer is not trusted. The default suits
    /// a backend whose answers are always offers.
    fn finish_renewal(&self, slot: PeerSlot, answer: &[u8]) -> Result<()> {
        self.renew(slot, answer).map(drop)
    }

    /// Fences the slot: makes sure that no request of the peer that was posted over this pair of rails can touch
    /// memory of this side any more. The peer asks for it after one of the two devices was lost, before it posts the
    /// requests again over other rails. `kind` is `DeviceLost` if the peer's device sends nothing any more, and
    /// `PathLost` if it may still do so. Returns `Pending` while bytes may still land; the engine calls again until
    /// the answer is `Ready`. Never blocks. What has arrived before is reported as usual. The slot stays until it is
    /// disconnected.
    ///
    /// # Errors
    /// `Unsupported` if the backend cannot do this: late bytes may land. That is the default.
    fn fence(&self, slot: PeerSlot, kind: FenceKind) -> Poll<Result<()>> {
        let _ = (slot, kind);
        let why = "this backend cannot keep out what a peer's lost device has sent";
        Poll::Ready(Err(Error::new(ErrorKind::Unsupported, "fence", why)))
    }

    /// Lifts a fence: the peer may send over this pair of rails again. Nothing of what it had posted there before the
    /// fence may arrive, now or later. The engine calls this once both sides have settled what was posted. If the slot
    /// is not fenced, nothing happens. The engine then asks for [`Connector::next_offer`], in case the slot needs
    /// another connection. Never blocks.
    ///
    /// # Errors
    /// `Unsupported` if the slot cannot be used again. That is the default.
    fn lift_fence(&self, slot: PeerSlot) -> Result<()> {
        let _ = slot;
        let why = "this backend cannot use a fenced pair of rails again";
        Err(Error::new(ErrorKind::Unsupported, "lift a fence", why))
    }

    /// Whether an arrival ([`Event::Imm`](crate::Event::Imm), [`Event::Received`](crate::Event::Received)) that names the
    /// slot `named` may be from the peer of `other`. That is so if both connections join the same two endpoints, and the
    /// device knows a sender only by its endpoint. The default suits a backend whose arrivals name their connection.
    fn is_same_sender(&self, named: PeerSlot, other: PeerSlot) -> bool {
        named == other
    }

    /// Ends the connection. The endpoint reports [`Event::PeerGone`](crate::Event::PeerGone) after the slot's last
    /// request has ended. One poll returns the event; the backend may reuse the slot from the next poll on, because
    /// the engine has acted on the event by then.
    fn disconnect(&self, slot: PeerSlot);
}

/// The numbers by which a peer addresses a region. A backend chooses their meaning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub struct RemoteKey {
    /// The remote address of the first byte; 0 where requests address by offset.
    pub base: u64,
    /// The key.
    pub key: u64,
    /// Length of the region in bytes.
    pub len: u64,
}

impl RemoteKey {
    /// The bit that marks a staged region, in `base` and so in the remote addresses of requests. `backend-staging` sets
    /// it in the local keys of its staged regions, too. No address of a process and no offset has this bit. Only a
    /// domain that [supports staging](Capabilities::supports_staging) imports such a key.
    pub const STAGED: u64 = 1 << 63;

    /// Whether the region is staged.
    pub fn is_staged(&self) -> bool {
        self.base & Self::STAGED != 0
    }
}

/// Registered memory. Dropping it deregisters the memory; the engine drops it after its last request has ended.
pub trait MemoryRegion: Send + Sync {
    /// The local key that work requests carry.
    fn lkey(&self) -> u64;

    /// The key that a peer needs.
    fn key(&self) -> RemoteKey;

    /// Why bytes of this region go through staging buffers, in a few words for people. `None` if the device reaches the
    /// region itself.
    fn staging_reason(&self) -> Option<&str> {
        None
    }

    /// Revokes the peers' key. Returns `Pending` while bytes of peers can still land, and `Ready` once none can. The
    /// engine calls it again until then. Never blocks.
    ///
    /// # Errors
    /// The device did not invalidate the key, and peers may still use it. The next call tries again.
    fn revoke(&self) -> Poll<Result<()>>;

    /// Whether requests and receives of this side may use [`MemoryRegion::lkey`] after `revoke` was called. If not, the
    /// engine calls `revoke` only when no such request is outstanding, and posts none after it.
    fn lkey_outlives_revoke(&self) -> bool {
        false
    }
}

/// An *import*: a peer's region that this side may address. [`Domain::import`] makes it.
pub trait RemoteMemory: Send + Sync + Any {
    /// The remote key that work requests carry. It is valid while this value lives.
    fn rkey(&self) -> u64;

    /// The address that work requests add their offset to.
    fn base(&self) -> u64;

    /// Does the work of the first request to this region in advance, in the calling thread. It is a hint and cannot
    /// fail. Does nothing by default.
    fn warm_up(&self) {}

    /// Returns true if requests to neighbouring ranges of the region are cheaper directly after each other. Then the
    /// entries of a list are posted in the order of their remote addresses, which takes some 50 ns an entry to plan.
    fn prefers_ascending(&self) -> bool {
        false
    }

    /// The most bytes of a request to the region that may be coalesced
    /// ([`WorkRequest::COALESCE`](crate::WorkRequest::COALESCE)); larger ones are not. 0 if this side or the region's
    /// owner does not allow it.
    fn max_coalesced(&self) -> u64 {
        0
    }

    /// The path that bytes take to the region, in a few words for people.
    fn path(&self) -> &'static str {
        "the device"
    }

    /// The paths that bytes take between the region and local memory. `in_device_memory` is true if the local memory is
    /// a GPU's.
    fn paths(&self, in_device_memory: bool) -> Paths;
}

/// The *direct path* to a peer: runs one small request at once, in the calling thread. It checks key, bounds,
/// revocation and peer as for a posted request.
pub trait Direct: Send + Sync {
    /// Runs `request`. `None` if the caller must post it instead: the queue is full, or the request too large.
    ///
    /// # Safety
    /// The local span is valid for the call, and `remote` is the import that `request.rkey` came from.
    unsafe fn run(&self, request: &WorkRequest, remote: Option<&dyn RemoteMemory>) -> Option<Result<()>>;

    /// As [`Direct::run`], for a local span in device memory, which the processor cannot address. `request.lkey` is the
    /// number of the span's region, unique in the fabric.
    ///
    /// # Safety
    /// As [`Direct::run`].
    unsafe fn run_device_memory(
        &self,
        request: &WorkRequest,
        remote: &dyn RemoteMemory,
    ) -> Option<Result<()>> {
        let _ = (request, remote);
        None
    }

    /// Why the direct path never runs requests of `len` bytes to this region, in a few words for people; `None` if it
    /// may run them. `in_device_memory` is true if the processor cannot address the local span.
    fn decline_reason(
        &self,
        remote: &dyn RemoteMemory,
        in_device_memory: bool,
        len: u64,
    ) -> Option<&'static str> {
        let _ = (remote, in_device_memory, len);
        None
    }
}
