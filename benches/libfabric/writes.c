// What libfabric itself can do, the upper limit of multirail's libfabric backend: a window of
// fi_writemsg between two processes of one host, and nothing around it. The parent writes page by
// page in a shuffled order; the child is the target. A wrong byte is an error, and no figure is printed.
//
// Either process has one thread: glibc locks without atomics then (SINGLE_THREAD_P), and libfabric locks
// eight times for each look at its queue.
//
//   cc -std=c11 -Wall -Wextra -O2 -o writes writes.c -lfabric
//   ./writes --provider tcp --node 127.0.0.1 --size 65536 --inflight 16 --millis 1000
#define _GNU_SOURCE
#include <fcntl.h>
#include <getopt.h>
#include <poll.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_rma.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

// Completions read at once, most writes in flight, a key; seconds without a completion, for the last bytes.
enum { BATCH = 64, WINDOW = 4096, KEY = 1, STALL = 10, LATE = 5 };

// What was asked for, and the order of the pages. Both processes have it from before the fork.
static const char *provider = "tcp", *node;
static size_t size = 65536, inflight = 16, count, region = 64 << 20, pages;
static int delivery;
static double seconds = 1;
static uint32_t *order;

// This process's end. Nothing of it is open before the fork.
static struct fi_info *info;
static struct fid_fabric *fabric;
static struct fid_domain *domain;
static struct fid_av *av;
static struct fid_cq *cq;
static struct fid_ep *ep;
static struct fid_mr *mr;
static uint8_t *memory;
static struct pollfd heard = {.events = POLLIN}; // from the other process
static int tell_fd;

// What the parent must know of the target.
static struct card {
    uint64_t base, key;
    size_t name_len;
    uint8_t name[256];
} card;

// What the target shall check: the writes, and how many last ones are of pattern 2. No writes: end.
struct task { uint64_t written, fresh; };

// The parent's writes. A context is libfabric's from its write to its completion.
static struct fi_context2 contexts[WINDOW], *idle[WINDOW];
static fi_addr_t target;
static uint64_t next; // counts writes; the next one goes to page order[next % pages]

_Noreturn static void fail(const char *what, long code) {
    fprintf(stderr, "writes: %s%s%s\n", what, code ? ": " : "", code ? fi_strerror((int)labs(code)) : "");
    exit(1);
}

static void must(const char *what, long code) {
    if (code < 0) fail(what, code);
}

// Messages are shorter than a pipe's buffer: they come whole, or not at all.
static void tell(const void *message, size_t len) {
    if (write(tell_fd, message, len) != (ssize_t)len) fail("the other process is gone", 0);
}

static bool hear(void *message, size_t len) {
    ssize_t got = read(heard.fd, message, len);
    if (got >= 0 && got != (ssize_t)len) fail("the other process is gone", 0);
    return got >= 0;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

// Word `at` of the region in pattern `seed`: splitmix64.
static uint64_t mix(uint64_t at, uint64_t seed) {
    uint64_t z = (at + (seed << 40)) * 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9, z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
}

static void fill(size_t page, uint64_t seed) {
    uint64_t *words = (uint64_t *)memory;
    for (size_t i = page * size / 8; i < (page + 1) * size / 8; i++) words[i] = mix(i, seed);
}

// Whether every page that was written holds what was written last.
static bool right(struct task task) {
    const volatile uint64_t *words = (const volatile uint64_t *)memory;
    for (uint64_t n = task.written > pages ? task.written - pages : 0; n < task.written; n++) {
        size_t page = order[n % pages];
        for (size_t i = page * size / 8; i < (page + 1) * size / 8; i++)
            if (words[i] != mix(i, n < task.written - task.fresh ? 1 : 2)) return false;
    }
    return true;
}

static void open_all(uint64_t access) {
    struct fi_info *hints = fi_allocinfo();
    hints->caps = FI_MSG | FI_RMA;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
    hints->domain_attr->threading = FI_THREAD_SAFE;
    hints->domain_attr->av_type = FI_AV_TABLE;
    hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
    hints->fabric_attr->prov_name = strdup(provider);
    must("fi_getinfo", fi_getinfo(FI_VERSION(1, 17), node, NULL, node ? FI_SOURCE : 0, hints, &info));
    fi_freeinfo(hints);
    must("fi_fabric", fi_fabric(info->fabric_attr, &fabric, NULL));
    must("fi_domain", fi_domain(fabric, info, &domain, NULL));
    must("fi_av_open", fi_av_open(domain, &(struct fi_av_attr){.type = FI_AV_TABLE}, &av, NULL));
    size_t depth = inflight > BATCH ? inflight : BATCH;
    struct fi_cq_attr queue = {.size = depth, .format = FI_CQ_FORMAT_DATA, .wait_obj = FI_WAIT_NONE};
    must("fi_cq_open", fi_cq_open(domain, &queue, &cq, NULL));
    must("fi_endpoint", fi_endpoint(domain, info, &ep, NULL));
    must("fi_ep_bind of the queue", fi_ep_bind(ep, &cq->fid, FI_TRANSMIT | FI_RECV));
    must("fi_ep_bind of the addresses", fi_ep_bind(ep, &av->fid, 0));
    must("fi_enable", fi_enable(ep));
    memory = mmap(NULL, region, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail("memory for the region", 0);
    (void)madvise(memory, region, MADV_HUGEPAGE); // where the kernel has them
    memset(memory, 0, region);
    must("fi_mr_reg", fi_mr_reg(domain, memory, region, access, 0, KEY, 0, &mr, NULL));
    // Either process may be the one that copies. A kernel that does not ask refuses this call.
    (void)prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
}

static void close_all(void) {
    struct fid *all[] = {&ep->fid, &mr->fid, &cq->fid, &av->fid, &domain->fid, &fabric->fid};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) must("fi_close", fi_close(all[i]));
    fi_freeinfo(info);
}

// The completions there are, at most BATCH; 0 if there are none.
__attribute__((noinline)) static uint64_t reap(struct fi_cq_data_entry *entries) {
    ssize_t got = fi_cq_read(cq, entries, BATCH);
    if (got >= 0) return (uint64_t)got;
    if (got == -FI_EAGAIN || got == -FI_EINTR) return 0;
    struct fi_cq_err_entry error = {0};
    if (got != -FI_EAVAIL || fi_cq_readerr(cq, &error, 0) != 1) fail("fi_cq_read", got);
    fail(fi_cq_strerror(cq, error.prov_errno, error.err_data, NULL, 0), error.err);
}

// The target: it hands out its card, then moves data on until it is told to check and to end.
static void serve(void) {
    open_all(FI_REMOTE_WRITE);
    struct fi_cq_data_entry entries[BATCH];
    card.key = fi_mr_key(mr), card.name_len = sizeof card.name;
    if (info->domain_attr->mr_mode & FI_MR_VIRT_ADDR) card.base = (uint64_t)(uintptr_t)memory;
    must("fi_getname", fi_getname(&ep->fid, card.name, &card.name_len));
    tell(&card, sizeof card);
    for (uint64_t turn = 1;; turn++) {
        reap(entries);
        struct task task;
        if (turn % 1024 || !hear(&task, sizeof task)) continue;
        if (!task.written) break;
        // With --delivery all bytes are in place. Without it this end may still have to move some on.
        double limit = now() + (delivery ? 0 : LATE);
        while (!right(task)) {
            if (now() > limit) fail("WRONG BYTES at the target", 0);
            for (int i = 0; i < 1024; i++) reap(entries);
        }
        tell("", 1);
    }
    close_all();
}

// Posts the next write; false if libfabric has no room now.
__attribute__((noinline)) static bool post(struct fi_context2 *context) {
    size_t at = order[next % pages] * size;
    struct iovec here = {memory + at, size};
    struct fi_rma_iov there = {card.base + at, size, card.key};
    void *desc = fi_mr_desc(mr);
    struct fi_msg_rma message = {&here, &desc, 1, target, &there, 1, context, 0};
    uint64_t flags = FI_COMPLETION | (delivery ? FI_DELIVERY_COMPLETE : 0);
    ssize_t code = fi_writemsg(ep, &message, flags);
    if (code == -FI_EAGAIN) return false;
    must("fi_writemsg", code);
    next++;
    return true;
}

// Writes, `inflight` at a time, until there were `limit` or it is `until` (0: ever). Then drains.
static uint64_t run(uint64_t limit, double until) {
    struct fi_cq_data_entry entries[BATCH];
    uint64_t posted = 0, done = 0, seen = 0;
    double since = now();
    for (uint64_t turn = 1; done < limit; turn++) {
        for (; posted < limit && posted - done < inflight; posted++) {
            if (!post(idle[posted - done])) break;
        }
        // The idle contexts are those from idle[posted - done] on.
        uint64_t got = reap(entries);
        for (uint64_t i = 0; i < got; i++) idle[posted - ++done] = entries[i].op_context;
        if (turn % 16) continue;
        double time = now();
        if (until && time > until) limit = posted, until = 0;
        if (turn % 4096) continue;
        if (poll(&heard, 1, 0)) fail("the target is gone", 0);
        if (done != seen) seen = done, since = time;
        if (time - since > STALL) fail(done ? "no completion for 10 s" : "no first completion for 10 s", 0);
    }
    return posted;
}

static void lead(pid_t child) {
    open_all(FI_WRITE);
    for (size_t page = 0; page < pages; page++) fill(page, 1);
    for (size_t i = 0; i < inflight; i++) idle[i] = &contexts[i];
    hear(&card, sizeof card);
    if (fi_av_insert(av, card.name, 1, &target, 0, NULL) != 1) fail("fi_av_insert", 0);
    run(1, 0); // This connects.
    double start = now();
    uint64_t writes = run(count ? count : UINT64_MAX, count ? 0 : start + seconds);
    double took = now() - start;
    // One more window with another pattern: what was written before cannot stand in for it.
    struct task task = {.fresh = inflight < pages ? inflight : pages};
    for (size_t i = 0; i < task.fresh; i++) fill(order[(next + i) % pages], 2);
    run(task.fresh, 0);
    task.written = next;
    tell(&task, sizeof task);
    while (!poll(&heard, 1, 0)) reap((struct fi_cq_data_entry[BATCH]){0});
    hear(&(char){0}, 1);
    tell(&(struct task){0}, sizeof(struct task));
    int status;
    if (waitpid(child, &status, 0) != child || status) fail("the target ended badly", 0);
    double mops = (double)writes / took / 1e6, gb_per_s = mops * (double)size / 1e3;
    printf("{\"provider\":\"%s\",\"size\":%zu,", info->fabric_attr->prov_name, size);
    printf("\"inflight\":%zu,\"writes\":%zu,\"seconds\":%.6f,", inflight, (size_t)writes, took);
    printf("\"gb_per_s\":%.4f,\"mops\":%.4f}\n", gb_per_s, mops);
    close_all();
}

static void ask(int argc, char **argv) {
    static const struct option options[] = {
        {"provider", 1, 0, 'p'}, {"node", 1, 0, 'n'}, {"size", 1, 0, 's'}, {"inflight", 1, 0, 'i'},
        {"millis", 1, 0, 't'}, {"count", 1, 0, 'c'}, {"region", 1, 0, 'r'},
        {"delivery", 0, &delivery, 1}, {"batch", 1, 0, 0}, {0}}; // the window here goes write by write
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) {
        char *end = "";
        size_t value = optarg ? strtoull(optarg, &end, 10) : 0;
        if (option && strchr("sitcr", option) && (*end || !value)) fail("a number is wrong", 0);
        if (option == 'p') provider = optarg;
        if (option == 'n') node = optarg;
        if (option == 's') size = value;
        if (option == 'i') inflight = value;
        if (option == 'c') count = value;
        if (option == 'r') region = value;
        if (option == 't') seconds = (double)value / 1000;
        if (option == '?') exit(1);
    }
    pages = region / size, region = pages * size;
    if (size % 8 || !pages || pages > UINT32_MAX) fail("--size is a multiple of 8 and at most --region", 0);
    if (inflight > WINDOW) fail("--inflight is at most 4096", 0);
}

// Binds this process to the core `which` of those it may use, if there are that many.
static void pin(int which) {
    cpu_set_t may, only = {0};
    if (sched_getaffinity(0, sizeof may, &may)) fail("sched_getaffinity", 0);
    for (int core = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &may) && which-- == 0) CPU_SET(core, &only);
    if (CPU_COUNT(&only)) sched_setaffinity(0, sizeof only, &only);
}

int main(int argc, char **argv) {
    ask(argc, argv);
    if (!(order = calloc(pages, sizeof *order))) fail("memory for the order", 0);
    for (size_t i = 0; i < pages; i++) { // each page swaps places with one before it, or with itself
        size_t j = mix(i, 3) % (i + 1);
        order[i] = order[j], order[j] = (uint32_t)i;
    }
    signal(SIGPIPE, SIG_IGN);
    int down[2], up[2];
    if (pipe(down) || pipe(up) || fcntl(down[0], F_SETFL, O_NONBLOCK)) fail("pipes", 0);
    pid_t parent = getpid(), child = fork();
    if (child < 0) fail("fork", 0);
    heard.fd = child ? up[0] : down[0], close(child ? up[1] : down[1]);
    tell_fd = child ? down[1] : up[1], close(child ? down[0] : up[0]);
    pin(child ? 0 : 1);
    if (child) lead(child);
    // SIGTERM, so that a provider can take its files away.
    else if (prctl(PR_SET_PDEATHSIG, SIGTERM) || getppid() != parent) fail("the parent is gone", 0);
    else serve();
    return 0;
}
