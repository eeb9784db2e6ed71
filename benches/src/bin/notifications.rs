//! How long after a write the target learns of it, by an imm and by a notification: the same ping-pong between two
//! processes, in turn.

use std::process::ExitCode;
use std::time::Duration;

use backend_efa::{Efa, EfaConfig};
use backend_loopback::Loopback;
use benches::ping_pong::AnnouncedBy;
use benches::processes::{BenchDevices, ConnectedWriter, ProcessRole, Target, pin, transport};
use benches::{BenchResult, exit_code};
use clap::{Parser, Subcommand};
use transport_core::TransportConfig;

#[derive(Parser)]
struct NotificationArguments {
    #[command(subcommand)]
    what: NotificationCommand,
}

#[derive(Subcommand)]
enum NotificationCommand {
    /// Compares imms and notifications.
    Compare(Comparison),
    /// Measures messages: half a round trip, and round trips in a second with many under way.
    Messages(Messages),
    /// The other side.
    #[command(hide = true)]
    Target(Target<Over>),
}

fn main() -> ExitCode {
    let done = match NotificationArguments::parse().what {
        NotificationCommand::Compare(comparison) => comparison.run().map(|()| ExitCode::SUCCESS),
        NotificationCommand::Messages(messages) => messages.run().map(|()| ExitCode::SUCCESS),
        NotificationCommand::Target(target) => target.run(),
    };
    exit_code("notifications", done)
}

#[derive(clap::Args)]
struct Comparison {
    #[command(flatten)]
    over: Over,
    /// Bytes of each write.
    #[arg(long, default_value_t = 4096)]
    size: usize,
    /// Pairs of runs.
    #[arg(long, default_value_t = 9)]
    pairs: usize,
    /// Round trips of each run.
    #[arg(long, default_value_t = 5000)]
    trips: usize,
}

impl Comparison {
    /// Prints the median of each, and of their ratio.
    fn run(&self) -> BenchResult<()> {
        let (mut imms, mut notifications, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        let (mut both, mut least) = (Vec::new(), Vec::new());
        for _ in 0..self.pairs {
            let imm = self.latency(AnnouncedBy::Imm)?;
            let notification = self.latency(AnnouncedBy::Notification)?;
            let at_once = self.latency(AnnouncedBy::Both)?;
            imms.push(imm.as_secs_f64() * 1e6);
            notifications.push(notification.as_secs_f64() * 1e6);
            ratios.push(notification.as_secs_f64() / imm.as_secs_f64());
            both.push(at_once.as_secs_f64() * 1e6);
            least.push(at_once.as_secs_f64() / imm.as_secs_f64());
        }
        println!(
            "{}, {} bytes, one way: imm {:.2} us, notification {:.2} us, ratio {:.2}; imm and notification at once \
             {:.2} us, ratio {:.2}",
            self.over.over,
            self.size,
            median(&mut imms),
            median(&mut notifications),
            median(&mut ratios),
            median(&mut both),
            median(&mut least)
        );
        Ok(())
    }

    fn latency(&self, announced: AnnouncedBy) -> BenchResult<Duration> {
        // A thread of its own, which alone is bound to a core: the next target must be free to choose another.
        let measure = || {
            let writer =
                ConnectedWriter::echo(&self.over, self.size, announced).map_err(|why| why.to_string())?;
            let pinned = pin(ProcessRole::Writer).and_then(|()| writer.ping_pong(self.size, announced));
            pinned.and_then(|mut ping_pong| ping_pong.latency(self.trips)).map_err(|why| why.to_string())
        };
        let measured = std::thread::scope(|scope| scope.spawn(measure).join());
        Ok(measured.map_err(|_| "the measurement has panicked")??)
    }
}

#[derive(clap::Args)]
struct Messages {
    #[command(flatten)]
    over: Over,
    /// Bytes of each message.
    #[arg(long, value_delimiter = ',', default_value = "8,64,1024,4096")]
    sizes: Vec<usize>,
    /// Runs, each with processes of its own.
    #[arg(long, default_value_t = 9)]
    runs: usize,
    /// Round trips of each run.
    #[arg(long, default_value_t = 20_000)]
    trips: usize,
    /// Round trips under way.
    #[arg(long, default_value_t = 64)]
    window: usize,
}

impl Messages {
    /// Prints the medians for each size.
    fn run(&self) -> BenchResult<()> {
        for size in &self.sizes {
            let (mut halves, mut rates) = (Vec::new(), Vec::new());
            for _ in 0..self.runs {
                // A thread of its own, as above.
                let measured = std::thread::scope(|scope| scope.spawn(|| self.measure(*size)).join());
                let (half, rate) = measured.map_err(|_| "the measurement has panicked")??;
                halves.push(half.as_secs_f64() * 1e6);
                rates.push(rate / 1e6);
            }
            println!(
                "{}, messages of {size} bytes: half a round trip {:.2} us, {:.2} million round trips a second",
                self.over.over,
                median(&mut halves),
                median(&mut rates)
            );
        }
        Ok(())
    }

    fn measure(&self, size: usize) -> std::result::Result<(Duration, f64), String> {
        let writer = ConnectedWriter::echo(&self.over, size, AnnouncedBy::Message);
        let writer = writer.map_err(|why| why.to_string())?;
        pin(ProcessRole::Writer).map_err(|why| why.to_string())?;
        let mut ping_pong = writer.ping_pong(size, AnnouncedBy::Message).map_err(|why| why.to_string())?;
        ping_pong.latency(self.trips / 10).map_err(|why| why.to_string())?;
        let half = ping_pong.latency(self.trips).map_err(|why| why.to_string())?;
        let rate = ping_pong.rate(self.trips / 1000, self.window).map_err(|why| why.to_string())?;
        Ok((half, rate))
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    values[values.len() / 2]
}

/// What carries the writes.
#[derive(clap::Args, Clone)]
struct Over {
    /// loopback, or a provider of libfabric: tcp, shm, ...
    #[arg(long, default_value = "loopback")]
    over: String,
}

impl BenchDevices for Over {
    const PINS: bool = true;

    fn transport(&self, _: ProcessRole) -> BenchResult<TransportConfig> {
        match self.over.as_str() {
            "loopback" => transport(Loopback::new(), None),
            provider => {
                let config = EfaConfig::default().provider(provider);
                transport(Efa::with(if provider == "shm" { config } else { config.node("127.0.0.1") }), None)
            }
        }
    }

    fn arguments(&self) -> Vec<String> {
        vec!["--over".to_owned(), self.over.clone()]
    }
}
