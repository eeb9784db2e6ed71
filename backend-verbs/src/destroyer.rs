//! Destroys the queue pairs of broken connections in a thread of its own. A card takes milliseconds for it, and
//! soft-RoCE seconds while a link is down: it waits for packets that wait for the peer's address. Other peers and other
//! rails of the same worker must not wait for that.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread::{Builder, JoinHandle};

use crate::peers::QueuePairs;

/// The thread, which the first broken connection starts.
#[derive(Default)]
pub(crate) struct Destroyer(Option<(Sender<Arc<QueuePairs>>, JoinHandle<()>)>);

impl Destroyer {
    /// Destroys the queue pairs of a connection that has stopped and whose completions are read, if the caller was the
    /// last that held them.
    pub(crate) fn destroy(&mut self, pairs: Arc<QueuePairs>) {
        if self.0.is_none() {
            let (sender, connections) = channel();
            let thread = Builder::new()
                .name("multirail-destroy-qp".to_owned())
                .spawn(move || connections.into_iter().for_each(drop));
            self.0 = thread.ok().map(|thread| (sender, thread));
        }
        // Without a thread, they are destroyed here.
        if let Some((sender, _)) = &self.0 {
            let _ = sender.send(pairs);
        }
    }

    /// Waits until all are destroyed.
    pub(crate) fn finish(&mut self) {
        if let Some((sender, thread)) = self.0.take() {
            drop(sender);
            let _ = thread.join();
        }
    }
}

impl Drop for Destroyer {
    fn drop(&mut self) {
        self.finish();
    }
}
