//! Limits of waits in tests: how long a test waits for an event before it calls the wait a hang.
//!
//! A test passes by the event alone and never by a time. A limit only turns a hang into a
//! failure, so a limit may be generous: it costs time only where a test fails. Two kinds exist:
//!
//! - [`HANG`] is for waits of the library under test (`op.wait(HANG)`), which count wall time.
//! - [`stretched`] and [`Limit`] are for waits of the tests themselves. They count the time that
//!   this process has a processor to itself for: on a machine where eight threads want each core,
//!   a limit of 20 s takes about 160 s.

use std::time::{Duration, Instant};

/// The limit of a wait that the library under test counts, in wall time.
///
/// The longest such wait of a trial takes about two seconds on two idle cores, so 64 threads
/// for each core are allowed for.
pub const HANG: Duration = Duration::from_secs(120);

/// The longest time between two looks at how busy the machine is.
const LOOK: Duration = Duration::from_millis(100);

/// Between two questions of [`Limit::ask`], for what tells no event.
const NAP: Duration = Duration::from_millis(2);

/// Threads that want to run for each core, 1 at least: so much slower everything is.
///
/// Reads `/proc/loadavg`, whose fourth field counts the threads that run or want to at this
/// moment. Returns 1 where the system does not say.
pub fn crowding() -> f64 {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let runnable = std::fs::read_to_string("/proc/loadavg").ok().and_then(|text| runnable(&text));
    (runnable.unwrap_or(1) as f64 / cores as f64).max(1.0)
}

/// The fourth field of `/proc/loadavg`: `0.35 0.31 0.30 3/457 12345` says 3.
fn runnable(loadavg: &str) -> Option<usize> {
    loadavg.split_whitespace().nth(3)?.split('/').next()?.parse().ok()
}

/// `span` of an idle machine, as wall time on this machine at this moment.
///
/// For what takes one number: the settings of a fabric under test, such as its peer timeout.
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
    /// Charges the time since the last call: at most the slice that was given then, because a
    /// wake-up that comes late says that other threads ran; and divided by [`crowding`].
    pub fn slice(&mut self) -> Option<Duration> {
        let now = Instant::now();
        let passed = now.duration_since(self.looked).min(self.slice);
        self.used += passed.div_f64(crowding());
        self.looked = now;
        let left = self.span.checked_sub(self.used).filter(|left| !left.is_zero())?;
        // A rest of less than a millisecond would be waited for many times over.
        self.slice = left.clamp(Duration::from_millis(1), LOOK);
        Some(self.slice)
    }

    /// Whether the limit is used up: for loops that poll, which ask at every turn.
    pub fn is_over(&mut self) -> bool {
        self.looked.elapsed() >= self.slice && self.slice().is_none()
    }

    /// Asks until there is an answer, or `None` once the limit is used up; asks once at least.
    pub fn ask<T>(mut self, mut answer: impl FnMut() -> Option<T>) -> Option<T> {
        loop {
            let answer = answer();
            if answer.is_some() || self.is_over() {
                return answer;
            }
            std::thread::sleep(NAP);
        }
    }

    /// Waits for `receiver`'s next value.
    ///
    /// # Errors
    /// `Timeout` once the limit is used up, `Disconnected` once nothing can come any more.
    pub fn receive<T>(
        &mut self,
        receiver: &std::sync::mpsc::Receiver<T>,
    ) -> Result<T, std::sync::mpsc::RecvTimeoutError> {
        use std::sync::mpsc::RecvTimeoutError;
        while let Some(slice) = self.slice() {
            match receiver.recv_timeout(slice) {
                Err(RecvTimeoutError::Timeout) => {}
                ended => return ended,
            }
        }
        receiver.try_recv().map_err(|_| RecvTimeoutError::Timeout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_says_how_many_want_to_run() {
        assert_eq!(runnable("0.35 0.31 0.30 3/457 12345\n"), Some(3));
        assert_eq!(runnable("nonsense"), None);
        assert!(crowding() >= 1.0);
    }

    #[test]
    fn a_limit_is_used_up_by_waiting_alone() {
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
    fn an_answer_ends_the_asking() {
        let mut asked = 0;
        let answer = Limit::of(HANG).ask(|| {
            asked += 1;
            (asked == 3).then_some(7)
        });
        assert_eq!((answer, asked), (Some(7), 3));
        assert_eq!(Limit::of(Duration::ZERO).ask(|| None::<u8>), None);
        let (tell, told) = std::sync::mpsc::channel();
        tell.send(5).unwrap();
        assert_eq!(Limit::of(HANG).receive(&told), Ok(5));
    }
}
