//! Dumps of this process: on SIGUSR1, on stalls, after a peer's death.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use multirail::observe::{MAX_RECORDING, OperationDump, OperationKind};
use multirail::{Dump, Fabric, FabricBuilder, Recording, WeakFabric};

use crate::failure::{CommandResult, Failure};

/// Where dumps of the fabrics of this process go: stderr, and a recording if one was asked for.
#[derive(Default)]
pub struct Dumps {
    recording: Mutex<Option<Log>>,
    /// Say on stderr what stalls.
    print_stalls: bool,
    fabrics: Mutex<Vec<WeakFabric>>,
}

/// A recording that is being written.
struct Log {
    file: File,
    bytes: usize,
}

impl Log {
    fn create(path: &Path) -> io::Result<Self> {
        let mut log = Self { file: File::create(path)?, bytes: 0 };
        log.append(Recording::header())?;
        Ok(log)
    }

    /// Appends as long as the recording can be read.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let sum = self.bytes.saturating_add(bytes.len());
        if sum > MAX_RECORDING {
            return Err(io::Error::other(format!(
                "the recording would be over {} MiB, the most that `multirail trace` reads",
                MAX_RECORDING >> 20
            )));
        }
        self.file.write_all(bytes)?;
        self.bytes = sum;
        Ok(())
    }
}

impl Dumps {
    /// To stderr, and to a new recording at `path`.
    pub fn new(path: Option<&Path>, print_stalls: bool) -> CommandResult<Self> {
        let create = |path: &Path| {
            Log::create(path)
                .map_err(|error| Failure::new(format!("cannot write dumps to {}: {error}", path.display())))
        };
        let recording = Mutex::new(path.map(create).transpose()?);
        Ok(Self { recording, print_stalls, fabrics: Mutex::default() })
    }

    /// Opens a fabric that is dumped when it stalls, and with all others on SIGUSR1.
    pub fn open(self: &Arc<Self>, builder: FabricBuilder) -> CommandResult<Fabric> {
        let dumps = Arc::clone(self);
        let fabric = builder.on_stall(Arc::new(move |dump: &Dump| dumps.stalled(dump))).open()?;
        let mut fabrics = lock(&self.fabrics);
        fabrics.push(fabric.downgrade());
        if fabrics.len() == 1 {
            Arc::clone(self).await_signals()?;
        }
        Ok(fabric)
    }

    /// A command on `fabric` failed: says which operations that cut short.
    pub fn after_failure(&self, fabric: &Fabric) {
        let dump = fabric.dump();
        let waiting = |operation: &&OperationDump| operation.kind != OperationKind::Receive;
        for operation in dump.casualties().chain(dump.operations().filter(waiting)) {
            say(&format!("cut short: {operation}"));
        }
        self.record(&dump);
    }

    fn stalled(&self, dump: &Dump) {
        if self.print_stalls {
            dump.stalled().for_each(|operation| say(&format!("stalled: {operation}")));
        }
        self.record(dump);
    }

    fn on_demand(&self) {
        let fabrics = lock(&self.fabrics).clone();
        for fabric in fabrics.iter().filter_map(WeakFabric::upgrade) {
            let dump = fabric.dump();
            say(dump.to_string().trim_end());
            self.record(&dump);
        }
    }

    fn record(&self, dump: &Dump) {
        let mut recording = lock(&self.recording);
        let Some(log) = &mut *recording else { return };
        let written = dump.to_bytes().map_err(io::Error::other).and_then(|frame| log.append(&frame));
        if let Err(error) = written {
            say(&format!("a dump was not recorded, nor will be later ones: {error}"));
            *recording = None;
        }
    }

    #[cfg(unix)]
    fn await_signals(self: Arc<Self>) -> CommandResult {
        let signals = signal_hook::iterator::Signals::new([signal_hook::consts::SIGUSR1]);
        let mut signals = signals.map_err(|error| Failure::new(format!("cannot take SIGUSR1: {error}")))?;
        let body = move || signals.forever().for_each(|_| self.on_demand());
        std::thread::Builder::new()
            .name("mr-dump".into())
            .spawn(body)
            .map(drop)
            .map_err(|error| Failure::new(format!("cannot start the thread that dumps: {error}")))
    }

    #[cfg(not(unix))]
    fn await_signals(self: Arc<Self>) -> CommandResult {
        Ok(())
    }
}

/// Prints to stderr in one piece. Nothing is left to do if that fails.
fn say(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recording_ends_before_it_cannot_be_read() {
        let path = tempfile::NamedTempFile::new().unwrap();
        let mut log = Log::create(path.path()).unwrap();
        let most = MAX_RECORDING - Recording::header().len();
        let said = log.append(&vec![0; most + 1]).unwrap_err().to_string();
        assert!(said.contains("32 MiB"), "{said}");
        assert_eq!(std::fs::read(path.path()).unwrap(), Recording::header());
        log.append(&vec![0; most]).unwrap();
        assert!(log.append(&[0]).is_err());
        assert_eq!(std::fs::metadata(path.path()).unwrap().len(), MAX_RECORDING as u64);
    }
}
