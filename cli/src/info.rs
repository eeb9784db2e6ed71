//! `multirail info`: lists the backends, and why one is unavailable.

use std::ops::Range;

use multirail::cuda::Device;
use multirail::spi::{DeviceInfo, Operations};
use multirail::{BackendChoice, GroupLocation, Registry, TransportInfo};
use serde::Serialize;

use crate::failure::{CommandFailure, CommandResult};
use crate::output::TextTable;
use crate::units::Size;
use crate::{Common, output};

#[derive(Serialize)]
struct InfoRow {
    backend: &'static str,
    available: bool,
    devices: Vec<DeviceRow>,
    reason: Option<String>,
    remedy: Option<String>,
    /// The number of requests that a device can hold.
    send_depth: Option<u32>,
    recv_depth: Option<u32>,
    max_message: Option<u64>,
    max_write: Option<u64>,
    /// The limit of regions, if the device has one.
    max_regions: Option<u32>,
    imm_bytes: Option<u8>,
    idle: Option<String>,
    groups: Vec<RailGroupRow>,
    /// `emulated` if the peers' CPUs run the writes that the device cannot run.
    rdma_write: Option<&'static str>,
}

/// A rail group: its devices, its GPUs, and the core of its worker.
#[derive(Serialize)]
struct RailGroupRow {
    devices: Vec<String>,
    gpus: Vec<String>,
    node: Option<u32>,
    core: Option<u32>,
}

#[derive(Serialize)]
struct DeviceRow {
    name: String,
    about: String,
    gbps: Option<f64>,
    address: Option<String>,
}

impl InfoRow {
    fn new(backend: &'static str) -> Self {
        Self {
            backend,
            available: false,
            devices: Vec::new(),
            reason: None,
            remedy: None,
            send_depth: None,
            recv_depth: None,
            max_message: None,
            max_write: None,
            max_regions: None,
            imm_bytes: None,
            idle: None,
            groups: Vec::new(),
            rdma_write: None,
        }
    }

    /// The failure of a command that asked for this backend.
    fn failure(&self) -> CommandFailure {
        let words = |text: &Option<String>| text.clone().unwrap_or_default();
        let (reason, remedy) = (words(&self.reason), words(&self.remedy));
        CommandFailure::new(format!("{} is unavailable: {reason}; {remedy}", self.backend))
    }
}

/// Prints one row per backend, and one for GPU memory. If a backend is named, prints its row only. Fails if a
/// requested backend is unavailable.
pub fn run(common: &Common) -> CommandResult {
    common.check_security()?;
    let (registry, choice) = (common.registry()?, common.choice()?);
    let rows = match &choice {
        BackendChoice::Auto => {
            let rows = registry.names().map(|name| row(&registry, name));
            rows.chain([Ok(gpu_memory())]).collect::<CommandResult<Vec<_>>>()?
        }
        BackendChoice::Named(name) => vec![row(&registry, registry.find(name)?.name())?],
    };
    let missing = rows.iter().find(|row| !row.available && common.asks_for(&choice, row.backend));
    let missing = missing.map(InfoRow::failure);
    match common.json {
        true => rows.iter().try_for_each(output::json)?,
        false => print(rows)?,
    }
    missing.map_or(Ok(()), Err)
}

fn print(rows: Vec<InfoRow>) -> CommandResult {
    let table = TextTable::named_by(1).text("backend").text("available").text("devices").text("capabilities");
    let mut table = table.text("reason").text("fix");
    rows.into_iter().for_each(|row| table.row(cells(row)));
    table.print()
}

fn row(registry: &Registry, name: &'static str) -> CommandResult<InfoRow> {
    let mut row = InfoRow::new(name);
    match registry.find(name)?.probe() {
        Ok(devices) => {
            row.available = true;
            row.devices = devices.iter().map(device).collect();
            // The capabilities of a device are known only once it is open.
            match capabilities(registry, name) {
                Ok(Some(opened)) => {
                    let limits = &opened.capabilities;
                    (row.send_depth, row.recv_depth) = (Some(limits.send_depth), Some(limits.recv_depth));
                    (row.max_message, row.max_write) = (Some(limits.max_message), Some(limits.max_write));
                    (row.max_regions, row.imm_bytes) = (limited(limits.max_regions), Some(limits.imm_bytes));
                    row.idle = Some(idle(&opened));
                    row.groups = groups(&opened);
                    let is_emulated = limits.emulated.contains(Operations::WRITE);
                    row.rdma_write = is_emulated.then_some("emulated");
                }
                Ok(None) => {}
                Err(error) => {
                    row.available = false;
                    row.reason = Some(format!("found, but opening it failed: {}", error.message()));
                    row.remedy = Some("fix what the reason names".to_owned());
                }
            }
        }
        Err(why) => {
            row.reason = Some(why.reason);
            row.remedy = Some(why.remedy);
        }
    }
    Ok(row)
}

/// Returns a limit, or `None` for no limit.
fn limited(most: u32) -> Option<u32> {
    (most < u32::MAX).then_some(most)
}

fn capabilities(registry: &Registry, name: &str) -> CommandResult<Option<TransportInfo>> {
    let fabric = registry.builder(&BackendChoice::Named(name.to_owned()))?.open()?;
    let first = fabric.transports().into_iter().next();
    fabric.close();
    Ok(first)
}

/// The row of the GPUs. They belong to no backend, but their memory can be registered with one.
fn gpu_memory() -> InfoRow {
    let mut row = InfoRow::new("GPU memory");
    match Device::all() {
        Ok(gpus) => {
            row.available = true;
            row.devices = gpus.iter().map(gpu).collect();
        }
        Err(why) => {
            row.reason = Some(why.context().to_owned());
            row.remedy = Some("run `multirail doctor`, which checks the GPU setup".to_owned());
        }
    }
    row
}

fn gpu(gpu: &Device) -> DeviceRow {
    let path = if gpu.has_dma_buf() { "DMA-BUF" } else { "no DMA-BUF" };
    DeviceRow {
        name: format!("GPU {}", gpu.ordinal()),
        about: format!("{}, {path}, writes of cards ordered by: {:?}", gpu.name(), gpu.writes_ordering()),
        gbps: None,
        address: gpu.address().map(|address| address.to_string()),
    }
}

/// How an idle worker waits: it sleeps if the device can wake it, or it polls with short sleeps.
fn idle(transport: &TransportInfo) -> String {
    if transport.capabilities.supports_wakeup {
        return "sleeps until woken".to_owned();
    }
    format!(
        "polls every {} µs or less; the device cannot wake it",
        transport.capabilities.idle_backoff.as_micros()
    )
}

fn groups(transport: &TransportInfo) -> Vec<RailGroupRow> {
    let group = |(rails, location): (&Range<usize>, &GroupLocation)| RailGroupRow {
        devices: transport.devices[rails.clone()].iter().map(|device| device.name.clone()).collect(),
        gpus: location.gpus.iter().map(ToString::to_string).collect(),
        node: location.node,
        core: location.core,
    };
    transport.groups.iter().zip(&transport.locations).map(group).collect()
}

/// The number of groups, and the CPUs of pinned workers.
fn summary(groups: &[RailGroupRow]) -> Option<String> {
    let cores: Vec<String> = groups.iter().filter_map(|group| Some(group.core?.to_string())).collect();
    match (groups.len(), cores.is_empty()) {
        (0, _) => None,
        (count, true) => Some(format!("rail groups {count}")),
        (count, false) => Some(format!("rail groups {count}, workers on CPUs {}", cores.join(", "))),
    }
}

fn device(device: &DeviceInfo) -> DeviceRow {
    DeviceRow {
        name: device.name.clone(),
        about: device.about.clone(),
        gbps: device.link_bits_per_s.map(|bits| bits as f64 / 1e9),
        address: device.address.map(|address| address.to_string()),
    }
}

fn cells(row: InfoRow) -> Vec<String> {
    let devices = row.devices.iter().map(|device| match device.gbps {
        Some(gbps) => format!("{} ({}, {gbps:.0} Gbps)", device.name, device.about),
        None => format!("{} ({})", device.name, device.about),
    });
    let mut highlights = Vec::new();
    highlights.extend(row.send_depth.map(|depth| format!("send depth {depth}")));
    highlights.extend(row.recv_depth.map(|depth| format!("receive depth {depth}")));
    highlights.extend(row.max_message.map(|bytes| format!("max message {}", Size(bytes))));
    highlights.extend(row.max_write.map(|bytes| format!("max write {}", Size(bytes))));
    highlights.extend(row.max_regions.map(|regions| format!("regions {regions}")));
    highlights.extend(row.imm_bytes.map(|bytes| format!("imm {bytes} bytes")));
    highlights.extend(summary(&row.groups));
    highlights.extend(row.idle.map(|idle| format!("idle: {idle}")));
    highlights.extend(row.rdma_write.map(|how| format!("rdma_write: {how}, by the peers' CPUs")));
    vec![
        row.backend.to_owned(),
        if row.available { "yes" } else { "no" }.to_owned(),
        devices.collect::<Vec<_>>().join("\n"),
        highlights.join("\n"),
        row.reason.unwrap_or_default(),
        row.remedy.unwrap_or_default(),
    ]
}
