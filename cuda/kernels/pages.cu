// Gathers and scatters pages by a table: one launch per batch.
//
// A warp copies a page in units of 4 KiB. The units are numbered so that the first units of all pages come first, then
// the second units, and so on: so the copies in flight are spread over memory even if pages are large. The table lies in
// host memory, and reading it takes long: a warp takes up to 32 consecutive units, reads their entries at once, one per
// lane, and shares them between its lanes.
//
// The last block to end writes a word in host memory. All that the launch has written is visible to every GPU and the
// host before that word is.
//
// `ci/ptx/generate` compiles this file to PTX by clang, without CUDA's headers. So the file defines the few keywords of
// CUDA itself.

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef u32 words4 __attribute__((ext_vector_type(4)));

// The pointers lead to GPU or host memory, never to shared memory.
#define GLOBAL __attribute__((address_space(1)))

enum { LANES = 32, UNIT = 4096 };

// The kernel's argument: `PageLaunch` in page_kernel.rs is the same.
struct Launch {
    const u64 *from;
    const u64 *to;
    const u32 *len;
    // The number of blocks that have ended, in memory of this GPU. Zero between launches.
    u32 *ended;
    // The word in host memory to which the last block writes `value`.
    u32 *done;
    u32 value;
    u32 entries;
    // Units of the longest entry; shorter ones have empty units at their end.
    u32 units;
    // Bytes of every entry; 0 if they differ, and `len` has them.
    u32 each;
};

static __device__ u64 hand_around(u64 mine, u32 lane) {
    u32 low = __nvvm_shfl_sync_idx_i32(0xffffffff, (u32)mine, lane, 31);
    u32 high = __nvvm_shfl_sync_idx_i32(0xffffffff, (u32)(mine >> 32), lane, 31);
    return (u64)high << 32 | low;
}

// Copies `len` bytes, at most UNIT, whose addresses are aligned for T.
template <typename T> static __device__ void move(u64 to, u64 from, u32 len, u32 lane) {
    // The loads in flight per lane. Within an H200, batches of 32 MiB moved at 0.88 of the speed of one copy with four
    // loads, and at 0.85 with eight. Between two H200s it made no difference.
    enum { DEPTH = 4 };
    const GLOBAL T *source = (const GLOBAL T *)from;
    GLOBAL T *target = (GLOBAL T *)to;
    u32 whole = len / sizeof(T);
    u32 at = lane;
    for (; at + (DEPTH - 1) * LANES < whole; at += DEPTH * LANES) {
        T held[DEPTH];
#pragma unroll
        for (u32 i = 0; i < DEPTH; i++) held[i] = source[at + i * LANES];
#pragma unroll
        for (u32 i = 0; i < DEPTH; i++) target[at + i * LANES] = held[i];
    }
    for (; at < whole; at += LANES) target[at] = source[at];
    u32 tail = whole * sizeof(T) + lane;
    if (tail < len) ((GLOBAL u8 *)to)[tail] = ((const GLOBAL u8 *)from)[tail];
}

// 1024 threads per block leave at most 64 registers to a thread.
extern "C" __global__ __attribute__((launch_bounds(1024))) void multirail_pages(struct Launch launch) {
    u32 threads = __nvvm_read_ptx_sreg_ntid_x();
    u32 thread = __nvvm_read_ptx_sreg_tid_x();
    u32 blocks = __nvvm_read_ptx_sreg_nctaid_x();
    u32 lane = thread % LANES;
    u32 warps = blocks * (threads / LANES);
    // Consecutive warp numbers are in different blocks, so a short table is spread over all blocks.
    u32 warp = thread / LANES * blocks + __nvvm_read_ptx_sreg_ctaid_x();
    u32 total = launch.entries * launch.units;
    u32 share = (total + warps - 1) / warps;
    share = share < LANES ? share : LANES;

    for (u32 first = warp * share; first < total; first += warps * share) {
        u64 from = 0, to = 0;
        u32 len = 0;
        u32 mine = first + lane;
        if (lane < share && mine < total) {
            u32 entry = mine % launch.entries;
            u32 skip = mine / launch.entries * UNIT;
            u32 whole = launch.each ? launch.each : launch.len[entry];
            if (skip < whole) {
                len = whole - skip < UNIT ? whole - skip : UNIT;
                from = launch.from[entry] + skip;
                to = launch.to[entry] + skip;
            }
        }
        for (u32 turn = 0; turn < share && first + turn < total; turn++) {
            u64 source = hand_around(from, turn);
            u64 target = hand_around(to, turn);
            u32 bytes = __nvvm_shfl_sync_idx_i32(0xffffffff, len, turn, 31);
            u64 both = source | target;
            if (both % 16 == 0) move<words4>(target, source, bytes, lane);
            else if (both % 8 == 0) move<u64>(target, source, bytes, lane);
            else if (both % 4 == 0) move<u32>(target, source, bytes, lane);
            else move<u8>(target, source, bytes, lane);
        }
    }

    __syncthreads();
    if (thread == 0) {
        __nvvm_membar_sys();
        if ((u32)__nvvm_atom_add_gen_i((int *)launch.ended, 1) == blocks - 1) {
            *(volatile u32 *)launch.ended = 0;
            __nvvm_membar_sys();
            *(volatile u32 *)launch.done = launch.value;
        }
    }
}
