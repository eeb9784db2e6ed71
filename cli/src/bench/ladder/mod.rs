//! `multirail bench ladder`: the gain of each of Perplexity's steps on this machine.

mod ladder_run;
mod row;
mod rung;

use std::sync::Arc;
use std::time::Duration;

use backend_loopback::{Loopback, LoopbackConfig, Null};
use multirail::BackendChoice;
use multirail::spi::Backend;

use super::report::RowReport;
use crate::Common;
use crate::failure::{CommandFailure, CommandResult};
use crate::units::{self, Size};
use ladder_run::{LadderDevices, LadderRun};
use row::LadderRow;
use rung::{RUNGS, Rung};

/// The arguments of `multirail bench ladder`.
#[derive(clap::Args)]
pub struct LadderArguments {
    /// Use devices that move no bytes, which leaves the cost of the software
    #[arg(long)]
    null: bool,

    /// Number of null or loopback devices [default: 32 null ones, 4 of loopback]
    #[arg(long, value_name = "N")]
    devices: Option<u32>,

    /// Number of their rail groups [default: one per core, at most 8]
    #[arg(long, value_name = "N")]
    groups: Option<u32>,

    /// Size of a page
    #[arg(long, default_value = "64KiB", value_name = "SIZE")]
    size: Size,

    /// Requests per doorbell, on rungs with batched posting
    #[arg(long, default_value_t = 64, value_name = "N")]
    batch: usize,

    /// Duration of each rung
    #[arg(long, default_value = "1s", value_parser = units::duration, value_name = "TIME")]
    duration: Duration,

    /// Count instructions with valgrind (null devices)
    #[arg(long, requires = "null")]
    instructions: bool,

    /// Run one rung with this many operations, driven by the caller, and print its work requests
    #[arg(long, hide = true, value_parser = ladder_run::parse)]
    counted: Option<(usize, u64)>,
}

/// Measures the rungs and prints one row per rung.
pub fn run(common: &Common, arguments: &LadderArguments) -> CommandResult {
    let page = usize::try_from(arguments.size.0).unwrap_or(usize::MAX);
    if page == 0 || page > 1 << 20 || arguments.batch == 0 {
        return Err(CommandFailure::new("--size must be between 1 byte and 1 MiB, and --batch at least 1"));
    }
    let devices = arguments.open(common)?;
    if let Some((number, operations)) = arguments.counted {
        let rung = RUNGS.get(number).ok_or_else(|| CommandFailure::new("the rung does not exist"))?;
        return ladder_run::counted(&devices, rung, arguments.batch, page, operations);
    }
    let cores: Vec<usize> = (0..cores()).collect();
    let null = arguments.null;
    let report = RowReport::new(common.json, RUNGS.len(), "rungs", move |rows: &[LadderRow]| {
        LadderRow::print(rows, null)
    });
    report.take_signals(Vec::new())?;
    report.end(measure_rungs(arguments, &devices, page, &cores, &report))
}

/// Measures every rung until a signal arrives.
fn measure_rungs(
    arguments: &LadderArguments,
    devices: &LadderDevices,
    page: usize,
    cores: &[usize],
    report: &RowReport<LadderRow>,
) -> CommandResult {
    for (number, rung) in RUNGS.iter().enumerate() {
        let workers = rung.workers(arguments.batch, cores);
        let ladder_run = LadderRun::open(devices, rung, page, |builder| builder.workers(workers.clone()))?;
        let measured = ladder_run.run_for(arguments.duration, || report.is_interrupted())?;
        drop(ladder_run);
        if report.is_interrupted() {
            break;
        }
        let instructions = match arguments.instructions {
            true => Some(ladder_run::instructions(number, &arguments.counted_options())?),
            false => None,
        };
        let busy_cores = arguments.busy_cores(rung, devices);
        report.add(LadderRow::new(number + 1, rung, page, measured, busy_cores, instructions), false)?;
    }
    Ok(())
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

impl LadderArguments {
    fn count(&self) -> u32 {
        self.devices.unwrap_or(if self.null { 32 } else { 4 })
    }

    fn groups(&self) -> u32 {
        self.groups.unwrap_or_else(|| cores().min(8) as u32)
    }

    fn open(&self, common: &Common) -> CommandResult<LadderDevices> {
        let (count, groups) = (self.count(), self.groups());
        if count == 0 || count > 64 || groups == 0 || groups > count {
            return Err(CommandFailure::new(
                "--devices must be between 1 and 64, and --groups between 1 and --devices",
            ));
        }
        if self.null && (common.backend.is_some() || common.provider.is_given()) {
            return Err(CommandFailure::new("--null uses no backend; remove the backend options, or --null"));
        }
        let backend: Arc<dyn Backend> = match (self.null, common.choice()?) {
            (true, _) => Arc::new(Null::new(count).groups(groups)),
            (false, BackendChoice::Named(name)) if name != "loopback" => {
                if self.devices.is_some() || self.groups.is_some() {
                    return Err(CommandFailure::new("--devices and --groups are for null and loopback"));
                }
                Arc::clone(common.registry()?.find(&name)?)
            }
            (false, _) => Arc::new(Loopback::with(LoopbackConfig::default().devices(count).groups(groups))),
        };
        match backend.probe() {
            Ok(devices) => Ok(LadderDevices { backend, devices }),
            Err(why) => {
                Err(CommandFailure::new(format!("{}: {}; {}", backend.name(), why.reason, why.remedy)))
            }
        }
    }

    /// The options that give a counted run the same settings.
    fn counted_options(&self) -> Vec<String> {
        let devices = self.count().to_string();
        let (groups, size, batch) =
            (self.groups().to_string(), self.size.0.to_string(), self.batch.to_string());
        let options =
            ["--null", "--devices", &devices, "--groups", &groups, "--size", &size, "--batch", &batch];
        options.map(str::to_owned).to_vec()
    }

    /// The number of cores that a rung's workers keep busy.
    fn busy_cores(&self, rung: &Rung, devices: &LadderDevices) -> usize {
        let mut groups: Vec<_> = devices.devices.iter().map(|device| device.group).collect();
        groups.dedup();
        if rung.thread_per_group && rung.all_rails { groups.len().min(cores()) } else { 1 }
    }
}
