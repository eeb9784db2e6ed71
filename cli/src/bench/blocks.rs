//! How many blocks of a GPU copy, as a setting of this process and of the server it starts.
#![allow(unsafe_code)]

/// The variable by which loopback is told.
const VARIABLE: &str = "MULTIRAIL_GPU_BLOCKS";

/// Sets it, before any fabric is open.
pub fn set(blocks: u32) {
    // SAFETY: no other thread reads the environment but through the standard library, which locks it: the
    // libraries that would are loaded when backends are asked for their devices, after this.
    unsafe { std::env::set_var(VARIABLE, blocks.to_string()) };
}
