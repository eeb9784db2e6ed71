// What p2pmem is to a program: memory of a PCI device (here an NVMe disk's controller memory buffer)
// that its driver has published, taken by mapping p2pmem/allocate. Prints what each use of it comes
// to, and ends with 1 where that is not what Linux 7.3 does.
//
//   cc -std=c11 -Wall -Wextra -O2 -o p2pmem p2pmem.c -libverbs
//   ./p2pmem /sys/bus/pci/devices/0000:03:00.0 /dev/nvme1n1 rxe0 rxe1
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { KIB = 1024, SIZE = 1024 * KIB };

static const char *pci;
static int failures;

static void die(const char *what) {
    perror(what);
    exit(2);
}

// 0 or an errno, as it is and as it should be.
static void expect(const char *what, int got, int wanted) {
    bool right = got == wanted;
    printf("%s %-66s %s\n", right ? "  " : "!!", what, got ? strerrorname_np(got) : "ok");
    failures += !right;
}

static int failed(bool failed) { return failed ? errno : 0; }

static int attribute(const char *name, int flags) {
    char path[512];
    snprintf(path, sizeof path, "%s/p2pmem/%s", pci, name);
    int fd = open(path, flags | O_CLOEXEC);
    if (fd < 0) die(path);
    return fd;
}

static unsigned long number(const char *name) {
    char text[32] = "";
    int fd = attribute(name, O_RDONLY);
    if (read(fd, text, sizeof text - 1) < 0) die(name);
    close(fd);
    return strtoul(text, NULL, 10);
}

static struct ibv_context *opened(const char *name) {
    struct ibv_device **list = ibv_get_device_list(NULL), *device = NULL;
    for (int i = 0; list && list[i]; i++)
        if (!strcmp(ibv_get_device_name(list[i]), name)) device = list[i];
    struct ibv_context *context = device ? ibv_open_device(device) : NULL;
    if (!context) die(name);
    ibv_free_device_list(list);
    return context;
}

// One end of a connection.
struct end {
    struct ibv_context *context;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    union ibv_gid gid;
};

static struct end made(const char *name) {
    struct end end = {.context = opened(name)};
    if (!(end.pd = ibv_alloc_pd(end.context)) || !(end.cq = ibv_create_cq(end.context, 16, NULL, NULL, 0))) die(name);
    struct ibv_qp_init_attr init = {.send_cq = end.cq, .recv_cq = end.cq, .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1}};
    if (!(end.qp = ibv_create_qp(end.pd, &init)) || ibv_query_gid(end.context, 1, 1, &end.gid)) die(name);
    return end;
}

// A packet carries 4 KiB, one page: of soft-RoCE's memory that is paged on demand, Linux 7.3 forgets where in
// its page a packet begins (drivers/infiniband/sw/rxe/rxe_odp.c, __rxe_odp_mr_copy), whatever memory it is.
static void connected(struct end *from, const struct end *to) {
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1,
        .qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ};
    struct ibv_qp_attr hear = {.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_4096, .dest_qp_num = to->qp->qp_num,
        .max_dest_rd_atomic = 1, .min_rnr_timer = 12,
        .ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = to->gid, .sgid_index = 1, .hop_limit = 1}}};
    struct ibv_qp_attr tell = {.qp_state = IBV_QPS_RTS, .timeout = 18, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1};
    if (ibv_modify_qp(from->qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS)
        || ibv_modify_qp(from->qp, &hear, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER)
        || ibv_modify_qp(from->qp, &tell, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY
            | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
        die("ibv_modify_qp");
}

// Posts one write or read of `size` bytes, and waits for what becomes of it.
static enum ibv_wc_status moved(struct end *end, enum ibv_wr_opcode opcode, struct ibv_mr *here, struct ibv_mr *there,
    size_t size) {
    struct ibv_sge sge = {.addr = (uintptr_t)here->addr, .length = size, .lkey = here->lkey};
    struct ibv_send_wr wr = {.opcode = opcode, .send_flags = IBV_SEND_SIGNALED, .sg_list = &sge, .num_sge = 1,
        .wr.rdma = {.remote_addr = (uintptr_t)there->addr, .rkey = there->rkey}}, *bad;
    struct ibv_wc wc;
    if (ibv_post_send(end->qp, &wr, &bad)) die("ibv_post_send");
    int count;
    while (!(count = ibv_poll_cq(end->cq, 1, &wc)));
    if (count < 0) die("ibv_poll_cq");
    return wc.status;
}

// By verbs: pinned, and paged on demand.
static void register_it(uint8_t *memory, struct end ends[2]) {
    int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    struct ibv_mr *mr = ibv_reg_mr(ends[1].pd, memory, SIZE, access);
    // Pages that may be written behind a file's back are not pinned for long; nor is p2pmem, ever.
    expect("ibv_reg_mr", failed(!mr), EFAULT);
    if (mr) ibv_dereg_mr(mr);
    mr = ibv_reg_mr(ends[1].pd, memory, SIZE, 0);
    expect("ibv_reg_mr, to read only", failed(!mr), EREMOTEIO);
    if (mr) ibv_dereg_mr(mr);

    struct ibv_device_attr_ex attributes;
    if (ibv_query_device_ex(ends[1].context, NULL, &attributes)) die("ibv_query_device_ex");
    bool on_demand = attributes.odp_caps.general_caps & IBV_ODP_SUPPORT;
    expect("the device pages on demand", on_demand ? 0 : EOPNOTSUPP, 0);
    mr = ibv_reg_mr(ends[1].pd, memory, SIZE, access | IBV_ACCESS_ON_DEMAND);
    expect("ibv_reg_mr, paged on demand", failed(!mr), 0);
    if (!mr) return;
    uint8_t *host = aligned_alloc(4 * KIB, SIZE);
    struct ibv_mr *from = host ? ibv_reg_mr(ends[0].pd, host, SIZE, access) : NULL;
    if (!from) die("ordinary memory");
    for (int i = 0; i < SIZE; i++) host[i] = i * 7 + (i >> 8);
    memset(memory, 0, SIZE);
    enum ibv_wc_status status = moved(&ends[0], IBV_WR_RDMA_WRITE, from, mr, SIZE);
    expect("a write of 1 MiB into it from the other card", status ? EIO : 0, 0);
    if (status) printf("   %s\n", ibv_wc_status_str(status));
    expect("all bytes are there", memcmp(memory, host, SIZE) ? EIO : 0, 0);
    memset(host, 0, SIZE);
    status = status ? status : moved(&ends[0], IBV_WR_RDMA_READ, from, mr, SIZE);
    expect("a read of 1 MiB from it to the other card", status ? EIO : 0, 0);
    expect("all bytes are there", memcmp(memory, host, SIZE) ? EIO : 0, 0);
    ibv_dereg_mr(from);
    ibv_dereg_mr(mr);
    free(host);
}

int main(int count, char **arguments) {
    if (count != 5) return fprintf(stderr, "p2pmem PCI-DEVICE DISK RDMA-DEVICE RDMA-DEVICE\n"), 2;
    pci = arguments[1];
    printf("   %s: size %lu, available %lu, published %lu\n", pci, number("size"), number("available"), number("published"));

    unsigned long before = number("available");
    int fd = attribute("allocate", O_RDWR);
    expect("a private mapping", failed(mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0) == MAP_FAILED), EINVAL);
    expect("a mapping from another offset than 0",
        failed(mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 4 * KIB) == MAP_FAILED), EINVAL);
    expect("a mapping of more than there is",
        failed(mmap(NULL, number("size"), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) == MAP_FAILED), ENOMEM);
    uint8_t *memory = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    expect("a shared mapping of 1 MiB", failed(memory == MAP_FAILED), 0);
    if (memory == MAP_FAILED) return 1;
    uint8_t *other = mmap(NULL, 5 * KIB, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    expect("another, of 5 KiB", failed(other == MAP_FAILED), 0);
    int status;
    pid_t child = fork();
    if (!child) {
        mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        kill(getpid(), number("available") == before - 2 * SIZE - 8 * KIB ? SIGKILL : SIGTERM);
    }
    if (waitpid(child, &status, 0) != child) die("waitpid");
    expect("a third, by a program that is killed", WTERMSIG(status) == SIGKILL ? 0 : EIO, 0);
    close(fd);
    printf("   available %lu: %lu less\n", number("available"), before - number("available"));
    expect("1 MiB and 8 KiB are taken", before - number("available") == SIZE + 8 * KIB ? 0 : EIO, 0);

    uint8_t *host = aligned_alloc(4 * KIB, SIZE);
    if (!host) die("memory");
    for (int i = 0; i < SIZE; i++) host[i] = i * 5 + (i >> 8);
    memset(other, 1, 5 * KIB);
    memcpy(memory, host, SIZE);
    expect("written and read by this program", memcmp(memory, host, SIZE) ? EIO : 0, 0);
    expect("the other mapping is other memory", other[0] == 1 && other[5 * KIB - 1] == 1 ? 0 : EIO, 0);
    expect("munmap of the other mapping", failed(munmap(other, 5 * KIB)), 0);
    expect("its 8 KiB are back", before - number("available") == SIZE ? 0 : EIO, 0);

    int file = memfd_create("file", MFD_CLOEXEC);
    expect("write: copied by the kernel to a file", failed(pwrite(file, memory, SIZE, 0) != SIZE), 0);
    memset(memory, 0, SIZE);
    expect("read: and back", failed(pread(file, memory, SIZE, 0) != SIZE), 0);
    expect("all bytes are there", memcmp(memory, host, SIZE) ? EIO : 0, 0);
    close(file);

    // Pinned for a while by a disk behind the same switch: from device to device.
    int disk = open(arguments[2], O_RDWR | O_DIRECT | O_CLOEXEC);
    if (disk < 0) die(arguments[2]);
    expect("O_DIRECT: it goes to another disk", failed(pwrite(disk, memory, SIZE, 0) != SIZE), 0);
    memset(memory, 0, SIZE);
    expect("O_DIRECT: and comes back", failed(pread(disk, memory, SIZE, 0) != SIZE), 0);
    expect("all bytes are there", memcmp(memory, host, SIZE) ? EIO : 0, 0);
    close(disk);

    // By another process (here this one), which gets at pages as verbs does.
    struct iovec here = {host, SIZE}, there = {memory, SIZE};
    expect("process_vm_readv", failed(process_vm_readv(getpid(), &here, 1, &there, 1, 0) != SIZE), EFAULT);

    struct end ends[2] = {made(arguments[3]), made(arguments[4])};
    connected(&ends[0], &ends[1]);
    connected(&ends[1], &ends[0]);
    register_it(memory, ends);

    expect("munmap", failed(munmap(memory, SIZE)), 0);
    expect("all of it is available again", number("available") == before ? 0 : EIO, 0);
    return failures ? 1 : 0;
}
