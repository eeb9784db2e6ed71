//! The unauthenticated clients of a listener. Each is cheap; when there are too many, the oldest is
//! dropped for the newest.

use std::collections::VecDeque;
use std::future::Future;

use tokio::task::{AbortHandle, JoinSet};

/// The most unauthenticated clients at once. A client with a valid token authenticates within a few round
/// trips, so it is the oldest only if this many further clients connect within that time.
const MAX_CLIENTS: usize = 256;
/// Unauthenticated clients may hold one part in this many of the process's descriptors.
const DESCRIPTOR_SHARE: u64 = 4;

/// The tasks that authenticate clients. Dropping this aborts all of them.
pub(crate) struct UnauthenticatedClients<T> {
    tasks: JoinSet<T>,
    /// The tasks that have not ended, the oldest first.
    waiting: VecDeque<AbortHandle>,
    capacity: usize,
}

impl<T: Send + 'static> UnauthenticatedClients<T> {
    pub fn new() -> Self {
        let capacity = descriptors().map_or(MAX_CLIENTS, |limit| {
            usize::try_from(limit / DESCRIPTOR_SHARE).unwrap_or(MAX_CLIENTS).clamp(1, MAX_CLIENTS)
        });
        Self { tasks: JoinSet::new(), waiting: VecDeque::new(), capacity }
    }

    /// Adds a client. Drops the oldest clients if there are too many.
    pub fn add(&mut self, client: impl Future<Output = T> + Send + 'static) {
        while self.waiting.len() >= self.capacity {
            self.drop_oldest();
        }
        self.waiting.push_back(self.tasks.spawn(client));
    }

    /// Drops the oldest client. Returns `false` if there is none.
    pub fn drop_oldest(&mut self) -> bool {
        let oldest = self.waiting.pop_front();
        if let Some(oldest) = &oldest {
            oldest.abort();
        }
        oldest.is_some()
    }

    /// Waits for the next task to end and returns its output: `Some(None)` if that client was
    /// dropped. Returns `None` at once if there are no clients. Cancel-safe.
    pub async fn next(&mut self) -> Option<Option<T>> {
        let ended = self.tasks.join_next_with_id().await?;
        let (id, outcome) = match ended {
            Ok((id, outcome)) => (id, Some(outcome)),
            Err(error) => (error.id(), None),
        };
        self.waiting.retain(|task| task.id() != id);
        Some(outcome)
    }
}

/// The most descriptors that this process may have open.
#[cfg(unix)]
fn descriptors() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current
}

#[cfg(not(unix))]
fn descriptors() -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn the_oldest_are_dropped_and_ended_tasks_are_returned() {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
            let mut clients = UnauthenticatedClients { capacity: 3, ..UnauthenticatedClients::new() };
            let alive = Arc::new(());
            for number in 0..5 {
                let kept = Arc::clone(&alive);
                clients.add(async move {
                    if number == 3 {
                        return (number, kept);
                    }
                    std::future::pending().await
                });
            }
            let mut dropped = 0;
            let done = loop {
                match clients.next().await {
                    Some(Some((number, _))) => break number,
                    Some(None) => dropped += 1,
                    None => panic!("no task ended"),
                }
            };
            while dropped < 2 {
                assert!(clients.next().await.unwrap().is_none());
                dropped += 1;
            }
            assert_eq!(done, 3);
            assert_eq!(clients.waiting.len(), 2);
            assert_eq!(Arc::strong_count(&alive), 1 + 2);
            assert!(clients.drop_oldest() && clients.drop_oldest() && !clients.drop_oldest());
            while clients.next().await.is_some() {}
            assert_eq!(Arc::strong_count(&alive), 1);
        });
    }
}
