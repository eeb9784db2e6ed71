//! Subjects side by side: process trials run alone in their process, and mostly wait, so that each subject
//! gets a process of its own, and a few of them run at once.

use std::process::{Command, ExitCode, Output};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::subject::Subject;

/// Runs this program once for each subject, prints what each says, and says whether all passed.
pub(crate) fn run(subjects: &[Arc<dyn Subject>]) -> ExitCode {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (next, failed, printing) = (AtomicUsize::new(0), AtomicUsize::new(0), Mutex::new(()));
    std::thread::scope(|scope| {
        for _ in 0..=cores.min(subjects.len()) {
            scope.spawn(|| {
                while let Some(subject) = subjects.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let output = alone(subject.name());
                    let _whole = printing.lock().unwrap_or_else(PoisonError::into_inner);
                    println!("-- {}", subject.name());
                    match output {
                        Ok(Output { status, stdout, stderr }) => {
                            eprint!("{}", String::from_utf8_lossy(&stderr));
                            print!("{}", String::from_utf8_lossy(&stdout));
                            failed.fetch_add(usize::from(!status.success()), Ordering::Relaxed);
                        }
                        Err(why) => {
                            eprintln!("it does not start: {why}");
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
            println!("{failed} of {} subjects failed", subjects.len());
            ExitCode::FAILURE
        }
    }
}

/// The trials of one subject.
fn alone(subject: &str) -> std::io::Result<Output> {
    let arguments = std::env::args_os().skip(1);
    Command::new(std::env::current_exe()?).args(arguments).arg(format!("{subject}::")).output()
}
