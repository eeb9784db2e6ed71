//! One fabric and one region with a peer over loopback and a peer over libfabric. Skipped without libfabric.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use backend_loopback::Loopback;
use multirail::spi::Backend;
use multirail::{Access, Efa, EfaConfig, Fabric, FabricBuilder, TransportConfig, WriteOptions};

const LIMIT: Duration = limit::HANG;
const LEN: usize = 3 << 20;

fn open(transports: &[&TransportConfig]) -> Fabric {
    let transports = transports.iter().map(|transport| (*transport).clone());
    transports.fold(FabricBuilder::new(), FabricBuilder::transport).open().unwrap()
}

fn libfabric() -> Efa {
    Efa::with(EfaConfig::default().provider("tcp").node("127.0.0.1").domains(2))
}

/// The reason why libfabric is missing, or `None`.
fn missing() -> Option<String> {
    libfabric().probe().err().map(|why| format!("{}; {}", why.reason, why.remedy))
}

fn each_peer_over_its_transport() {
    let efa = libfabric();
    let devices = efa.probe().unwrap();
    let libfabric = TransportConfig::new("libfabric", Arc::new(efa)).devices(devices);
    let loopback = TransportConfig::new("loopback", Arc::new(Loopback::new()));
    let ours = open(&[&loopback, &libfabric]);
    let (near, far) = (open(&[&loopback]), open(&[&libfabric]));
    let region = ours.alloc(LEN, Access::all()).unwrap();
    let content: Vec<u8> = (0..LEN).map(|at| (at % 251) as u8).collect();
    region.copy_in(0, &content).unwrap();
    for (other, label) in [(near, "loopback"), (far, "libfabric")] {
        let (peer, _) = ours.connect_local(&other).unwrap();
        let there = other.alloc(LEN, Access::all()).unwrap();
        let remote = peer.import(&there.descriptor()).unwrap();
        let explained = peer.explain_write(&region, 0..LEN, &remote, 0, &WriteOptions::new()).unwrap();
        let taken = explained.transports.iter().find(|choice| choice.taken);
        assert_eq!(taken.map(|choice| choice.transport.as_str()), Some(label));
        peer.write(&region, 0..LEN, &remote, 0).unwrap().wait(LIMIT).unwrap();
        let mut arrived = vec![0; LEN];
        there.copy_out(0, &mut arrived).unwrap();
        assert!(arrived == content, "wrong bytes over {label}");
    }
}

fn main() -> ExitCode {
    conformance::run_or_skip(missing(), conformance::tests![each_peer_over_its_transport])
}
