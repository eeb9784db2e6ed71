//! A fabric's turns. Where callers drive, this thread serves its connections too, and there is no other:
//! glibc locks without atomics in such a process, libfabric locks often, and the programs in C that ours
//! are compared with have one thread.

use std::cell::Cell;
use std::ops::Deref;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use tokio::runtime::{Builder, Runtime};
use tokio::task::yield_now;
use transport_core::{Fabric, FabricBuilder, StepReport};

use crate::{BenchResult, Driven};

/// Turns between two looks at the connections: some milliseconds, where nobody sleeps in between. A look costs as
/// much as dozens of turns, and who measures the median of round trips must not look in each third of them.
const PER_LOOK: u32 = 4096;

/// A fabric, and what drives it.
pub struct Turns {
    fabric: Fabric,
    /// Where callers drive.
    connections: Option<Runtime>,
    taken: Cell<u32>,
}

impl Turns {
    /// Opens the fabric.
    pub fn open(builder: FabricBuilder, driven: Driven) -> BenchResult<Self> {
        let (builder, connections) = match driven {
            Driven::ByWorkers => (builder, None),
            Driven::ByCaller => {
                let runtime = Builder::new_current_thread().enable_all().build()?;
                (builder.caller_driven().control_on(runtime.handle().clone()), Some(runtime))
            }
        };
        Ok(Self { fabric: builder.open()?, connections, taken: Cell::default() })
    }

    /// One of them.
    pub fn step(&self) -> StepReport {
        self.taken.set(self.taken.get().wrapping_add(1));
        if self.taken.get().is_multiple_of(PER_LOOK) {
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

    fn serve(&self) {
        if let Some(connections) = &self.connections {
            connections.block_on(yield_now());
        }
    }
}

impl Deref for Turns {
    type Target = Fabric;

    fn deref(&self) -> &Fabric {
        &self.fabric
    }
}

impl Drop for Turns {
    fn drop(&mut self) {
        if let Some(connections) = &self.connections {
            connections.block_on(self.fabric.close_and_wait());
        }
    }
}
