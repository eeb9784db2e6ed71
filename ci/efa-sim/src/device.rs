//! The cards as devices and contexts of verbs, and their attributes.

use std::ffi::{c_char, c_int};
use std::mem::{offset_of, zeroed};
use std::ptr::null_mut;
use std::sync::OnceLock;

use rdma_sys as ib;

use crate::efadv::{self, DeviceAttr};
use crate::host::SimHost;
use crate::p5::P5Card;
use crate::page::{QUEUES, RECEIVE_BUFFERS, REGIONS};
use crate::{completions, poll, queue_pair};

/// The most bytes of a message, as libfabric shows it on a p5.
pub(crate) const MTU: u32 = 8760;
/// The most requests of a queue pair, and the most receives. libfabric then shows the sizes of a p5, 4096 and 8192
/// (`efa_prov_info.c`, which divides the latter by the buffers of a receive).
const SENDS: u32 = 4096;
const RECEIVES: u32 = 32_768;
const SEND_BUFFERS: u16 = 2;
/// The most bytes that a request carries itself, and the most bytes of an access.
pub(crate) const INLINE: usize = 32;
pub(crate) const MAX_RDMA: u32 = 1 << 30;
/// Active port speed and width of 100 Gbit/s: four lanes of EDR (`ib_user_verbs.h`).
const EDR: u8 = 32;
const FOUR_LANES: u8 = 2;

/// A device, and its index among the cards.
#[repr(C)]
struct SimDevice {
    device: ib::ibv_device,
    index: usize,
}

/// An open device. verbs finds the outer context by the address of the inner one.
#[repr(C)]
struct SimContext {
    verbs: ib::verbs_context,
    index: usize,
}

struct DeviceList(Vec<*mut SimDevice>);

// SAFETY: the devices are made once, and never changed or freed.
unsafe impl Send for DeviceList {}
// SAFETY: as above.
unsafe impl Sync for DeviceList {}

fn devices() -> &'static [*mut SimDevice] {
    static DEVICES: OnceLock<DeviceList> = OnceLock::new();
    let make = || {
        let Some(host) = SimHost::get() else { return DeviceList(Vec::new()) };
        let device = |index| {
            let name = P5Card::new(index).name();
            // SAFETY: zero is a value of the structure.
            let mut device: ib::ibv_device = unsafe { zeroed() };
            // As for an EFA card (rdma-core, `providers/efa/efa.c`).
            device.node_type = ib::IBV_NODE_UNSPECIFIED;
            device.transport_type = ib::IBV_TRANSPORT_UNSPECIFIED;
            write(&mut device.name, name);
            write(&mut device.dev_name, &format!("uverbs{index}"));
            write(&mut device.dev_path, &format!("/dev/infiniband/uverbs{index}"));
            let ibdev = host.sysfs.join("class/infiniband").join(name);
            write(&mut device.ibdev_path, &ibdev.to_string_lossy());
            Box::into_raw(Box::new(SimDevice { device, index }))
        };
        DeviceList((0..host.config.devices).map(device).collect())
    };
    &DEVICES.get_or_init(make).0
}

/// Writes a string and a zero byte into a field.
fn write(field: &mut [c_char], value: &str) {
    let last = field.len() - 1;
    for (to, from) in field[..last].iter_mut().zip(value.bytes()) {
        *to = from as c_char;
    }
}

/// Sets errno to `code` and returns null, as a refused call of verbs does.
pub(crate) fn refuse<T>(code: c_int) -> *mut T {
    // SAFETY: errno belongs to the calling thread.
    unsafe { *libc::__errno_location() = code };
    null_mut()
}

/// The index of a context's card.
///
/// # Safety
/// The context was made by this library and is not closed.
pub(crate) unsafe fn card_of(context: *mut ib::ibv_context) -> usize {
    let outer = offset_of!(SimContext, verbs) + offset_of!(ib::verbs_context, context);
    // SAFETY: by the caller, the context is part of a `SimContext`.
    unsafe { (*context.byte_sub(outer).cast::<SimContext>()).index }
}

/// `ibv_get_device_list(3)`.
///
/// # Safety
/// `count` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ib::ibv_device {
    let devices = devices();
    // SAFETY: the list has an entry for each device and a null; `count` by the caller.
    unsafe {
        let list = libc::calloc(devices.len() + 1, size_of::<*mut ib::ibv_device>());
        let list = list.cast::<*mut ib::ibv_device>();
        if list.is_null() {
            return refuse(libc::ENOMEM);
        }
        for (place, device) in devices.iter().enumerate() {
            *list.add(place) = device.cast();
        }
        if !count.is_null() {
            *count = devices.len() as c_int;
        }
        list
    }
}

/// `ibv_free_device_list(3)`.
///
/// # Safety
/// A list of [`ibv_get_device_list`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ib::ibv_device) {
    // SAFETY: by the caller.
    unsafe { libc::free(list.cast()) };
}

/// `ibv_open_device(3)`.
///
/// # Safety
/// A device of [`ibv_get_device_list`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_open_device(device: *mut ib::ibv_device) -> *mut ib::ibv_context {
    // SAFETY: by the caller; zero is a value of the other structures.
    unsafe {
        let mut verbs: ib::verbs_context = zeroed();
        verbs.sz = size_of::<ib::verbs_context>();
        verbs.query_port = Some(query_port);
        verbs.create_cq_ex = Some(completions::create);
        verbs.create_qp_ex = Some(queue_pair::create_datagram);
        verbs.context.device = device;
        verbs.context.cmd_fd = -1;
        verbs.context.async_fd = -1;
        verbs.context.num_comp_vectors = 1;
        // __VERBS_ABI_IS_EXTENDED of `verbs.h`.
        verbs.context.abi_compat = std::ptr::without_provenance_mut(usize::MAX);
        verbs.context.ops.post_send = Some(crate::post::post_send);
        verbs.context.ops.post_recv = Some(crate::post::post_recv);
        verbs.context.ops.poll_cq = Some(poll::poll);
        verbs.context.ops.req_notify_cq = Some(poll::notify);
        let context = SimContext { verbs, index: (*device.cast::<SimDevice>()).index };
        &raw mut (*Box::into_raw(Box::new(context))).verbs.context
    }
}

/// `ibv_close_device(3)`.
///
/// # Safety
/// An open context, without objects.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_close_device(context: *mut ib::ibv_context) -> c_int {
    let outer = offset_of!(SimContext, verbs) + offset_of!(ib::verbs_context, context);
    // SAFETY: by the caller, the context is part of a `SimContext` of a box.
    drop(unsafe { Box::from_raw(context.byte_sub(outer).cast::<SimContext>()) });
    0
}

/// `ibv_query_device(3)`.
///
/// # Safety
/// The context is open, and the other pointer has memory for the attributes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_device(_: *mut ib::ibv_context, attr: *mut ib::ibv_device_attr) -> c_int {
    // SAFETY: plain data; by the caller.
    unsafe {
        *attr = zeroed();
        let attr = &mut *attr;
        write(&mut attr.fw_ver, "simulated");
        attr.max_mr_size = 1 << 40;
        attr.page_size_cap = 0xffff_f000;
        // The IDs of Amazon and of a p5's card, as in its sysfs.
        (attr.vendor_id, attr.vendor_part_id, attr.hw_ver) = (0x1d0f, 0xefa1, 0xefa1);
        attr.max_qp = QUEUES as c_int;
        (attr.max_qp_wr, attr.max_sge, attr.max_sge_rd) = (RECEIVES as c_int, SEND_BUFFERS.into(), 1);
        (attr.max_cq, attr.max_cqe) = (512, 65_536);
        (attr.max_mr, attr.max_pd, attr.max_ah) = (REGIONS as c_int, 256, 65_536);
        (attr.max_pkeys, attr.phys_port_cnt) = (1, 1);
    }
    0
}

unsafe extern "C" fn query_port(
    _: *mut ib::ibv_context,
    _: u8,
    attr: *mut ib::ibv_port_attr,
    len: usize,
) -> c_int {
    // SAFETY: zero is a value of the structure.
    let mut port: ib::ibv_port_attr = unsafe { zeroed() };
    port.state = ib::IBV_PORT_ACTIVE;
    (port.max_mtu, port.active_mtu) = (ib::IBV_MTU_4096, ib::IBV_MTU_4096);
    (port.gid_tbl_len, port.pkey_tbl_len, port.max_msg_sz) = (1, 1, MTU);
    (port.active_speed, port.active_width, port.phys_state) = (EDR, FOUR_LANES, 5);
    // SAFETY: `len` is the size that the program passes.
    unsafe { copy_attributes(&port, attr, len) };
    0
}

/// Copies as much of the attributes as the program has memory for.
///
/// # Safety
/// `into` has room for `len` bytes.
unsafe fn copy_attributes<T>(attributes: &T, into: *mut T, len: usize) {
    // SAFETY: by the caller; the attributes are plain data.
    unsafe {
        let from = std::ptr::from_ref(attributes).cast::<u8>();
        into.cast::<u8>().copy_from_nonoverlapping(from, len.min(size_of::<T>()));
    }
}

/// `ibv_query_port(3)`, for programs that do not use extended contexts.
///
/// # Safety
/// The context is open, and `attr` has memory for the older attributes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_port(
    context: *mut ib::ibv_context,
    number: u8,
    attr: *mut ib::_compat_ibv_port_attr,
) -> c_int {
    // SAFETY: by the caller; the older attributes end before `port_cap_flags2`.
    unsafe { query_port(context, number, attr.cast(), offset_of!(ib::ibv_port_attr, flags)) }
}

/// `ibv_query_gid(3)`.
///
/// # Safety
/// The context is open, and the other pointer has memory for the attributes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_gid(
    context: *mut ib::ibv_context,
    _: u8,
    index: c_int,
    gid: *mut ib::ibv_gid,
) -> c_int {
    let Some(host) = SimHost::get().filter(|_| index == 0) else { return -1 };
    // SAFETY: by the caller.
    unsafe { (*gid).raw = host.process.gid(card_of(context)) };
    0
}

/// `efadv_query_device(3)`.
///
/// # Safety
/// The context is open, and `attr` has `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn efadv_query_device(
    _: *mut ib::ibv_context,
    attr: *mut DeviceAttr,
    len: u32,
) -> c_int {
    let Some(host) = SimHost::get() else { return libc::ENODEV };
    let cap = |has: bool, cap: u32| if has { cap } else { 0 };
    let device = DeviceAttr {
        comp_mask: 0,
        max_sq_wr: SENDS,
        max_rq_wr: RECEIVES,
        max_sq_sge: SEND_BUFFERS,
        max_rq_sge: RECEIVE_BUFFERS as u16,
        inline_buf_size: INLINE as u16,
        reserved: [0; 2],
        device_caps: efadv::CAPS_RNR_RETRY
            | efadv::CAPS_CQ_WITH_SGID
            | cap(host.config.read, efadv::CAPS_RDMA_READ)
            | cap(host.config.write, efadv::CAPS_RDMA_WRITE)
            | cap(host.config.write && host.config.unsolicited, efadv::CAPS_UNSOLICITED_WRITE_RECV),
        max_rdma_size: MAX_RDMA,
    };
    // SAFETY: by the caller.
    unsafe { copy_attributes(&device, attr, len as usize) };
    0
}

/// `ibv_fork_init(3)`. No memory is pinned, so forks do no harm.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_fork_init() -> c_int {
    0
}

/// `ibv_is_fork_initialized(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_is_fork_initialized() -> ib::ibv_fork_status {
    ib::IBV_FORK_UNNEEDED
}
