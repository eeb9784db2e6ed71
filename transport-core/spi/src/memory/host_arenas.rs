//! The host memory of one fabric: a file for each buffer, or, once the process is short of descriptors, files that
//! small buffers share.

use std::sync::Arc;

#[cfg(all(target_os = "linux", not(miri)))]
use super::carved_buffer::{CarvedBuffer, Carver};
use super::{HostBuffer, Memory};
use crate::Result;

/// Allocates the host memory of one fabric, or of one tenant.
///
/// A process may have more regions than open files: once the files of its buffers take a quarter of its descriptors
/// (`ulimit -n`), further buffers of at most 512 KiB are carved from files that they share.
///
/// A peer that imports a carved buffer gets the file, and so could map the other buffers in it: those of the same
/// fabric that peers may reach. Such a peer may use them anyway. The buffers that no peer may reach, and those of other
/// fabrics and tenants, are in other files. After [`HostArenas::retire`] nothing more is carved from the files that a
/// peer may have.
#[derive(Default)]
pub struct HostArenas {
    /// The files that no peer gets, and those that peers may map.
    #[cfg(all(target_os = "linux", not(miri)))]
    carvers: [Arc<Carver>; 2],
}

impl HostArenas {
    /// Allocates `len` zeroed bytes, which have memory when this returns. `is_shared` says whether peers may map them.
    ///
    /// # Errors
    /// As [`HostBuffer::new`].
    pub fn alloc(&self, len: usize, is_shared: bool) -> Result<Arc<dyn Memory>> {
        #[cfg(all(target_os = "linux", not(miri)))]
        if HostBuffer::takes_many_descriptors()
            && let Some(carved) = CarvedBuffer::new(&self.carvers[usize::from(is_shared)], len)?
        {
            return Ok(Arc::new(carved));
        }
        let _ = is_shared;
        Ok(Arc::new(HostBuffer::new(len)?))
    }

    /// A peer has left, which may keep the files that it has mapped: no more buffers are carved from the files that a
    /// peer may have ([`SharedRange::hand_out`](super::SharedRange::hand_out)).
    pub fn retire(&self) {
        #[cfg(all(target_os = "linux", not(miri)))]
        self.carvers[1].retire();
    }
}

#[cfg(all(test, target_os = "linux", not(miri)))]
mod tests {
    use rustix::process::{Resource, Rlimit, setrlimit};

    use super::*;

    /// Tells this test executable that it is the child.
    const CHILD: &str = "MULTIRAIL_SPI_ARENAS";

    /// Limits the descriptors, in a process of its own.
    #[test]
    #[ignore = "the other process of the test below"]
    fn allocates_with_few_descriptors() {
        if std::env::var_os(CHILD).is_none() {
            return;
        }
        setrlimit(Resource::Nofile, Rlimit { current: Some(64), maximum: Some(64) }).unwrap();
        let arenas = HostArenas::default();
        let buffers: Vec<_> = (0..500).map(|_| arenas.alloc(5000, true).unwrap()).collect();
        let is_carved = |buffer: &Arc<dyn Memory>| buffer.shared_range().unwrap().file_len != 5000;
        let own = buffers.iter().take_while(|buffer| !is_carved(buffer)).count();
        assert!(buffers[own..].iter().all(is_carved));
        drop(buffers);
        println!("\n@{own} {}", is_carved(&arenas.alloc(5000, true).unwrap()));
    }

    #[test]
    fn buffers_share_files_only_while_the_process_is_short_of_descriptors() {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        let name = "memory::host_arenas::tests::allocates_with_few_descriptors";
        let output =
            child.args(["--ignored", "--exact", name, "--nocapture"]).env(CHILD, "1").output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("@16 false"), "{}: {said}", output.status);
    }
}
