//! Our loop: writes by the thread that measures, as programs in C do it. Pages go in batches, as
//! they do in any program that moves many.

use std::collections::VecDeque;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use transport_core::{Op, Pages};

use crate::ends::{BenchDevices, ConnectedWriter};
use crate::ends::{ProcessRole, pin};
use crate::{BenchResult, Driven, LIMIT, shuffled};

/// A loop of writes.
#[derive(clap::Args, Clone)]
pub struct WriteLoop<P: BenchDevices> {
    /// Where.
    #[command(flatten)]
    pub place: P,
    /// Bytes of a write.
    #[arg(long, default_value_t = 65_536)]
    pub size: usize,
    /// Writes under way.
    #[arg(long, default_value_t = 1024)]
    pub inflight: usize,
    /// Pages of a batch of ours.
    #[arg(long, default_value_t = 32)]
    pub batch: usize,
    /// How long, in milliseconds.
    #[arg(long, default_value_t = 1000)]
    pub millis: u64,
    /// Bytes of either side's region, walked page by page in a shuffled order.
    #[arg(long, default_value_t = 64 << 20)]
    pub region: usize,
    /// Instead of a time: about so many writes.
    #[arg(long)]
    pub count: Option<u64>,
    /// The target has a worker, which sleeps while nothing asks for it; else a thread that never does.
    #[arg(long)]
    pub worker: bool,
    /// Sleeps for so many milliseconds when all are posted, so that little is polled in vain.
    #[arg(long, default_value_t = 0, hide = true)]
    pub pause: u64,
}

impl<P: BenchDevices> WriteLoop<P> {
    /// Writes of `size` bytes, the rest as it usually is.
    pub fn of(place: P, size: usize) -> Self {
        Self {
            place,
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

    /// The same for another process.
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
        let mut arguments = self.place.arguments();
        arguments.extend(numbers.flat_map(|(name, number)| [name.to_owned(), number.to_string()]));
        arguments.extend(self.worker.then(|| "--worker".to_owned()));
        arguments
    }

    /// Prints operations and GB per second, after the bytes were compared.
    pub fn run(self) -> BenchResult<ExitCode> {
        let pages = self.region.checked_div(self.size).unwrap_or(0);
        if self.batch == 0 || self.inflight < self.batch || pages < self.batch {
            return Err("as many in flight as a batch has, and a region of a batch's pages, please".into());
        }
        let target = if self.worker { Driven::ByWorkers } else { Driven::ByCaller };
        let ends = ConnectedWriter::meet(&self.place, Driven::ByCaller, target, self.region)?;
        if P::PINS {
            pin(ProcessRole::Writer)?;
        }
        let order = shuffled(pages as u32, 1);
        let batches: Vec<Pages> = order.chunks_exact(self.batch).map(Pages::new).collect();
        // The first write brings the connection up.
        ends.peer.warm_up()?.wait(LIMIT)?;
        let per_batch = self.batch as u64;
        let begun = Instant::now();
        let until = match self.count {
            Some(count) => Until::Batches(count.div_ceil(per_batch)),
            None => Until::Time(begun + Duration::from_millis(self.millis)),
        };
        let pause = Duration::from_millis(self.pause);
        let under_way = self.inflight / self.batch;
        let window = WriteWindow { ends: &ends, size: self.size, under_way, pause, yields: !P::PINS };
        let done = window.run(&batches, until)? * per_batch;
        let seconds = begun.elapsed().as_secs_f64();
        let written = (batches.len() * self.batch).min(done as usize);
        ends.verify(&order[..written], self.size)?;
        let bytes = done as f64 * self.size as f64;
        println!(
            r#"{{"writes":{done},"gb_per_s":{:.4},"mops":{:.4}}}"#,
            bytes / seconds / 1e9,
            done as f64 / seconds / 1e6
        );
        Ok(ExitCode::SUCCESS)
    }
}

/// When it is enough.
#[derive(Clone, Copy)]
enum Until {
    Batches(u64),
    Time(Instant),
}

/// So many batches of writes of `size` bytes, under way at any time.
struct WriteWindow<'a> {
    ends: &'a ConnectedWriter,
    size: usize,
    under_way: usize,
    pause: Duration,
    /// Lets others have the core when nothing has happened: whoever does the card's work.
    yields: bool,
}

impl WriteWindow<'_> {
    /// Writes the batches over and over; how many.
    #[inline(never)]
    fn run(&self, batches: &[Pages], until: Until) -> BenchResult<u64> {
        let Self { ends, size, under_way: most, pause, yields } = self;
        let mut pages = batches.iter().cycle();
        let mut under_way: VecDeque<Op> = VecDeque::with_capacity(*most);
        let (mut begun, mut done, mut is_over) = (0_u64, 0_u64, false);
        while !is_over || !under_way.is_empty() {
            while !is_over && under_way.len() < *most {
                let pages = pages.next().ok_or("no pages")?;
                under_way.push_back(ends.peer.write_pages(&ends.src, pages, &ends.dst, pages, *size)?);
                begun += 1;
                is_over = matches!(until, Until::Batches(batches) if begun == batches);
            }
            let is_idle = ends.turns.step().events == 0;
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
