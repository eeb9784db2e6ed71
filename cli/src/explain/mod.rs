//! `multirail explain`: which cards, core and registration a buffer would use, and why.

mod backends;
mod rails;

use multirail::MachineSource;
use serde::Serialize;
use topology::{Address, Distance, Function, Kind, Machine, RailGroup};

use super::Common;
use super::doctor::{GpuRegistration, gpu_registration};
use super::failure::{CommandFailure, CommandResult, printable};
use super::output::{self, TextTable};
use super::topo::label;
use super::units::Size;

#[derive(clap::Args)]
pub struct ExplainArguments {
    /// The buffer is on this GPU, counted in the order of PCI addresses, as in `multirail topo`
    #[arg(long, value_name = "NUMBER", conflicts_with = "numa")]
    gpu: Option<usize>,

    /// The buffer is host memory registered near this NUMA node
    #[arg(long, value_name = "NUMBER")]
    numa: Option<u32>,

    /// Size of one write, or of one page
    #[arg(long, value_name = "SIZE", default_value = "64KiB")]
    size: Size,

    /// The machine, as for `multirail topo`. For a machine other than this host, decisions that depend on
    /// its drivers are unknown [default: $MULTIRAIL_TOPOLOGY, or this host]
    #[arg(long, value_name = "SOURCE")]
    from: Option<MachineSource>,
}

/// An option of a decision: whether it is chosen, and why.
#[derive(Serialize)]
struct Choice {
    question: &'static str,
    choice: String,
    taken: bool,
    why: String,
}

impl Choice {
    fn taken(question: &'static str, choice: impl Into<String>, why: impl Into<String>) -> Self {
        Self { question, choice: choice.into(), taken: true, why: why.into() }
    }

    fn left(question: &'static str, choice: impl Into<String>, why: impl Into<String>) -> Self {
        Self { taken: false, ..Self::taken(question, choice, why) }
    }
}

/// The memory of the buffer.
enum Memory<'a> {
    Gpu(usize, &'a Function),
    Host(Option<u32>),
}

impl Memory<'_> {
    fn description(&self) -> String {
        match self {
            Self::Gpu(number, gpu) => format!("GPU {number} at {}", gpu.address),
            Self::Host(Some(node)) => format!("host memory of NUMA node {node}"),
            Self::Host(None) => "host memory".to_owned(),
        }
    }

    /// Returns true if a rail group serves this memory.
    fn is_served_by(&self, group: &GroupDescription) -> bool {
        match self {
            Self::Gpu(_, gpu) => group.gpus.contains(&gpu.address),
            Self::Host(node) => node.is_none() || group.node == *node,
        }
    }
}

/// A rail group of an open fabric, or of a described machine.
struct GroupDescription {
    /// Names of devices, or of cards on a described machine.
    rails: Vec<String>,
    gpus: Vec<Address>,
    cards: Vec<Address>,
    node: Option<u32>,
    distance: Option<Distance>,
    cores: Vec<u32>,
    core: Option<u32>,
}

impl GroupDescription {
    fn described(machine: &Machine, group: RailGroup) -> Self {
        let rails = group.cards.iter().map(|card| label::card(machine, *card)).collect();
        let RailGroup { gpus, cards, node, distance, cores, core, .. } = group;
        Self { rails, gpus, cards, node, distance, cores, core }
    }
}

/// Prints each decision with its options.
pub fn run(common: &Common, arguments: &ExplainArguments) -> CommandResult {
    let source = arguments.from.clone().map_or_else(MachineSource::of_this_host, Ok)?;
    let is_here = arguments.from.is_none() || source == MachineSource::ThisHost;
    let (name, machine) = source.read()?;
    let name = printable(&name);
    common.check_security()?;
    let memory = memory(&name, &machine, arguments)?;
    let mut found = match is_here {
        true => backends::found(common)?,
        false => backends::AvailableBackends::default(),
    };
    let mut backends = common.registry()?.rail_groups(&common.choice()?, &machine, is_here)?;
    // The first backend that both sides have is used. The other backends' cards are listed as not chosen.
    let others = backends.split_off(backends.len().min(1));
    let groups = match found.groups.is_empty() {
        true => {
            let groups = backends.iter().flat_map(|backend| backend.groups.clone());
            groups.map(|group| GroupDescription::described(&machine, group)).collect()
        }
        false => std::mem::take(&mut found.groups),
    };
    let mut choices = rails::choices(&machine, &groups, &memory, is_here);
    if let Some(first) = backends.first() {
        choices.extend(others.iter().map(|other| rails::not_preferred(&machine, first.backend, other)));
    }
    choices.extend(registration_choices(&memory, is_here));
    let rails = groups.iter().filter(|group| memory.is_served_by(group)).map(|group| group.rails.len()).sum();
    choices.extend(backends::choices(&found, is_here, arguments.size, rails));
    if common.json {
        return choices.iter().try_for_each(output::json);
    }
    output::print_text(&format!("{} of {name}, {} at a time", memory.description(), arguments.size))?;
    let mut table = TextTable::named_by(2).text("decision").text("option").text("chosen").text("reason");
    for choice in choices {
        let chosen = if choice.taken { "yes" } else { "no" };
        table.row(vec![choice.question.to_owned(), choice.choice, chosen.to_owned(), choice.why]);
    }
    table.print()
}

fn memory<'a>(name: &str, machine: &'a Machine, arguments: &ExplainArguments) -> CommandResult<Memory<'a>> {
    if let Some(number) = arguments.gpu {
        let gpus: Vec<&Function> = machine.of_kind(Kind::Gpu).collect();
        return match gpus.get(number) {
            Some(gpu) => Ok(Memory::Gpu(number, gpu)),
            None => Err(CommandFailure::new(format!(
                "{name} has {}; GPU numbers start at 0; without --gpu the buffer is host memory",
                label::count(gpus.len(), "GPU")
            ))),
        };
    }
    match arguments.numa {
        Some(node) if machine.nodes.iter().all(|known| known.number != node) => {
            let known: Vec<String> = machine.nodes.iter().map(|node| node.number.to_string()).collect();
            Err(CommandFailure::new(format!("{name} has no NUMA node {node}; it has: {}", known.join(", "))))
        }
        node => Ok(Memory::Host(node)),
    }
}

const REGISTRATION: &str = "registration";
const DMA_BUF: &str = "DMA-BUF";
const PEERMEM: &str = "nvidia_peermem";

/// The ways to register the memory, in order of preference.
fn registration_choices(memory: &Memory<'_>, is_here: bool) -> Vec<Choice> {
    let Memory::Gpu(..) = memory else {
        let why = "the card's driver pins host memory";
        return vec![Choice::taken(REGISTRATION, "by address", why)];
    };
    if !is_here {
        let why = "depends on the machine's kernel and GPU driver: run the command there";
        return [DMA_BUF, PEERMEM].map(|way| Choice::left(REGISTRATION, way, why)).into();
    }
    let GpuRegistration { dma_buf, peermem } = gpu_registration();
    let mut choices = Vec::new();
    let is_dma_buf = dma_buf.is_ok();
    choices.push(match dma_buf {
        Ok(description) => Choice::taken(REGISTRATION, DMA_BUF, description),
        Err(why) => Choice::left(REGISTRATION, DMA_BUF, why),
    });
    choices.push(match peermem {
        Ok(_) if is_dma_buf => Choice::left(REGISTRATION, PEERMEM, "DMA-BUF is preferred"),
        Ok(description) => Choice::taken(REGISTRATION, PEERMEM, description),
        Err(why) => Choice::left(REGISTRATION, PEERMEM, why),
    });
    let why = "never automatic: if registration fails, you get an error, not staging";
    choices.push(Choice::left(REGISTRATION, "staging in host memory", why));
    choices
}
