//! The cost of an idle fabric, and of the first write after a pause.

use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};

use benches::processes::ConnectedWriter;
use benches::{BenchResult, Driven, LIMIT};
use transport_core::spi::Capabilities;

use crate::LibfabricProvider;

/// Pauses before a write.
const PAUSES: [Duration; 4] =
    [Duration::ZERO, Duration::from_millis(1), Duration::from_millis(20), Duration::from_millis(300)];
/// Writes after each pause.
const WRITES: usize = 20;
/// How long the fabric is idle.
const SPAN: Duration = Duration::from_secs(3);

/// Fabrics with workers, as programs have them.
#[derive(clap::Args)]
pub struct Idle {
    /// Providers.
    #[arg(long, value_delimiter = ',', default_value = "tcp,shm")]
    providers: Vec<String>,
    /// Stage all memory, as GPU memory is staged if a card refuses it.
    #[arg(long)]
    staged: bool,
}

impl Idle {
    /// Prints a line per provider.
    pub fn run(self) -> BenchResult<ExitCode> {
        println!("idle: share of a core of a process with one connected peer; then the median latency of");
        println!("one 4 KiB write after a pause, both sides idle");
        let pauses = PAUSES.map(|pause| format!("{:>12}", format!("{pause:?}"))).join("");
        println!("provider     waits by        idle{pauses}");
        for provider in self.providers {
            let devices = LibfabricProvider { staged: self.staged, ..LibfabricProvider::of(&provider) };
            let writer = ConnectedWriter::connect(&devices, Driven::ByWorkers, Driven::ByWorkers, 1 << 20)?;
            writer.peer.warm_up()?.wait(LIMIT)?;
            let waits = waits(&writer.fabric.transports()[0].capabilities);
            let before = busy();
            sleep(SPAN);
            let share = (busy() - before).as_secs_f64() / SPAN.as_secs_f64() * 100.0;
            print!("{provider:<12} {waits:<10} {share:>8.2} %");
            for pause in PAUSES {
                let mut latencies = Vec::new();
                for _ in 0..WRITES {
                    sleep(pause);
                    let begun = Instant::now();
                    writer.peer.write(&writer.src, 0..4096, &writer.dst, 0)?.wait(LIMIT)?;
                    latencies.push(begun.elapsed());
                }
                latencies.sort();
                print!("{:>9} us", latencies[WRITES / 2].as_micros());
            }
            println!();
        }
        Ok(ExitCode::SUCCESS)
    }
}

fn waits(capabilities: &Capabilities) -> &'static str {
    if capabilities.supports_wakeup { "wake-ups" } else { "naps" }
}

/// Processor time of this process.
fn busy() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
