//! The scenario on a runtime that also serves the connections.

use tokio::runtime::{Builder, Runtime};

use crate::device::{TestDevices, limited};
use crate::scenario::scenario;

fn serves(runtime: &Runtime) {
    for device in TestDevices::ALL {
        let builder = |seed| device.builder(seed).control_on(runtime.handle().clone());
        runtime.block_on(limited(scenario(builder(12), builder(13)))).unwrap();
    }
}

#[test]
fn of_one_thread() {
    serves(&Builder::new_current_thread().enable_all().build().unwrap());
}

#[test]
fn of_many_threads() {
    serves(&Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap());
}
