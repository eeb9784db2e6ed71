//! How a fabric ends.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::transport::Transport;
use super::{Fabric, FabricInner, lock};
use crate::{Error, ErrorKind};

impl Fabric {
    /// Ends everything: peers see `Closed`, operations end, threads are joined.
    /// Every later call on this fabric fails with `Closed`.
    ///
    /// Where [`FabricBuilder::control_on`](crate::FabricBuilder::control_on) was given a runtime, use
    /// [`Fabric::close_and_wait`].
    pub fn close(&self) {
        self.0.close();
    }

    /// The devices whose library has not closed their endpoints within the backend's limit, which [`Fabric::close`]
    /// leaves behind then, with a warning (`tracing`). A thread of the backend goes on with them, and all memory that
    /// was registered there stays alive until it is done; a process may exit meanwhile. Usually empty.
    pub fn unclosed(&self) -> Vec<String> {
        let of = |transport: &Transport| {
            let rails = transport.devices.iter().zip(&transport.domains);
            let unclosed = rails.filter(|(_, domain)| domain.unclosed() > 0);
            unclosed.map(|(device, _)| device.name.clone()).collect::<Vec<_>>()
        };
        self.0.transports.iter().flat_map(of).collect()
    }

    /// As [`Fabric::close`], without blocking while farewells are said: await it on the runtime of
    /// [`FabricBuilder::control_on`](crate::FabricBuilder::control_on) before that ends, or peers see this
    /// side die. Dropped before its end, it leaves the fabric to be closed.
    pub fn close_and_wait(&self) -> impl Future<Output = ()> + Send + 'static {
        let fabric = Arc::clone(&self.0);
        async move {
            // Before the links go down, as peers might take their end for our death.
            fabric.begin_shutdown();
            if let Some(tasks) = fabric.closing_tasks.get() {
                tasks.none().await;
            }
            fabric.close();
        }
    }
}

impl FabricInner {
    /// Ends the sessions, here and of its tenants.
    fn begin_shutdown(&self) {
        self.tenants().iter().for_each(|tenant| tenant.begin_shutdown());
        if let Some(control) = &*lock(&self.control) {
            control.begin_shutdown();
        }
    }

    pub(super) fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        self.close_tenants();
        let peers: Vec<_> = lock(&self.peers).drain().map(|(_, peer)| peer).collect();
        peers.iter().for_each(|peer| peer.0.session.goodbye());
        // Not under the lock: tasks that are awaited may ask for the thread.
        let thread = lock(&self.control).take();
        if let Some(thread) = thread {
            thread.shutdown();
        }
        for peer in peers {
            peer.close(Error::new(ErrorKind::Closed, "close", "this fabric was closed"));
        }
        self.transports.iter().for_each(Transport::close);
        lock(&self.published).clear();
    }
}

impl Drop for FabricInner {
    fn drop(&mut self) {
        self.close();
    }
}
