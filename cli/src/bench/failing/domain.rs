//! The domain of a failing device.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use multirail::spi::{
    Capabilities, Connector, Direct, Domain, Endpoint, EndpointConfig, FenceKind, MemoryRegion, PeerSlot,
    RemoteKey, RemoteMemory,
};
use multirail::{Access, Memory, Result};

use super::RailFailure;
use super::endpoint::FailingEndpoint;

/// The domain of a device that fails. It is the inner domain and its connector, without the direct path, which would go
/// past the endpoint.
pub(super) struct FailingDomain {
    inner: Arc<dyn Domain>,
    failure: Arc<RailFailure>,
}

impl FailingDomain {
    pub(super) fn new(inner: Arc<dyn Domain>, failure: Arc<RailFailure>) -> Self {
        Self { inner, failure }
    }
}

impl Domain for FailingDomain {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn id(&self) -> u64 {
        self.inner.id()
    }

    unsafe fn register(&self, memory: Arc<dyn Memory>, access: Access) -> Result<Arc<dyn MemoryRegion>> {
        // SAFETY: handed on to the caller.
        unsafe { self.inner.register(memory, access) }
    }

    fn import(&self, peer: PeerSlot, key: &RemoteKey, limit: Duration) -> Result<Arc<dyn RemoteMemory>> {
        self.inner.import(peer, key, limit)
    }

    fn connector(&self) -> &dyn Connector {
        self
    }

    fn endpoint(&self, config: EndpointConfig) -> Result<Box<dyn Endpoint>> {
        let inner = self.inner.endpoint(config)?;
        Ok(Box::new(FailingEndpoint::new(inner, Arc::clone(&self.failure))))
    }

    fn unclosed_endpoints(&self) -> usize {
        self.inner.unclosed_endpoints()
    }

    fn direct(&self, _peer: PeerSlot) -> Option<Arc<dyn Direct>> {
        None
    }
}

impl Connector for FailingDomain {
    fn prepare(&self) -> Result<(PeerSlot, Vec<u8>)> {
        self.inner.connector().prepare()
    }

    fn prepare_local(&self) -> Result<(PeerSlot, Vec<u8>)> {
        self.inner.connector().prepare_local()
    }

    fn complete(&self, slot: PeerSlot, offer: &[u8]) -> Result<()> {
        self.inner.connector().complete(slot, offer)
    }

    fn next_offer(&self, slot: PeerSlot) -> Result<Option<Vec<u8>>> {
        self.inner.connector().next_offer(slot)
    }

    fn renew(&self, slot: PeerSlot, offer: &[u8]) -> Result<Vec<u8>> {
        self.inner.connector().renew(slot, offer)
    }

    fn finish_renewal(&self, slot: PeerSlot, answer: &[u8]) -> Result<()> {
        self.inner.connector().finish_renewal(slot, answer)
    }

    fn fence(&self, slot: PeerSlot, kind: FenceKind) -> Poll<Result<()>> {
        self.inner.connector().fence(slot, kind)
    }

    fn is_same_sender(&self, named: PeerSlot, other: PeerSlot) -> bool {
        self.inner.connector().is_same_sender(named, other)
    }

    fn disconnect(&self, slot: PeerSlot) {
        // Before the inner endpoint can report the last event.
        self.failure.leaving().push(slot);
        self.inner.connector().disconnect(slot);
    }
}
