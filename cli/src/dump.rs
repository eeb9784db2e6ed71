//! Dumps of this process: on SIGUSR1, on stalls, and after a failure.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use multirail::observe::{MAX_RECORDING, OperationDump, OperationKind};
use multirail::{Dump, Fabric, FabricBuilder, Recording, WeakFabric};

use crate::failure::{CommandFailure, CommandResult};

/// Writes dumps of this process's fabrics to stderr, and to a recording if `--dump` names one.
#[derive(Default)]
pub struct Dumps {
    recording: Mutex<Option<RecordingFile>>,
    /// True if stalled operations are printed to stderr.
    print_stalls: bool,
    fabrics: Mutex<Vec<WeakFabric>>,
}

/// A recording that is being written.
struct RecordingFile {
    file: File,
    bytes: usize,
}

impl RecordingFile {
    fn create(path: &Path) -> io::Result<Self> {
        let mut file = Self { file: File::create(path)?, bytes: 0 };
        file.append(Recording::header())?;
        Ok(file)
    }

    /// Appends `bytes`, unless the recording would become too large to read.
    fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        let sum = self.bytes.saturating_add(bytes.len());
        if sum > MAX_RECORDING {
            return Err(io::Error::other(format!(
                "the recording would exceed {} MiB, the limit of `multirail trace`",
                MAX_RECORDING >> 20
            )));
        }
        self.file.write_all(bytes)?;
        self.bytes = sum;
        Ok(())
    }
}

impl Dumps {
    /// Dumps to stderr, and to a new recording at `path`.
    pub fn new(path: Option<&Path>, print_stalls: bool) -> CommandResult<Self> {
        let create = |path: &Path| {
            RecordingFile::create(path).map_err(|error| {
                CommandFailure::new(format!("cannot write dumps to {}: {error}", path.display()))
            })
        };
        let recording = Mutex::new(path.map(create).transpose()?);
        Ok(Self { recording, print_stalls, fabrics: Mutex::default() })
    }

    /// Opens a fabric. It is dumped when it stalls, and on SIGUSR1.
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

    /// Prints the operations of `fabric` that a failed command cut short.
    pub fn after_failure(&self, fabric: &Fabric) {
        let dump = fabric.dump();
        let waiting = |operation: &&OperationDump| operation.kind != OperationKind::Receive;
        for operation in dump.recent_failures().chain(dump.operations().filter(waiting)) {
            print_to_stderr(&format!("cut short: {operation}"));
        }
        self.record(&dump);
    }

    fn stalled(&self, dump: &Dump) {
        if self.print_stalls {
            dump.stalled().for_each(|operation| print_to_stderr(&format!("stalled: {operation}")));
        }
        self.record(dump);
    }

    fn on_demand(&self) {
        let fabrics = lock(&self.fabrics).clone();
        for fabric in fabrics.iter().filter_map(WeakFabric::upgrade) {
            let dump = fabric.dump();
            print_to_stderr(dump.to_string().trim_end());
            self.record(&dump);
        }
    }

    fn record(&self, dump: &Dump) {
        let mut recording = lock(&self.recording);
        let Some(file) = &mut *recording else { return };
        let written = dump.to_bytes().map_err(io::Error::other).and_then(|frame| file.append(&frame));
        if let Err(error) = written {
            print_to_stderr(&format!("cannot record a dump, and later ones will not be recorded: {error}"));
            *recording = None;
        }
    }

    #[cfg(unix)]
    fn await_signals(self: Arc<Self>) -> CommandResult {
        let signals = signal_hook::iterator::Signals::new([signal_hook::consts::SIGUSR1]);
        let mut signals =
            signals.map_err(|error| CommandFailure::new(format!("cannot take SIGUSR1: {error}")))?;
        let body = move || signals.forever().for_each(|_| self.on_demand());
        std::thread::Builder::new()
            .name("mr-dump".into())
            .spawn(body)
            .map(drop)
            .map_err(|error| CommandFailure::new(format!("cannot start the dump thread: {error}")))
    }

    #[cfg(not(unix))]
    fn await_signals(self: Arc<Self>) -> CommandResult {
        Ok(())
    }
}

/// Prints a text to stderr with one write. An error is ignored.
fn print_to_stderr(text: &str) {
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
        let mut file = RecordingFile::create(path.path()).unwrap();
        let most = MAX_RECORDING - Recording::header().len();
        let error = file.append(&vec![0; most + 1]).unwrap_err().to_string();
        assert!(error.contains("32 MiB"), "{error}");
        assert_eq!(std::fs::read(path.path()).unwrap(), Recording::header());
        file.append(&vec![0; most]).unwrap();
        assert!(file.append(&[0]).is_err());
        assert_eq!(std::fs::metadata(path.path()).unwrap().len(), MAX_RECORDING as u64);
    }
}
