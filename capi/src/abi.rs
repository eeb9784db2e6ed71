//! The numbers and structs of `multirail.h`, under its names. `tests/header.rs` compares both.
#![allow(non_camel_case_types, reason = "the names of the header")]

use std::ffi::{c_char, c_void};

/// `MR_ABI_VERSION`: major << 16 | minor.
pub const ABI_VERSION: u32 = 1;

/// A time without end.
pub const MR_FOREVER: u64 = u64::MAX;

pub type mr_status = i32;

pub const MR_OK: mr_status = 0;
pub const MR_PENDING: mr_status = 1;
pub const MR_ERROR_INVALID_REQUEST: mr_status = -1;
pub const MR_ERROR_OUT_OF_BOUNDS: mr_status = -2;
pub const MR_ERROR_LOCAL_ACCESS: mr_status = -3;
pub const MR_ERROR_REMOTE_ACCESS: mr_status = -4;
pub const MR_ERROR_REVOKED: mr_status = -5;
pub const MR_ERROR_TOO_LARGE: mr_status = -6;
pub const MR_ERROR_UNSUPPORTED: mr_status = -7;
pub const MR_ERROR_BUSY: mr_status = -8;
pub const MR_ERROR_EXHAUSTED: mr_status = -9;
pub const MR_ERROR_DEADLINE_EXCEEDED: mr_status = -10;
pub const MR_ERROR_CANCELLED: mr_status = -11;
pub const MR_ERROR_PEER_DIED: mr_status = -12;
pub const MR_ERROR_DEVICE_LOST: mr_status = -13;
pub const MR_ERROR_CLOSED: mr_status = -14;
pub const MR_ERROR_NOT_FOUND: mr_status = -15;
pub const MR_ERROR_UNREACHABLE: mr_status = -16;
pub const MR_ERROR_VERSION: mr_status = -17;
pub const MR_ERROR_PROTOCOL: mr_status = -18;
pub const MR_ERROR_PERMISSION: mr_status = -19;
pub const MR_ERROR_IO: mr_status = -20;
pub const MR_ERROR_HANDLE: mr_status = -64;
pub const MR_ERROR_BUFFER: mr_status = -65;
pub const MR_ERROR_FORKED: mr_status = -66;
pub const MR_ERROR_PANIC: mr_status = -67;
pub const MR_ERROR_OTHER: mr_status = -68;

pub type mr_fabric = u64;
pub type mr_region = u64;
pub type mr_peer = u64;
pub type mr_remote = u64;
pub type mr_local_list = u64;
pub type mr_remote_list = u64;
pub type mr_prepared = u64;
pub type mr_op = u64;

pub const MR_ACCESS_LOCAL: u32 = 0;
pub const MR_ACCESS_REMOTE_WRITE: u32 = 1;
pub const MR_ACCESS_REMOTE_READ: u32 = 2;
pub const MR_ACCESS_ALL: u32 = 3;

pub const MR_MEMORY_HOST: u32 = 0;
pub const MR_MEMORY_CUDA: u32 = 1;
pub const MR_REGISTER_EVERYWHERE: u32 = 1;
pub const MR_DEVICE_ANY: i32 = -1;

pub const MR_TRANSFER_IMM: u32 = 1;
pub const MR_TRANSFER_IMM_PER_REQUEST: u32 = 2;
pub const MR_TRANSFER_NOTIFY: u32 = 4;
pub const MR_TRANSFER_COLD: u32 = 8;
pub const MR_TRANSFER_COALESCE_NEVER: u32 = 16;
pub const MR_TRANSFER_COALESCE_AUTO: u32 = 32;
pub const MR_TRANSFER_COALESCE_ALWAYS: u32 = 64;
pub const MR_TRANSFER_NO_REPLAY: u32 = 128;

pub const MR_PATH_RDMA: u32 = 1;
pub const MR_PATH_GPU_COPY: u32 = 2;
pub const MR_PATH_MEMORY_COPY: u32 = 4;
pub const MR_PATH_SOCKETS: u32 = 8;
pub const MR_PATH_STAGED: u32 = 16;
pub const MR_PATH_COALESCED: u32 = 32;

pub const MR_OUTCOME_PEER: u32 = 1;
pub const MR_OUTCOME_IMM: u32 = 2;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct mr_option {
    pub key: *const c_char,
    pub value: *const c_char,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct mr_memory {
    pub size: u32,
    pub kind: u32,
    pub address: *mut c_void,
    pub length: usize,
    pub device: i32,
    pub access: u32,
    pub flags: u32,
    pub reserved: u32,
    pub release: Option<extern "C" fn(context: *mut c_void)>,
    pub context: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct mr_transfer_options {
    pub size: u32,
    pub flags: u32,
    pub deadline_ns: u64,
    pub imm: u32,
    pub paths: u32,
    pub notification: *const c_void,
    pub notification_len: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct mr_pages {
    pub indices: *const u32,
    pub stride: usize,
    pub offset: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct mr_local_entry {
    pub region: mr_region,
    pub offset: u64,
    pub length: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct mr_remote_entry {
    pub remote: mr_remote,
    pub offset: u64,
    pub length: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct mr_outcome {
    pub size: u32,
    pub flags: u32,
    pub bytes: u64,
    pub work_requests: u32,
    pub merged: u32,
    pub peer: u64,
    pub imm: u32,
    pub reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct mr_receipt {
    pub size: u32,
    pub rail_size: u32,
    pub bytes: u64,
    pub work_requests: u32,
    pub merged: u32,
    pub post_ns: u64,
    pub transfer_ns: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct mr_rail_receipt {
    pub bytes: u64,
    pub rail: u32,
    pub paths: u32,
    pub transport: [u8; 72],
    pub device: [u8; 72],
}
