// Finds the first wrong byte in pages of SplitMix64 output (Steele, Lea, Flood 2014). Each page has its own stream. The
// n-th word of a stream depends on n and the stream's first state alone.
//
// `ci/ptx/generate` compiles this file to PTX by clang, without CUDA's headers. So the file defines the few keywords of
// CUDA itself.

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// The pointers lead to GPU memory, never to shared memory.
#define GLOBAL __attribute__((address_space(1)))

enum { WORD = 8 };

// The kernel's argument: `VerifyLaunch` in verify_kernel.rs is the same.
struct Launch {
    u64 start;
    // The first state of each page's stream.
    const u64 *streams;
    // The result: the least offset of a wrong byte. Larger than any offset before the launch.
    u64 *first;
    // The bytes of a page, and its words; the last word may be partial.
    u64 size;
    u64 words;
    // Words of all pages.
    u64 total;
};

static __device__ u64 splitmix(u64 begin, u64 nth) {
    u64 z = begin + (nth + 1) * 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

// Reads `bytes` bytes at an address as a little-endian number.
static __device__ u64 read(u64 address, u32 bytes) {
    if (bytes == WORD && address % WORD == 0) return *(const GLOBAL u64 *)address;
    u64 found = 0;
    for (u32 i = 0; i < bytes; i++) found |= (u64)((const GLOBAL u8 *)address)[i] << (8 * i);
    return found;
}

extern "C" __global__ void multirail_verify(struct Launch launch) {
    u64 threads = (u64)__nvvm_read_ptx_sreg_nctaid_x() * __nvvm_read_ptx_sreg_ntid_x();
    u64 thread = (u64)__nvvm_read_ptx_sreg_ctaid_x() * __nvvm_read_ptx_sreg_ntid_x() + __nvvm_read_ptx_sreg_tid_x();

    for (u64 at = thread; at < launch.total; at += threads) {
        u64 page = at / launch.words;
        u64 word = at % launch.words;
        u64 offset = page * launch.size + word * WORD;
        u64 left = launch.size - word * WORD;
        u32 bytes = left < WORD ? left : WORD;
        u64 wrong = splitmix(launch.streams[page], word) ^ read(launch.start + offset, bytes);
        if (bytes < WORD) wrong &= ((u64)1 << (8 * bytes)) - 1;
        if (wrong) {
            __nvvm_atom_min_gen_ull(launch.first, offset + __builtin_ctzll(wrong) / 8);
            // Later words of this thread have larger offsets.
            return;
        }
    }
}
