/*
 * Disaggregated inference: one process computes a prompt's KV cache (prefill), and another continues from it (decode).
 *
 * The decode process owns the cache and publishes it by name. The prefill process finds it, writes pages to places that
 * lie apart, and tells by a notification which request is complete. The notification arrives after the last byte.
 *
 *     cc -std=c99 kv_handover.c $(pkg-config --cflags --libs multirail) -o kv_handover && ./kv_handover
 *
 * The program starts itself a second time, as the prefill process.
 */
#define _POSIX_C_SOURCE 200809L

#include <inttypes.h>
#include <multirail.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#define PAGE ((size_t)16384)
#define SLOTS 64
#define PAGES 8
#define SECONDS ((uint64_t)1000000000)

extern char **environ;

/* The pages of the cache that decode has free, as after some hours of serving. */
static const uint32_t slots[PAGES] = {41, 3, 17, 58, 0, 29, 63, 12};

static void check(mr_status status, const char *what) {
    char why[512];
    if (status == MR_OK) return;
    if (status == MR_PENDING) {
        fprintf(stderr, "%s: nothing came in time\n", what);
    } else {
        mr_last_error(why, sizeof why);
        fprintf(stderr, "%s: %s (%s)\n", what, why, mr_status_name(status));
    }
    exit(1);
}

/* Stands for the keys and values of one page. */
static unsigned char computed(size_t page, size_t byte) {
    return (unsigned char)(byte * 31 + (byte >> 8) * 7 + page * 101 + 1);
}

static void print_receipt(mr_op op) {
    mr_receipt receipt = MR_RECEIPT_INIT;
    mr_rail_receipt rails[8];
    size_t count = 0;
    check(mr_op_receipt(op, &receipt, rails, 8, &count), "receipt");
    printf("prefill: %" PRIu64 " bytes in %.1f us\n", receipt.bytes, (double)receipt.transfer_ns / 1e3);
    for (size_t rail = 0; rail < count && rail < 8; rail++) {
        printf("prefill: %s carried %" PRIu64 " bytes\n", rails[rail].device, rails[rail].bytes);
    }
    fflush(stdout);
}

static int prefill(const char *address) {
    const mr_option options[] = {{"notifications", "4194304"}};
    const char done[] = "request 7";
    mr_transfer_options transfer = MR_TRANSFER_OPTIONS_INIT;
    mr_pages from = {NULL, 0, 0}, to = {slots, 0, 0};
    mr_fabric fabric;
    mr_peer decode;
    mr_region region;
    mr_remote cache;
    mr_op op;
    void *memory = NULL;

    check(mr_fabric_open(options, 1, &fabric), "open");
    check(mr_peer_connect(fabric, address, 10 * SECONDS, &decode), "connect");
    check(mr_peer_lookup(decode, "kv-cache", &op), "lookup");
    check(mr_op_wait(op, 10 * SECONDS), "lookup");
    check(mr_op_take_remote(op, &cache), "lookup");
    check(mr_op_release(op), "release");

    check(mr_region_alloc(fabric, PAGES * PAGE, MR_ACCESS_LOCAL, MR_MEMORY_HOST, MR_DEVICE_ANY, &region), "alloc");
    check(mr_region_data(region, &memory, NULL), "data");
    for (size_t at = 0; at < PAGES * PAGE; at++) ((unsigned char *)memory)[at] = computed(at / PAGE, at % PAGE);

    transfer.flags = MR_TRANSFER_NOTIFY;
    transfer.notification = done;
    transfer.notification_len = sizeof done;
    check(mr_write_pages(decode, region, &from, cache, &to, PAGES, PAGE, &transfer, &op), "write");
    check(mr_op_wait(op, 10 * SECONDS), "write");
    print_receipt(op);

    check(mr_op_release(op), "release");
    check(mr_region_release(region), "release");
    check(mr_remote_release(cache), "release");
    check(mr_peer_release(decode), "release");
    check(mr_fabric_close(fabric), "close");
    return 0;
}

static void verify(mr_region cache) {
    void *memory = NULL;
    check(mr_region_data(cache, &memory, NULL), "data");
    for (size_t at = 0; at < PAGES * PAGE; at++) {
        size_t page = at / PAGE, byte = at % PAGE;
        if (((unsigned char *)memory)[slots[page] * PAGE + byte] != computed(page, byte)) {
            fprintf(stderr, "page %zu is wrong at byte %zu\n", page, byte);
            exit(1);
        }
    }
}

static int decode(char *program) {
    const mr_option options[] = {{"notifications", "4194304"}, {"listen", "127.0.0.1:0"}};
    char address[128], message[64], role[] = "prefill";
    char *arguments[] = {program, role, address, NULL};
    mr_fabric fabric;
    mr_region cache;
    size_t length = 0;
    uint64_t peer = 0;
    pid_t process;
    int code = 0;

    check(mr_fabric_open(options, 2, &fabric), "open");
    check(mr_region_alloc(fabric, SLOTS * PAGE, MR_ACCESS_REMOTE_WRITE, MR_MEMORY_HOST, MR_DEVICE_ANY, &cache),
          "alloc");
    check(mr_fabric_publish(fabric, "kv-cache", cache), "publish");
    check(mr_fabric_address(fabric, address, sizeof address, NULL), "address");
    if (posix_spawn(&process, program, NULL, NULL, arguments, environ) != 0) {
        perror(program);
        return 1;
    }

    check(mr_fabric_next_notification(fabric, 30 * SECONDS, message, sizeof message, &length, &peer), "notification");
    verify(cache);
    printf("decode: peer %" PRIu64 " has sent \"%.*s\": %d pages, every byte verified\n", peer, (int)length, message,
           PAGES);

    if (waitpid(process, &code, 0) != process || code != 0) {
        fprintf(stderr, "the prefill process failed\n");
        return 1;
    }
    check(mr_region_release(cache), "release");
    check(mr_fabric_close(fabric), "close");
    return 0;
}

int main(int count, char **arguments) {
    if ((multirail_abi_version() >> 16) != (MR_ABI_VERSION >> 16)) {
        fprintf(stderr, "this program is for another libmultirail than version %s\n", multirail_version());
        return 1;
    }
    if (count == 3 && strcmp(arguments[1], "prefill") == 0) return prefill(arguments[2]);
    return decode(arguments[0]);
}
