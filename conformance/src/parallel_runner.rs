//! Runs several backends under test at once, each in its own process.
//!
//! Process trials run alone in their process and mostly wait. So each backend gets its own process,
//! and a few of these processes run at the same time.

use std::process::{Command, ExitCode, Output};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::backend_under_test::BackendUnderTest;

/// Runs this program once for each backend and prints each output. Returns success if all passed.
pub(crate) fn run(backends: &[Arc<dyn BackendUnderTest>]) -> ExitCode {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (next, failed, printing) = (AtomicUsize::new(0), AtomicUsize::new(0), Mutex::new(()));
    std::thread::scope(|scope| {
        for _ in 0..=cores.min(backends.len()) {
            scope.spawn(|| {
                while let Some(backend) = backends.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let output = run_one(backend.name());
                    let _whole_output = printing.lock().unwrap_or_else(PoisonError::into_inner);
                    println!("-- {}", backend.name());
                    match output {
                        Ok(Output { status, stdout, stderr }) => {
                            eprint!("{}", String::from_utf8_lossy(&stderr));
                            print!("{}", String::from_utf8_lossy(&stdout));
                            failed.fetch_add(usize::from(!status.success()), Ordering::Relaxed);
                        }
                        Err(error) => {
                            eprintln!("the test process did not start: {error}");
                            failed.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    match failed.into_inner() {
        0 => ExitCode::SUCCESS,
        failed => {
            println!("{failed} of {} backends failed", backends.len());
            ExitCode::FAILURE
        }
    }
}

/// Runs the trials of one backend in a new process.
fn run_one(backend: &str) -> std::io::Result<Output> {
    let arguments = std::env::args_os().skip(1);
    Command::new(std::env::current_exe()?).args(arguments).arg(format!("{backend}::")).output()
}
