//! Instructions per write of our code, of libfabric and of others, counted by callgrind.

use std::collections::HashMap;
use std::fs;
use std::process::{Command, ExitCode};

use benches::BenchResult;
use benches::compare::find;

use crate::{LibfabricProvider, WriteLoop};

/// The maximum of our instructions per write.
const LIMIT: f64 = 150.0;
/// Pages of a batch.
const BATCH: usize = 512;
/// Milliseconds for the target between two turns. During a longer pause the engine would look for stalls, and callgrind
/// would count that.
const PAUSE: u64 = 2;
/// The measured loop. Callgrind counts nothing outside of it.
const LOOP: &str = "benches::load::WriteWindow::run*";

/// Counts the instructions of a write.
#[derive(clap::Args)]
pub struct Instructions {
    /// Providers.
    #[arg(long, value_delimiter = ',', default_value = "tcp,shm")]
    providers: Vec<String>,
    /// Bytes of a write.
    #[arg(long, default_value_t = 65_536)]
    size: usize,
}

impl Instructions {
    /// Prints the instructions of each part. Fails if ours exceed the limit.
    pub fn run(self) -> BenchResult<ExitCode> {
        let mut code = ExitCode::SUCCESS;
        println!("instructions per write of {} bytes, 1024 under way, in batches of {BATCH}", self.size);
        for provider in &self.providers {
            let (few, many) = (self.callgrind(provider, 4096)?, self.callgrind(provider, 3 * 4096)?);
            let writes = many.writes - few.writes;
            let each = |of: fn(&InstructionCounts) -> f64| (of(&many) - of(&few)) / writes;
            let ours = each(|counts| counts.ours);
            println!(
                "{provider:<12} ours {ours:>5.0} (limit {LIMIT})   libfabric {:>6.0}   simulated cards {:>6.0}   \
                 the C library {:>5.0}",
                each(|counts| counts.libfabric),
                each(|counts| counts.simulator),
                each(|counts| counts.others),
            );
            if ours > LIMIT {
                code = ExitCode::FAILURE;
            }
        }
        Ok(code)
    }

    /// Counts the instructions of a run of about `count` writes.
    fn callgrind(&self, provider: &str, count: u64) -> BenchResult<InstructionCounts> {
        let load = WriteLoop {
            count: Some(count),
            batch: BATCH,
            pause: PAUSE,
            ..WriteLoop::of(LibfabricProvider::of(provider), self.size)
        };
        let out = std::env::temp_dir().join(format!("multirail-{}.callgrind", std::process::id()));
        let program = std::env::current_exe()?;
        let mut valgrind = Command::new("valgrind");
        valgrind.args(["--tool=callgrind", "--collect-atstart=no", &format!("--toggle-collect={LOOP}")]);
        valgrind.arg(format!("--callgrind-out-file={}", out.display()));
        valgrind.arg(&program).arg("ours").args(load.arguments());
        let advice = "valgrind does not start; install Debian's package valgrind";
        let run = valgrind.output().map_err(|why| format!("{advice} ({why})"))?;
        if !run.status.success() {
            return Err(String::from_utf8_lossy(&run.stderr).into_owned().into());
        }
        let text = fs::read_to_string(&out)?;
        fs::remove_file(&out)?;
        let line = String::from_utf8_lossy(&run.stdout);
        let writes = find(&line, "writes").ok_or_else(|| format!("no writes in {line}"))?;
        let counts = InstructionCounts {
            writes,
            ..InstructionCounts::of(&by_file(&text), &program.display().to_string())
        };
        match counts.ours > 0.0 {
            true => Ok(counts),
            false => Err(format!("callgrind saw nothing of {LOOP}").into()),
        }
    }
}

/// Instructions by the code that ran them, and the number of writes.
#[derive(Default)]
struct InstructionCounts {
    ours: f64,
    libfabric: f64,
    /// Instructions of `ci/efa-sim`, if it is preloaded.
    simulator: f64,
    others: f64,
    writes: f64,
}

impl InstructionCounts {
    fn of(by_file: &HashMap<String, u64>, program: &str) -> Self {
        let of = |name: &str| {
            let of_it = by_file.iter().filter(|(file, _)| file.contains(name));
            of_it.map(|(_, count)| *count as f64).sum::<f64>()
        };
        let (ours, libfabric, simulator) = (of(program), of("libfabric.so"), of("libefa_sim.so"));
        let all = by_file.values().map(|count| *count as f64).sum::<f64>();
        Self { ours, libfabric, simulator, others: all - ours - libfabric - simulator, ..Self::default() }
    }
}

/// The costs of each object file without its callees, from callgrind's output (its manual, "Callgrind Format
/// Specification").
fn by_file(text: &str) -> HashMap<String, u64> {
    let (mut names, mut counts) = (HashMap::new(), HashMap::new());
    let (mut file, mut is_call) = (String::new(), false);
    for line in text.lines() {
        if let Some(object) = line.strip_prefix("ob=") {
            file = named(object, &mut names);
        } else if let Some(object) = line.strip_prefix("cob=") {
            named(object, &mut names);
        } else if line.starts_with("calls=") {
            is_call = true;
        } else if line.starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first)) {
            // The line after a call has the callee's cost.
            if !std::mem::take(&mut is_call) {
                let cost = line.split(' ').nth(1).and_then(|cost| cost.parse::<u64>().ok());
                *counts.entry(file.clone()).or_default() += cost.unwrap_or(0);
            }
        }
    }
    counts
}

/// Resolves a name. Callgrind writes `(3) /lib/a.so` the first time, and `(3)` later.
fn named(object: &str, names: &mut HashMap<String, String>) -> String {
    match object.split_once(' ') {
        Some((number, name)) => {
            names.insert(number.to_owned(), name.to_owned());
            name.to_owned()
        }
        None => names.get(object).cloned().unwrap_or_else(|| object.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn costs_are_the_file_s_own() {
        let text = "version: 1\nob=(1) /a\nfn=(1) f\n10 5\n+2 3\ncob=(2) /b\ncfn=(2) g\ncalls=1 20\n12 100\n\nob=(2)\nfn=(2)\n20 100\n\nob=(1)\nfn=(1)\n* 2\n";
        assert_eq!(by_file(text), HashMap::from([("/a".to_owned(), 10), ("/b".to_owned(), 100)]));
    }
}
