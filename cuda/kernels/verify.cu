// Finds the first byte that is not what belongs there: pages of SplitMix64 (Steele, Lea, Flood 2014), a stream
// per page, whose n-th word follows from where the stream begins and n alone.
//
// Compiled to PTX by `ci/ptx/generate`, by clang without CUDA's headers: hence the few words of CUDA spelled
// out here.

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

// Where the pointers lead: to a GPU's memory, never to shared memory.
#define GLOBAL __attribute__((address_space(1)))

enum { WORD = 8 };

// What the host fills in: `Launch` in verify.rs is the same.
struct Launch {
    u64 start;
    // Where each page's stream begins.
    const u64 *streams;
    // The least offset of a wrong byte; more than all of them at first.
    u64 *first;
    // Bytes of a page, and its words, the last one begun or whole.
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

// The bytes at an address, the first one lowest.
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
            // What this thread comes to later lies behind.
            return;
        }
    }
}
