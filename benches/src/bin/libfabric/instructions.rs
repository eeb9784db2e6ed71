//! Instructions per write, by callgrind and by whose they are.

use std::collections::HashMap;
use std::fs;
use std::process::{Command, ExitCode};

use crate::Done;
use crate::ends::Provider;
use crate::ours::Load;
use crate::overhead::find;

/// Ours per write, at most.
const LIMIT: f64 = 150.0;
/// Turns of which the cost of one is told in which nothing happens.
const TURNS: u64 = 20_000;
/// Milliseconds for the target between two turns. Longer pauses are counted with what the engine
/// does by time: its look for stalls.
const PAUSE: u64 = 2;
/// The measured loop; what is outside is not counted.
const LOOP: &str = "libfabric::ours::Window::run*";

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
    /// Prints what is whose; fails where ours are more than the limit.
    pub fn run(self) -> Done<ExitCode> {
        let mut code = ExitCode::SUCCESS;
        println!("instructions per write of {} bytes, 1024 under way, in batches of 512;", self.size);
        println!("turns in which nothing happened are not counted, but said");
        for provider in &self.providers {
            let [few, many] = [4096, 3 * 4096].map(|count| self.callgrind(provider, count, 0));
            let idle = self.callgrind(provider, 4096, TURNS)?;
            let (few, many) = (few?, many?);
            // As many writes, and more turns.
            let turn = idle.less(&few, idle.idle_turns.saturating_sub(few.idle_turns).max(1));
            let writes = many.writes - few.writes;
            let turns = many.idle_turns as f64 - few.idle_turns as f64;
            let each = |of: fn(&Counts) -> f64| (of(&many) - of(&few) - turns * of(&turn)) / writes as f64;
            let (ours, libfabric) = (each(|counts| counts.ours), each(|counts| counts.libfabric));
            let others = each(|counts| counts.others);
            println!(
                "{provider:<12} ours {ours:>5.0} (limit {LIMIT})   libfabric {libfabric:>6.0}   \
                 the C library {others:>5.0}   idle turns {:.3} of {:.0}, ours {:.0}",
                turns / writes as f64,
                turn.ours + turn.libfabric + turn.others,
                turn.ours
            );
            if ours > LIMIT {
                code = ExitCode::FAILURE;
            }
        }
        Ok(code)
    }

    /// A run of about `count` writes and `turns` turns in which nothing happens.
    fn callgrind(&self, provider: &str, count: u64, turns: u64) -> Done<Counts> {
        let load = Load {
            provider: Provider { provider: provider.to_owned() },
            size: self.size,
            inflight: 1024,
            seconds: 1,
            region: 64 << 20,
            count: Some(count),
            pause: PAUSE,
            turns,
        };
        let out = std::env::temp_dir().join(format!("multirail-{}.callgrind", std::process::id()));
        let program = std::env::current_exe()?;
        let mut valgrind = Command::new("valgrind");
        valgrind.args(["--tool=callgrind", "--collect-atstart=no", &format!("--toggle-collect={LOOP}")]);
        valgrind.arg(format!("--callgrind-out-file={}", out.display()));
        valgrind.arg(&program).arg("ours").args(load.arguments());
        valgrind.args(["--pause", &PAUSE.to_string(), "--turns", &turns.to_string()]);
        let advice = "valgrind does not start; install Debian's package valgrind";
        let run = valgrind.output().map_err(|why| format!("{advice} ({why})"))?;
        if !run.status.success() {
            return Err(String::from_utf8_lossy(&run.stderr).into_owned().into());
        }
        let text = fs::read_to_string(&out)?;
        fs::remove_file(&out)?;
        let line = String::from_utf8_lossy(&run.stdout);
        let number = |name| find(&line, name).ok_or_else(|| format!("no {name} in {line}"));
        let counts = Counts {
            writes: number("writes")? as u64,
            idle_turns: number("idle_turns")? as u64,
            ..Counts::of(&by_file(&text), &program.display().to_string())
        };
        match counts.ours > 0.0 {
            true => Ok(counts),
            false => Err(format!("callgrind saw nothing of {LOOP}").into()),
        }
    }
}

/// Instructions by whose they are, and what was done with them.
#[derive(Default)]
struct Counts {
    ours: f64,
    libfabric: f64,
    others: f64,
    writes: u64,
    idle_turns: u64,
}

impl Counts {
    fn of(by_file: &HashMap<String, u64>, program: &str) -> Self {
        let of = |name: &str| {
            let of_it = by_file.iter().filter(|(file, _)| file.contains(name));
            of_it.map(|(_, count)| *count as f64).sum::<f64>()
        };
        let (ours, libfabric) = (of(program), of("libfabric.so"));
        let others = by_file.values().map(|count| *count as f64).sum::<f64>() - ours - libfabric;
        Self { ours, libfabric, others, ..Self::default() }
    }

    /// What is more here than in `other`, a `share`th of it.
    fn less(&self, other: &Self, share: u64) -> Self {
        let part = |of: fn(&Self) -> f64| (of(self) - of(other)) / share as f64;
        Self {
            ours: part(|counts| counts.ours),
            libfabric: part(|counts| counts.libfabric),
            others: part(|counts| counts.others),
            ..Self::default()
        }
    }
}

/// Own costs by object file, of callgrind's output (its manual, "Callgrind Format Specification").
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
            // The line after a call is the callee's cost.
            if !std::mem::take(&mut is_call) {
                let cost = line.split(' ').nth(1).and_then(|cost| cost.parse::<u64>().ok());
                *counts.entry(file.clone()).or_default() += cost.unwrap_or(0);
            }
        }
    }
    counts
}

/// A name: `(3) /lib/a.so` the first time, `(3)` later.
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
