//! Protection domains, regions and address handles.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, OnceLock};

use rdma_sys as ib;

use crate::device::{card_of, refuse};
use crate::efadv::AhAttr;
use crate::host::SimHost;
use crate::page::REGIONS;
use crate::queue_pair::lock;
use crate::remote::RemoteCard;

/// `ibv_alloc_pd(3)`.
///
/// # Safety
/// An open context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_alloc_pd(context: *mut ib::ibv_context) -> *mut ib::ibv_pd {
    Box::into_raw(Box::new(ib::ibv_pd { context, handle: 0 }))
}

/// `ibv_dealloc_pd(3)`.
///
/// # Safety
/// A domain of [`ibv_alloc_pd`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dealloc_pd(pd: *mut ib::ibv_pd) -> c_int {
    // SAFETY: by the caller.
    drop(unsafe { Box::from_raw(pd) });
    0
}

/// `ibv_reg_mr(3)`.
///
/// # Safety
/// A domain.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr(
    pd: *mut ib::ibv_pd,
    addr: *mut c_void,
    length: usize,
    access: c_int,
) -> *mut ib::ibv_mr {
    // The generation of the next key, so that an old key never fits the region that has its place now.
    static NEXT: Mutex<u32> = Mutex::new(0);
    let Some(host) = SimHost::get() else { return refuse(libc::ENODEV) };
    // SAFETY: by the caller.
    let context = unsafe { (*pd).context };
    // SAFETY: a domain's context is open.
    let card = host.card(unsafe { card_of(context) });
    let mut next = lock(&NEXT);
    for _ in 0..REGIONS {
        *next = next.wrapping_add(1).max(1);
        let region = &card.regions[*next as usize % REGIONS];
        if region.key.load(Ordering::Acquire) == 0 {
            region.addr.store(addr as u64, Ordering::Release);
            region.len.store(length as u64, Ordering::Release);
            region.access.store(access as u32, Ordering::Release);
            region.key.store(*next, Ordering::Release);
            let mr = ib::ibv_mr { context, pd, addr, length, handle: *next, lkey: *next, rkey: *next };
            return Box::into_raw(Box::new(mr));
        }
    }
    refuse(libc::ENOMEM)
}

/// `ibv_reg_mr_iova2`, which `ibv_reg_mr(3)` becomes with optional flags.
///
/// # Safety
/// A domain.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ib::ibv_pd,
    addr: *mut c_void,
    length: usize,
    iova: u64,
    access: u32,
) -> *mut ib::ibv_mr {
    if iova != addr as u64 {
        return refuse(libc::EOPNOTSUPP);
    }
    // SAFETY: by the caller.
    unsafe { ibv_reg_mr(pd, addr, length, access as c_int) }
}

/// `ibv_reg_dmabuf_mr(3)`. The simulation has no device memory.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_reg_dmabuf_mr(
    _: *mut ib::ibv_pd,
    _: u64,
    _: usize,
    _: u64,
    _: c_int,
    _: c_int,
) -> *mut ib::ibv_mr {
    refuse(libc::EOPNOTSUPP)
}

/// `ibv_dereg_mr(3)`.
///
/// # Safety
/// The region was made by this library.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_dereg_mr(mr: *mut ib::ibv_mr) -> c_int {
    // SAFETY: by the caller.
    let mr = unsafe { Box::from_raw(mr) };
    let Some(host) = SimHost::get() else { return libc::ENODEV };
    // SAFETY: a region's context is open.
    let card = host.card(unsafe { card_of(mr.context) });
    card.regions[mr.rkey as usize % REGIONS].key.store(0, Ordering::Release);
    // Afterwards, every request that has looked up the key before is done with the region.
    card.lock.await_holder();
    0
}

/// `efadv_query_mr(3)`. The interconnects are unknown.
#[unsafe(no_mangle)]
pub extern "C" fn efadv_query_mr(_: *mut ib::ibv_mr, _: *mut c_void, _: u32) -> c_int {
    libc::EOPNOTSUPP
}

/// An address handle.
#[repr(C)]
pub(crate) struct AddressHandle {
    ah: ib::ibv_ah,
    number: u16,
    gid: [u8; 16],
    /// `None` if the process did not exist.
    pub(crate) remote: Option<RemoteCard>,
}

/// For each card and GID, the number of its handles and how many handles it has; and the last number.
type Numbers = (HashMap<(usize, [u8; 16]), (u16, usize)>, u16);

fn numbers() -> &'static Mutex<Numbers> {
    static NUMBERS: OnceLock<Mutex<Numbers>> = OnceLock::new();
    NUMBERS.get_or_init(Mutex::default)
}

/// The number of the handles for `gid`, by which completions name the sender. `None` if there is no handle.
pub(crate) fn number_of(card: usize, gid: &[u8; 16]) -> Option<u16> {
    let numbers = lock(numbers());
    numbers.0.get(&(card, *gid)).map(|(number, _)| *number)
}

/// `ibv_create_ah(3)`.
///
/// # Safety
/// The domain was made by this library, and the attributes are valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_ah(pd: *mut ib::ibv_pd, attr: *mut ib::ibv_ah_attr) -> *mut ib::ibv_ah {
    let Some(host) = SimHost::get() else { return refuse(libc::ENODEV) };
    // SAFETY: by the caller.
    let (context, gid) = unsafe { ((*pd).context, (*attr).grh.dgid.raw) };
    let mut numbers = lock(numbers());
    // 0xffff means no handle (rdma-core's `wc_read_slid`).
    let next = (numbers.1 + 1) % 0xffff;
    // SAFETY: a domain's context is open.
    let known = numbers.0.entry((unsafe { card_of(context) }, gid)).or_insert((next, 0));
    known.1 += 1;
    let number = known.0;
    numbers.1 = next;
    let ah = ib::ibv_ah { context, pd, handle: number.into() };
    Box::into_raw(Box::new(AddressHandle { ah, number, gid, remote: RemoteCard::find(host, &gid) })).cast()
}

/// `ibv_destroy_ah(3)`.
///
/// # Safety
/// A handle of [`ibv_create_ah`], which no request uses.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_destroy_ah(ah: *mut ib::ibv_ah) -> c_int {
    // SAFETY: by the caller.
    let address = unsafe { Box::from_raw(ah.cast::<AddressHandle>()) };
    let mut numbers = lock(numbers());
    // SAFETY: a handle's context is open.
    let key = (unsafe { card_of(address.ah.context) }, address.gid);
    if let Some((_, count)) = numbers.0.get_mut(&key) {
        *count -= 1;
        if *count == 0 {
            numbers.0.remove(&key);
        }
    }
    0
}

/// `efadv_query_ah(3)`.
///
/// # Safety
/// A handle of [`ibv_create_ah`], and memory for the attributes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn efadv_query_ah(ah: *mut ib::ibv_ah, attr: *mut AhAttr, _: u32) -> c_int {
    // SAFETY: by the caller; the structure never grew.
    unsafe { *attr = AhAttr { comp_mask: 0, ahn: (*ah.cast::<AddressHandle>()).number, reserved: [0; 6] } };
    0
}
