//! `multirail info`: the backends by name, available or why not.

use multirail::spi::{DeviceInfo, Operations};
use multirail::{BackendChoice, Registry, TransportInfo};
use serde::Serialize;

use super::failure::Done;
use super::units::Size;
use super::{Common, output};

#[derive(Serialize)]
struct Row {
    backend: &'static str,
    available: bool,
    devices: Vec<Device>,
    reason: Option<String>,
    remedy: Option<String>,
    send_depth: Option<u32>,
    max_message: Option<u64>,
    idle: Option<String>,
    /// `emulated` where the peers' processors do what the device cannot.
    rdma_write: Option<&'static str>,
}

#[derive(Serialize)]
struct Device {
    name: String,
    about: String,
    gbps: Option<f64>,
    address: Option<String>,
}

/// Prints one row per backend.
pub fn run(common: &Common) -> Done {
    let registry = common.provider.registry()?;
    let rows = match common.choice()? {
        BackendChoice::Auto => registry.names().map(|name| row(&registry, name)).collect::<Done<Vec<_>>>()?,
        BackendChoice::Named(name) => vec![row(&registry, registry.find(&name)?.name())?],
    };
    if common.json {
        return rows.iter().try_for_each(output::json);
    }
    let header = ["backend", "available", "devices", "capabilities", "why not", "what mends it"];
    output::table(&header, rows.into_iter().map(cells).collect(), 0..0)
}

fn row(registry: &Registry, name: &'static str) -> Done<Row> {
    let mut row = Row {
        backend: name,
        available: false,
        devices: Vec::new(),
        reason: None,
        remedy: None,
        send_depth: None,
        max_message: None,
        idle: None,
        rdma_write: None,
    };
    match registry.find(name)?.probe() {
        Ok(devices) => {
            row.available = true;
            row.devices = devices.iter().map(device).collect();
            // What a domain can do is only known once it is open.
            match capabilities(registry, name) {
                Ok(Some(opened)) => {
                    row.send_depth = Some(opened.capabilities.send_depth);
                    row.max_message = Some(opened.capabilities.max_message);
                    row.idle = Some(idle(&opened));
                    let is_emulated = opened.capabilities.emulated.contains(Operations::WRITE);
                    row.rdma_write = is_emulated.then_some("emulated");
                }
                Ok(None) => {}
                Err(error) => {
                    row.available = false;
                    row.reason = Some(format!("found, but opening it failed: {}", error.sentence()));
                    row.remedy = Some("mend what the reason names".to_owned());
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

fn capabilities(registry: &Registry, name: &str) -> Done<Option<TransportInfo>> {
    let fabric = registry.builder(&BackendChoice::Named(name.to_owned()))?.open()?;
    let first = fabric.transports().into_iter().next();
    fabric.close();
    Ok(first)
}

/// How a worker without work waits: woken if the device can, else by naps.
fn idle(transport: &TransportInfo) -> String {
    if transport.capabilities.wakes {
        return "sleeps until woken".to_owned();
    }
    format!("naps of up to {} µs; the device cannot wake it", transport.capabilities.idle_backoff.as_micros())
}

fn device(device: &DeviceInfo) -> Device {
    Device {
        name: device.name.clone(),
        about: device.about.clone(),
        gbps: device.link_bits_per_s.map(|bits| bits as f64 / 1e9),
        address: device.address.map(|address| address.to_string()),
    }
}

fn cells(row: Row) -> Vec<String> {
    let devices = row.devices.iter().map(|device| match device.gbps {
        Some(gbps) => format!("{} ({}, {gbps:.0} Gbps)", device.name, device.about),
        None => format!("{} ({})", device.name, device.about),
    });
    let mut highlights = Vec::new();
    highlights.extend(row.send_depth.map(|depth| format!("send depth {depth}")));
    highlights.extend(row.max_message.map(|bytes| format!("max message {}", Size(bytes))));
    highlights.extend(row.idle.map(|idle| format!("idle: {idle}")));
    highlights.extend(row.rdma_write.map(|how| format!("rdma_write: {how}, by the peers' processors")));
    vec![
        row.backend.to_owned(),
        if row.available { "yes" } else { "no" }.to_owned(),
        devices.collect::<Vec<_>>().join("\n"),
        highlights.join("\n"),
        row.reason.unwrap_or_default(),
        row.remedy.unwrap_or_default(),
    ]
}
