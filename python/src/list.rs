//! Lists of pieces of regions, for transfers between many places at once.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use multirail::{LocalList as CoreLocalList, RemoteList as CoreRemoteList};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::IntoPython;
use crate::fork::ForkSafe;
use crate::indices::{numbers, one};
use crate::peer::RemoteCatalogue;
use crate::region::{Catalogue, Region, RemoteRegion};

macro_rules! list {
    ($(#[$doc:meta])* $name:ident, $core:ident, $region:ident, $catalogue:ident) => {
        $(#[$doc])*
        #[pyclass(frozen, module = "multirail")]
        pub struct $name(ForkSafe<Mutex<$core>>);

        impl $name {
            pub fn lock(&self) -> PyResult<MutexGuard<'_, $core>> {
                Ok(self.0.get()?.lock().unwrap_or_else(PoisonError::into_inner))
            }
        }

        #[pymethods]
        impl $name {
            #[new]
            fn new() -> Self {
                Self(ForkSafe::new(Mutex::new($core::new())))
            }

            /// A list of pieces that are given by their addresses, in the process that owns them. `addresses` is an array of
            /// integers, `lengths` one too, or one number for all. The catalogue finds the region of each.
            #[staticmethod]
            fn of_addresses(
                py: Python<'_>,
                catalogue: &Bound<'_, $catalogue>,
                addresses: &Bound<'_, PyAny>,
                lengths: &Bound<'_, PyAny>,
            ) -> PyResult<Self> {
                let addresses = numbers::<u64>(addresses, "addresses")?;
                let lengths = Lengths::of(lengths, addresses.len())?;
                let catalogue = catalogue.get().0.get()?;
                let list = py.detach(|| {
                    let mut list = $core::new();
                    for (index, address) in addresses.iter().enumerate() {
                        let len = lengths.at(index);
                        let (region, offset) = catalogue.find(*address, len)?;
                        list.push(region, offset, len)?;
                    }
                    Ok(list)
                });
                Ok(Self(ForkSafe::new(Mutex::new(list.into_python()?))))
            }

            /// Appends a piece of `length` bytes, `offset` bytes into `region`.
            fn append(&self, region: &Bound<'_, $region>, offset: usize, length: usize) -> PyResult<()> {
                self.lock()?.push(region.get().get()?, offset, length).into_python()
            }

            /// Appends `count` pieces of `length` bytes. The first lies `offset` bytes into `region`, each further one
            /// `stride` bytes behind the one before.
            fn append_strided(
                &self,
                region: &Bound<'_, $region>,
                offset: usize,
                length: usize,
                count: u32,
                stride: usize,
            ) -> PyResult<()> {
                self.lock()?.push_strided(region.get().get()?, offset, length, count, stride).into_python()
            }

            /// Appends one piece for each offset. `offsets` is an array of integers, `lengths` one too, or one number for
            /// all. After an error, the list has the pieces before the wrong one.
            fn extend(
                &self,
                py: Python<'_>,
                region: &Bound<'_, $region>,
                offsets: &Bound<'_, PyAny>,
                lengths: &Bound<'_, PyAny>,
            ) -> PyResult<()> {
                let offsets = numbers::<u64>(offsets, "offsets")?;
                let lengths = Lengths::of(lengths, offsets.len())?;
                let region = region.get().get()?;
                // The lock is given back before the GIL is taken: who holds the GIL may wait for the lock.
                let extend = || {
                    let mut list = self.lock()?;
                    let mut pieces = offsets.iter().enumerate();
                    let push = |(index, offset): (usize, &u64)| list.push(region, *offset as usize, lengths.at(index));
                    PyResult::Ok(pieces.try_for_each(push))
                };
                py.detach(extend)?.into_python()
            }

            fn __len__(&self) -> PyResult<usize> {
                Ok(self.lock()?.len())
            }

            fn __repr__(&self) -> PyResult<String> {
                Ok(format!("<{} of {} pieces>", stringify!($name), self.lock()?.len()))
            }
        }
    };
}

list! {
    /// Pieces of regions of this process. They may have any lengths, and lie in any number of regions.
    LocalList, CoreLocalList, Region, Catalogue
}

list! {
    /// Pieces of regions of one peer.
    RemoteList, CoreRemoteList, RemoteRegion, RemoteCatalogue
}

/// The lengths of pieces.
enum Lengths {
    All(u64),
    Each(Arc<[u64]>),
}

impl Lengths {
    fn of(lengths: &Bound<'_, PyAny>, pieces: usize) -> PyResult<Self> {
        if lengths.hasattr("__index__")? && !lengths.hasattr("__len__")? {
            return Ok(Self::All(one(lengths, "lengths")?));
        }
        let each = numbers::<u64>(lengths, "lengths")?;
        match each.len() == pieces {
            true => Ok(Self::Each(each)),
            false => {
                Err(PyValueError::new_err(format!("there are {} lengths for {pieces} pieces", each.len())))
            }
        }
    }

    fn at(&self, index: usize) -> usize {
        match self {
            Self::All(length) => *length as usize,
            Self::Each(each) => each[index] as usize,
        }
    }
}
