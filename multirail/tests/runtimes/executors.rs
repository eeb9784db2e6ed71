//! The scenario on every kind of executor.

use std::future::Future;
use std::sync::Arc;

use multirail::Result;
use tokio::runtime::{Builder, Runtime};

use crate::scenario::scenario;
use crate::strict;
use crate::{LIMIT, TestDevices, limited};

/// The number of concurrent tasks on executors with threads.
const TASKS: u64 = 6;

fn of(device: TestDevices, seed: u64) -> impl Future<Output = Result<()>> + Send + 'static {
    limited(scenario(device.builder(seed), device.builder(seed + 1)))
}

#[test]
fn woken_only() {
    TestDevices::ALL.into_iter().for_each(|device| {
        strict::run(scenario(device.builder(1), device.builder(2))).unwrap();
    });
}

#[test]
fn pollster() {
    TestDevices::ALL.into_iter().for_each(|device| pollster::block_on(of(device, 2)).unwrap());
}

#[test]
fn futures_executor() {
    TestDevices::ALL.into_iter().for_each(|device| futures::executor::block_on(of(device, 3)).unwrap());
}

#[test]
fn smol() {
    TestDevices::ALL.into_iter().for_each(|device| smol::block_on(of(device, 4)).unwrap());
    // On the global executor's thread, and on the test's own threads.
    smol::block_on(smol::spawn(of(TestDevices::Late, 5))).unwrap();
    let executor = Arc::new(smol::Executor::new());
    let tasks: Vec<_> = (0..TASKS).map(|seed| executor.spawn(of(TestDevices::Late, seed))).collect();
    let (running, stopped) = smol::channel::bounded::<()>(1);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let (executor, stopped) = (Arc::clone(&executor), stopped.clone());
            scope.spawn(move || smol::block_on(executor.run(stopped.recv())).unwrap_err());
        }
        let ended = smol::block_on(async {
            for task in tasks {
                task.await?;
            }
            Ok::<_, multirail::Error>(())
        });
        drop(running);
        ended.unwrap();
    });
}

#[test]
fn tokio_current_thread() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    TestDevices::ALL.into_iter().for_each(|device| runtime.block_on(of(device, 6)).unwrap());
    let task = runtime.spawn(of(TestDevices::Late, 7));
    runtime.block_on(task).unwrap().unwrap();
    let local = tokio::task::LocalSet::new();
    local
        .block_on(&runtime, async { tokio::task::spawn_local(of(TestDevices::Late, 8)).await })
        .unwrap()
        .unwrap();
}

#[test]
fn tokio_multi_thread() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).build().unwrap();
    let tasks: Vec<_> = TestDevices::ALL
        .into_iter()
        .flat_map(|device| (0..TASKS).map(move |seed| (device, seed)))
        .map(|(device, seed)| runtime.spawn(of(device, seed)))
        .collect();
    runtime.block_on(async {
        for task in tasks {
            task.await.unwrap().unwrap();
        }
    });
}

#[test]
fn no_executor() {
    TestDevices::ALL.into_iter().for_each(|device| multirail::wait(of(device, 9), LIMIT).unwrap().unwrap());
}

/// The test does not call `step`: the wait drives both fabrics.
#[test]
fn no_executor_and_no_workers() {
    for device in TestDevices::ALL {
        let builder = |seed| device.builder(seed).caller_driven();
        multirail::wait(scenario(builder(10), builder(11)), LIMIT).unwrap().unwrap();
    }
}

fn serves(runtime: &Runtime) {
    for device in TestDevices::ALL {
        let builder = |seed| device.builder(seed).control_on(runtime.handle().clone());
        runtime.block_on(limited(scenario(builder(12), builder(13)))).unwrap();
    }
}

#[test]
fn a_runtime_of_one_thread_serves_the_connections_too() {
    serves(&Builder::new_current_thread().enable_all().build().unwrap());
}

#[test]
fn a_runtime_of_many_threads_serves_the_connections_too() {
    serves(&Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap());
}
