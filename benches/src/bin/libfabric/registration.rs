//! The latency of writes while memory is registered.

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::scope;
use std::time::{Duration, Instant};

use benches::processes::ConnectedWriter;
use benches::{BenchResult, Driven, LIMIT};
use transport_core::{Access, HostBuffer};

use crate::LibfabricProvider;

/// The bytes that are registered again and again.
const LEN: usize = 1 << 30;
/// How long each part measures.
const SPAN: Duration = Duration::from_secs(3);
/// Parts of each kind, in turn.
const ROUNDS: usize = 5;

/// Compares the latencies with and without registration.
#[derive(clap::Args)]
pub struct RegistrationLatency {
    /// Providers.
    #[arg(long, value_delimiter = ',', default_value = "tcp,shm")]
    providers: Vec<String>,
    /// Bytes of a write.
    #[arg(long, default_value_t = 65_536)]
    size: usize,
}

impl RegistrationLatency {
    /// Prints the 99th percentiles.
    pub fn run(self) -> BenchResult<ExitCode> {
        println!(
            "99th percentile of one {} byte write at a time, median of {ROUNDS} rounds of {SPAN:?}",
            self.size
        );
        let mut code = ExitCode::SUCCESS;
        let memory = Arc::new(HostBuffer::new(LEN)?);
        for provider in &self.providers {
            let writer = ConnectedWriter::connect(
                &LibfabricProvider::of(provider),
                Driven::ByWorkers,
                Driven::ByWorkers,
                64 << 20,
            )?;
            writer.peer.warm_up()?.wait(LIMIT)?;
            let fabric = writer.fabric.clone();
            let (is_over, is_wanted, times) =
                (AtomicBool::new(false), AtomicBool::new(false), AtomicU32::new(0));
            let (mut without, mut with) = (Vec::new(), Vec::new());
            scope(|scope| -> BenchResult<()> {
                let registrar = scope.spawn(|| -> Result<(), transport_core::Error> {
                    while !is_over.load(Ordering::Acquire) {
                        if is_wanted.load(Ordering::Acquire) {
                            // SAFETY: no peer has the descriptor of the region, so that none touches the bytes.
                            drop(unsafe { fabric.register(memory.clone(), Access::all()) }?);
                            times.fetch_add(1, Ordering::Relaxed);
                        }
                        std::thread::park_timeout(Duration::from_millis(10));
                    }
                    Ok(())
                });
                let measured = (0..ROUNDS).try_for_each(|_| -> BenchResult<()> {
                    is_wanted.store(false, Ordering::Release);
                    without.push(self.percentile(&writer)?);
                    is_wanted.store(true, Ordering::Release);
                    with.push(self.percentile(&writer)?);
                    Ok(())
                });
                is_over.store(true, Ordering::Release);
                registrar.join().map_err(|_| "the registering thread panicked")??;
                measured
            })?;
            without.sort();
            with.sort();
            let (without, with) = (without[ROUNDS / 2], with[ROUNDS / 2]);
            let ratio = with.as_secs_f64() / without.as_secs_f64();
            println!(
                "{provider:<12} alone {without:>8.1?}   while 1 GiB was registered {} times {with:>8.1?}   ratio {ratio:.2} (limit 2)",
                times.load(Ordering::Relaxed)
            );
            if ratio >= 2.0 || times.load(Ordering::Relaxed) == 0 {
                code = ExitCode::FAILURE;
            }
        }
        Ok(code)
    }

    fn percentile(&self, writer: &ConnectedWriter) -> BenchResult<Duration> {
        let mut latencies = Vec::new();
        let end = Instant::now() + SPAN;
        while Instant::now() < end {
            let begun = Instant::now();
            writer.peer.write(&writer.src, 0..self.size, &writer.dst, 0)?.wait(LIMIT)?;
            latencies.push(begun.elapsed());
        }
        latencies.sort();
        Ok(latencies[latencies.len() * 99 / 100])
    }
}
