// What libibverbs itself can do, the lower limit of latencies over multirail's verbs backend: a write
// with imm there, one back, on completion queues, between two processes of one host. The parent
// measures; the child answers.
//
//   cc -std=c11 -Wall -Wextra -O2 -o pingpong pingpong.c -libverbs
//   ./pingpong --devices rxe0,rxe1 --gid 1 --size 8 --count 2000
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <getopt.h>
#include <infiniband/verbs.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

// Receives that are posted at any time; seconds without an answer.
enum { RECEIVES = 64, STALL = 10 };

static const char *devices[2] = {"rxe0", "rxe1"};
static int gid_index = 1;
static size_t size = 8, count = 2000;

// This process's end. Nothing of it is open before the fork.
static struct ibv_context *context;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static struct ibv_port_attr port;
static uint8_t *memory;
static int tell_fd, hear_fd;

// What the other process must know.
static struct card {
    uint32_t number, key;
    uint64_t base;
    union ibv_gid gid;
    uint16_t lid;
} mine, other;

_Noreturn static void fail(const char *what) {
    fprintf(stderr, "pingpong: %s: %m\n", what);
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

// A receive without a buffer: an imm takes it.
static void take(void) {
    struct ibv_recv_wr request = {.wr_id = 1}, *bad;
    if (ibv_post_recv(qp, &request, &bad)) fail("ibv_post_recv");
}

static void open_all(const char *name) {
    struct ibv_device **list = ibv_get_device_list(NULL);
    for (size_t i = 0; list && list[i]; i++)
        if (!strcmp(ibv_get_device_name(list[i]), name)) context = ibv_open_device(list[i]);
    if (!context) fail(name);
    if (ibv_query_port(context, 1, &port)) fail("ibv_query_port");
    if (ibv_query_gid(context, 1, gid_index, &mine.gid)) fail("ibv_query_gid");
    struct ibv_pd *pd = ibv_alloc_pd(context);
    if (!pd) fail("ibv_alloc_pd");
    if (!(memory = aligned_alloc(4096, (size + 4095) / 4096 * 4096))) fail("memory");
    memset(memory, 1, size);
    mr = ibv_reg_mr(pd, memory, size, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
    if (!mr) fail("ibv_reg_mr");
    if (!(cq = ibv_create_cq(context, 4 * RECEIVES, NULL, NULL, 0))) fail("ibv_create_cq");
    struct ibv_qp_init_attr attr = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC};
    attr.cap = (struct ibv_qp_cap){RECEIVES, RECEIVES, 1, 1, 0};
    if (!(qp = ibv_create_qp(pd, &attr))) fail("ibv_create_qp");
    struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1};
    init.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
    if (ibv_modify_qp(qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS))
        fail("ibv_modify_qp to init");
    for (int i = 0; i < RECEIVES; i++) take();
    mine.number = qp->qp_num, mine.key = mr->rkey, mine.base = (uintptr_t)memory, mine.lid = port.lid;
}

static void meet(void) {
    if (write(tell_fd, &mine, sizeof mine) != sizeof mine) fail("the other process is gone");
    if (read(hear_fd, &other, sizeof other) != sizeof other) fail("the other process is gone");
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR, .path_mtu = port.active_mtu};
    attr.dest_qp_num = other.number, attr.max_dest_rd_atomic = 1, attr.min_rnr_timer = 12;
    attr.ah_attr = (struct ibv_ah_attr){.dlid = other.lid, .port_num = 1, .is_global = 1};
    attr.ah_attr.grh = (struct ibv_global_route){.dgid = other.gid, .hop_limit = 64};
    attr.ah_attr.grh.sgid_index = (uint8_t)gid_index;
    if (ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN
                                     | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
        fail("ibv_modify_qp to receive");
    struct ibv_qp_attr sends = {.qp_state = IBV_QPS_RTS, .timeout = 18, .retry_cnt = 7, .rnr_retry = 7};
    sends.max_rd_atomic = 1;
    if (ibv_modify_qp(qp, &sends, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY
                                      | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC))
        fail("ibv_modify_qp to send");
    // Nobody writes before both can.
    if (write(tell_fd, "", 1) != 1 || read(hear_fd, &(char){0}, 1) != 1) fail("the other process is gone");
}

static void play(void) {
    struct ibv_sge here = {(uintptr_t)memory, (uint32_t)size, mr->lkey};
    struct ibv_send_wr request = {.sg_list = &here, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE_WITH_IMM}, *bad;
    request.send_flags = IBV_SEND_SIGNALED, request.imm_data = htonl(7);
    request.wr.rdma.remote_addr = other.base, request.wr.rdma.rkey = other.key;
    if (ibv_post_send(qp, &request, &bad)) fail("ibv_post_send");
}

// Reads completions until an imm is among them.
static void await(void) {
    struct ibv_wc entry;
    double limit = 0;
    for (uint64_t turn = 1;; turn++) {
        int got = ibv_poll_cq(cq, 1, &entry);
        if (got < 0) fail("ibv_poll_cq");
        if (got && entry.status) fail(ibv_wc_status_str(entry.status));
        if (got && entry.opcode == IBV_WC_RECV_RDMA_WITH_IMM) return take();
        if (turn % 4096) continue;
        if (!limit) limit = now() + STALL;
        if (now() > limit) fail("no answer for 10 s");
    }
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void lead(pid_t child) {
    open_all(devices[0]);
    meet();
    double *trips = calloc(count, sizeof *trips);
    if (!trips) fail("memory");
    for (size_t i = 0; i < count; i++) {
        double begun = now();
        play();
        await();
        trips[i] = now() - begun;
    }
    qsort(trips, count, sizeof *trips, ascending);
    int status;
    if (waitpid(child, &status, 0) != child || status) fail("the other process ended badly");
    printf("{\"size\":%zu,\"count\":%zu,\"latency_us\":%.3f}\n", size, count, trips[count / 2] / 2 * 1e6);
}

static void follow(void) {
    open_all(devices[1]);
    meet();
    for (size_t i = 0; i < count; i++) {
        await();
        play();
    }
    // The last one is under way until it is complete.
    struct ibv_wc entry = {0};
    for (double limit = now() + STALL; entry.opcode != IBV_WC_RDMA_WRITE && now() < limit;) ibv_poll_cq(cq, 1, &entry);
}

static void ask(int argc, char **argv) {
    static const struct option options[] = {
        {"devices", 1, 0, 'd'}, {"gid", 1, 0, 'g'}, {"size", 1, 0, 's'}, {"count", 1, 0, 'c'}, {0}};
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        char *end = "";
        size_t value = optarg && option != 'd' ? strtoull(optarg, &end, 10) : 1;
        if (option == '?' || *end || (!value && option != 'g')) fprintf(stderr, "pingpong: what number?\n"), exit(1);
        if (option == 'd') devices[0] = strtok(optarg, ","), devices[1] = strtok(NULL, ",");
        if (option == 'g') gid_index = (int)value;
        if (option == 's') size = value;
        if (option == 'c') count = value;
    }
    if (!devices[0] || !devices[1]) fprintf(stderr, "pingpong: --devices is two names\n"), exit(1);
}

// Binds this process to the core `which` of those it may use, if there are that many.
static void pin(int which) {
    cpu_set_t may, only = {0};
    if (sched_getaffinity(0, sizeof may, &may)) fail("sched_getaffinity");
    for (int core = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &may) && which-- == 0) CPU_SET(core, &only);
    if (CPU_COUNT(&only)) sched_setaffinity(0, sizeof only, &only);
}

int main(int argc, char **argv) {
    ask(argc, argv);
    int down[2], up[2];
    if (pipe(down) || pipe(up)) fail("pipes");
    pid_t parent = getpid(), child = fork();
    if (child < 0) fail("fork");
    hear_fd = child ? up[0] : down[0], close(child ? up[1] : down[1]);
    tell_fd = child ? down[1] : up[1], close(child ? down[0] : up[0]);
    pin(child ? 0 : 1);
    if (child) lead(child);
    else if (prctl(PR_SET_PDEATHSIG, SIGKILL) || getppid() != parent) fail("the parent is gone");
    else follow();
    return 0;
}
