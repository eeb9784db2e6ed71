//! Takes samples of a process in a thread of its own, so that keys work while the process does not answer.

use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::time::Duration;

use super::{AdminClient, CommandFailure, CommandResult, Sample};

/// A thread that takes a sample each interval, until it is dropped or the process gives no answer.
pub struct Sampler {
    samples: Receiver<CommandResult<Sample>>,
    /// Dropping it ends the thread after its current sample.
    _running: Sender<()>,
}

impl Sampler {
    /// Starts the thread.
    pub fn start(mut client: AdminClient, interval: Duration) -> CommandResult<Self> {
        // A view that does not draw, because its terminal is stalled, asks the process for no further sample.
        let (sender, samples) = sync_channel(1);
        let (running, stopped) = channel::<()>();
        let body = move || {
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                let sample = client.dump();
                let is_last = sample.is_err();
                if sender.send(sample).is_err() || is_last {
                    return;
                }
            }
        };
        std::thread::Builder::new()
            .name("mr-top".into())
            .spawn(body)
            .map_err(|error| CommandFailure::new(format!("cannot start a thread: {error}")))?;
        Ok(Self { samples, _running: running })
    }

    /// The newest sample since the last call, or the failure after which there are no more.
    pub fn take(&self) -> Option<CommandResult<Sample>> {
        self.samples.try_iter().last()
    }
}
