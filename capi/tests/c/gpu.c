/* Memory of a GPU: allocated by the library, and registered by its address with a release function. Needs a GPU. */
#include "check.h"

#define BYTES ((size_t)4 << 20)

static int released;

static void release(void *context) { ++*(int *)context; }

int main(void) {
    mr_fabric fabric = open_loopback(0), other = open_loopback(0);
    mr_peer peer = 0;
    mr_region source = 0, target = 0, again = 0;
    mr_remote remote = 0, remote_again = 0;
    mr_memory memory = MR_MEMORY_INIT;
    mr_receipt receipt = MR_RECEIPT_INIT;
    mr_rail_receipt rails[4];
    unsigned char *bytes = (unsigned char *)malloc(BYTES), *back = (unsigned char *)malloc(BYTES);
    size_t count = 0;
    void *address = NULL;
    mr_op op = 0;

    for (size_t at = 0; at < BYTES; at++) bytes[at] = (unsigned char)(at * 7 + (at >> 9));
    OK(mr_peer_connect_local(fabric, other, &peer, NULL));
    OK(mr_region_alloc(fabric, BYTES, MR_ACCESS_LOCAL, MR_MEMORY_CUDA, 0, &source));
    OK(mr_region_alloc(other, BYTES, MR_ACCESS_ALL, MR_MEMORY_CUDA, MR_DEVICE_ANY, &target));
    remote = import(peer, target);
    OK(mr_region_copy_in(source, 0, bytes, BYTES));
    OK(mr_write(peer, source, 0, remote, 0, BYTES, NULL, &op));
    OK(mr_op_wait(op, 20 * SECONDS));
    OK(mr_op_receipt(op, &receipt, rails, LENGTH(rails), &count));
    HOLDS(count >= 1 && rails[0].paths == MR_PATH_GPU_COPY);
    OK(mr_op_release(op));
    OK(mr_region_copy_out(target, 0, back, BYTES));
    HOLDS(memcmp(bytes, back, BYTES) == 0);

    /* The same memory by its address, as a program that has allocated it registers it. */
    OK(mr_region_data(target, &address, NULL));
    memory.kind = MR_MEMORY_CUDA;
    memory.address = address;
    memory.length = BYTES;
    memory.access = MR_ACCESS_ALL;
    memory.release = release;
    memory.context = &released;
    memory.device = 7000;
    GIVES(MR_ERROR_INVALID_REQUEST, mr_region_register(other, &memory, &again));
    HOLDS(released == 1);
    memory.device = 0;
    OK(mr_region_register(other, &memory, &again));
    remote_again = import(peer, again);
    memset(bytes, 3, 4096);
    OK(mr_region_copy_in(source, 0, bytes, 4096));
    OK(mr_write(peer, source, 0, remote_again, 8192, 4096, NULL, &op));
    FINISH(op);
    OK(mr_region_copy_out(target, 8192, back, 4096));
    HOLDS(memcmp(bytes, back, 4096) == 0);
    OK(mr_remote_release(remote_again));
    OK(mr_region_release(again));
    OK(mr_region_release(source));
    OK(mr_region_release(target));
    OK(mr_remote_release(remote));
    OK(mr_peer_release(peer));
    OK(mr_fabric_close(fabric));
    OK(mr_fabric_close(other));
    HOLDS(released == 2);
    free(bytes);
    free(back);
    puts("gpu: as the header says");
    return 0;
}
