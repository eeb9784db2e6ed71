//! Keeps the program's signal dispositions (signal(7)) unchanged while libfabric is loaded and opened.
//!
//! Some libraries install their own signal handlers, and replace those of the program:
//!
//! - libinfinipath installs handlers for SIGSEGV, SIGBUS, SIGILL, SIGABRT, SIGINT and SIGTERM. Debian 12's libfabric
//!   1.17 links it for its provider psm, and it installs them in a constructor, that is, while libfabric is loaded
//!   (`init_ipath_backtrace`). Its handler calls `exit`, which never returns if the interrupted thread is inside the
//!   dynamic linker or `fi_getinfo`: a process that is told to end hangs.
//! - libfabric's provider `shm` installs handlers for SIGSEGV, SIGBUS, SIGINT and SIGTERM with its first endpoint
//!   (`smr_init_sig_handlers`).
//!
//! [`load`] prevents the first, [`keep`] undoes the second after the call. Neither changes what other threads may be
//! using: the environment (libinfinipath obeys `IPATH_NO_BACKTRACE`, but `setenv` moves the array that `getenv` of
//! another thread reads), or the signal masks of the program's threads.

#[cfg(all(target_os = "linux", target_env = "gnu"))]
pub(crate) use gnu_linux::{keep, load};
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
pub(crate) use other::{keep, load};

#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod gnu_linux {
    use std::ffi::{c_int, c_void};
    use std::io;
    use std::mem::{offset_of, zeroed};
    use std::ops::Range;
    use std::ptr::{null, null_mut};
    use std::sync::OnceLock;

    /// Runs `call`, which loads a library, in a new thread that cannot change dispositions.
    ///
    /// A filter of this thread's system calls (seccomp(2)) refuses rt_sigaction(2). The thread blocks all signals, so
    /// that the program's own handlers, which may change dispositions, run in other threads. The thread and its filter
    /// end with the call.
    ///
    /// There is no filter if the kernel does not support it, and under valgrind, which ends the process when one of its
    /// own calls is refused. In these cases the handlers are removed as soon as `call` returns.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn load<T: Send>(call: impl FnOnce() -> T + Send) -> io::Result<T> {
        // Before another library is loaded.
        initial_code();
        let call = || {
            block_all();
            if is_under_valgrind() {
                tracing::debug!(
                    "no filter under valgrind: for a moment a library's handler may run at a signal"
                );
            } else if let Err(why) = refuse_changes() {
                tracing::warn!(%why, "the kernel refuses a seccomp filter: for a moment a library's handler may run at a signal");
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

    /// Runs `call`, and then removes the handlers that libraries have installed meanwhile.
    ///
    /// Only handlers whose code was loaded with libfabric, or after it, are removed. So a disposition that the program
    /// changes at the same time stays.
    pub(crate) fn keep<T>(call: impl FnOnce() -> T) -> T {
        let before: Vec<_> =
            (1..=libc::SIGRTMAX()).filter_map(|signal| Some((signal, disposition(signal)?))).collect();
        let result = call();
        let was_replaced = |(signal, before): &&(c_int, libc::sigaction)| {
            disposition(*signal)
                .is_some_and(|now| now.sa_sigaction != before.sa_sigaction && is_foreign(&now))
        };
        for (signal, before) in before.iter().filter(was_replaced) {
            // SAFETY: a disposition that the process had.
            let code = unsafe { libc::sigaction(*signal, before, null_mut()) };
            tracing::debug!(signal, code, "removed a library's signal handler");
        }
        result
    }

    /// Whether this process runs under valgrind, which calls sigaction(2) for the program. valgrind is known by the
    /// library that it preloads.
    fn is_under_valgrind() -> bool {
        std::env::var_os("LD_PRELOAD")
            .is_some_and(|list| list.as_encoded_bytes().windows(9).any(|part| part == b"vgpreload"))
    }

    /// The disposition of a signal; `None` for the signals that the C library reserves for itself.
    fn disposition(signal: c_int) -> Option<libc::sigaction> {
        // SAFETY: plain data, which may be zero; nothing is changed.
        unsafe {
            let mut now: libc::sigaction = zeroed();
            (libc::sigaction(signal, null(), &raw mut now) == 0).then_some(now)
        }
    }

    /// Whether the handler's code was loaded with libfabric, or after it.
    fn is_foreign(disposition: &libc::sigaction) -> bool {
        let is_in =
            |code: &[Range<usize>]| code.iter().any(|range| range.contains(&disposition.sa_sigaction));
        !is_in(initial_code()) && is_in(&loaded_code())
    }

    /// The addresses of the code that was loaded before libfabric.
    fn initial_code() -> &'static [Range<usize>] {
        static CODE: OnceLock<Vec<Range<usize>>> = OnceLock::new();
        CODE.get_or_init(loaded_code)
    }

    /// The addresses of all code that is loaded now.
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

    /// Makes the kernel refuse changes of dispositions by the calling thread from now on.
    fn refuse_changes() -> io::Result<()> {
        let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
        let number = offset_of!(libc::seccomp_data, nr) as u32;
        // The filter makes rt_sigaction(2) fail with EPERM. If the filter pretended success, the C library would return
        // an old disposition that the kernel did not give.
        let refuse = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
        let mut steps = [
            step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, number),
            step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_rt_sigaction as u32),
            step(libc::BPF_RET | libc::BPF_K, 0, 0, refuse),
            step(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let filter = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
        let done = |code| if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
        // SAFETY: both change the calling thread alone; the kernel copies the filter. The first call is required of
        // ordinary users: no program that this thread starts may gain rights.
        unsafe {
            done(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))?;
            done(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter))
        }
    }
}

/// The other systems have no libfabric that changes signal dispositions.
#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
mod other {
    pub(crate) fn load<T: Send>(call: impl FnOnce() -> T + Send) -> std::io::Result<T> {
        Ok(call())
    }

    pub(crate) fn keep<T>(call: impl FnOnce() -> T) -> T {
        call()
    }
}
