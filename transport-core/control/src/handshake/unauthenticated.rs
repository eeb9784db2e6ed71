//! Clients that have not shown yet that they may come in: cheap, many, and the
//! oldest makes way for a newer one.

use std::collections::VecDeque;
use std::future::Future;

use tokio::task::{AbortHandle, JoinSet};

/// UnauthenticatedClients at once. A good client is through in some round trips, so it is never
/// the oldest unless so many come within that time.
const UNAUTHENTICATED: usize = 256;
/// The part of the process's descriptors that strangers may hold: a quarter.
const SHARE: u64 = 4;

/// TaskTracker with strangers. Dropping it ends them all.
pub(crate) struct UnauthenticatedClients<T> {
    tasks: JoinSet<T>,
    /// Those that have not ended, the oldest first.
    waiting: VecDeque<AbortHandle>,
    room: usize,
}

impl<T: Send + 'static> UnauthenticatedClients<T> {
    pub fn new() -> Self {
        let room = descriptors().map_or(UNAUTHENTICATED, |limit| {
            usize::try_from(limit / SHARE).unwrap_or(UNAUTHENTICATED).clamp(1, UNAUTHENTICATED)
        });
        Self { tasks: JoinSet::new(), waiting: VecDeque::new(), room }
    }

    /// Adds one, at the cost of the oldest if there are enough.
    pub fn add(&mut self, stranger: impl Future<Output = T> + Send + 'static) {
        while self.waiting.len() >= self.room {
            self.drop_oldest();
        }
        self.waiting.push_back(self.tasks.spawn(stranger));
    }

    /// Drops the one that has waited longest; `false` if there is none.
    pub fn drop_oldest(&mut self) -> bool {
        let oldest = self.waiting.pop_front();
        if let Some(oldest) = &oldest {
            oldest.abort();
        }
        oldest.is_some()
    }

    /// What came of the next one that ended; `None` at once if there are none, inside
    /// it if that one was dropped. Cancel-safe.
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

/// Descriptors this process may have open.
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
    fn the_oldest_make_way_and_the_ended_are_told() {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
            let mut strangers = UnauthenticatedClients { room: 3, ..UnauthenticatedClients::new() };
            let alive = Arc::new(());
            for number in 0..5 {
                let kept = Arc::clone(&alive);
                strangers.add(async move {
                    if number == 3 {
                        return (number, kept);
                    }
                    std::future::pending().await
                });
            }
            let mut dropped = 0;
            let done = loop {
                match strangers.next().await {
                    Some(Some((number, _))) => break number,
                    Some(None) => dropped += 1,
                    None => panic!("nobody ended"),
                }
            };
            while dropped < 2 {
                assert!(strangers.next().await.unwrap().is_none());
                dropped += 1;
            }
            assert_eq!(done, 3);
            assert_eq!(strangers.waiting.len(), 2);
            assert_eq!(Arc::strong_count(&alive), 1 + 2);
            assert!(strangers.drop_oldest() && strangers.drop_oldest() && !strangers.drop_oldest());
            while strangers.next().await.is_some() {}
            assert_eq!(Arc::strong_count(&alive), 1);
        });
    }
}
