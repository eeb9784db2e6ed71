/* What the header promises: owners, operations, transfers, connections, threads and forks. */
#define _POSIX_C_SOURCE 200809L

#include "check.h"

#include <dirent.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE ((size_t)4096)

static mr_fabric fabric, other;
static mr_peer to_other, to_fabric;

static pthread_mutex_t released_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t released_changed = PTHREAD_COND_INITIALIZER;

/* Memory of this program, whose release function counts its calls, and frees it. */
struct owned {
    unsigned char *memory;
    int released;
};

static void release(void *context) {
    struct owned *owned = (struct owned *)context;
    pthread_mutex_lock(&released_lock);
    owned->released++;
    free(owned->memory);
    owned->memory = NULL;
    pthread_cond_broadcast(&released_changed);
    pthread_mutex_unlock(&released_lock);
}

static int times_released(struct owned *owned) {
    int times;
    pthread_mutex_lock(&released_lock);
    times = owned->released;
    pthread_mutex_unlock(&released_lock);
    return times;
}

/* Waits for the first call; the script that runs this program limits the time. */
static void wait_for_release(struct owned *owned) {
    pthread_mutex_lock(&released_lock);
    while (owned->released == 0) pthread_cond_wait(&released_changed, &released_lock);
    pthread_mutex_unlock(&released_lock);
}

static mr_memory describe(struct owned *owned, size_t length) {
    mr_memory memory = MR_MEMORY_INIT;
    owned->memory = (unsigned char *)calloc(1, length);
    owned->released = 0;
    memory.address = owned->memory;
    memory.length = length;
    memory.access = MR_ACCESS_ALL;
    memory.release = release;
    memory.context = owned;
    return memory;
}

static void owners(void) {
    struct owned owned;
    mr_region region = 0, target = allocate(other, 16 * PAGE, MR_ACCESS_ALL);
    mr_remote remote = import(to_other, target);
    mr_memory memory = describe(&owned, 16 * PAGE);
    mr_local_entry entry = {0, 0, 64};
    mr_local_list list = 0;
    mr_op op = 0;

    OK(mr_region_register(fabric, &memory, &region));
    memset(owned.memory, 5, 16 * PAGE);
    OK(mr_write(to_other, region, 0, remote, 0, 16 * PAGE, NULL, &op));
    FINISH(op);
    HOLDS(bytes_of(target)[16 * PAGE - 1] == 5);
    /* A list keeps its region. */
    entry.region = region;
    OK(mr_local_list_new(&entry, 1, &list));
    OK(mr_region_release(region));
    HOLDS(times_released(&owned) == 0);
    OK(mr_local_list_release(list));
    wait_for_release(&owned);
    HOLDS(times_released(&owned) == 1);

    /* Registrations that fail. */
    memory = describe(&owned, PAGE);
    memory.kind = 7;
    GIVES(MR_ERROR_INVALID_REQUEST, mr_region_register(fabric, &memory, &region));
    wait_for_release(&owned);
    memory = describe(&owned, PAGE);
    GIVES(MR_ERROR_HANDLE, mr_region_register(0, &memory, &region));
    wait_for_release(&owned);
    memory = describe(&owned, PAGE);
    GIVES(MR_ERROR_INVALID_REQUEST, mr_region_register(fabric, &memory, NULL));
    wait_for_release(&owned);
    memory = describe(&owned, PAGE);
    memory.length = 0;
    GIVES(MR_ERROR_INVALID_REQUEST, mr_region_register(fabric, &memory, &region));
    wait_for_release(&owned);
    HOLDS(times_released(&owned) == 1);

    OK(mr_remote_release(remote));
    OK(mr_region_release(target));
}

/* Large writes that are released while they are under way: their memory stays until no byte can move. */
static void release_under_way(void) {
    enum { ROUNDS = 8 };
    const size_t length = (size_t)32 << 20;
    struct owned owned[ROUNDS];
    mr_region target = allocate(other, length, MR_ACCESS_ALL);
    mr_remote remote = import(to_other, target);
    mr_op op = 0, drain = 0;

    for (int round = 0; round < ROUNDS; round++) {
        mr_memory memory = describe(&owned[round], length);
        mr_region region = 0;
        memset(owned[round].memory, 9, length);
        OK(mr_region_register(fabric, &memory, &region));
        OK(mr_write(to_other, region, 0, remote, 0, length, NULL, &op));
        OK(mr_region_release(region));
        if (round % 2 == 0) {
            OK(mr_op_release(op));
        } else {
            mr_status status;
            OK(mr_op_cancel(op));
            status = mr_op_wait(op, 20 * SECONDS);
            HOLDS(status == MR_OK || status == MR_ERROR_CANCELLED);
            HOLDS(mr_op_test(op) == status);
            OK(mr_op_release(op));
        }
    }
    OK(mr_peer_drain(to_other, &drain));
    FINISH(drain);
    /* No byte moves any more: what is written here stays. */
    memset(bytes_of(target), 1, length);
    for (int round = 0; round < ROUNDS; round++) wait_for_release(&owned[round]);
    for (size_t at = 0; at < length; at += 512) HOLDS(bytes_of(target)[at] == 1);
    for (int round = 0; round < ROUNDS; round++) HOLDS(times_released(&owned[round]) == 1);
    OK(mr_remote_release(remote));
    OK(mr_region_release(target));
}

static void operations(void) {
    mr_region region = allocate(other, PAGE, MR_ACCESS_ALL);
    mr_outcome outcome = MR_OUTCOME_INIT;
    mr_receipt receipt = MR_RECEIPT_INIT;
    mr_transfer_options options = MR_TRANSFER_OPTIONS_INIT;
    mr_region source = allocate(fabric, PAGE, MR_ACCESS_LOCAL);
    char text[256];
    uint64_t id = 0;
    mr_op recv = 0, send = 0, never = 0;
    mr_peer none = 0;

    /* A receive names its sender; cancelled, it gives its error at every call. */
    OK(mr_recv(other, region, 0, PAGE, &recv));
    GIVES(MR_PENDING, mr_op_test(recv));
    GIVES(MR_PENDING, mr_op_outcome(recv, &outcome));
    options.flags = MR_TRANSFER_IMM;
    options.imm = 77;
    OK(mr_send(to_other, source, 0, 100, &options, &send));
    FINISH(send);
    OK(mr_op_wait(recv, 10 * SECONDS));
    OK(mr_op_outcome(recv, &outcome));
    OK(mr_peer_id(to_fabric, &id));
    HOLDS(outcome.flags == (MR_OUTCOME_PEER | MR_OUTCOME_IMM));
    HOLDS(outcome.bytes == 100 && outcome.peer == id && outcome.imm == 77);
    GIVES(MR_ERROR_NOT_FOUND, mr_op_receipt(recv, &receipt, NULL, 0, NULL));
    OK(mr_op_error(recv, text, sizeof text, NULL));
    HOLDS(text[0] == 0);
    OK(mr_op_release(recv));

    OK(mr_recv(other, region, 0, PAGE, &recv));
    OK(mr_op_cancel(recv));
    GIVES(MR_ERROR_CANCELLED, mr_op_wait(recv, 10 * SECONDS));
    GIVES(MR_ERROR_CANCELLED, mr_op_test(recv));
    GIVES(MR_ERROR_CANCELLED, mr_op_outcome(recv, &outcome));
    OK(mr_op_error(recv, text, sizeof text, NULL));
    HOLDS(strstr(text, "cancel") != NULL);
    OK(mr_op_release(recv));
    GIVES(MR_ERROR_HANDLE, mr_op_test(recv));

    /* Waits that end by their time. */
    OK(mr_imm_expect(to_other, 99, 1, &never));
    GIVES(MR_PENDING, mr_op_wait(never, 0));
    GIVES(MR_PENDING, mr_op_wait(never, 1000000));
    GIVES(MR_PENDING, mr_op_take_peer(never, &none));
    OK(mr_op_cancel(never));
    GIVES(MR_ERROR_CANCELLED, mr_op_test(never));
    OK(mr_op_release(never));
    OK(mr_imm_expect(to_other, 99, 1, &never));
    OK(mr_op_detach(never));
    GIVES(MR_ERROR_HANDLE, mr_op_test(never));
    OK(mr_region_release(region));
    OK(mr_region_release(source));
}

static unsigned char pattern(size_t page, size_t seed) { return (unsigned char)(page * 7 + seed * 13 + 3); }

static void fill(mr_region region, size_t pages, size_t seed) {
    for (size_t page = 0; page < pages; page++) memset(bytes_of(region) + page * PAGE, pattern(page, seed), PAGE);
}

/* The bytes that the device lo1 of a fabric has carried. */
static uint64_t carried_by_lo1(mr_fabric of) {
    char text[8192];
    const char *at = NULL;
    OK(mr_fabric_counters(of, text, sizeof text, NULL));
    at = strstr(text, "\"device\":\"lo1\"");
    if (at != NULL) at = strstr(at, "\"bytes\":");
    HOLDS(at != NULL);
    return strtoull(at + strlen("\"bytes\":"), NULL, 10);
}

/* A device is taken out of service while a write is under way, and back: writes go over the other one. */
static void maintenance(void) {
    const size_t length = (size_t)16 << 20;
    mr_fabric one = 0, two = 0;
    mr_peer to_two = 0, to_one = 0;
    mr_remote remote = 0;
    mr_region source = 0, target = 0;
    mr_op write = 0, drain = 0;
    uint64_t before = 0;

    HOLDS(setenv("MULTIRAIL_LOOPBACK_THREADS", "2", 1) == 0);
    one = open_loopback(0);
    two = open_loopback(0);
    HOLDS(unsetenv("MULTIRAIL_LOOPBACK_THREADS") == 0);
    OK(mr_peer_connect_local(one, two, &to_two, &to_one));
    source = allocate(one, length, MR_ACCESS_LOCAL);
    target = allocate(two, length, MR_ACCESS_ALL);
    remote = import(to_two, target);

    memset(bytes_of(source), 5, length);
    OK(mr_write(to_two, source, 0, remote, 0, length, NULL, &write));
    OK(mr_fabric_drain_device(one, "lo1", &drain));
    FINISH(drain);
    FINISH(write);
    HOLDS(bytes_of(target)[0] == 5 && bytes_of(target)[length - 1] == 5);
    before = carried_by_lo1(one);
    OK(mr_write(to_two, source, 0, remote, 0, length, NULL, &write));
    FINISH(write);
    HOLDS(carried_by_lo1(one) == before);
    OK(mr_fabric_restore_device(one, "lo1"));
    OK(mr_fabric_restore_device(one, "lo1"));
    /* The device's worker takes it back, in its own time. */
    for (int writes = 0; carried_by_lo1(one) == before; writes++) {
        HOLDS(writes < 1000);
        OK(mr_write(to_two, source, 0, remote, 0, length, NULL, &write));
        FINISH(write);
    }

    GIVES(MR_ERROR_INVALID_REQUEST, mr_fabric_drain_device(one, "lo7", &drain));
    SAYS("there are lo0, lo1");
    GIVES(MR_ERROR_INVALID_REQUEST, mr_fabric_restore_device(one, "lo7"));
    OK(mr_remote_release(remote));
    OK(mr_region_release(source));
    OK(mr_region_release(target));
    OK(mr_peer_release(to_two));
    OK(mr_peer_release(to_one));
    OK(mr_fabric_close(one));
    OK(mr_fabric_close(two));
}

static void transfers(void) {
    enum { PAGES = 32 };
    const uint32_t from[] = {3, 9, 1, 30}, to[] = {0, 31, 8, 2};
    mr_region source = allocate(fabric, PAGES * PAGE, MR_ACCESS_LOCAL);
    mr_region target = allocate(other, PAGES * PAGE, MR_ACCESS_ALL);
    mr_remote remote = import(to_other, target);
    mr_pages source_pages = {from, 0, 0}, target_pages = {to, 0, 0};
    mr_local_entry local[PAGES];
    mr_remote_entry distant[PAGES];
    mr_local_list local_list = 0;
    mr_remote_list remote_list = 0;
    mr_prepared prepared = 0;
    mr_transfer_options options = MR_TRANSFER_OPTIONS_INIT;
    mr_receipt receipt = MR_RECEIPT_INIT;
    mr_rail_receipt rails[4];
    mr_outcome outcome = MR_OUTCOME_INIT;
    char text[4096], message[32];
    size_t count = 0, needed = 0;
    uint64_t number = 0, sum = 0;
    mr_op op = 0;

    /* Pages there and back. */
    fill(source, PAGES, 1);
    OK(mr_write_pages(to_other, source, &source_pages, remote, &target_pages, LENGTH(from), PAGE, NULL, &op));
    OK(mr_op_wait(op, 10 * SECONDS));
    for (size_t at = 0; at < LENGTH(from); at++) {
        HOLDS(bytes_of(target)[to[at] * PAGE] == pattern(from[at], 1));
        HOLDS(bytes_of(target)[to[at] * PAGE + PAGE - 1] == pattern(from[at], 1));
    }
    OK(mr_op_outcome(op, &outcome));
    HOLDS(outcome.bytes == LENGTH(from) * PAGE && outcome.flags == 0);
    OK(mr_op_receipt(op, &receipt, rails, LENGTH(rails), &count));
    HOLDS(receipt.bytes == outcome.bytes && count >= 1 && count <= LENGTH(rails));
    for (size_t at = 0; at < count; at++) {
        sum += rails[at].bytes;
        HOLDS(rails[at].paths == MR_PATH_MEMORY_COPY && strlen(rails[at].device) > 0);
    }
    HOLDS(sum == receipt.bytes);
    OK(mr_op_receipt_json(op, text, sizeof text, &needed));
    HOLDS(strstr(text, "\"rails\":[{") != NULL && strstr(text, "memory-copy") != NULL && strlen(text) + 1 == needed);
    OK(mr_op_release(op));
    fill(source, PAGES, 2);
    OK(mr_read_pages(to_other, source, &source_pages, remote, &target_pages, LENGTH(from), PAGE, NULL, &op));
    FINISH(op);
    for (size_t at = 0; at < LENGTH(from); at++) HOLDS(bytes_of(source)[from[at] * PAGE] == pattern(from[at], 1));

    /* Lists: all entries, chosen entries, and strided ones. */
    fill(source, PAGES, 3);
    for (size_t at = 0; at < PAGES; at++) {
        local[at].region = source;
        local[at].offset = at * PAGE;
        distant[at].remote = remote;
        distant[at].offset = (PAGES - 1 - at) * PAGE;
        local[at].length = distant[at].length = PAGE;
    }
    OK(mr_local_list_new(local, PAGES, &local_list));
    OK(mr_remote_list_new(distant, PAGES, &remote_list));
    OK(mr_write_list(to_other, local_list, NULL, remote_list, NULL, PAGES, NULL, &op));
    FINISH(op);
    for (size_t at = 0; at < PAGES; at++) HOLDS(bytes_of(target)[(PAGES - 1 - at) * PAGE] == pattern(at, 3));
    fill(source, PAGES, 4);
    OK(mr_read_list(to_other, local_list, from, remote_list, to, LENGTH(from), NULL, &op));
    FINISH(op);
    for (size_t at = 0; at < LENGTH(from); at++) HOLDS(bytes_of(source)[from[at] * PAGE] == pattern(to[at], 3));
    HOLDS(bytes_of(source)[0] == pattern(0, 4));
    GIVES(MR_ERROR_INVALID_REQUEST, mr_write_list(to_other, local_list, NULL, remote_list, NULL, PAGES + 1, NULL, &op));
    OK(mr_local_list_append_strided(local_list, source, 0, 64, 8, PAGE));
    OK(mr_local_list_len(local_list, &count));
    HOLDS(count == PAGES + 8);
    OK(mr_remote_list_append(remote_list, distant, 2));
    OK(mr_remote_list_len(remote_list, &count));
    HOLDS(count == PAGES + 2);

    /* A prepared transfer, with another notification and another imm each time. */
    options.flags = MR_TRANSFER_IMM;
    options.imm = 1;
    OK(mr_prepare_write_list(to_other, local_list, from, remote_list, to, LENGTH(from), &options, &prepared));
    OK(mr_prepared_bytes(prepared, &number));
    HOLDS(number == LENGTH(from) * PAGE);
    OK(mr_prepared_explain(prepared, text, sizeof text, NULL));
    HOLDS(strstr(text, "loopback") != NULL);
    OK(mr_local_list_release(local_list));
    OK(mr_remote_list_release(remote_list));
    for (uint32_t round = 0; round < 50; round++) {
        options.imm = 100 + round;
        OK(mr_prepared_post(prepared, &options, &op));
        FINISH(op);
        OK(mr_imm_wait(to_fabric, 100 + round, 1, 10 * SECONDS));
    }
    options.deadline_ns = SECONDS;
    GIVES(MR_ERROR_INVALID_REQUEST, mr_prepared_post(prepared, &options, &op));
    options.deadline_ns = 0;
    options.flags = MR_TRANSFER_NOTIFY;
    options.notification = "layer";
    options.notification_len = 5;
    OK(mr_prepared_post(prepared, &options, NULL));
    GIVES(MR_ERROR_BUFFER, mr_fabric_next_notification(other, 10 * SECONDS, message, 2, &needed, NULL));
    HOLDS(needed == 5);
    OK(mr_fabric_next_notification(other, 0, message, sizeof message, &needed, &number));
    HOLDS(needed == 5 && memcmp(message, "layer", 5) == 0);
    GIVES(MR_PENDING, mr_fabric_next_notification(other, 0, message, sizeof message, &needed, &number));
    GIVES(MR_PENDING, mr_fabric_next_notification(other, 1000000, message, sizeof message, &needed, &number));
    OK(mr_prepared_release(prepared));

    /* Notifications and imms alone. */
    OK(mr_notify(to_other, NULL, 0, 0, NULL));
    OK(mr_fabric_next_notification(other, 10 * SECONDS, NULL, 0, &needed, NULL));
    HOLDS(needed == 0);
    OK(mr_write_imm(to_other, 500, &op));
    FINISH(op);
    OK(mr_imm_wait(to_fabric, 500, 1, 10 * SECONDS));
    OK(mr_imm_count(to_fabric, 500, &number));
    HOLDS(number == 1);
    OK(mr_imm_take(to_fabric, 500, 1));
    GIVES(MR_PENDING, mr_imm_take(to_fabric, 500, 1));
    GIVES(MR_PENDING, mr_imm_wait(to_fabric, 500, 1, 0));

    OK(mr_explain_write(to_other, source, 0, remote, 0, PAGE, NULL, text, sizeof text, NULL));
    OK(mr_explain_read(to_other, source, 0, remote, 0, PAGE, NULL, text, sizeof text, NULL));
    OK(mr_peer_explain(to_other, text, sizeof text, NULL));
    HOLDS(strstr(text, "loopback") != NULL);
    OK(mr_fabric_counters(fabric, text, sizeof text, NULL));
    HOLDS(strstr(text, "\"bytes\":") != NULL);
    OK(mr_peer_set_path_policy(to_other, "rdma"));
    GIVES(MR_ERROR_UNREACHABLE, mr_write(to_other, source, 0, remote, 0, PAGE, NULL, &op));
    OK(mr_peer_set_path_policy(to_other, "rdma,gpu-copy,memory-copy"));
    OK(mr_peer_warm_up(to_other, &op));
    FINISH(op);

    /* A revoked region is refused on both sides, and may be copied. */
    OK(mr_region_revoke(target, &op));
    FINISH(op);
    GIVES(MR_ERROR_REVOKED, mr_write(to_other, source, 0, remote, 0, PAGE, NULL, &op));
    OK(mr_region_copy_in(target, 5, "abc", 3));
    OK(mr_region_copy_out(target, 5, text, 3));
    HOLDS(memcmp(text, "abc", 3) == 0);
    OK(mr_region_release(source));
    OK(mr_region_release(target));
    OK(mr_remote_release(remote));
}

static void connections(void) {
    mr_fabric target = open_loopback(1), restarted = 0;
    mr_option again[] = {{"transports", "loopback"}, {"listen", NULL}};
    unsigned char metadata[2048];
    char address[128];
    size_t length = 0;
    uint64_t incarnation = 0, found = 0, peer_id = 0;
    mr_peer peer = 0, accepted = 0, itself = 0;
    mr_region region = allocate(target, PAGE, MR_ACCESS_ALL);
    mr_remote remote = 0;
    mr_op op = 0;

    GIVES(MR_ERROR_NOT_FOUND, mr_fabric_metadata(fabric, metadata, sizeof metadata, &length));
    GIVES(MR_ERROR_BUSY, mr_fabric_listen(target, "127.0.0.1:0"));
    OK(mr_fabric_address(target, address, sizeof address, NULL));
    OK(mr_fabric_metadata(target, metadata, sizeof metadata, &length));
    GIVES(MR_PENDING, mr_fabric_accept(target, 0, &accepted));
    GIVES(MR_PENDING, mr_fabric_accept(target, 1000000, &accepted));

    /* By metadata, without waiting; the target need not take the peer. */
    OK(mr_peer_connect_metadata_start(fabric, metadata, length, &op));
    OK(mr_op_wait(op, 10 * SECONDS));
    OK(mr_op_take_peer(op, &peer));
    GIVES(MR_ERROR_INVALID_REQUEST, mr_op_take_peer(op, &peer));
    OK(mr_op_release(op));
    OK(mr_peer_incarnation(peer, &found));
    OK(mr_fabric_incarnation(target, &incarnation));
    HOLDS(found == incarnation);
    OK(mr_peer_check(peer));

    /* Regions by name. */
    OK(mr_peer_lookup(peer, "cache", &op));
    GIVES(MR_ERROR_NOT_FOUND, mr_op_wait(op, 10 * SECONDS));
    OK(mr_op_release(op));
    OK(mr_fabric_publish(target, "cache", region));
    OK(mr_peer_lookup(peer, "cache", &op));
    OK(mr_op_wait(op, 10 * SECONDS));
    OK(mr_op_take_remote(op, &remote));
    OK(mr_op_release(op));
    OK(mr_remote_info(remote, &found, NULL));
    HOLDS(found == PAGE);
    OK(mr_fabric_unpublish(target, "cache"));

    /* The target's side of the same connection: the notification may be there before mr_fabric_accept has the peer. */
    OK(mr_notify(peer, "hello", 5, 0, NULL));
    OK(mr_fabric_next_notification(target, 10 * SECONDS, address, sizeof address, &length, &peer_id));
    OK(mr_fabric_peer(target, peer_id, &accepted));
    OK(mr_peer_check(accepted));
    OK(mr_peer_release(accepted));
    OK(mr_fabric_accept(target, 10 * SECONDS, &accepted));
    OK(mr_peer_id(accepted, &found));
    HOLDS(found == peer_id);
    GIVES(MR_ERROR_NOT_FOUND, mr_fabric_peer(target, peer_id + 1000, &itself));
    GIVES(MR_ERROR_NOT_FOUND, mr_fabric_peer(target, 0, &itself));
    OK(mr_peer_id(peer, &found));
    GIVES(MR_ERROR_NOT_FOUND, mr_fabric_peer(target, found, &itself));
    OK(mr_fabric_peer(fabric, found, &itself));
    OK(mr_peer_release(itself));

    /* A peer that nobody takes ends with its operation. */
    OK(mr_fabric_address(target, address, sizeof address, NULL));
    OK(mr_peer_connect_start(fabric, address, &op));
    OK(mr_op_wait(op, 10 * SECONDS));
    OK(mr_op_release(op));

    /* A fabric connects to itself. */
    OK(mr_fabric_metadata(target, metadata, sizeof metadata, &length));
    OK(mr_peer_connect_metadata(target, metadata, length, 10 * SECONDS, &itself));
    OK(mr_peer_release(itself));

    /* The end of a connection, as both sides see it. */
    OK(mr_imm_expect(accepted, 1, 1, &op));
    OK(mr_peer_disconnect(peer));
    GIVES(MR_ERROR_CLOSED, mr_peer_check(peer));
    GIVES(MR_ERROR_CLOSED, mr_op_wait(op, 10 * SECONDS));
    GIVES(MR_ERROR_CLOSED, mr_peer_check(accepted));
    OK(mr_op_release(op));
    OK(mr_peer_release(accepted));
    OK(mr_peer_release(peer));
    OK(mr_remote_release(remote));
    OK(mr_region_release(region));
    OK(mr_fabric_close(target));

    /* Nobody answers, and then another opening does. */
    GIVES(MR_ERROR_UNREACHABLE, mr_peer_connect_metadata(fabric, metadata, length, 10 * SECONDS, &peer));
    again[1].value = address;
    OK(mr_fabric_open(again, 2, &restarted));
    GIVES(MR_ERROR_PEER_DIED, mr_peer_connect_metadata(fabric, metadata, length, 10 * SECONDS, &peer));
    SAYS("ask for new metadata");
    GIVES(MR_ERROR_PROTOCOL, mr_peer_connect_metadata(fabric, metadata, length - 1, 10 * SECONDS, &peer));
    OK(mr_fabric_close(restarted));
}

/* Another process that listens until it is killed. Tells its number and address to the pipe. */
static int target(void) {
    char address[128];
    mr_fabric mine = open_loopback(1);
    mr_region region = allocate(mine, PAGE, MR_ACCESS_ALL);
    OK(mr_fabric_publish(mine, "memory", region));
    OK(mr_fabric_address(mine, address, sizeof address, NULL));
    printf("%ld %s\n", (long)getpid(), address);
    fflush(stdout);
    while (pause() == -1) {
    }
    return 1;
}

static void killed_peers(const char *program) {
    char command[512], address[128];
    long process = 0;
    FILE *pipe = NULL;
    mr_peer peer = 0;
    mr_remote remote = 0;
    mr_region source = allocate(fabric, PAGE, MR_ACCESS_LOCAL);
    mr_op lookup = 0, imm = 0, op = 0;
    snprintf(command, sizeof command, "exec '%s' target", program);
    pipe = popen(command, "r");
    HOLDS(pipe != NULL);
    HOLDS(fscanf(pipe, "%ld %127s", &process, address) == 2);
    OK(mr_peer_connect(fabric, address, 10 * SECONDS, &peer));
    OK(mr_peer_lookup(peer, "memory", &lookup));
    OK(mr_op_wait(lookup, 10 * SECONDS));
    OK(mr_op_take_remote(lookup, &remote));
    OK(mr_op_release(lookup));
    OK(mr_write(peer, source, 0, remote, 0, PAGE, NULL, &op));
    FINISH(op);
    OK(mr_imm_expect(peer, 1, 1, &imm));
    HOLDS(kill((pid_t)process, SIGKILL) == 0);
    GIVES(MR_ERROR_PEER_DIED, mr_op_wait(imm, 20 * SECONDS));
    GIVES(MR_ERROR_PEER_DIED, mr_peer_check(peer));
    GIVES(MR_ERROR_PEER_DIED, mr_write(peer, source, 0, remote, 0, PAGE, NULL, &op));
    OK(mr_op_release(imm));
    OK(mr_remote_release(remote));
    OK(mr_peer_release(peer));
    OK(mr_region_release(source));
    HOLDS(WIFSIGNALED(pclose(pipe)));
}

struct shared {
    mr_region source;
    mr_remote remote;
    mr_op op;
};

static void *post_and_release(void *given) {
    const struct shared *shared = (const struct shared *)given;
    for (int round = 0; round < 5000; round++) {
        mr_op op = 0;
        const size_t length = round % 2 == 0 ? 64 : 65536;
        mr_status status = mr_write(to_other, shared->source, 0, shared->remote, 0, length, NULL, &op);
        if (status == MR_ERROR_BUSY) continue;
        if (status == MR_ERROR_HANDLE) return NULL; /* The main thread has released the region. */
        OK(status);
        if (round % 3 == 0) OK(mr_op_detach(op));
        else if (round % 3 == 1) OK(mr_op_release(op));
        else FINISH(op);
    }
    return NULL;
}

static void *wait_for_end(void *given) {
    GIVES(MR_ERROR_CANCELLED, mr_op_wait(((struct shared *)given)->op, MR_FOREVER));
    return NULL;
}

static void start(pthread_t *workers, size_t count, void *(*work)(void *), struct shared *shared) {
    for (size_t at = 0; at < count; at++) HOLDS(pthread_create(&workers[at], NULL, work, shared) == 0);
}

static void threads(void) {
    pthread_t workers[4];
    mr_region target = allocate(other, (size_t)1 << 20, MR_ACCESS_ALL);
    struct shared shared = {0, 0, 0};
    mr_op drain = 0;
    for (int round = 0; round < 2; round++) {
        shared.source = allocate(fabric, (size_t)1 << 20, MR_ACCESS_LOCAL);
        shared.remote = import(to_other, target);
        start(workers, LENGTH(workers), post_and_release, &shared);
        /* In the second round, the handles go away in the middle. */
        if (round == 1) {
            OK(mr_region_release(shared.source));
            OK(mr_remote_release(shared.remote));
        }
        for (size_t at = 0; at < LENGTH(workers); at++) HOLDS(pthread_join(workers[at], NULL) == 0);
        if (round == 0) {
            OK(mr_region_release(shared.source));
            OK(mr_remote_release(shared.remote));
        }
    }
    OK(mr_peer_drain(to_other, &drain));
    FINISH(drain);
    /* Several threads wait for one operation, which this thread cancels. */
    OK(mr_imm_expect(to_other, 4242, 1, &shared.op));
    start(workers, LENGTH(workers), wait_for_end, &shared);
    OK(mr_op_cancel(shared.op));
    for (size_t at = 0; at < LENGTH(workers); at++) HOLDS(pthread_join(workers[at], NULL) == 0);
    OK(mr_op_release(shared.op));
    OK(mr_region_release(target));
}

/* The entries of a folder of this process's: open files, threads. */
static int entries(const char *folder) {
    int count = 0;
    DIR *opened = opendir(folder);
    HOLDS(opened != NULL);
    while (readdir(opened) != NULL) count++;
    closedir(opened);
    return count;
}

/* Fabrics that come and go leave no thread, no file and no memory of the program behind. */
static void repeats(void) {
    int files = 0, threads_of_process = 0;
    for (int round = 0; round < 20; round++) {
        mr_fabric one = open_loopback(1), two = open_loopback(1);
        struct owned owned;
        mr_memory memory = describe(&owned, 4 * PAGE);
        unsigned char metadata[2048];
        size_t length = 0;
        mr_region source = 0, sink = allocate(two, 4 * PAGE, MR_ACCESS_ALL);
        mr_remote remote = 0;
        mr_peer peer = 0;
        mr_op op = 0;
        OK(mr_region_register(one, &memory, &source));
        OK(mr_fabric_metadata(two, metadata, sizeof metadata, &length));
        OK(mr_peer_connect_metadata(one, metadata, length, 10 * SECONDS, &peer));
        remote = import(peer, sink);
        OK(mr_write(peer, source, 0, remote, 0, 4 * PAGE, NULL, &op));
        FINISH(op);
        OK(mr_imm_expect(peer, 1, 1, &op));
        /* In the reverse of the usual order. */
        OK(mr_fabric_close(two));
        OK(mr_fabric_close(one));
        OK(mr_op_release(op));
        OK(mr_remote_release(remote));
        OK(mr_peer_release(peer));
        OK(mr_region_release(sink));
        OK(mr_region_release(source));
        wait_for_release(&owned);
        if (round == 1) {
            files = entries("/proc/self/fd");
            threads_of_process = entries("/proc/self/task");
        }
    }
    HOLDS(entries("/proc/self/fd") <= files);
    HOLDS(entries("/proc/self/task") <= threads_of_process);
}

static void forks(void) {
    int code = 0;
    mr_region region = allocate(fabric, PAGE, MR_ACCESS_LOCAL);
    mr_op op = 0;
    pid_t child;
    OK(mr_imm_expect(to_other, 8, 1, &op));
    child = fork();
    HOLDS(child >= 0);
    if (child == 0) {
        uint64_t number = 0;
        mr_fabric mine = 0;
        GIVES(MR_ERROR_FORKED, mr_fabric_incarnation(fabric, &number));
        SAYS("fork");
        GIVES(MR_ERROR_FORKED, mr_op_test(op));
        GIVES(MR_ERROR_FORKED, mr_op_release(op));
        GIVES(MR_ERROR_FORKED, mr_region_release(region));
        GIVES(MR_ERROR_FORKED, mr_peer_check(to_other));
        GIVES(MR_ERROR_FORKED, mr_fabric_close(fabric));
        mine = open_loopback(1);
        OK(mr_fabric_close(mine));
        fflush(stdout);
        _exit(0);
    }
    HOLDS(waitpid(child, &code, 0) == child);
    HOLDS(WIFEXITED(code) && WEXITSTATUS(code) == 0);
    GIVES(MR_PENDING, mr_op_test(op));
    OK(mr_op_release(op));
    OK(mr_region_release(region));
}

int main(int count, char **arguments) {
    if (count == 2 && strcmp(arguments[1], "target") == 0) return target();
    fabric = open_loopback(0);
    other = open_loopback(0);
    OK(mr_peer_connect_local(fabric, other, &to_other, &to_fabric));
    owners();
    release_under_way();
    operations();
    transfers();
    maintenance();
    connections();
    killed_peers(arguments[0]);
    threads();
    repeats();
    forks();
    OK(mr_peer_release(to_other));
    OK(mr_peer_release(to_fabric));
    OK(mr_fabric_close(fabric));
    OK(mr_fabric_close(other));
    puts("behaviour: as the header says");
    return 0;
}
