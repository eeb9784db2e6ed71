//! Fabrics: opening and closing, listening, and what is known of them.

use std::sync::{Mutex, MutexGuard, PoisonError};

use multirail::{Fabric, wait};

use crate::abi::*;
use crate::accepted::Accepted;
use crate::arguments::{Entries, Out, OutBytes, OutText, Text, pairs};
use crate::failure::Failure;
use crate::handles::{FABRICS, PEERS, REGIONS};
use crate::inbox::Inbox;
use crate::metadata::Metadata;
use crate::op::begun;
use crate::operation::Value;
use crate::settings::Settings;
use crate::transfer_options::limit;

/// A fabric, and what a C program need not keep itself: its listener, and its notifications.
pub struct OpenFabric {
    pub fabric: Fabric,
    pub inbox: Inbox,
    /// The hosts that the metadata tells.
    advertised: Vec<String>,
    listening: Mutex<Option<Listening>>,
}

struct Listening {
    address: String,
    accepted: std::sync::Arc<Accepted>,
}

impl OpenFabric {
    fn open(settings: &Settings<'_>) -> Result<Self, Failure> {
        let advertised = settings.list("advertise")?.unwrap_or_default();
        let fabric = settings.builder()?.open()?;
        let opened = Self {
            inbox: Inbox::new(&fabric),
            fabric,
            advertised: advertised.into_iter().map(str::to_owned).collect(),
            listening: Mutex::new(None),
        };
        if let Some(address) = settings.text("listen") {
            opened.listen(address).inspect_err(|_| opened.fabric.close())?;
        }
        Ok(opened)
    }

    fn listening(&self) -> MutexGuard<'_, Option<Listening>> {
        self.listening.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn listen(&self, address: &str) -> Result<(), Failure> {
        let mut listening = self.listening();
        if let Some(Listening { address, .. }) = &*listening {
            return Err(Failure::new(MR_ERROR_BUSY, format!("the fabric listens at {address} already")));
        }
        // The library limits the time.
        let listener = wait(self.fabric.listen(address), limit(MR_FOREVER))??;
        let address = listener.local_addr();
        *listening = Some(Listening { address, accepted: std::sync::Arc::new(Accepted::new(listener)?) });
        Ok(())
    }

    fn address(&self) -> Result<String, Failure> {
        self.listening().as_ref().map(|listening| listening.address.clone()).ok_or_else(not_listening)
    }

    fn accepted(&self) -> Result<std::sync::Arc<Accepted>, Failure> {
        let listening = self.listening();
        listening
            .as_ref()
            .map(|listening| std::sync::Arc::clone(&listening.accepted))
            .ok_or_else(not_listening)
    }

    fn close(&self) {
        self.fabric.close();
        if let Ok(accepted) = self.accepted() {
            accepted.join();
        }
    }
}

#[cold]
fn not_listening() -> Failure {
    let why = "the fabric does not listen; open it with the option listen, or call mr_fabric_listen";
    Failure::new(MR_ERROR_NOT_FOUND, why)
}

entry_points! {
    fn mr_fabric_open(options: Entries<mr_option>, count: usize, fabric: Out<mr_fabric>) {
        fabric.check("fabric")?;
        let settings = Settings::new(pairs(options.read(count, "options")?)?)?;
        fabric.set(FABRICS.insert(OpenFabric::open(&settings)?)?);
        Ok(MR_OK)
    }

    fn mr_fabric_close(fabric: mr_fabric) {
        FABRICS.take(fabric)?.close();
        Ok(MR_OK)
    }

    fn mr_fabric_listen(fabric: mr_fabric, address: Text) {
        FABRICS.find(fabric)?.listen(address.read("address")?)?;
        Ok(MR_OK)
    }

    fn mr_fabric_address(fabric: mr_fabric, buf: OutText, len: usize, needed: Out<usize>) {
        buf.write(len, needed, &FABRICS.find(fabric)?.address()?)
    }

    fn mr_fabric_metadata(fabric: mr_fabric, buf: OutBytes, len: usize, needed: Out<usize>) {
        let fabric = FABRICS.find(fabric)?;
        let metadata = Metadata::new(fabric.fabric.incarnation(), &fabric.address()?, &fabric.advertised)?;
        buf.write(len, needed, &metadata.to_bytes())
    }

    fn mr_fabric_accept(fabric: mr_fabric, timeout_ns: u64, peer: Out<mr_peer>) {
        peer.check("peer")?;
        match FABRICS.find(fabric)?.accepted()?.next(limit(timeout_ns))? {
            Some(accepted) => peer.set(PEERS.insert(accepted)?),
            None => return Ok(MR_PENDING),
        }
        Ok(MR_OK)
    }

    fn mr_fabric_peer(fabric: mr_fabric, id: u64, peer: Out<mr_peer>) {
        peer.check("peer")?;
        let found = multirail::PeerId::from_number(id);
        let fabric = FABRICS.find(fabric)?;
        let found = found.and_then(|found| fabric.fabric.peer(found));
        let why = || format!("no peer with number {id} is connected");
        peer.set(PEERS.insert(found.ok_or_else(|| Failure::new(MR_ERROR_NOT_FOUND, why()))?)?);
        Ok(MR_OK)
    }

    fn mr_fabric_incarnation(fabric: mr_fabric, incarnation: Out<u64>) {
        incarnation.check("incarnation")?;
        incarnation.set(FABRICS.find(fabric)?.fabric.incarnation());
        Ok(MR_OK)
    }

    fn mr_fabric_counters(fabric: mr_fabric, buf: OutText, len: usize, needed: Out<usize>) {
        let counters = serde_json::to_string(&FABRICS.find(fabric)?.fabric.counters());
        buf.write(len, needed, &counters.map_err(not_text)?)
    }

    fn mr_fabric_transports(fabric: mr_fabric, buf: OutText, len: usize, needed: Out<usize>) {
        let transport = |transport: multirail::TransportInfo| {
            let devices: Vec<&str> = transport.devices.iter().map(|device| device.name.as_str()).collect();
            serde_json::json!({"label": transport.label, "backend": transport.backend, "devices": devices})
        };
        let transports: Vec<_> = FABRICS.find(fabric)?.fabric.transports().into_iter().map(transport).collect();
        buf.write(len, needed, &serde_json::to_string(&transports).map_err(not_text)?)
    }

    fn mr_fabric_drain_device(fabric: mr_fabric, device: Text, op: Out<mr_op>) {
        op.check("op")?;
        let drain = FABRICS.find(fabric)?.fabric.drain_device(device.read("device")?)?;
        begun(op, async move { drain.await.map(|()| Value::Nothing) })
    }

    fn mr_fabric_restore_device(fabric: mr_fabric, device: Text) {
        FABRICS.find(fabric)?.fabric.restore_device(device.read("device")?)?;
        Ok(MR_OK)
    }

    fn mr_fabric_publish(fabric: mr_fabric, name: Text, region: mr_region) {
        FABRICS.find(fabric)?.fabric.publish(name.read("name")?, &*REGIONS.find(region)?)?;
        Ok(MR_OK)
    }

    fn mr_fabric_unpublish(fabric: mr_fabric, name: Text) {
        FABRICS.find(fabric)?.fabric.unpublish(name.read("name")?);
        Ok(MR_OK)
    }
}

/// Numbers and names always have a form in JSON.
#[cold]
pub fn not_text(why: serde_json::Error) -> Failure {
    Failure::new(MR_ERROR_OTHER, format!("the text cannot be written: {why}"))
}
