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
/// The measured loop of the writer, and the turns of the target. Callgrind counts nothing outside of them.
const LOOP: &str = "benches::load::WriteWindow::run*";
const TURN: &str = "benches::processes::turn*";
/// The maximum share of its own instructions that a page takes if it is coalesced, on both sides together, without the
/// instructions that copy its bytes.
const MAX_COALESCED: f64 = 1.0 / 6.0;

/// Counts the instructions of a write.
#[derive(clap::Args)]
pub struct Instructions {
    /// Providers.
    #[arg(long, value_delimiter = ',', default_value = "tcp,shm")]
    providers: Vec<String>,
    /// Bytes of a write.
    #[arg(long, default_value_t = 65_536)]
    size: usize,
    /// Count the instructions of coalesced writes too, and those of the target.
    #[arg(long)]
    coalesced: bool,
}

impl Instructions {
    /// Prints the instructions of each part. Fails if ours exceed the limit.
    pub fn run(self) -> BenchResult<ExitCode> {
        let mut code = ExitCode::SUCCESS;
        println!("instructions per write of {} bytes, 1024 under way, in batches of {BATCH}", self.size);
        for name in &self.providers {
            let provider = LibfabricProvider::of(name);
            let [writer, target] = self.per_write(&provider)?;
            writer.print(name, &format!(" (limit {LIMIT})"));
            if writer.ours > LIMIT {
                code = ExitCode::FAILURE;
            }
            if self.coalesced {
                let coalesced = LibfabricProvider { coalesced: true, ..provider };
                let [coalesced_writer, coalesced_target] = self.per_write(&coalesced)?;
                target.print("  target", "");
                coalesced_writer.print("  coalesced", "");
                coalesced_target.print("  target", "");
                let sum = |sides: [&InstructionCounts; 2]| {
                    sides.map(InstructionCounts::without_copies).iter().sum::<f64>()
                };
                let (direct, coalesced) =
                    (sum([&writer, &target]), sum([&coalesced_writer, &coalesced_target]));
                println!(
                    "  both sides without copies: {direct:.0}, coalesced {coalesced:.0}: {:.3} of it (limit {MAX_COALESCED:.3})",
                    coalesced / direct
                );
                if coalesced > MAX_COALESCED * direct {
                    code = ExitCode::FAILURE;
                }
            }
        }
        Ok(code)
    }

    /// Counts the instructions of one write, on both sides.
    fn per_write(&self, provider: &LibfabricProvider) -> BenchResult<[InstructionCounts; 2]> {
        let ((few, writes), (many, more_writes)) =
            (self.callgrind(provider, 4096)?, self.callgrind(provider, 3 * 4096)?);
        Ok([0, 1].map(|side| many[side].per_write_more(&few[side], more_writes - writes)))
    }

    /// Counts the instructions of both sides in a run of about `count` writes, and the writes.
    fn callgrind(
        &self,
        provider: &LibfabricProvider,
        count: u64,
    ) -> BenchResult<([InstructionCounts; 2], f64)> {
        let load = WriteLoop {
            count: Some(count),
            batch: BATCH,
            pause: PAUSE,
            ..WriteLoop::of(provider.clone(), self.size)
        };
        let folder = std::env::temp_dir().join(format!("multirail-{}.callgrind", std::process::id()));
        fs::create_dir_all(&folder)?;
        let program = std::env::current_exe()?;
        let mut valgrind = Command::new("valgrind");
        valgrind.args(["--tool=callgrind", "--trace-children=yes", "--collect-atstart=no"]);
        valgrind.args([LOOP, TURN].map(|function| format!("--toggle-collect={function}")));
        valgrind.arg(format!("--callgrind-out-file={}/%p", folder.display()));
        valgrind.arg(&program).arg("ours").args(load.arguments());
        let advice = "valgrind does not start; install Debian's package valgrind";
        let run = valgrind.output().map_err(|why| format!("{advice} ({why})"))?;
        if !run.status.success() {
            return Err(String::from_utf8_lossy(&run.stderr).into_owned().into());
        }
        let mut sides = <[InstructionCounts; 2]>::default();
        for file in fs::read_dir(&folder)? {
            let text = fs::read_to_string(file?.path())?;
            let command = text.lines().find(|line| line.starts_with("cmd:")).unwrap_or_default();
            let side = usize::from(command.contains(" target "));
            sides[side] = InstructionCounts::of(&by_part(&text), &program.display().to_string());
        }
        fs::remove_dir_all(&folder)?;
        let line = String::from_utf8_lossy(&run.stdout);
        let writes = find(&line, "writes").ok_or_else(|| format!("no writes in {line}"))?;
        match sides.iter().all(|side| side.ours > 0.0) {
            true => Ok((sides, writes)),
            false => Err(format!("callgrind saw nothing of {LOOP} or of {TURN}").into()),
        }
    }
}

/// Instructions of one side, by the code that ran them.
#[derive(Default)]
struct InstructionCounts {
    ours: f64,
    /// Those of ours that copy bytes.
    copies: f64,
    libfabric: f64,
    /// Instructions of `ci/efa-sim`, if it is preloaded.
    simulator: f64,
    others: f64,
}

impl InstructionCounts {
    fn of(by_part: &HashMap<Part, u64>, program: &str) -> Self {
        let sum = |is_it: &dyn Fn(&Part) -> bool| {
            let of_it = by_part.iter().filter(|(part, _)| is_it(part));
            of_it.map(|(_, count)| *count as f64).sum::<f64>()
        };
        let of = |name: &str| sum(&|part| !part.copies && part.file.contains(name));
        let (ours, libfabric, simulator) = (of(program), of("libfabric.so"), of("libefa_sim.so"));
        let others = sum(&|part| !part.copies) - ours - libfabric - simulator;
        let copies = sum(&|part| part.copies && !part.file.contains("libefa_sim.so"));
        Self { ours, copies, libfabric, simulator, others }
    }

    /// The instructions per write, from those of a run with fewer writes.
    fn per_write_more(&self, few: &Self, writes: f64) -> Self {
        let each = |of: fn(&Self) -> f64| (of(self) - of(few)) / writes;
        Self {
            ours: each(|counts| counts.ours),
            copies: each(|counts| counts.copies),
            libfabric: each(|counts| counts.libfabric),
            simulator: each(|counts| counts.simulator),
            others: each(|counts| counts.others),
        }
    }

    /// All but copies and the simulated cards, which stand for hardware.
    fn without_copies(&self) -> f64 {
        self.ours + self.libfabric + self.others
    }

    fn print(&self, name: &str, limit: &str) {
        let Self { ours, copies, libfabric, simulator, others } = self;
        println!(
            "{name:<12} ours {ours:>5.0}{limit}   libfabric {libfabric:>6.0}   simulated cards {simulator:>6.0}   \
             the C library {others:>5.0}   copies {copies:>5.0}"
        );
    }
}

/// What ran instructions.
#[derive(Debug, PartialEq, Eq, Hash, Default, Clone)]
struct Part {
    /// The object file.
    file: String,
    /// Whether the function copies bytes: one of ours, or memcpy of the C library.
    copies: bool,
}

/// The costs of each part without its callees, from callgrind's output (its manual, "Callgrind Format Specification").
fn by_part(text: &str) -> HashMap<Part, u64> {
    let (mut files, mut functions, mut counts) = (HashMap::new(), HashMap::new(), HashMap::new());
    let (mut part, mut is_call) = (Part::default(), false);
    for line in text.lines() {
        if let Some(object) = line.strip_prefix("ob=") {
            part.file = named(object, &mut files);
        } else if let Some(object) = line.strip_prefix("cob=") {
            named(object, &mut files);
        } else if let Some(function) = line.strip_prefix("fn=") {
            let name = named(function, &mut functions);
            part.copies = ["spi::copy::", "memcpy", "memmove"].iter().any(|copy| name.contains(copy));
        } else if let Some(function) = line.strip_prefix("cfn=") {
            named(function, &mut functions);
        } else if line.starts_with("calls=") {
            is_call = true;
        } else if line.starts_with(|first: char| first.is_ascii_digit() || "+-*".contains(first)) {
            // The line after a call has the callee's cost.
            if !std::mem::take(&mut is_call) {
                let cost = line.split(' ').nth(1).and_then(|cost| cost.parse::<u64>().ok());
                *counts.entry(part.clone()).or_default() += cost.unwrap_or(0);
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
    fn costs_are_the_part_s_own() {
        let text = "version: 1\nob=(1) /a\nfn=(1) f\n10 5\n+2 3\ncob=(2) /b\ncfn=(2) g\ncalls=1 20\n12 100\n\nob=(2)\nfn=(2)\n20 100\n\nob=(1)\nfn=(3) memcpy\n* 7\nfn=(1)\n* 2\n";
        let part = |file: &str, copies| Part { file: file.to_owned(), copies };
        let expected = [(part("/a", false), 10), (part("/b", false), 100), (part("/a", true), 7)];
        assert_eq!(by_part(text), HashMap::from(expected));
    }
}
