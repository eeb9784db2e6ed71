//! Instructions per write, by callgrind and by whose they are.

use std::collections::HashMap;
use std::fs;
use std::process::{Command, ExitCode};

use crate::Done;
use crate::ends::Provider;
use crate::ours::Load;

/// Ours per write, at most.
const LIMIT: u64 = 150;
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
        println!("instructions per write of {} bytes, 1024 under way, in batches of 512", self.size);
        for provider in &self.providers {
            let counts = self.count(provider)?;
            let of = |name: &str| {
                let of_it = counts.iter().filter(|(file, _)| file.contains(name));
                of_it.map(|(_, count)| count).sum::<u64>()
            };
            let program = std::env::current_exe()?.display().to_string();
            let (ours, libfabric, all) = (of(&program), of("libfabric.so"), counts.values().sum::<u64>());
            let others = all - ours - libfabric;
            println!(
                "{provider:<12} ours {ours:>5} (limit {LIMIT})   libfabric {libfabric:>6}   the C library {others:>5}"
            );
            if ours > LIMIT {
                code = ExitCode::FAILURE;
            }
        }
        Ok(code)
    }

    /// Instructions per write by the file they are in: the difference of a longer and a shorter run.
    fn count(&self, provider: &str) -> Done<HashMap<String, u64>> {
        let (few, many) = (4096, 3 * 4096);
        let shorter = self.callgrind(provider, few)?;
        let mut longer = self.callgrind(provider, many)?;
        for (file, count) in &mut longer {
            let before = shorter.get(file).copied().unwrap_or(0);
            *count = count.saturating_sub(before) / (many - few);
        }
        Ok(longer)
    }

    fn callgrind(&self, provider: &str, count: u64) -> Done<HashMap<String, u64>> {
        let load = Load {
            provider: Provider { provider: provider.to_owned() },
            size: self.size,
            inflight: 1024,
            seconds: 1,
            region: 64 << 20,
            count: Some(count),
            pause: PAUSE,
        };
        let out = std::env::temp_dir().join(format!("multirail-{}.callgrind", std::process::id()));
        let mut valgrind = Command::new("valgrind");
        valgrind.args(["--tool=callgrind", "--collect-atstart=no", &format!("--toggle-collect={LOOP}")]);
        valgrind.arg(format!("--callgrind-out-file={}", out.display()));
        let run = valgrind
            .arg(std::env::current_exe()?)
            .arg("ours")
            .args(load.arguments())
            .args(["--pause", &PAUSE.to_string()])
            .output();
        let run =
            run.map_err(|why| format!("valgrind does not start ({why}): install Debian's package valgrind"))?;
        if !run.status.success() {
            return Err(String::from_utf8_lossy(&run.stderr).into_owned().into());
        }
        let text = fs::read_to_string(&out)?;
        fs::remove_file(&out)?;
        let counts = by_file(&text);
        if counts.is_empty() {
            return Err(format!("callgrind saw nothing of {LOOP}").into());
        }
        Ok(counts)
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
