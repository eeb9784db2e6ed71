//! Links the unwinder that the wheel's build names.
//!
//! zig links an unwinder of its own into the module. CPython before 3.14 ends daemon threads at its exit by `pthread_exit`,
//! which unwinds their frames with the C library's unwinder, libgcc_s.so.1: two unwinders in one stack crash. So
//! `ci/python` names libgcc_s.so.1, which manylinux allows, and every system of the GNU C library has.

fn main() {
    println!("cargo:rerun-if-env-changed=MULTIRAIL_UNWINDER");
    if let Ok(library) = std::env::var("MULTIRAIL_UNWINDER") {
        println!("cargo:rustc-cdylib-link-arg={library}");
    }
}
