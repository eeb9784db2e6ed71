//! This process, as a host of the simulation.

use std::ffi::{CStr, c_char};
use std::fs::{self, OpenOptions};
use std::io::Result;
use std::mem::transmute;
use std::path::PathBuf;
use std::sync::OnceLock;

use crate::config::Config;
use crate::device::refuse;
use crate::name::ProcessId;
use crate::p5::{P5Card, write_tree};
use crate::page::{self, ProcessPage};

/// The name of a process's page in its folder.
const PAGE: &str = "page";

/// This process as a simulated host.
pub(crate) struct SimHost {
    pub(crate) config: Config,
    pub(crate) process: ProcessId,
    pub(crate) sysfs: PathBuf,
    page: *mut ProcessPage,
}

// SAFETY: the page is shared memory made of atomics and locked rings, and is never unmapped.
unsafe impl Send for SimHost {}
// SAFETY: as above.
unsafe impl Sync for SimHost {}

impl SimHost {
    /// The host of this process. The first call opens it, and prints the reason if that fails.
    pub(crate) fn get() -> Option<&'static Self> {
        static HOST: OnceLock<Option<SimHost>> = OnceLock::new();
        HOST.get_or_init(|| Self::open().map_err(|why| eprintln!("efa-sim: {why}")).ok()).as_ref()
    }

    fn open() -> std::result::Result<Self, String> {
        let config = Config::read(std::env::vars_os())?;
        let process = ProcessId::of(std::process::id()).ok_or("/proc shows nothing of this process")?;
        let dir = config.dir.clone();
        remove_ended(&dir);
        let folder = dir.join(process.folder());
        let (sysfs, page) =
            prepare(&config, &folder).map_err(|why| format!("{}: {why}", folder.display()))?;
        // SAFETY: the function lives as long as the process, because this library is never unloaded.
        unsafe { libc::atexit(remove_folder) };
        // SAFETY: the arguments are plain numbers. The call lets processes of this user copy from and to this process
        // although Yama is active. Kernels without Yama refuse the call.
        unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0) };
        // SAFETY: libfabric opens its providers once, under its own lock, and reads the variable right after that. A
        // program whose other threads read the environment at that time sets the variable itself.
        unsafe { std::env::set_var("SYSFS_PATH", &sysfs) };
        Ok(Self { config, process, sysfs, page })
    }

    /// The part of the page for card `index`.
    pub(crate) fn card(&self, index: usize) -> &page::SharedCard {
        // SAFETY: the page is mapped as long as the process lives.
        unsafe { &(*self.page).cards[index] }
    }

    /// Whether the fault `cut` separates this host from all others now.
    pub(crate) fn is_cut(&self) -> bool {
        self.config.faults.cut && self.config.dir.join("cut").exists()
    }

    /// Maps the page of another process.
    pub(crate) fn page_of(&self, process: ProcessId) -> Result<*mut ProcessPage> {
        let path = self.config.dir.join(process.folder()).join(PAGE);
        page::map(&OpenOptions::new().read(true).write(true).open(path)?)
    }
}

/// Writes the sysfs tree of this host and maps its page.
fn prepare(config: &Config, folder: &std::path::Path) -> Result<(PathBuf, *mut ProcessPage)> {
    fs::create_dir_all(folder)?;
    let sysfs = folder.join("sys");
    let cards: Vec<P5Card> = (0..config.devices).map(P5Card::new).collect();
    write_tree(&sysfs, &cards)?;
    let page =
        OpenOptions::new().read(true).write(true).create(true).truncate(true).open(folder.join(PAGE))?;
    let page = page::map(&page)?;
    // SAFETY: the page was just mapped, and no other process uses it: no card has a GID yet.
    unsafe { (*page).prepare(config.devices) };
    Ok((sysfs, page))
}

/// Removes the folders of processes that have ended without removing them.
fn remove_ended(dir: &std::path::Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let process = entry.file_name().to_str().and_then(ProcessId::of_folder);
        if process.is_some_and(|process| !process.is_alive()) {
            // Another process may have removed it meanwhile.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Removes the folder of this process at its exit. The last process also removes the folder around it.
extern "C" fn remove_folder() {
    // A forked child does not remove the folder of its parent.
    if let Some(host) = SimHost::get().filter(|host| host.process.pid == std::process::id()) {
        let _ = fs::remove_dir_all(host.config.dir.join(host.process.folder()));
        let _ = fs::remove_dir(&host.config.dir);
    }
}

/// The kernel's symbols. libfabric's provider `verbs`, which is loaded beside the provider for EFA, reads all of them
/// in every process, to find out whether GPUs and cards know each other (`vrb_set_peer_mem_support`). That takes longer
/// than everything else that a process with one card does at its start.
const SYMBOLS: &CStr = c"/proc/kallsyms";

type FopenFn = unsafe extern "C" fn(*const c_char, *const c_char) -> *mut libc::FILE;

/// `fopen(3)`, which does not find the kernel's symbols.
///
/// # Safety
/// As for the C library's `fopen`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fopen(path: *const c_char, mode: *const c_char) -> *mut libc::FILE {
    // SAFETY: by the caller, `path` is a string.
    if unsafe { CStr::from_ptr(path) } == SYMBOLS {
        return refuse(libc::ENOENT);
    }
    match next() {
        // SAFETY: by the caller.
        Some(open) => unsafe { open(path, mode) },
        None => refuse(libc::ENOSYS),
    }
}

/// The C library's `fopen`.
fn next() -> Option<FopenFn> {
    static NEXT: OnceLock<Option<FopenFn>> = OnceLock::new();
    // SAFETY: the name is a string, the function of this name in the C library has this type, and a null pointer is
    // `None`.
    *NEXT.get_or_init(|| unsafe { transmute(libc::dlsym(libc::RTLD_NEXT, c"fopen".as_ptr())) })
}
