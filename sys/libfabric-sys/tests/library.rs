//! The library as this machine has it, and what is none.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

use std::ptr::{null, null_mut};

use multirail_libfabric_sys::{FI_EP_RDM, Library, LoadError, version};

#[test]
fn what_is_no_libfabric_is_said() {
    // SAFETY: nothing is there.
    let missing = unsafe { Library::open("/nowhere/libfabric.so.1") }.err().unwrap();
    assert!(matches!(&missing, LoadError::Missing { name, .. } if name.contains("nowhere")), "{missing}");
    // SAFETY: it is loaded already.
    let other = unsafe { Library::open("libc.so.6") }.err().unwrap();
    assert!(matches!(other, LoadError::Symbol { symbol: "fi_version", .. }), "{other}");
    // SAFETY: no library has such a name.
    let zero = unsafe { Library::open("lib\0fabric") }.err().unwrap();
    assert!(zero.to_string().contains("zero byte"), "{zero}");
    let old = LoadError::TooOld { name: "x".into(), found: version(1, 9) };
    assert_eq!(old.to_string(), "x is version 1.9, and at least 1.17 is needed");
}

#[test]
fn lists_reliable_datagrams_over_sockets() {
    // SAFETY: libfabric itself.
    let library = match unsafe { Library::open("libfabric.so.1") } {
        Ok(library) => library,
        Err(why) => {
            eprintln!("skipped: {why}; apt-get install libfabric1");
            return;
        }
    };
    assert!(library.version() >= version(1, 17));
    assert_eq!(library.strerror(-11), library.strerror(11));
    // SAFETY: the hints are libfabric's own and complete; both lists are freed once.
    unsafe {
        let hints = library.fi_dupinfo(null());
        (*(*hints).ep_attr).type_ = FI_EP_RDM;
        let mut list = null_mut();
        assert_eq!(library.fi_getinfo(version(1, 17), null(), null(), 0, hints, &mut list), 0);
        let (mut next, mut entries) = (list, 0);
        while !next.is_null() {
            assert_eq!((*(*next).ep_attr).type_, FI_EP_RDM);
            assert!(!(*(*next).fabric_attr).prov_name.is_null());
            (next, entries) = ((*next).next, entries + 1);
        }
        assert!(entries > 0);
        library.fi_freeinfo(list);
        library.fi_freeinfo(hints);
    }
}
