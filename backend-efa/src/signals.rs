//! Keeps the program's signal dispositions (signal(7)) as they are while libfabric is loaded and opened.
//!
//! Libraries around libfabric install handlers of their own, over whatever the program has:
//!
//! - libinfinipath, which Debian 12's libfabric 1.17 links for its provider psm, for SIGSEGV, SIGBUS, SIGILL,
//!   SIGABRT, SIGINT and SIGTERM, by a constructor, so while libfabric is loaded (`init_ipath_backtrace`). Its
//!   handler calls `exit`, which never returns where the interrupted thread is inside the dynamic linker or
//!   `fi_getinfo`: a process that is told to end hangs.
//! - libfabric's `shm`, for SIGSEGV, SIGBUS, SIGINT and SIGTERM, with its first endpoint (`smr_init_sig_handlers`).
//!
//! [`load`] keeps such a handler from being installed at all, [`keep`] takes it back after the call. Neither
//! touches what others may be using: the environment (libinfinipath obeys `IPATH_NO_BACKTRACE`, but `setenv` moves
//! the array that `getenv` of another thread reads), nor the signal masks of the program's threads.

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::{offset_of, zeroed};
use std::ops::Range;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

/// Runs `call`, which loads a library, in a thread of its own that cannot change a disposition.
///
/// A filter of that thread's system calls (seccomp(2)) refuses rt_sigaction(2). The thread blocks all
/// signals, so that a handler of the program's, which may change dispositions, runs in another one. Filter and
/// thread end with the call. Where the kernel takes no filter, and under valgrind, which ends the process when a call of
/// its own is refused, the handlers are taken back as soon as `call` returns.
///
/// # Errors
/// The thread cannot be started.
pub(crate) fn load<T: Send>(call: impl FnOnce() -> T + Send) -> io::Result<T> {
    // Looked at before there is another library.
    programs_code();
    let call = || {
        block_all();
        if is_under_valgrind() {
            tracing::debug!("no filter under valgrind: a signal may meet a foreign handler for a moment");
        } else if let Err(why) = refuse_changes() {
            tracing::warn!(%why, "the kernel takes no seccomp filter: a signal may meet a foreign handler for a moment");
        }
        call()
    };
    let load = || {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("mr-load".into()).spawn_scoped(scope, call)?;
            thread.join().or_else(|panic| std::panic::resume_unwind(panic))
        })
    };
    keep(load)
}

/// Runs `call`, and takes back the handlers that libraries have installed meanwhile.
///
/// A disposition that the program changes at the same time stays: only a handler whose code came with
/// libfabric, or after it, is taken back.
pub(crate) fn keep<T>(call: impl FnOnce() -> T) -> T {
    let before: Vec<_> =
        (1..=libc::SIGRTMAX()).filter_map(|signal| Some((signal, disposition(signal)?))).collect();
    let result = call();
    let is_changed = |(signal, before): &&(c_int, libc::sigaction)| {
        disposition(*signal).is_some_and(|now| now.sa_sigaction != before.sa_sigaction && is_foreign(&now))
    };
    for (signal, before) in before.iter().filter(is_changed) {
        // SAFETY: a disposition that the process had.
        let code = unsafe { libc::sigaction(*signal, before, null_mut()) };
        tracing::debug!(signal, code, "a library's signal handler is taken back");
    }
    result
}

/// valgrind makes sigaction(2) itself for the program; it shows by what it preloads.
fn is_under_valgrind() -> bool {
    std::env::var_os("LD_PRELOAD")
        .is_some_and(|list| list.as_encoded_bytes().windows(9).any(|part| part == b"vgpreload"))
}

/// `None` for the numbers that the C library keeps to itself.
fn disposition(signal: c_int) -> Option<libc::sigaction> {
    // SAFETY: plain data, for which zero will do; nothing is changed.
    unsafe {
        let mut now: libc::sigaction = zeroed();
        (libc::sigaction(signal, null(), &raw mut now) == 0).then_some(now)
    }
}

/// Whether the handler's code came into the process with libfabric, or later.
fn is_foreign(disposition: &libc::sigaction) -> bool {
    let is_in = |code: &[Range<usize>]| code.iter().any(|range| range.contains(&disposition.sa_sigaction));
    !is_in(programs_code()) && is_in(&loaded_code())
}

/// The addresses of what was loaded before libfabric.
fn programs_code() -> &'static [Range<usize>] {
    static CODE: OnceLock<Vec<Range<usize>>> = OnceLock::new();
    CODE.get_or_init(loaded_code)
}

/// The addresses of all that is loaded now.
fn loaded_code() -> Vec<Range<usize>> {
    unsafe extern "C" fn add(object: *mut libc::dl_phdr_info, _: usize, into: *mut c_void) -> c_int {
        // SAFETY: as dl_iterate_phdr(3) calls it; `into` is the vector below.
        let (object, into, headers) = unsafe {
            let headers = std::slice::from_raw_parts((*object).dlpi_phdr, (*object).dlpi_phnum.into());
            (&*object, &mut *into.cast::<Vec<Range<usize>>>(), headers)
        };
        for segment in headers.iter().filter(|header| header.p_type == libc::PT_LOAD) {
            let start = (object.dlpi_addr as usize).wrapping_add(segment.p_vaddr as usize);
            into.push(start..start.wrapping_add(segment.p_memsz as usize));
        }
        0
    }
    let mut code: Vec<Range<usize>> = Vec::new();
    // SAFETY: the callback has the type, and `code` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(add), (&raw mut code).cast()) };
    code
}

/// Blocks every signal in the calling thread.
fn block_all() {
    // SAFETY: a set on the stack, which is filled before it is read.
    unsafe {
        let mut all: libc::sigset_t = zeroed();
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const all, null_mut());
    }
}

/// Has the kernel refuse the calling thread's changes of dispositions from now on.
fn refuse_changes() -> io::Result<()> {
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let number = offset_of!(libc::seccomp_data, nr) as u32;
    // An error, not a pretended success: the C library would hand out a disposition that the kernel has not told.
    let refuse = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let mut steps = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, number),
        step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_rt_sigaction as u32),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, refuse),
        step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let filter = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    let done = |code| if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    // SAFETY: both change the calling thread alone; the kernel copies the filter. The first is what an
    // ordinary user has to promise: that no program this thread starts gains rights.
    unsafe {
        done(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
        done(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter))
    }
}
