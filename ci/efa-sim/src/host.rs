//! This process among those of the simulation.

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

/// Where a process's page is, in its folder.
const PAGE: &str = "page";

/// What this process has.
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
    /// The one of this process, opened at the first call. What is wrong is said once.
    pub(crate) fn get() -> Option<&'static Self> {
        static HOST: OnceLock<Option<SimHost>> = OnceLock::new();
        HOST.get_or_init(|| Self::open().map_err(|why| eprintln!("efa-sim: {why}")).ok()).as_ref()
    }

    fn open() -> std::result::Result<Self, String> {
        let config = Config::read(std::env::vars_os())?;
        let process = ProcessId::of(std::process::id()).ok_or("/proc shows nothing of this process")?;
        let dir = config.dir.clone();
        sweep(&dir);
        let folder = dir.join(process.folder());
        let (sysfs, page) =
            prepare(&config, &folder).map_err(|why| format!("{}: {why}", folder.display()))?;
        // SAFETY: the function lives as long as the process; this library is never unloaded before.
        unsafe { libc::atexit(leave) };
        // SAFETY: plain arguments. It lets processes of this user copy from and to this one where
        // Yama would forbid that; kernels without it refuse the call.
        unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0) };
        // SAFETY: libfabric opens its providers once, under a lock of its own, and reads this right
        // after. A program whose other threads read the environment at that time sets it itself.
        unsafe { std::env::set_var("SYSFS_PATH", &sysfs) };
        Ok(Self { config, process, sysfs, page })
    }

    /// The part of the page that is card `index`'s.
    pub(crate) fn card(&self, index: usize) -> &page::SharedCard {
        // SAFETY: mapped for the life of the process.
        unsafe { &(*self.page).cards[index] }
    }

    /// Whether the fault `cut` parts this host from all others now.
    pub(crate) fn is_cut(&self) -> bool {
        self.config.faults.cut && self.config.dir.join("cut").exists()
    }

    /// Maps the page of another process.
    pub(crate) fn page_of(&self, process: ProcessId) -> Result<*mut ProcessPage> {
        let path = self.config.dir.join(process.folder()).join(PAGE);
        page::map(&OpenOptions::new().read(true).write(true).open(path)?)
    }
}

fn prepare(config: &Config, folder: &std::path::Path) -> Result<(PathBuf, *mut ProcessPage)> {
    fs::create_dir_all(folder)?;
    let sysfs = folder.join("sys");
    let cards: Vec<P5Card> = (0..config.devices).map(P5Card::new).collect();
    write_tree(&sysfs, &cards)?;
    let page =
        OpenOptions::new().read(true).write(true).create(true).truncate(true).open(folder.join(PAGE))?;
    let page = page::map(&page)?;
    // SAFETY: just mapped, and nobody else knows of it: no card has a GID yet.
    unsafe { (*page).prepare(config.devices) };
    Ok((sysfs, page))
}

/// Removes what processes left that were killed.
fn sweep(dir: &std::path::Path) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let process = entry.file_name().to_str().and_then(ProcessId::of_folder);
        if process.is_some_and(|process| !process.is_alive()) {
            // Another process may be faster.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// At exit: takes this process's folder away, and the last one the folder around it.
extern "C" fn leave() {
    // A child that was forked leaves what is its parent's.
    if let Some(host) = SimHost::get().filter(|host| host.process.pid == std::process::id()) {
        let _ = fs::remove_dir_all(host.config.dir.join(host.process.folder()));
        let _ = fs::remove_dir(&host.config.dir);
    }
}

/// The kernel's symbols. libfabric's provider `verbs`, which is loaded beside the provider for EFA, reads all of them in
/// every process, to find out whether GPUs and cards know each other (`vrb_set_peer_mem_support`). That takes longer than
/// everything else that a process with one card does at its start.
const SYMBOLS: &CStr = c"/proc/kallsyms";

type FopenFn = unsafe extern "C" fn(*const c_char, *const c_char) -> *mut libc::FILE;

/// `fopen(3)`, for which there are no kernel's symbols.
///
/// # Safety
/// As for the C library's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fopen(path: *const c_char, mode: *const c_char) -> *mut libc::FILE {
    // SAFETY: by the caller, a string.
    if unsafe { CStr::from_ptr(path) } == SYMBOLS {
        return refuse(libc::ENOENT);
    }
    match next() {
        // SAFETY: by the caller.
        Some(open) => unsafe { open(path, mode) },
        None => refuse(libc::ENOSYS),
    }
}

/// The C library's.
fn next() -> Option<FopenFn> {
    static NEXT: OnceLock<Option<FopenFn>> = OnceLock::new();
    // SAFETY: the name is a string; what is behind it in the C library has this type, and a null
    // pointer is `None`.
    *NEXT.get_or_init(|| unsafe { transmute(libc::dlsym(libc::RTLD_NEXT, c"fopen".as_ptr())) })
}
