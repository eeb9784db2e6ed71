// UCX between two processes: an initiator that measures, and a target, which is its child.
//
//     cc -O2 -o ucx ucx.c -I UCX/include -L UCX/lib -lucp -lucs && UCX_TLS=posix ./ucx
//
// It serves the commands of `benches/src/bin/peers.rs`, one a line of its input, and answers each with a line of JSON.
// It ends with its input. A step that fails ends both processes with an error.

#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

enum { MEMORY = 128 << 20, MOST_PEERS = 1024, MOST_SAMPLES = 1 << 16, LEAST_SAMPLES = 3, LARGEST_MESSAGE = 4096 };
// As in `peers.rs`.
static const double SAMPLE_S = 0.1, LIMIT_S = 30;
static const unsigned BATCH = 64, BURST = 1024;
enum { ECHO, COUNTED, LAST };

typedef struct {
    size_t length;
    char bytes[8192];
} Blob;

typedef struct {
    Blob address, key;
    uint64_t memory;
} Offer;

static ucp_context_h context;
static ucp_worker_h worker;
static ucp_mem_h handle;
static char *memory;
static Blob packed_key;
// Set by the handler of active messages.
static unsigned echoes, arrived;
static size_t echo_length;

static void check(int is_good, const char *what) {
    if (!is_good) {
        fprintf(stderr, "ucx: %s failed\n", what);
        exit(1);
    }
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void await(ucs_status_ptr_t request, ucp_worker_h by) {
    if (request == NULL) {
        return;
    }
    check(!UCS_PTR_IS_ERR(request), "an operation");
    double end = now() + LIMIT_S;
    for (unsigned turn = 1; ucp_request_check_status(request) == UCS_INPROGRESS; turn++) {
        ucp_worker_progress(by);
        check(turn % 1024 != 0 || now() < end, "an operation, within its limit,");
    }
    check(ucp_request_check_status(request) == UCS_OK, "an operation");
    ucp_request_free(request);
}

static ucs_status_t on_message(void *arg, const void *header, size_t header_length, void *data, size_t length,
                               const ucp_am_recv_param_t *param) {
    (void)arg, (void)header, (void)header_length, (void)param;
    char kind = *(const char *)data;
    arrived++;
    if (kind != COUNTED) {
        echoes++;
        echo_length = length;
    }
    return UCS_OK;
}

static ucp_worker_h new_worker(void) {
    ucp_worker_params_t params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE, .thread_mode = UCS_THREAD_MODE_SINGLE};
    ucp_worker_h made;
    check(ucp_worker_create(context, &params, &made) == UCS_OK, "ucp_worker_create");
    ucp_am_handler_param_t handler = {.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB,
                                      .id = 0, .cb = on_message};
    check(ucp_worker_set_am_recv_handler(made, &handler) == UCS_OK, "ucp_worker_set_am_recv_handler");
    return made;
}

static void open_ucx(void) {
    ucp_config_t *config;
    check(ucp_config_read(NULL, NULL, &config) == UCS_OK, "ucp_config_read");
    ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES, .features = UCP_FEATURE_RMA | UCP_FEATURE_AM};
    check(ucp_init(&params, config, &context) == UCS_OK, "ucp_init");
    ucp_config_release(config);
    worker = new_worker();
    ucp_mem_map_params_t map = {.field_mask = UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS,
                                .length = MEMORY, .flags = UCP_MEM_MAP_ALLOCATE};
    check(ucp_mem_map(context, &map, &handle) == UCS_OK, "ucp_mem_map");
    ucp_mem_attr_t attributes = {.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS};
    check(ucp_mem_query(handle, &attributes) == UCS_OK, "ucp_mem_query");
    memory = attributes.address;
    memset(memory, 1, MEMORY);
    void *key;
    check(ucp_rkey_pack(context, handle, &key, &packed_key.length) == UCS_OK, "ucp_rkey_pack");
    check(packed_key.length <= sizeof packed_key.bytes, "a key of this size");
    memcpy(packed_key.bytes, key, packed_key.length);
    ucp_rkey_buffer_release(key);
}

static Offer offer_of(ucp_worker_h of) {
    Offer offer = {.key = packed_key, .memory = (uint64_t)memory};
    ucp_address_t *address;
    check(ucp_worker_get_address(of, &address, &offer.address.length) == UCS_OK, "ucp_worker_get_address");
    check(offer.address.length <= sizeof offer.address.bytes, "an address of this size");
    memcpy(offer.address.bytes, address, offer.address.length);
    ucp_worker_release_address(of, address);
    return offer;
}

static void put_all(int pipe, const void *bytes, size_t length) {
    for (size_t at = 0; at < length;) {
        ssize_t put = write(pipe, (const char *)bytes + at, length - at);
        check(put > 0, "write");
        at += (size_t)put;
    }
}

// Returns 0 at the end of the pipe.
static int take_all(int pipe, void *bytes, size_t length) {
    for (size_t at = 0; at < length;) {
        ssize_t taken = read(pipe, (char *)bytes + at, length - at);
        if (taken <= 0) {
            return 0;
        }
        at += (size_t)taken;
    }
    return 1;
}

static ucp_ep_h connect_to(const Offer *offer) {
    ucp_ep_params_t params = {.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS,
                              .address = (const ucp_address_t *)offer->address.bytes};
    ucp_ep_h endpoint;
    check(ucp_ep_create(worker, &params, &endpoint) == UCS_OK, "ucp_ep_create");
    return endpoint;
}

static ucp_rkey_h key_of(ucp_ep_h endpoint, const Offer *offer) {
    ucp_rkey_h key;
    check(ucp_ep_rkey_unpack(endpoint, offer->key.bytes, &key) == UCS_OK, "ucp_ep_rkey_unpack");
    return key;
}

static void send_message(ucp_ep_h endpoint, char kind, size_t length) {
    static char bytes[LARGEST_MESSAGE];
    bytes[0] = kind;
    ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS, .flags = UCP_AM_SEND_FLAG_EAGER};
    await(ucp_am_send_nbx(endpoint, 0, NULL, 0, bytes, length, &param), worker);
}

// The child: answers messages, and makes workers when it is asked for them.
static void target(int from, int to) {
    open_ucx();
    Offer own = offer_of(worker), theirs;
    put_all(to, &own, sizeof own);
    check(take_all(from, &theirs, sizeof theirs), "reading the initiator's offer");
    ucp_ep_h endpoint = connect_to(&theirs);
    static ucp_worker_h workers[MOST_PEERS];
    uint32_t count = 0;
    struct pollfd input = {.fd = from, .events = POLLIN};
    for (unsigned turn = 1;; turn++) {
        ucp_worker_progress(worker);
        for (uint32_t each = 0; each < count; each++) {
            ucp_worker_progress(workers[each]);
        }
        for (; echoes > 0; echoes--) {
            send_message(endpoint, ECHO, echo_length);
        }
        if (turn % 256 != 0 || poll(&input, 1, 0) == 0) {
            continue;
        }
        for (uint32_t each = 0; each < count; each++) {
            ucp_worker_destroy(workers[each]);
        }
        if (!take_all(from, &count, sizeof count)) {
            exit(0);
        }
        for (uint32_t each = 0; each < count; each++) {
            workers[each] = new_worker();
            Offer offer = offer_of(workers[each]);
            put_all(to, &offer, sizeof offer);
        }
    }
}

static int compare(const void *a, const void *b) {
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

// The samples of a command, until SAMPLE_S have passed.
typedef struct {
    double end, begun;
    size_t count;
    double all[MOST_SAMPLES];
} Samples;

static Samples samples;

static int more(void) {
    samples.begun = now();
    return samples.count < LEAST_SAMPLES || (samples.count < MOST_SAMPLES && samples.begun < samples.end);
}

static void start(void) {
    samples.count = 0;
    samples.end = now() + SAMPLE_S;
}

static void sampled(double operations) { samples.all[samples.count++] = (now() - samples.begun) / operations; }

static double median_us(void) {
    qsort(samples.all, samples.count, sizeof *samples.all, compare);
    return 1e6 * samples.all[samples.count / 2];
}

static const ucp_request_param_t NO_PARAM;

static void put(ucp_ep_h endpoint, ucp_rkey_h key, uint64_t remote, size_t from, size_t to, size_t length) {
    ucs_status_ptr_t request = ucp_put_nbx(endpoint, memory + from, length, remote + to, key, &NO_PARAM);
    check(!UCS_PTR_IS_ERR(request), "ucp_put_nbx");
    // The flush waits for it.
    if (request != NULL) {
        ucp_request_free(request);
    }
}

static void flush(ucp_ep_h endpoint) { await(ucp_ep_flush_nbx(endpoint, &NO_PARAM), worker); }

static uint32_t *shuffled(uint32_t count) {
    uint32_t *order = malloc(count * sizeof *order);
    check(order != NULL, "malloc");
    for (uint32_t at = 0; at < count; at++) {
        order[at] = at;
    }
    for (uint32_t at = count; at > 1; at--) {
        uint32_t other = (uint32_t)rand() % at, kept = order[at - 1];
        order[at - 1] = order[other];
        order[other] = kept;
    }
    return order;
}

static void writes(ucp_ep_h endpoint, ucp_rkey_h key, uint64_t remote, size_t length) {
    unsigned batch = length < 65536 ? BATCH : 1;
    for (start(); more(); sampled(batch)) {
        for (unsigned each = 0; each < batch; each++) {
            put(endpoint, key, remote, 0, 0, length);
            flush(endpoint);
        }
    }
    printf("{\"us\": %.4f}\n", median_us());
}

static void pages(ucp_ep_h endpoint, ucp_rkey_h key, uint64_t remote, uint32_t count, size_t length, size_t gap) {
    check(count * (length + gap) <= MEMORY, "so many pages");
    uint32_t *from = shuffled(count), *to = shuffled(count);
    for (start(); more(); sampled(count)) {
        for (uint32_t each = 0; each < count; each++) {
            put(endpoint, key, remote, from[each] * (length + gap), to[each] * (length + gap), length);
        }
        flush(endpoint);
    }
    free(from);
    free(to);
    printf("{\"us\": %.4f}\n", median_us());
}

static void await_echo(void) {
    double end = now() + LIMIT_S;
    for (unsigned turn = 1; arrived == 0; turn++) {
        ucp_worker_progress(worker);
        check(turn % 1024 != 0 || now() < end, "waiting for a message");
    }
    arrived = echoes = 0;
}

// Half of a round trip.
static void message(ucp_ep_h endpoint, size_t length) {
    for (start(); more(); sampled(2)) {
        send_message(endpoint, ECHO, length);
        await_echo();
    }
    printf("{\"us\": %.4f}\n", median_us());
}

// Many messages in one direction, and an answer to the last one.
static void messages(ucp_ep_h endpoint, size_t length) {
    for (start(); more(); sampled(BURST)) {
        for (unsigned each = 1; each < BURST; each++) {
            send_message(endpoint, COUNTED, length);
        }
        send_message(endpoint, LAST, length);
        await_echo();
    }
    printf("{\"us\": %.4f}\n", median_us());
}

static void peers(int from, int to, uint32_t count) {
    static ucp_ep_h endpoints[MOST_PEERS];
    static ucp_rkey_h keys[MOST_PEERS];
    static Offer offers[MOST_PEERS];
    check(count > 0 && count <= MOST_PEERS, "so many peers");
    put_all(to, &count, sizeof count);
    check(take_all(from, offers, count * sizeof *offers), "reading offers");
    samples.count = 0;
    for (uint32_t each = 0; each < count; each++) {
        samples.begun = now();
        endpoints[each] = connect_to(&offers[each]);
        keys[each] = key_of(endpoints[each], &offers[each]);
        put(endpoints[each], keys[each], offers[each].memory, 0, 0, 8);
        flush(endpoints[each]);
        sampled(1);
    }
    double connect_us = median_us();
    for (start(); more(); sampled(count)) {
        for (uint32_t each = 0; each < count; each++) {
            put(endpoints[each], keys[each], offers[each].memory, 0, 0, 8);
            flush(endpoints[each]);
        }
    }
    printf("{\"us\": %.4f, \"connect_us\": %.1f}\n", median_us(), connect_us);
    for (uint32_t each = 0; each < count; each++) {
        ucp_rkey_destroy(keys[each]);
        await(ucp_ep_close_nbx(endpoints[each], &NO_PARAM), worker);
    }
}

int main(void) {
    int there[2], back[2];
    check(pipe(there) == 0 && pipe(back) == 0, "pipe");
    pid_t child = fork();
    check(child >= 0, "fork");
    if (child == 0) {
        close(there[1]);
        close(back[0]);
        target(there[0], back[1]);
    }
    close(there[0]);
    close(back[1]);
    open_ucx();
    Offer theirs, own = offer_of(worker);
    check(take_all(back[0], &theirs, sizeof theirs), "reading the target's offer");
    put_all(there[1], &own, sizeof own);
    ucp_ep_h endpoint = connect_to(&theirs);
    ucp_rkey_h key = key_of(endpoint, &theirs);
    printf("{\"ready\": true}\n");
    fflush(stdout);
    char line[128];
    while (fgets(line, sizeof line, stdin) != NULL) {
        unsigned count;
        size_t length, gap;
        if (sscanf(line, "write %zu", &length) == 1 && length <= MEMORY) {
            writes(endpoint, key, theirs.memory, length);
        } else if (sscanf(line, "pages %u %zu %zu", &count, &length, &gap) == 3) {
            pages(endpoint, key, theirs.memory, count, length, gap);
        } else if (sscanf(line, "message %zu", &length) == 1 && length >= 1 && length <= LARGEST_MESSAGE) {
            message(endpoint, length);
        } else if (sscanf(line, "messages %zu", &length) == 1 && length >= 1 && length <= LARGEST_MESSAGE) {
            messages(endpoint, length);
        } else if (sscanf(line, "peers %u", &count) == 1) {
            peers(back[0], there[1], count);
        } else {
            fprintf(stderr, "ucx: no such command: %s", line);
            return 1;
        }
        fflush(stdout);
    }
    close(there[1]);
    waitpid(child, NULL, 0);
    return 0;
}
