//! A page by which a call on another process's memory makes sure that it reaches the right address space.
//!
//! A process that calls exec keeps its pid, and a pidfd of it stays valid, but it has another address space, in which
//! other memory is at a region's addresses. The kernel may also give a pid to a new process. The kernel looks the
//! address space up once per `process_vm_writev`, so no check before or after the call holds for it. The call
//! itself checks: its first piece moves [`GuardPage::LEN`] bytes to or from the target's guard page. The kernel takes
//! the pieces in order and ends the call at the first address that is not mapped. If the guard page is missing, no
//! byte of another piece moves.
//!
//! The page's address is random, so hardly any other address space has something mapped there: the target draws
//! it from 2^33 pages in the middle of the address space (x86-64, aarch64 with 48 bits), which neither the kernel's
//! own layout of a program nor the usual allocators use. A read also compares the word that it got, which is 64
//! random bits. One risk is left: a write reaches the memory of the next program if that program has a writable page
//! mapped at this very address. The chance is one in 2^33 for each page that it has in that range.

use std::ffi::c_void;
use std::ptr::without_provenance_mut;
use std::sync::Mutex;

use libc::iovec;
use multirail_spi::{Error, ErrorKind, Result};
use rustix::mm::{MapFlags, ProtFlags};
use serde::{Deserialize, Serialize};

use crate::host::random;

/// The address of a process's guard page, and the word in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct GuardPage {
    address: u64,
    word: u64,
}

/// The ends of the possible address spaces: of 47 bits (x86-64; half of aarch64's 48), and smaller ones for kernels
/// and emulators (valgrind) that have less.
const ENDS: [u64; 4] = [1 << 47, 1 << 44, 1 << 40, 1 << 38];
/// Random addresses tried per end. Fewer than one page in a thousand is mapped already.
const TRIES: usize = 8;

impl GuardPage {
    /// Bytes that a call moves before all others.
    pub(crate) const LEN: usize = size_of::<u64>();

    /// The guard page of this process. The first call maps it. It stays until the process ends or calls exec.
    ///
    /// # Errors
    /// `Exhausted` where the kernel gives no page.
    pub(crate) fn own() -> Result<Self> {
        static OWN: Mutex<Option<GuardPage>> = Mutex::new(None);
        let mut own = OWN.lock().expect("guard page");
        match *own {
            Some(guard) => Ok(guard),
            None => Ok(*own.insert(Self::map()?)),
        }
    }

    fn map() -> Result<Self> {
        let mut refused = rustix::io::Errno::NOMEM;
        for end in ENDS {
            for _ in 0..TRIES {
                let [random, word] = [random()?, random()?].map(u64::from_ne_bytes);
                match map_at(page_below(end, random)) {
                    Ok(page) => {
                        // SAFETY: the first word of a page that was just mapped, to which nothing else refers.
                        // Other processes write the same word there later, and this process does not read it.
                        unsafe { page.cast::<u64>().write_volatile(word) };
                        return Ok(Self { address: page.expose_provenance() as u64, word });
                    }
                    Err(why) => refused = why,
                }
            }
        }
        let context = "the kernel maps no guard page, which peers need to recognise this process's memory; raise \
                       vm.max_map_count or free memory";
        Err(Error::new(ErrorKind::Exhausted, "import", context).with_source(refused))
    }

    /// The word in the page.
    pub(crate) fn word(self) -> u64 {
        self.word
    }

    /// The two ends of a call's first piece: `word` in this process, and the guard page in the target.
    pub(crate) fn pieces(self, word: &mut u64) -> [iovec; 2] {
        let page = without_provenance_mut(self.address as usize);
        [
            iovec { iov_base: std::ptr::from_mut(word).cast(), iov_len: Self::LEN },
            iovec { iov_base: page, iov_len: Self::LEN },
        ]
    }

    #[cfg(test)]
    pub(crate) fn at(address: u64, word: u64) -> Self {
        Self { address, word }
    }
}

/// The address of a random page in the middle of the addresses below `end`: from 1/4 to 5/8. Programs lie at 2/3 and
/// above. The tables of sanitizers, and heaps with fixed addresses, lie below.
fn page_below(end: u64, random: u64) -> u64 {
    let page = page_size() as u64;
    let pages = end / 8 * 3 / page;
    end / 4 + random % pages * page
}

fn page_size() -> usize {
    // SAFETY: asks for a number.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Maps a page at `address`, unless something is mapped there.
fn map_at(address: u64) -> rustix::io::Result<*mut c_void> {
    let (wanted, len) = (without_provenance_mut(address as usize), page_size());
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE;
    // SAFETY: the flag replaces nothing that is mapped.
    let mapped = unsafe { rustix::mm::mmap_anonymous(wanted, len, protection, flags)? };
    if mapped == wanted {
        return Ok(mapped);
    }
    // Before Linux 4.17 the flag is unknown, and the kernel may choose another address.
    // SAFETY: the mapping made above, to which nothing refers.
    unsafe { rustix::mm::munmap(mapped, len)? };
    Err(rustix::io::Errno::EXIST)
}

#[cfg(test)]
mod tests {
    use std::ptr::with_exposed_provenance;

    use super::*;

    #[test]
    fn addresses_are_in_the_middle() {
        for end in ENDS {
            for random in [0, 1, u64::MAX / 3, u64::MAX] {
                let address = page_below(end, random);
                assert!(
                    (end / 4..end / 8 * 5).contains(&address) && address.is_multiple_of(page_size() as u64),
                    "{address:#x}"
                );
            }
        }
    }

    #[test]
    fn a_process_has_one_page_with_its_word() {
        let guard = GuardPage::own().unwrap();
        assert_eq!(GuardPage::own().unwrap(), guard);
        // SAFETY: mapped by `own`, and not written in this test.
        let word = unsafe { with_exposed_provenance::<u64>(guard.address as usize).read_volatile() };
        assert_eq!(word, guard.word());
    }
}
