/* Every misuse of a handle, a pointer or a size is an error code. */
#include "check.h"

enum kind { FABRIC, REGION, PEER, REMOTE, LOCAL_LIST, REMOTE_LIST, PREPARED, OP, KINDS };

static uint64_t valid[KINDS];

/* Calls every function with `bad` in place of each of its handles, unless `bad` is a handle of that kind. */
static void refuse(uint64_t bad, enum kind of) {
    char text[64];
    unsigned char bytes[64] = {0};
    size_t needed = 0;
    uint64_t number = 0;
    uint32_t bits = 0;
    void *address = NULL;
    mr_pages pages = {NULL, 0, 0};
    mr_outcome outcome = MR_OUTCOME_INIT;
    mr_receipt receipt = MR_RECEIPT_INIT;
    mr_memory memory = MR_MEMORY_INIT;
    mr_local_entry local_entry = {0, 0, 1};
    mr_remote_entry remote_entry = {0, 0, 1};
    const uint64_t none = 12345;
    uint64_t made = none;

    memory.address = bytes;
    memory.length = sizeof bytes;
    local_entry.region = bad;
    remote_entry.remote = bad;

#define BAD(call) GIVES(MR_ERROR_HANDLE, call)
    if (of != FABRIC) {
        BAD(mr_fabric_close(bad));
        BAD(mr_fabric_listen(bad, "127.0.0.1:0"));
        BAD(mr_fabric_address(bad, text, sizeof text, &needed));
        BAD(mr_fabric_metadata(bad, bytes, sizeof bytes, &needed));
        BAD(mr_fabric_accept(bad, 0, &made));
        BAD(mr_fabric_peer(bad, 1, &made));
        BAD(mr_fabric_incarnation(bad, &number));
        BAD(mr_fabric_counters(bad, text, sizeof text, &needed));
        BAD(mr_fabric_transports(bad, text, sizeof text, &needed));
        BAD(mr_fabric_drain_device(bad, "lo0", &made));
        BAD(mr_fabric_restore_device(bad, "lo0"));
        BAD(mr_region_register(bad, &memory, &made));
        BAD(mr_region_alloc(bad, 64, 0, MR_MEMORY_HOST, MR_DEVICE_ANY, &made));
        BAD(mr_fabric_publish(bad, "name", valid[REGION]));
        BAD(mr_fabric_unpublish(bad, "name"));
        BAD(mr_peer_connect(bad, "127.0.0.1:1", 1, &made));
        BAD(mr_peer_connect_metadata(bad, bytes, sizeof bytes, 1, &made));
        BAD(mr_peer_connect_start(bad, "127.0.0.1:1", &made));
        BAD(mr_peer_connect_metadata_start(bad, bytes, sizeof bytes, &made));
        BAD(mr_peer_connect_local(bad, valid[FABRIC], &made, NULL));
        BAD(mr_peer_connect_local(valid[FABRIC], bad, &made, NULL));
        BAD(mr_fabric_next_notification(bad, 0, bytes, sizeof bytes, &needed, &number));
        BAD(mr_recv(bad, valid[REGION], 0, 1, &made));
    }
    if (of != REGION) {
        BAD(mr_fabric_publish(valid[FABRIC], "name", bad));
        BAD(mr_region_data(bad, &address, &needed));
        BAD(mr_region_copy_in(bad, 0, bytes, 1));
        BAD(mr_region_copy_out(bad, 0, bytes, 1));
        BAD(mr_region_descriptor(bad, bytes, sizeof bytes, &needed));
        BAD(mr_region_revoke(bad, &made));
        BAD(mr_region_release(bad));
        BAD(mr_write(valid[PEER], bad, 0, valid[REMOTE], 0, 1, NULL, &made));
        BAD(mr_read(valid[PEER], bad, 0, valid[REMOTE], 0, 1, NULL, &made));
        BAD(mr_write_pages(valid[PEER], bad, &pages, valid[REMOTE], &pages, 1, 1, NULL, &made));
        BAD(mr_read_pages(valid[PEER], bad, &pages, valid[REMOTE], &pages, 1, 1, NULL, &made));
        BAD(mr_prepare_write_pages(valid[PEER], bad, &pages, valid[REMOTE], &pages, 1, 1, NULL, &made));
        BAD(mr_prepare_read_pages(valid[PEER], bad, &pages, valid[REMOTE], &pages, 1, 1, NULL, &made));
        BAD(mr_local_list_new(&local_entry, 1, &made));
        SAYS("entry 0");
        BAD(mr_local_list_append(valid[LOCAL_LIST], &local_entry, 1));
        BAD(mr_local_list_append_strided(valid[LOCAL_LIST], bad, 0, 1, 1, 0));
        BAD(mr_explain_write(valid[PEER], bad, 0, valid[REMOTE], 0, 1, NULL, text, sizeof text, &needed));
        BAD(mr_explain_read(valid[PEER], bad, 0, valid[REMOTE], 0, 1, NULL, text, sizeof text, &needed));
        BAD(mr_send(valid[PEER], bad, 0, 1, NULL, &made));
        BAD(mr_recv(valid[FABRIC], bad, 0, 1, &made));
    }
    if (of != PEER) {
        BAD(mr_peer_id(bad, &number));
        BAD(mr_peer_incarnation(bad, &number));
        BAD(mr_peer_check(bad));
        BAD(mr_peer_explain(bad, text, sizeof text, &needed));
        BAD(mr_peer_set_path_policy(bad, "rdma"));
        BAD(mr_peer_import(bad, bytes, sizeof bytes, &made));
        BAD(mr_peer_lookup(bad, "name", &made));
        BAD(mr_peer_drain(bad, &made));
        BAD(mr_peer_warm_up(bad, &made));
        BAD(mr_peer_disconnect(bad));
        BAD(mr_peer_release(bad));
        BAD(mr_write(bad, valid[REGION], 0, valid[REMOTE], 0, 1, NULL, &made));
        BAD(mr_read(bad, valid[REGION], 0, valid[REMOTE], 0, 1, NULL, &made));
        BAD(mr_write_pages(bad, valid[REGION], &pages, valid[REMOTE], &pages, 1, 1, NULL, &made));
        BAD(mr_read_pages(bad, valid[REGION], &pages, valid[REMOTE], &pages, 1, 1, NULL, &made));
        BAD(mr_write_list(bad, valid[LOCAL_LIST], NULL, valid[REMOTE_LIST], NULL, 1, NULL, &made));
        BAD(mr_read_list(bad, valid[LOCAL_LIST], NULL, valid[REMOTE_LIST], NULL, 1, NULL, &made));
        BAD(mr_prepare_write_pages(bad, valid[REGION], &pages, valid[REMOTE], &pages, 1, 1, NULL, &made));
        BAD(mr_prepare_read_pages(bad, valid[REGION], &pages, valid[REMOTE], &pages, 1, 1, NULL, &made));
        BAD(mr_prepare_write_list(bad, valid[LOCAL_LIST], NULL, valid[REMOTE_LIST], NULL, 1, NULL, &made));
        BAD(mr_prepare_read_list(bad, valid[LOCAL_LIST], NULL, valid[REMOTE_LIST], NULL, 1, NULL, &made));
        BAD(mr_explain_write(bad, valid[REGION], 0, valid[REMOTE], 0, 1, NULL, text, sizeof text, &needed));
        BAD(mr_explain_read(bad, valid[REGION], 0, valid[REMOTE], 0, 1, NULL, text, sizeof text, &needed));
        BAD(mr_notify(bad, bytes, 1, 0, &made));
        BAD(mr_imm_count(bad, 1, &number));
        BAD(mr_imm_take(bad, 1, 1));
        BAD(mr_imm_wait(bad, 1, 1, 0));
        BAD(mr_imm_expect(bad, 1, 1, &made));
        BAD(mr_write_imm(bad, 1, &made));
        BAD(mr_send(bad, valid[REGION], 0, 1, NULL, &made));
    }
    if (of != REMOTE) {
        BAD(mr_remote_info(bad, &number, &bits));
        BAD(mr_remote_release(bad));
        BAD(mr_write(valid[PEER], valid[REGION], 0, bad, 0, 1, NULL, &made));
        BAD(mr_read(valid[PEER], valid[REGION], 0, bad, 0, 1, NULL, &made));
        BAD(mr_write_pages(valid[PEER], valid[REGION], &pages, bad, &pages, 1, 1, NULL, &made));
        BAD(mr_read_pages(valid[PEER], valid[REGION], &pages, bad, &pages, 1, 1, NULL, &made));
        BAD(mr_prepare_write_pages(valid[PEER], valid[REGION], &pages, bad, &pages, 1, 1, NULL, &made));
        BAD(mr_prepare_read_pages(valid[PEER], valid[REGION], &pages, bad, &pages, 1, 1, NULL, &made));
        BAD(mr_remote_list_new(&remote_entry, 1, &made));
        BAD(mr_remote_list_append(valid[REMOTE_LIST], &remote_entry, 1));
        BAD(mr_remote_list_append_strided(valid[REMOTE_LIST], bad, 0, 1, 1, 0));
        BAD(mr_explain_write(valid[PEER], valid[REGION], 0, bad, 0, 1, NULL, text, sizeof text, &needed));
        BAD(mr_explain_read(valid[PEER], valid[REGION], 0, bad, 0, 1, NULL, text, sizeof text, &needed));
    }
    if (of != LOCAL_LIST) {
        BAD(mr_local_list_append(bad, NULL, 0));
        BAD(mr_local_list_append_strided(bad, valid[REGION], 0, 1, 1, 0));
        BAD(mr_local_list_len(bad, &needed));
        BAD(mr_local_list_release(bad));
        BAD(mr_write_list(valid[PEER], bad, NULL, valid[REMOTE_LIST], NULL, 1, NULL, &made));
        BAD(mr_read_list(valid[PEER], bad, NULL, valid[REMOTE_LIST], NULL, 1, NULL, &made));
        BAD(mr_prepare_write_list(valid[PEER], bad, NULL, valid[REMOTE_LIST], NULL, 1, NULL, &made));
        BAD(mr_prepare_read_list(valid[PEER], bad, NULL, valid[REMOTE_LIST], NULL, 1, NULL, &made));
    }
    if (of != REMOTE_LIST) {
        BAD(mr_remote_list_append(bad, NULL, 0));
        BAD(mr_remote_list_append_strided(bad, valid[REMOTE], 0, 1, 1, 0));
        BAD(mr_remote_list_len(bad, &needed));
        BAD(mr_remote_list_release(bad));
        BAD(mr_write_list(valid[PEER], valid[LOCAL_LIST], NULL, bad, NULL, 1, NULL, &made));
        BAD(mr_read_list(valid[PEER], valid[LOCAL_LIST], NULL, bad, NULL, 1, NULL, &made));
        BAD(mr_prepare_write_list(valid[PEER], valid[LOCAL_LIST], NULL, bad, NULL, 1, NULL, &made));
        BAD(mr_prepare_read_list(valid[PEER], valid[LOCAL_LIST], NULL, bad, NULL, 1, NULL, &made));
    }
    if (of != PREPARED) {
        BAD(mr_prepared_post(bad, NULL, &made));
        BAD(mr_prepared_bytes(bad, &number));
        BAD(mr_prepared_explain(bad, text, sizeof text, &needed));
        BAD(mr_prepared_release(bad));
    }
    if (of != OP) {
        BAD(mr_op_test(bad));
        BAD(mr_op_wait(bad, 0));
        BAD(mr_op_cancel(bad));
        BAD(mr_op_release(bad));
        BAD(mr_op_detach(bad));
        BAD(mr_op_error(bad, text, sizeof text, &needed));
        BAD(mr_op_take_peer(bad, &made));
        BAD(mr_op_take_remote(bad, &made));
        BAD(mr_op_outcome(bad, &outcome));
        BAD(mr_op_receipt(bad, &receipt, NULL, 0, &needed));
        BAD(mr_op_receipt_json(bad, text, sizeof text, &needed));
    }
    HOLDS(made == none);
}

static mr_fabric fabric, other;
static mr_peer to_other, to_fabric;
static mr_region own, theirs;

static void make_one_of_each_kind(uint64_t *handles) {
    mr_local_entry local = {0, 0, 64};
    mr_remote_entry remote = {0, 0, 64};
    mr_pages pages = {NULL, 0, 0};
    handles[FABRIC] = open_loopback(0);
    OK(mr_peer_connect_local(handles[FABRIC], other, &handles[PEER], NULL));
    handles[REGION] = allocate(handles[FABRIC], 4096, MR_ACCESS_ALL);
    handles[REMOTE] = import(handles[PEER], theirs);
    local.region = handles[REGION];
    remote.remote = handles[REMOTE];
    OK(mr_local_list_new(&local, 1, &handles[LOCAL_LIST]));
    OK(mr_remote_list_new(&remote, 1, &handles[REMOTE_LIST]));
    OK(mr_prepare_write_pages(handles[PEER], handles[REGION], &pages, handles[REMOTE], &pages, 2, 64, NULL,
                              &handles[PREPARED]));
    OK(mr_imm_expect(handles[PEER], 1, 1, &handles[OP]));
}

static void release_one_of_each_kind(const uint64_t *handles) {
    OK(mr_op_release(handles[OP]));
    OK(mr_prepared_release(handles[PREPARED]));
    OK(mr_remote_list_release(handles[REMOTE_LIST]));
    OK(mr_local_list_release(handles[LOCAL_LIST]));
    OK(mr_remote_release(handles[REMOTE]));
    OK(mr_region_release(handles[REGION]));
    OK(mr_peer_release(handles[PEER]));
    OK(mr_fabric_close(handles[FABRIC]));
}

static void handles(void) {
    static const char *names[KINDS] = {"a fabric",     "a region",      "a peer",              "a region of a peer",
                                       "a local list", "a remote list", "a prepared transfer", "an operation"};
    const uint64_t numbers[] = {0, 1, UINT64_MAX, (uint64_t)1 << 58 | 0xffffff, (uint64_t)63 << 58};
    uint64_t released[KINDS];
    make_one_of_each_kind(valid);
    make_one_of_each_kind(released);
    release_one_of_each_kind(released);
    for (size_t at = 0; at < LENGTH(numbers); at++) refuse(numbers[at], KINDS);
    for (int kind = 0; kind < KINDS; kind++) {
        GIVES(MR_ERROR_HANDLE, mr_op_test(kind == OP ? released[OP] : valid[kind]));
        SAYS(kind == OP ? "released" : names[kind]);
        refuse(released[kind], KINDS);
        refuse(valid[kind], (enum kind)kind);
    }
    release_one_of_each_kind(valid);
    refuse(valid[REGION], KINDS);
}

static void pointers(void) {
    char text[8] = "same";
    unsigned char small[4];
    size_t needed = 0;
    mr_op op = 0;
    mr_remote remote = import(to_other, theirs);
    mr_transfer_options options = MR_TRANSFER_OPTIONS_INIT;
    mr_outcome outcome = MR_OUTCOME_INIT;
    mr_receipt receipt = MR_RECEIPT_INIT;
    mr_memory memory = MR_MEMORY_INIT;
    mr_fabric none = 0;
    const mr_option unknown = {"bandwidth", "all"}, no_value = {"listen", NULL};
    char not_text[] = {(char)0xff, 0};
    const mr_option not_utf8 = {"listen", not_text};

#define INVALID(call) GIVES(MR_ERROR_INVALID_REQUEST, call)
    INVALID(mr_fabric_open(NULL, 1, &none));
    INVALID(mr_fabric_open(NULL, 0, NULL));
    INVALID(mr_fabric_open(&unknown, 1, &none));
    SAYS("transports, devices");
    INVALID(mr_fabric_open(&no_value, 1, &none));
    SAYS("options[0].value is NULL");
    INVALID(mr_fabric_open(&not_utf8, 1, &none));
    INVALID(mr_peer_connect(fabric, NULL, 0, &none));
    INVALID(mr_peer_connect(fabric, "127.0.0.1:1", 0, NULL));
    INVALID(mr_region_copy_in(own, 0, NULL, 1));
    INVALID(mr_region_copy_out(own, 0, NULL, 1));
    INVALID(mr_write_pages(to_other, own, NULL, remote, NULL, 1, 64, NULL, &op));
    INVALID(mr_local_list_new(NULL, 1, &op));
    INVALID(mr_recv(fabric, own, 0, 1, NULL));
    INVALID(mr_imm_expect(to_other, 1, 1, NULL));
    INVALID(mr_region_register(fabric, NULL, &op));

    GIVES(MR_ERROR_BUFFER, mr_fabric_transports(fabric, text, sizeof text, &needed));
    HOLDS(needed > sizeof text && strlen(text) == sizeof text - 1);
    GIVES(MR_ERROR_BUFFER, mr_fabric_transports(fabric, NULL, 0, &needed));
    memset(small, 7, sizeof small);
    GIVES(MR_ERROR_BUFFER, mr_region_descriptor(own, small, sizeof small, &needed));
    HOLDS(small[0] == 7 && small[3] == 7 && needed > sizeof small);
    HOLDS(mr_last_error(NULL, 0) > 1);

    options.size = 4;
    INVALID(mr_write(to_other, own, 0, remote, 0, 1, &options, &op));
    SAYS("MR_TRANSFER_OPTIONS_INIT");
    options.size = (uint32_t)sizeof options;
    options.flags = 1u << 31;
    INVALID(mr_write(to_other, own, 0, remote, 0, 1, &options, &op));
    options.flags = MR_TRANSFER_IMM_PER_REQUEST;
    INVALID(mr_write(to_other, own, 0, remote, 0, 1, &options, &op));
    options.flags = MR_TRANSFER_IMM;
    INVALID(mr_read(to_other, own, 0, remote, 0, 1, &options, &op));
    options.flags = MR_TRANSFER_NOTIFY;
    options.notification_len = 1;
    INVALID(mr_write(to_other, own, 0, remote, 0, 1, &options, &op));
    options.flags = 0;
    options.paths = 1u << 31;
    INVALID(mr_write(to_other, own, 0, remote, 0, 1, &options, &op));
    options.flags = MR_TRANSFER_COALESCE_AUTO | MR_TRANSFER_COALESCE_NEVER;
    options.paths = 0;
    INVALID(mr_write(to_other, own, 0, remote, 0, 1, &options, &op));
    SAYS("MR_TRANSFER_COALESCE_");
    options.flags = MR_TRANSFER_COALESCE_ALWAYS;
    GIVES(MR_ERROR_UNSUPPORTED, mr_write(to_other, own, 0, remote, 0, 1, &options, &op));
    SAYS("MULTIRAIL_COALESCE");
    options.flags = 0;
    options.paths = MR_PATH_RDMA;
    GIVES(MR_ERROR_UNREACHABLE, mr_write(to_other, own, 0, remote, 0, 1, &options, &op));

    OK(mr_write(to_other, own, 0, remote, 0, 64, NULL, &op));
    OK(mr_op_wait(op, 10 * SECONDS));
    outcome.size = 8;
    INVALID(mr_op_outcome(op, &outcome));
    INVALID(mr_op_receipt(op, &receipt, NULL, 1, NULL));
    receipt.rail_size = 8;
    INVALID(mr_op_receipt(op, &receipt, NULL, 0, NULL));
    INVALID(mr_op_take_peer(op, &none));
    OK(mr_op_cancel(op));
    OK(mr_op_test(op));
    OK(mr_op_release(op));

    memory.address = small;
    memory.length = sizeof small;
    memory.kind = 9;
    INVALID(mr_region_register(fabric, &memory, &none));
    memory.kind = MR_MEMORY_HOST;
    memory.access = 8;
    INVALID(mr_region_register(fabric, &memory, &none));
    INVALID(mr_region_alloc(fabric, 64, 0, 9, 0, &none));
    HOLDS(none == 0);
    OK(mr_remote_release(remote));
}

static void other_fabrics(void) {
    mr_remote remote = import(to_other, theirs), back = import(to_fabric, own);
    mr_local_entry local[2] = {{0, 0, 64}, {0, 0, 64}};
    mr_pages pages = {NULL, 0, 0};
    unsigned char descriptor[4096];
    size_t length = 0;
    uint64_t made = 0;
    local[0].region = own;
    local[1].region = theirs;
    INVALID(mr_write(to_other, theirs, 0, remote, 0, 64, NULL, &made));
    INVALID(mr_write(to_other, own, 0, back, 0, 64, NULL, &made));
    INVALID(mr_write_pages(to_other, theirs, &pages, remote, &pages, 1, 64, NULL, &made));
    INVALID(mr_local_list_new(local, 2, &made));
    SAYS("entry 1");
    INVALID(mr_fabric_publish(fabric, "name", theirs));
    INVALID(mr_recv(fabric, theirs, 0, 64, &made));
    /* A descriptor of a fabric that this peer is not. */
    OK(mr_region_descriptor(own, descriptor, sizeof descriptor, &length));
    GIVES(MR_ERROR_REVOKED, mr_peer_import(to_other, descriptor, length, &made));
    GIVES(MR_ERROR_PROTOCOL, mr_peer_import(to_other, descriptor, length / 2, &made));
    GIVES(MR_ERROR_OUT_OF_BOUNDS, mr_write(to_other, own, 4000, remote, 0, 100, NULL, &made));
    GIVES(MR_ERROR_OUT_OF_BOUNDS, mr_write(to_other, own, SIZE_MAX, remote, 0, SIZE_MAX, NULL, &made));
    INVALID(mr_write(to_other, own, 0, remote, 0, 0, NULL, &made));
    OK(mr_remote_release(remote));
    OK(mr_remote_release(back));
}

static void closed_fabrics(void) {
    mr_fabric gone = open_loopback(1);
    mr_region region = allocate(gone, 4096, MR_ACCESS_ALL);
    mr_peer peer = 0;
    mr_remote remote = 0;
    mr_op op = 0, later = 0;
    OK(mr_peer_connect_local(gone, other, &peer, NULL));
    remote = import(peer, theirs);
    OK(mr_imm_expect(peer, 5, 1, &op));
    OK(mr_fabric_close(gone));
    GIVES(MR_ERROR_HANDLE, mr_fabric_close(gone));
    GIVES(MR_ERROR_CLOSED, mr_op_wait(op, 10 * SECONDS));
    GIVES(MR_ERROR_CLOSED, mr_write(peer, region, 0, remote, 0, 64, NULL, &later));
    GIVES(MR_ERROR_CLOSED, mr_region_revoke(region, &later));
    GIVES(MR_ERROR_CLOSED, mr_peer_check(peer));
    OK(mr_op_release(op));
    OK(mr_region_release(region));
    OK(mr_remote_release(remote));
    OK(mr_peer_release(peer));
}

int main(void) {
    fabric = open_loopback(0);
    other = open_loopback(0);
    OK(mr_peer_connect_local(fabric, other, &to_other, &to_fabric));
    own = allocate(fabric, 4096, MR_ACCESS_ALL);
    theirs = allocate(other, 4096, MR_ACCESS_ALL);
    handles();
    pointers();
    other_fabrics();
    closed_fabrics();
    HOLDS(strcmp(mr_status_name(MR_ERROR_FORKED), "MR_ERROR_FORKED") == 0);
    HOLDS(strcmp(mr_status_name(-1000), "unknown status") == 0);
    OK(mr_region_release(own));
    OK(mr_region_release(theirs));
    OK(mr_peer_release(to_other));
    OK(mr_peer_release(to_fabric));
    OK(mr_fabric_close(fabric));
    OK(mr_fabric_close(other));
    puts("misuse: every misuse was refused");
    return 0;
}
