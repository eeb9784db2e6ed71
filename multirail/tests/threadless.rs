//! A fabric without threads: callers drive its engines and serve its connections.
#![cfg(target_os = "linux")]

use std::sync::Arc;
use std::time::Duration;

use backend_loopback::Loopback;
use multirail::{Access, Fabric, FabricBuilder, TransportConfig};
use tokio::runtime::{Builder, Runtime};
use tokio::task::yield_now;

const LIMIT: Duration = limit::HANG;

fn open(runtime: &Runtime) -> Fabric {
    let loopback = TransportConfig::new("loopback", Arc::new(Loopback::new()));
    let builder = FabricBuilder::new().transport(loopback).caller_driven();
    builder.control_on(runtime.handle().clone()).open().unwrap()
}

/// The number of this process's threads.
fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn connects_and_writes_without_a_thread() {
    let before = threads();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let (a, b) = (open(&runtime), open(&runtime));
    runtime.block_on(async {
        let listener = b.listen("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr();
        let connecting = async { tokio::join!(a.connect(&address), listener.accept()) };
        let (to_b, to_a) = driven([&a, &b], connecting).await;
        let (to_b, to_a) = (to_b.unwrap(), to_a.unwrap());
        let (src, dst) = (a.alloc(4096, Access::LOCAL).unwrap(), b.alloc(4096, Access::all()).unwrap());
        src.copy_in(0, &[7; 4096]).unwrap();
        b.publish("dst", &dst).unwrap();
        let remote = driven([&a, &b], to_b.region("dst")).await.unwrap();
        to_b.write(&src, 0..4096, &remote, 0).unwrap().wait(LIMIT).unwrap();
        let mut page = [0; 4096];
        dst.copy_out(0, &mut page).unwrap();
        assert_eq!(page, [7; 4096]);
        // Loopback has one thread per fabric, through which other processes find it. There is no other thread.
        assert_eq!(threads(), before + 2);
        a.close_and_wait().await;
        assert_eq!(
            driven([&b, &b], async { to_a.closed().await }).await.kind(),
            multirail::ErrorKind::Closed
        );
    });
}

/// Awaits `future` while driving both fabrics.
async fn driven<T>(fabrics: [&Fabric; 2], future: impl Future<Output = T>) -> T {
    let drive = async {
        loop {
            fabrics.into_iter().for_each(|fabric| _ = fabric.step());
            yield_now().await;
        }
    };
    tokio::select! {
        output = future => output,
        () = drive => unreachable!("it drives for ever"),
    }
}
