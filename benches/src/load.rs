//! Our loop of writes. The measuring thread writes, as the programs in C do. It writes pages in batches, as any program
//! does that moves many.

use std::collections::VecDeque;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use transport_core::{Op, Pages};

use crate::processes::{BenchDevices, ConnectedWriter, ProcessRole, pin};
use crate::{BenchResult, Driven, LIMIT, shuffled};

/// A loop of writes.
#[derive(clap::Args, Clone)]
pub struct WriteLoop<P: BenchDevices> {
    /// The devices of both processes.
    #[command(flatten)]
    pub devices: P,
    /// Bytes of a write.
    #[arg(long, default_value_t = 65_536)]
    pub size: usize,
    /// Writes under way.
    #[arg(long, default_value_t = 1024)]
    pub inflight: usize,
    /// Pages of a batch of ours.
    #[arg(long, default_value_t = 32)]
    pub batch: usize,
    /// How long the loop runs, in milliseconds.
    #[arg(long, default_value_t = 1000)]
    pub millis: u64,
    /// Bytes of either side's region, walked page by page in a shuffled order.
    #[arg(long, default_value_t = 64 << 20)]
    pub region: usize,
    /// The loop ends after about this number of writes, instead of after a time.
    #[arg(long)]
    pub count: Option<u64>,
    /// The target has a worker, which sleeps while it is idle. Otherwise it has a thread that never sleeps.
    #[arg(long)]
    pub worker: bool,
    /// The loop sleeps this number of milliseconds when all writes are posted, and the target after each turn, so that
    /// both rarely poll in vain.
    #[arg(long, default_value_t = 0, hide = true)]
    pub pause: u64,
}

impl<P: BenchDevices> WriteLoop<P> {
    /// A loop of writes of `size` bytes, with the default of every other option.
    pub fn of(devices: P, size: usize) -> Self {
        Self {
            devices,
            size,
            inflight: 1024,
            batch: 64,
            millis: 1000,
            region: 64 << 20,
            count: None,
            worker: false,
            pause: 0,
        }
    }

    /// The arguments that give another process the same loop.
    pub fn arguments(&self) -> Vec<String> {
        let numbers = [
            ("--batch", self.batch as u64),
            ("--size", self.size as u64),
            ("--inflight", self.inflight as u64),
            ("--region", self.region as u64),
            ("--millis", self.millis),
        ];
        let pause = Some(self.pause).filter(|pause| *pause > 0);
        let rare = [("--count", self.count), ("--pause", pause)];
        let rare = rare.into_iter().filter_map(|(name, number)| Some((name, number?)));
        let numbers = numbers.into_iter().chain(rare);
        let mut arguments = self.devices.arguments();
        arguments.extend(numbers.flat_map(|(name, number)| [name.to_owned(), number.to_string()]));
        arguments.extend(self.worker.then(|| "--worker".to_owned()));
        arguments
    }

    /// The command that runs this loop in another process.
    pub fn command(&self) -> BenchResult<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("ours").args(self.arguments());
        Ok(command)
    }

    /// Runs the loop, compares the bytes, and prints operations and GB per second.
    pub fn run(self) -> BenchResult<ExitCode> {
        let pages = self.region.checked_div(self.size).unwrap_or(0);
        if self.batch == 0 || self.inflight < self.batch || pages < self.batch {
            return Err("--inflight must be at least --batch, and --region must have at least as many pages as --batch".into());
        }
        let target = if self.worker { Driven::ByWorkers } else { Driven::ByCaller };
        let pause = Duration::from_millis(self.pause);
        let writer = match pause.is_zero() {
            true => ConnectedWriter::connect(&self.devices, Driven::ByCaller, target, self.region)?,
            false => ConnectedWriter::with_pauses(&self.devices, self.region, pause)?,
        };
        if P::PINS {
            pin(ProcessRole::Writer)?;
        }
        let order = shuffled(pages as u32, 1);
        let batches: Vec<Pages> = order.chunks_exact(self.batch).map(Pages::new).collect();
        // The first write brings the connection up.
        writer.peer.warm_up()?.wait(LIMIT)?;
        let per_batch = self.batch as u64;
        let begun = Instant::now();
        let until = match self.count {
            Some(count) => Until::Batches(count.div_ceil(per_batch)),
            None => Until::Time(begun + Duration::from_millis(self.millis)),
        };
        let under_way = self.inflight / self.batch;
        let window = WriteWindow { writer: &writer, size: self.size, under_way, pause, yields: !P::PINS };
        let done = window.run(&batches, until)? * per_batch;
        let seconds = begun.elapsed().as_secs_f64();
        let written = (batches.len() * self.batch).min(done as usize);
        writer.verify(&order[..written], self.size)?;
        let bytes = done as f64 * self.size as f64;
        println!(
            r#"{{"writes":{done},"gb_per_s":{:.4},"mops":{:.4}}}"#,
            bytes / seconds / 1e9,
            done as f64 / seconds / 1e6
        );
        Ok(ExitCode::SUCCESS)
    }
}

/// When the loop ends.
#[derive(Clone, Copy)]
enum Until {
    Batches(u64),
    Time(Instant),
}

/// Keeps a number of batches of writes of `size` bytes under way.
struct WriteWindow<'a> {
    writer: &'a ConnectedWriter,
    size: usize,
    under_way: usize,
    pause: Duration,
    /// The thread yields its core after a turn without an event, to the thread that does the card's work.
    yields: bool,
}

impl WriteWindow<'_> {
    /// Writes the batches again and again. Returns the number of written batches.
    #[inline(never)]
    fn run(&self, batches: &[Pages], until: Until) -> BenchResult<u64> {
        let Self { writer, size, under_way: most, pause, yields } = self;
        let mut pages = batches.iter().cycle();
        let mut under_way: VecDeque<Op> = VecDeque::with_capacity(*most);
        let (mut begun, mut done, mut is_over) = (0_u64, 0_u64, false);
        while !is_over || !under_way.is_empty() {
            while !is_over && under_way.len() < *most {
                let pages = pages.next().ok_or("no pages")?;
                under_way.push_back(writer.peer.write_pages(
                    &writer.src,
                    pages,
                    &writer.dst,
                    pages,
                    *size,
                )?);
                begun += 1;
                is_over = matches!(until, Until::Batches(batches) if begun == batches);
            }
            let is_idle = writer.fabric.step().events == 0;
            if is_idle && *yields {
                std::thread::yield_now();
            }
            if !pause.is_zero() {
                std::thread::sleep(*pause);
            }
            while let Some(result) = under_way.front_mut().and_then(Op::try_result) {
                result?;
                under_way.pop_front();
                done += 1;
                if let Until::Time(end) = until {
                    is_over = Instant::now() >= end;
                }
            }
        }
        Ok(done)
    }
}
