//! A fabric, and the code that drives it.
//!
//! If the caller drives the engine, the same thread serves the connections too, so that the process has one thread.
//! glibc locks without atomics in such a process, libfabric locks often, and the programs in C that the benches compare
//! with have one thread.

use std::cell::Cell;
use std::ops::Deref;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use tokio::runtime::{Builder, Runtime};
use tokio::task::yield_now;
use transport_core::{Fabric, FabricBuilder, StepReport};

use crate::{BenchResult, Driven};

/// Turns of the engine between two turns of the connections: some milliseconds, if the thread does not sleep. A turn of
/// the connections costs as much as dozens of turns of the engine, and must not fall into every third round trip.
const TURNS_PER_SERVE: u32 = 4096;

/// A fabric, and the runtime of its connections.
pub struct DrivenFabric {
    fabric: Fabric,
    /// `Some` if the caller drives the fabric.
    connections: Option<Runtime>,
    turns: Cell<u32>,
}

impl DrivenFabric {
    /// Opens the fabric.
    pub fn open(builder: FabricBuilder, driven: Driven) -> BenchResult<Self> {
        let (builder, connections) = match driven {
            Driven::ByWorkers => (builder, None),
            Driven::ByCaller => {
                let runtime = Builder::new_current_thread().enable_all().build()?;
                (builder.caller_driven().control_on(runtime.handle().clone()), Some(runtime))
            }
        };
        Ok(Self { fabric: builder.open()?, connections, turns: Cell::default() })
    }

    /// Runs one turn of the engine.
    pub fn step(&self) -> StepReport {
        self.turns.set(self.turns.get().wrapping_add(1));
        if self.turns.get().is_multiple_of(TURNS_PER_SERVE) {
            self.serve();
        }
        self.fabric.step()
    }

    /// Awaits `future`.
    pub fn drive<T>(&self, future: impl Future<Output = transport_core::Result<T>>) -> BenchResult<T> {
        let mut future = pin!(future);
        let mut context = Context::from_waker(Waker::noop());
        loop {
            self.serve();
            self.fabric.step();
            if let Poll::Ready(result) = future.as_mut().poll(&mut context) {
                return Ok(result?);
            }
        }
    }

    /// Runs one turn of the connections, if the caller drives them.
    pub fn serve(&self) {
        if let Some(connections) = &self.connections {
            connections.block_on(yield_now());
        }
    }
}

impl Deref for DrivenFabric {
    type Target = Fabric;

    fn deref(&self) -> &Fabric {
        &self.fabric
    }
}

impl Drop for DrivenFabric {
    fn drop(&mut self) {
        if let Some(connections) = &self.connections {
            connections.block_on(self.fabric.close_and_wait());
        }
    }
}
