//! The rows of a bench. They are printed at the end, also after a signal or a failure.

use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
#[cfg(unix)]
use std::time::Duration;

use multirail::WeakFabric;
use serde::Serialize;

use crate::failure::{CommandFailure, CommandResult};
use crate::output;

/// How long a measurement may take to notice a signal before its fabrics are closed.
#[cfg(unix)]
const NOTICE: Duration = Duration::from_millis(300);
/// How long a measurement may then take to end before the process exits.
#[cfg(unix)]
const END: Duration = Duration::from_millis(400);

/// The function that prints rows.
type Print<R> = dyn Fn(&[R]) -> CommandResult + Send + Sync;

/// The function that gets all rows at the end, and the failure that ended the bench.
type AtEnd<R> = dyn FnOnce(&[R], Option<&CommandFailure>) -> CommandResult + Send;

/// The rows measured so far.
pub struct RowReport<R> {
    json: bool,
    /// The number of rows of a complete bench, and the noun for a row.
    planned: (usize, &'static str),
    print: Box<Print<R>>,
    rows: Mutex<Rows<R>>,
    at_end: Mutex<Option<Box<AtEnd<R>>>>,
    /// The received signal, or 0.
    signal: AtomicI32,
}

struct Rows<R> {
    /// All rows. Those of a table are printed at the end.
    kept: Vec<R>,
    /// The number of complete rows.
    whole: usize,
    /// True if a row was cut short.
    is_cut_short: bool,
}

impl<R: Serialize + Send + 'static> RowReport<R> {
    /// A report of `planned` rows, with the noun `what`. Rows are printed as JSON one by one, or with `print` at the
    /// end.
    pub fn new(
        json: bool,
        planned: usize,
        what: &'static str,
        print: impl Fn(&[R]) -> CommandResult + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self {
            json,
            planned: (planned, what),
            print: Box::new(print),
            rows: Mutex::new(Rows { kept: Vec::new(), whole: 0, is_cut_short: false }),
            at_end: Mutex::new(None),
            signal: AtomicI32::new(0),
        })
    }

    /// Calls `hook` once, at the end.
    pub fn at_end(&self, hook: impl FnOnce(&[R], Option<&CommandFailure>) -> CommandResult + Send + 'static) {
        *self.at_end.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(hook));
    }

    /// Handles INT, TERM and HUP from now on: the measurement sees them with [`Self::is_interrupted`]. If it does not
    /// end, `fabrics` are closed. If it still does not end, the report is printed and the process exits.
    #[cfg(unix)]
    pub fn take_signals(self: &Arc<Self>, fabrics: Vec<WeakFabric>) -> CommandResult {
        use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
        let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM, SIGHUP])
            .map_err(|error| CommandFailure::new(format!("cannot handle signals: {error}")))?;
        let report = Arc::clone(self);
        let end = move || {
            let Some(signal) = signals.forever().next() else { return };
            report.signal.store(signal, Ordering::Release);
            std::thread::sleep(NOTICE);
            // Closing may wait for a device, so it runs in another thread. This thread ends the process.
            std::thread::spawn(move || {
                fabrics.iter().filter_map(WeakFabric::upgrade).for_each(|f| f.close())
            });
            std::thread::sleep(END);
            if let Err(failure) = report.end(Ok(())) {
                output::print_error(failure.message());
            }
            signal_hook::low_level::exit(128 + signal);
        };
        let thread = std::thread::Builder::new().name("mr-signals".into()).spawn(end);
        thread
            .map(drop)
            .map_err(|error| CommandFailure::new(format!("cannot start the signal thread: {error}")))
    }

    /// Signals are not handled.
    #[cfg(not(unix))]
    pub fn take_signals(self: &Arc<Self>, _: Vec<WeakFabric>) -> CommandResult {
        Ok(())
    }

    /// Returns true after a signal to end.
    pub fn is_interrupted(&self) -> bool {
        self.signal.load(Ordering::Acquire) != 0
    }

    /// Adds a row. Its measurement may have been cut short.
    pub fn add(&self, row: R, is_cut_short: bool) -> CommandResult {
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        rows.whole += usize::from(!is_cut_short);
        rows.is_cut_short |= is_cut_short;
        let printed = if self.json { output::json(&row) } else { Ok(()) };
        rows.kept.push(row);
        printed
    }

    /// Prints the remaining rows. Returns `done`, or the failure of a signal that ended the bench.
    pub fn end(&self, done: CommandResult) -> CommandResult {
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let kept = std::mem::take(&mut rows.kept);
        let ended = self.end_of(&rows, &kept, done);
        let hook = self.at_end.lock().unwrap_or_else(PoisonError::into_inner).take();
        match hook.map_or(Ok(()), |hook| hook(&kept, ended.as_ref().err())) {
            Ok(()) => ended,
            Err(failure) => ended.and(Err(failure)),
        }
    }

    fn end_of(&self, rows: &Rows<R>, kept: &[R], done: CommandResult) -> CommandResult {
        let printed = if kept.is_empty() || self.json { Ok(()) } else { (self.print)(kept) };
        let signal = self.signal.load(Ordering::Acquire);
        if signal == 0 || (done.is_ok() && rows.whole == self.planned.0) {
            return done.and(printed);
        }
        printed?;
        let (planned, what) = self.planned;
        let part = if rows.is_cut_short { ", and a part of one more" } else { "" };
        let words =
            format!("interrupted by {}: {} of {planned} {what} measured{part}", name(signal), rows.whole);
        Err(CommandFailure::Interrupted(signal.try_into().unwrap_or(0), words))
    }
}

#[cfg(unix)]
fn name(signal: i32) -> String {
    signal_hook::low_level::signal_name(signal).map_or(format!("signal {signal}"), str::to_owned)
}

#[cfg(not(unix))]
fn name(signal: i32) -> String {
    format!("signal {signal}")
}
