//! Host memory that somebody else has allocated.

use std::any::Any;
use std::sync::Arc;

use super::Memory;
use crate::{Error, ErrorKind, Result};

/// Host memory that another library has allocated, by its address: an array of numpy, a buffer of an engine.
pub struct HostRange {
    start: *mut u8,
    len: usize,
    /// Keeps the bytes allocated.
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: the address is only handed on. Whoever accesses the bytes is bound by the contract of `Memory`.
unsafe impl Send for HostRange {}
// SAFETY: as above.
unsafe impl Sync for HostRange {}

impl HostRange {
    /// Takes `len` bytes from `address` on. `owner` keeps them allocated.
    ///
    /// # Errors
    /// `InvalidRequest` if there are no bytes, or no such addresses.
    ///
    /// # Safety
    /// While `owner` lives, the bytes stay mapped and writable at this address, and nobody holds a Rust reference into
    /// them.
    pub unsafe fn of_pointer(address: usize, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Result<Self> {
        if address == 0
            || len == 0
            || address.checked_add(len).is_none_or(|end| isize::try_from(end).is_err())
        {
            let why =
                format!("{len} bytes from address {address:#x} on; give at least one byte of this process");
            return Err(Error::new(ErrorKind::InvalidRequest, "use host memory", why));
        }
        Ok(Self { start: std::ptr::with_exposed_provenance_mut(address), len, _owner: owner })
    }
}

// SAFETY: the address and the length never change, and `of_pointer` was called by somebody who guarantees the rest.
unsafe impl Memory for HostRange {
    fn as_ptr(&self) -> *mut u8 {
        self.start
    }

    fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[test]
    fn the_owner_lives_as_long_as_the_range() {
        let mut bytes = vec![1_u8, 2, 3];
        let address = bytes.as_mut_ptr().expose_provenance();
        let owner = Arc::new(Mutex::new(bytes));
        // SAFETY: the owner keeps the vector, and nobody refers to its bytes.
        let range = unsafe { HostRange::of_pointer(address, 3, owner.clone()) }.unwrap();
        assert_eq!((range.as_ptr().addr(), range.len(), Arc::strong_count(&owner)), (address, 3, 2));
        drop(range);
        assert_eq!((Arc::strong_count(&owner), owner.lock().unwrap()[2]), (1, 3));
    }

    #[test]
    fn what_is_no_memory_is_refused() {
        for (address, len) in [(0, 8), (4096, 0), (usize::MAX, 2), (isize::MAX as usize, 1)] {
            // SAFETY: refused before it is used.
            let refused = unsafe { HostRange::of_pointer(address, len, Arc::new(())) };
            assert_eq!(
                refused.err().map(|error| error.kind()),
                Some(ErrorKind::InvalidRequest),
                "{address} {len}"
            );
        }
    }
}
