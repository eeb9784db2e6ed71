//! Limits of waits in tests: how long a test waits for an event before it calls the wait a hang.
//!
//! An event makes a test pass, never a time. A limit only turns a hang into a failure, so it may be
//! generous: it costs time only if a test fails. Two kinds exist:
//!
//! - [`HANG`] is for waits of the library under test (`op.wait(HANG)`), which count wall time.
//! - [`stretched`] and [`Limit`] are for waits of the tests themselves. They count the time that
//!   this process has a processor to itself for: on a machine where eight threads want each core,
//!   a limit of 20 s takes about 160 s.
//!
//! [`Woken`] is a waker that counts how often a future's waker is woken. [`lines`] makes a channel of a child process's output, for [`Limit::receive`].
//! `own_address` is where a test may listen that gives its port up and takes it again.

#[cfg(target_os = "linux")]
mod own_address;
mod woken;

use std::io::{BufRead, BufReader, Read};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

#[cfg(target_os = "linux")]
pub use own_address::own_address;
pub use woken::{Woken, poll};

/// The limit of a wait that the library under test counts, in wall time.
///
/// The longest such wait of a trial takes about two seconds on two idle cores, so 64 threads
/// for each core are allowed for.
pub const HANG: Duration = Duration::from_secs(120);

/// The longest time between two reads of how busy the machine is.
const LOAD_INTERVAL: Duration = Duration::from_millis(100);

/// The time between two polls of [`Limit::ask`].
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// The number of runnable threads per core, at least 1. Everything is slower by this factor.
///
/// Reads `/proc/loadavg`: the threads that run or want to run at this moment, or their average over the last minute if
/// that is more. On a busy machine, a single look may meet the one moment at which others wait, and a setting that is
/// stretched by it then has to do for the whole test. Returns 1 if the system has no such file.
pub fn crowding() -> f64 {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let runnable = std::fs::read_to_string("/proc/loadavg").ok().and_then(|text| runnable(&text));
    (runnable.unwrap_or(1.0) / cores as f64).max(1.0)
}

/// The first or the fourth field of `/proc/loadavg`, whichever is more: `0.35 0.31 0.30 3/457 12345` says 3.
fn runnable(loadavg: &str) -> Option<f64> {
    let mut fields = loadavg.split_whitespace();
    let average: f64 = fields.next()?.parse().ok()?;
    let now: f64 = fields.nth(2)?.split('/').next()?.parse().ok()?;
    Some(average.max(now))
}

/// `span` of an idle machine, as wall time on this machine.
///
/// For settings that take one number, such as the peer timeout of a fabric under test.
pub fn stretched(span: Duration) -> Duration {
    span.mul_f64(crowding())
}

/// A limit that is used up while a test waits, slower where the machine is busy.
#[derive(Debug)]
pub struct Limit {
    span: Duration,
    used: Duration,
    slice: Duration,
    looked: Instant,
}

impl Limit {
    /// Starts a limit of `span` of an idle machine.
    pub fn of(span: Duration) -> Self {
        Self { span, used: Duration::ZERO, slice: Duration::ZERO, looked: Instant::now() }
    }

    /// How long to wait for the event before asking again, or `None` once the limit is used up.
    ///
    /// Charges the time since the last call, divided by [`crowding`]. It charges at most the slice of the last call,
    /// because other threads ran if the wakeup came later.
    pub fn slice(&mut self) -> Option<Duration> {
        let now = Instant::now();
        let passed = now.duration_since(self.looked).min(self.slice);
        self.used += passed.div_f64(crowding());
        self.looked = now;
        let left = self.span.checked_sub(self.used).filter(|left| !left.is_zero())?;
        // Slices shorter than a millisecond would make the caller wait many times.
        self.slice = left.clamp(Duration::from_millis(1), LOAD_INTERVAL);
        Some(self.slice)
    }

    /// Returns true if the limit is used up. For loops that poll at every turn.
    pub fn is_over(&mut self) -> bool {
        self.looked.elapsed() >= self.slice && self.slice().is_none()
    }

    /// Calls `answer` until it returns a value. Returns `None` once the limit is used up. Calls `answer` at least once.
    pub fn ask<T>(mut self, mut answer: impl FnMut() -> Option<T>) -> Option<T> {
        loop {
            let answer = answer();
            if answer.is_some() || self.is_over() {
                return answer;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Waits for `receiver`'s next value.
    ///
    /// # Errors
    /// `Timeout` once the limit is used up, `Disconnected` once all senders are dropped.
    pub fn receive<T>(&mut self, receiver: &Receiver<T>) -> Result<T, RecvTimeoutError> {
        while let Some(slice) = self.slice() {
            match receiver.recv_timeout(slice) {
                Err(RecvTimeoutError::Timeout) => {}
                ended => return ended,
            }
        }
        receiver.try_recv().map_err(|_| RecvTimeoutError::Timeout)
    }
}

/// The lines of a child process's output. A thread reads them to the end of `pipe`, so that the child never blocks.
pub fn lines(pipe: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loadavg_has_the_runnable_threads() {
        assert_eq!(runnable("0.35 0.31 0.30 3/457 12345\n"), Some(3.0));
        assert_eq!(runnable("7.50 0.31 0.30 3/457 12345\n"), Some(7.5));
        assert_eq!(runnable("nonsense"), None);
        assert!(crowding() >= 1.0);
    }

    #[test]
    fn only_waiting_uses_up_a_limit() {
        let mut limit = Limit::of(Duration::from_millis(30));
        let first = limit.slice().unwrap();
        assert!(first <= Duration::from_millis(30));
        // Four busy threads for each core: a limit lasts longer than its span, never shorter.
        let begun = Instant::now();
        while let Some(slice) = limit.slice() {
            std::thread::sleep(slice);
        }
        assert!(begun.elapsed() >= Duration::from_millis(29), "{:?}", begun.elapsed());
    }

    #[test]
    fn an_answer_ends_the_polling() {
        let mut asked = 0;
        let answer = Limit::of(HANG).ask(|| {
            asked += 1;
            (asked == 3).then_some(7)
        });
        assert_eq!((answer, asked), (Some(7), 3));
        assert_eq!(Limit::of(Duration::ZERO).ask(|| None::<u8>), None);
        let (sender, receiver) = channel();
        sender.send(5).unwrap();
        assert_eq!(Limit::of(HANG).receive(&receiver), Ok(5));
    }
}
