//! Calls of a file system that may hang, such as one of a server that is away.

use std::io;
use std::sync::Arc;

use tokio::sync::Mutex;
use tokio::task::spawn_blocking;

/// Runs calls on a thread that may block, one at a time: however often a hung call is tried again, it takes one thread.
#[derive(Default)]
pub struct BlockingCalls(Arc<Mutex<()>>);

impl BlockingCalls {
    /// Runs a call once the former has ended, also a former whose caller does not wait any more.
    pub async fn run<T: Send + 'static>(
        &self,
        call: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let turn = Arc::clone(&self.0).lock_owned().await;
        let done = spawn_blocking(move || {
            let done = call();
            drop(turn);
            done
        });
        done.await.unwrap_or_else(|error| Err(io::Error::other(error)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[test]
    fn a_hung_call_takes_one_thread() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (calls, begun) = (BlockingCalls::default(), Arc::new(AtomicUsize::new(0)));
        let (go_on, hung) = channel::<()>();
        runtime.block_on(async {
            let count = Arc::clone(&begun);
            let hangs = move || {
                count.fetch_add(1, Ordering::Relaxed);
                let _ = hung.recv();
                Ok(())
            };
            timeout(Duration::from_millis(50), calls.run(hangs)).await.unwrap_err();
            for _ in 0..10 {
                let count = Arc::clone(&begun);
                let call = move || {
                    count.fetch_add(1, Ordering::Relaxed);
                    Ok(())
                };
                timeout(Duration::from_millis(10), calls.run(call)).await.unwrap_err();
            }
            drop(go_on);
            let count = Arc::clone(&begun);
            let done = calls.run(move || Ok(count.fetch_add(1, Ordering::Relaxed)));
            // The ten were given up before their turn.
            assert_eq!(timeout(limit::HANG, done).await.unwrap().unwrap(), 1);
        });
    }
}
