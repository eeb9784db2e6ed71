//! Our loop: writes by the thread that measures, as `writes.c` does it. Pages go in batches, as
//! they do in any program that moves many.

use std::collections::VecDeque;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use benches::{Driven, LIMIT, shuffled};
use transport_core::{Op, Pages};

use crate::Done;
use crate::ends::{Ends, Provider};

/// A loop of writes.
#[derive(clap::Args, Clone)]
pub struct Load {
    #[command(flatten)]
    pub provider: Provider,
    /// Bytes of a write.
    #[arg(long, default_value_t = 65_536)]
    pub size: usize,
    /// Writes under way: for ours of two batches together.
    #[arg(long, default_value_t = 1024)]
    pub inflight: usize,
    /// How long.
    #[arg(long, default_value_t = 1)]
    pub seconds: u64,
    /// Bytes of either side's region, walked page by page in a shuffled order.
    #[arg(long, default_value_t = 64 << 20)]
    pub region: usize,
    /// Instead of a time: about so many writes.
    #[arg(long)]
    pub count: Option<u64>,
    /// Sleeps for so many milliseconds when all are posted, so that little is polled in vain.
    #[arg(long, default_value_t = 0, hide = true)]
    pub pause: u64,
    /// Turns after it all, in which nothing happens.
    #[arg(long, default_value_t = 0, hide = true)]
    pub turns: u64,
}

impl Load {
    /// The same for another process; `writes.c` has the same names.
    pub fn arguments(&self) -> Vec<String> {
        let numbers = [
            ("--size", self.size as u64),
            ("--inflight", self.inflight as u64),
            ("--region", self.region as u64),
            ("--seconds", self.seconds),
        ];
        let numbers = numbers.into_iter().chain(self.count.map(|count| ("--count", count)));
        let provider = ["--provider".to_owned(), self.provider.provider.clone()];
        provider
            .into_iter()
            .chain(numbers.flat_map(|(name, number)| [name.to_owned(), number.to_string()]))
            .collect()
    }

    /// Prints operations and GB per second, after the bytes were compared.
    pub fn run(self) -> Done<ExitCode> {
        let pages = self.region.checked_div(self.size).unwrap_or(0);
        if pages < self.inflight || self.inflight < 2 {
            return Err("at least 2 in flight, and a region of at least as many pages, please".into());
        }
        let ends = Ends::meet(&self.provider, Driven::ByCaller, self.region)?;
        let order = shuffled(pages as u32, 1);
        let batches: Vec<Pages> = order.chunks_exact(self.inflight / 2).map(Pages::new).collect();
        // The first write brings the connection up.
        ends.peer.warm_up()?.wait(LIMIT)?;
        let per_batch = (self.inflight / 2) as u64;
        let begun = Instant::now();
        let until = match self.count {
            Some(count) => Until::Batches(count.div_ceil(per_batch)),
            None => Until::Time(begun + Duration::from_secs(self.seconds)),
        };
        let pause = Duration::from_millis(self.pause);
        let window = Window { ends: &ends, size: self.size, pause, turns: self.turns };
        let (done, idle) = window.run(&batches, until)?;
        let done = done * per_batch;
        let seconds = begun.elapsed().as_secs_f64();
        let written = (batches.len() * self.inflight / 2).min(done as usize);
        ends.verify(&order[..written], self.size)?;
        let bytes = done as f64 * self.size as f64;
        println!(
            r#"{{"writes":{done},"gb_per_s":{:.4},"mops":{:.4},"idle_turns":{idle}}}"#,
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

/// Two batches of writes of `size` bytes, under way at any time.
struct Window<'a> {
    ends: &'a Ends,
    size: usize,
    pause: Duration,
    turns: u64,
}

impl Window<'_> {
    /// Writes the batches over and over; how many, and in how many turns nothing happened.
    #[inline(never)]
    fn run(&self, batches: &[Pages], until: Until) -> Done<(u64, u64)> {
        let Self { ends, size, pause, turns } = self;
        let mut idle = 0;
        let mut pages = batches.iter().cycle();
        let mut under_way: VecDeque<Op> = VecDeque::with_capacity(2);
        let (mut begun, mut done, mut is_over) = (0_u64, 0_u64, false);
        while !is_over || !under_way.is_empty() {
            while !is_over && under_way.len() < 2 {
                let pages = pages.next().ok_or("no pages")?;
                under_way.push_back(ends.peer.write_pages(&ends.src, pages, &ends.dst, pages, *size)?);
                begun += 1;
                is_over = matches!(until, Until::Batches(batches) if begun == batches);
            }
            idle += u64::from(ends.fabric.step().events == 0);
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
        for _ in 0..*turns {
            idle += u64::from(ends.fabric.step().events == 0);
        }
        Ok((done, idle))
    }
}
