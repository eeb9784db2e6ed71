/* What the test programs share. A program ends at the first thing that is not as expected, with its line. */
#ifndef CHECK_H
#define CHECK_H

#include <multirail.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SECONDS ((uint64_t)1000000000)
#define LENGTH(array) (sizeof(array) / sizeof(array)[0])

/* Another result than the expected one is reported with the library's sentence. */
static inline void expect_status(mr_status status, mr_status expected, const char *call, int line) {
    char why[1024];
    if (status == expected) return;
    mr_last_error(why, sizeof why);
    fprintf(stderr, "line %d: %s gave %s instead of %s: %s\n", line, call, mr_status_name(status),
            mr_status_name(expected), why);
    exit(1);
}

static inline void expect_true(int holds, const char *what, int line) {
    if (holds) return;
    fprintf(stderr, "line %d: not so: %s\n", line, what);
    exit(1);
}

#define GIVES(expected, call) expect_status((call), (expected), #call, __LINE__)
#define OK(call) GIVES(MR_OK, call)
#define HOLDS(what) expect_true((what) ? 1 : 0, #what, __LINE__)

/* The last error of this thread has these words. */
static inline void expect_words(const char *words, int line) {
    char why[2048];
    mr_last_error(why, sizeof why);
    if (strstr(why, words) != NULL) return;
    fprintf(stderr, "line %d: the error does not say \"%s\": %s\n", line, words, why);
    exit(1);
}

#define SAYS(words) expect_words(words, __LINE__)

/* Releases an operation that must succeed. */
#define FINISH(op)                       \
    do {                                 \
        OK(mr_op_wait((op), 20 * SECONDS)); \
        OK(mr_op_release(op));           \
    } while (0)

static inline mr_fabric open_loopback(int listens) {
    const mr_option options[] = {{"transports", "loopback"}, {"notifications", "4194304"}, {"listen", "127.0.0.1:0"}};
    mr_fabric fabric = 0;
    OK(mr_fabric_open(options, listens ? 3 : 2, &fabric));
    return fabric;
}

static inline mr_region allocate(mr_fabric fabric, size_t length, uint32_t access) {
    mr_region region = 0;
    OK(mr_region_alloc(fabric, length, access, MR_MEMORY_HOST, MR_DEVICE_ANY, &region));
    return region;
}

static inline unsigned char *bytes_of(mr_region region) {
    void *address = NULL;
    OK(mr_region_data(region, &address, NULL));
    return (unsigned char *)address;
}

/* A region of `owner`'s fabric, imported by a peer's handle of that fabric. */
static inline mr_remote import(mr_peer peer, mr_region region) {
    unsigned char descriptor[4096];
    size_t length = 0;
    mr_remote remote = 0;
    OK(mr_region_descriptor(region, descriptor, sizeof descriptor, &length));
    OK(mr_peer_import(peer, descriptor, length, &remote));
    return remote;
}

#endif
