//! Names of endpoints of libfabric's `shm`, which are files of /dev/shm.
//!
//! The provider makes them of the process's number. A killed process leaves its files behind, and who is
//! given the number next (in a container that starts anew, most often the same one) could not open its
//! endpoint; where containers share /dev/shm, two that live have one number. So names are chosen here.

use std::ffi::CString;
use std::path::Path;

use libfabric_sys as sys;
use transport_core::Result;

use crate::objects::Fid;
use crate::region::random;
use crate::status::refused;

/// Where the provider's files are (`SMR_DIR`, include/ofi_shm.h).
const DIR: &str = "/dev/shm";
/// What the provider's addresses begin with; the file has the rest (`smr_no_prefix`, there).
const SCHEME: &str = "fi_shm://";
const OURS: &str = "multirail";

/// Gives an endpoint that is not enabled yet a name that nobody has, and removes what ended processes of
/// ours have left.
pub(crate) fn give_name(ep: &Fid<sys::fid_ep>) -> Result<()> {
    let namespace = namespace();
    sweep(Path::new(DIR), namespace);
    let name = format!("{SCHEME}{OURS}:{namespace}:{}:{:016x}", std::process::id(), random("open")?);
    let name = CString::new(name).expect("no zero is written into it");
    let len = name.as_bytes_with_nul().len();
    // SAFETY: the endpoint is open, and copies the name, whose length counts its zero.
    match unsafe { sys::fi_setname(ep.as_ptr(), name.as_ptr().cast_mut().cast(), len) } {
        0 => Ok(()),
        code => Err(refused("open", "a name for its endpoint", code)),
    }
}

/// The namespace that numbers of processes are of; 0 where it is not told.
fn namespace() -> u64 {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |link| link.ino())
}

/// Removes files of processes of this namespace that are no more. Others' stay: nobody here can tell whether
/// those live.
fn sweep(dir: &Path, namespace: u64) {
    for file in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if file.file_name().to_str().and_then(|name| owner(name, namespace)).is_some_and(has_ended) {
            // Another may remove it at the same time.
            let removed = std::fs::remove_file(file.path());
            tracing::info!(file = %file.path().display(), ?removed, "left by a process that has ended");
        }
    }
}

/// The number of the process that a file of this namespace is of.
fn owner(name: &str, namespace: u64) -> Option<libc::pid_t> {
    let mut parts = name.split(':');
    let is_ours = parts.next() == Some(OURS)
        && namespace != 0
        && parts.next().and_then(|text| text.parse().ok()) == Some(namespace);
    let process = parts.next().filter(|_| is_ours)?.parse().ok()?;
    (process > 0).then_some(process)
}

fn has_ended(process: libc::pid_t) -> bool {
    // SAFETY: signal 0 only asks whether there is such a process.
    let answer = unsafe { libc::kill(process, 0) };
    answer != 0 && std::io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ended_processes_left_goes() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        child.wait().unwrap();
        let (ended, ours) = (child.id(), std::process::id());
        let namespace = namespace();
        let stay = [
            format!("multirail:{namespace}:{ours}:00"),
            format!("multirail:{}:{ended}:00", namespace + 1),
            format!("{ended}:0:0"),
            format!("multirail:{namespace}:-1:00"),
            format!("multirail:{namespace}"),
        ];
        let goes = format!("multirail:{namespace}:{ended}:00");
        let dir = std::env::temp_dir().join(format!("multirail-shm-names-{ours}"));
        std::fs::create_dir(&dir).unwrap();
        for name in stay.iter().chain([&goes]) {
            std::fs::write(dir.join(name), b"").unwrap();
        }
        sweep(&dir, namespace);
        let left = |name: &String| dir.join(name).exists();
        let (stayed, went) = (stay.iter().all(left), !left(&goes));
        std::fs::remove_dir_all(&dir).unwrap();
        assert!(stayed && went, "stayed: {stayed}, went: {went}");
    }
}
