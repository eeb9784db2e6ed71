/*
 * multirail: moves memory between processes and machines at link speed. The C interface.
 *
 * Link with -lmultirail, or `pkg-config --cflags --libs multirail`. The header needs C99 or C++11, and no other file.
 *
 * Handles
 *   Every object is a 64-bit number, not a pointer. 0 is never a handle. A function that gets a number that is 0, was
 *   released, or belongs to another kind of object, returns MR_ERROR_HANDLE and does nothing else. A number is never
 *   used again for another object. Every handle that a function returns must be released by the function that its kind
 *   names. Objects that depend on each other may be released in any order: an operation keeps its regions.
 *
 * Errors
 *   Functions that can fail return mr_status: MR_OK (0), MR_PENDING (1, not over yet) or an error, which is negative.
 *   mr_last_error() has the sentence for this thread's last error: what happened, and what to do. After an error, a
 *   function has written none of its results, save where its comment says so.
 *
 * Threads
 *   Any thread may call any function at any time, with the same handles too, save where a comment says otherwise. Each
 *   comment ends with what the call may cost the calling thread:
 *     [fast]    takes no lock that another thread may hold for long, and makes no system call in the usual case
 *     [brief]   may allocate memory, copy up to the bytes that it is given, or wake a thread
 *     [slow]    may make system calls that take milliseconds: opening devices, pinning memory
 *     [waits]   waits for another process or thread, up to the given time
 *   No function may be called from a signal handler.
 *
 * fork()
 *   The child of a fork has no threads of the library. There, every handle from before the fork gives
 *   MR_ERROR_FORKED. Open a new fabric in the child, or start processes by posix_spawn() or exec().
 *
 * Structs
 *   A struct whose first member is `size` may grow. Begin with its initializer, which sets `size` and a default for the
 *   rest: `mr_transfer_options options = MR_TRANSFER_OPTIONS_INIT`. A later library reads and writes only the members
 *   that `size` covers. An earlier library refuses members that it does not know, unless they are 0.
 *
 * Bytes that peers send are copied into memory that this program names. Reading such memory while a transfer is under
 * way gives old or new bytes; wait for the end of the operation, its imm or its notification.
 */
#ifndef MULTIRAIL_H
#define MULTIRAIL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------------------------------------------- version -- */

/*
 * The version of this interface: major << 16 | minor. Functions and members that are added raise the minor number.
 * Anything that could break a program raises the major number, and the library's soname with it.
 */
#define MR_ABI_VERSION ((uint32_t)0x00000001)

/* The MR_ABI_VERSION that the library was built with. A program works with a library of the same major and of the same
 * or a higher minor number. [fast] */
uint32_t multirail_abi_version(void);

/* The version of the library as text, for example "0.1.0". The text lives as long as the library. [fast] */
const char *multirail_version(void);

/* ------------------------------------------------------------------------------------------------------ status -- */

typedef int32_t mr_status;

enum {
    /* The call has succeeded; for an operation: it is over and has succeeded. */
    MR_OK = 0,
    /* Not over yet, nothing there yet, or the time of a wait has passed. Not an error. */
    MR_PENDING = 1,

    /* A request that can never succeed as given: an empty list, an unknown option. */
    MR_ERROR_INVALID_REQUEST = -1,
    /* A range that does not lie inside its region. */
    MR_ERROR_OUT_OF_BOUNDS = -2,
    /* The local region was not registered for this use. */
    MR_ERROR_LOCAL_ACCESS = -3,
    /* The target refused: wrong key, out of bounds there, or no such right. */
    MR_ERROR_REMOTE_ACCESS = -4,
    /* The target has revoked the region, or registered it anew. */
    MR_ERROR_REVOKED = -5,
    /* Larger than the transport can carry in one piece. */
    MR_ERROR_TOO_LARGE = -6,
    /* The transport, or this platform, cannot do this. */
    MR_ERROR_UNSUPPORTED = -7,
    /* Something is in use, or a queue or table is full. A later call may succeed. */
    MR_ERROR_BUSY = -8,
    /* No more of something can be made: memory, registrations, file descriptors. */
    MR_ERROR_EXHAUSTED = -9,
    /* The operation's deadline passed first. */
    MR_ERROR_DEADLINE_EXCEEDED = -10,
    /* Cancelled by the caller. */
    MR_ERROR_CANCELLED = -11,
    /* The peer's process, host or connection is gone. */
    MR_ERROR_PEER_DIED = -12,
    /* The local device is gone or no longer usable. */
    MR_ERROR_DEVICE_LOST = -13,
    /* This fabric or peer was closed by this side, or the peer has closed the connection. */
    MR_ERROR_CLOSED = -14,
    /* Nothing has this name. */
    MR_ERROR_NOT_FOUND = -15,
    /* No transport of this side reaches that peer, or none by a path that the policy allows. */
    MR_ERROR_UNREACHABLE = -16,
    /* The peer speaks another version of the protocol. */
    MR_ERROR_VERSION = -17,
    /* Bytes that do not parse, or that break the protocol. */
    MR_ERROR_PROTOCOL = -18,
    /* A right, a setting, a token or a certificate is missing. */
    MR_ERROR_PERMISSION = -19,
    /* Any other failure of the operating system. */
    MR_ERROR_IO = -20,

    /* The handle is 0, was released, or belongs to another kind of object. */
    MR_ERROR_HANDLE = -64,
    /* A buffer is too small; `needed` has the size. */
    MR_ERROR_BUFFER = -65,
    /* The handle is from before a fork, and this is the child. */
    MR_ERROR_FORKED = -66,
    /* A fault of the library. It was caught before it could reach your program; the text says where it was. */
    MR_ERROR_PANIC = -67,
    /* An error that has no number in this version of the interface. */
    MR_ERROR_OTHER = -68
};

/* The name of a status, for example "MR_ERROR_BUSY"; "unknown status" for other numbers. The text lives as long as the
 * library. [fast] */
const char *mr_status_name(mr_status status);

/*
 * Text and bytes that functions return: `buf` has room for `len` bytes. If `needed` is not NULL, the function writes
 * there how many bytes there are, for text with its final NUL. If `len` is smaller, the function returns
 * MR_ERROR_BUFFER; then `buf` has the beginning of a text, with a final NUL, or no byte at all. `buf` may be NULL if
 * `len` is 0.
 */

/* The sentence for the last error that a function returned in this thread; "" if there was none. Returns the bytes that
 * the text has, with its final NUL. Writes at most `len` bytes, with a final NUL. [fast] */
size_t mr_last_error(char *buf, size_t len);

/* ----------------------------------------------------------------------------------------------------- handles -- */

typedef uint64_t mr_fabric;        /* opened transports;          mr_fabric_close           */
typedef uint64_t mr_region;        /* registered memory;          mr_region_release         */
typedef uint64_t mr_peer;          /* a connected peer;           mr_peer_release           */
typedef uint64_t mr_remote;        /* a region of a peer;         mr_remote_release         */
typedef uint64_t mr_local_list;    /* pieces of regions;          mr_local_list_release     */
typedef uint64_t mr_remote_list;   /* pieces of a peer's regions; mr_remote_list_release    */
typedef uint64_t mr_prepared;      /* a prepared transfer;        mr_prepared_release       */
typedef uint64_t mr_op;            /* an operation;               mr_op_release, mr_op_detach */

/* A time without end, for `timeout_ns`. */
#define MR_FOREVER UINT64_MAX

/* ------------------------------------------------------------------------------------------------------ fabric -- */

/* A setting by name; both are text that ends with NUL, in UTF-8. */
typedef struct mr_option {
    const char *key;
    const char *value;
} mr_option;

/*
 * Opens a fabric: finds devices, opens them, starts the threads that drive them, and listens for peers if `listen` is
 * given. `options` has `count` entries, and may be NULL if `count` is 0.
 *
 *   transports      the backends in order of preference, with commas: "loopback,efa"; "auto" takes all that are
 *                   available. Without it, MULTIRAIL_BACKEND decides, and "auto" if that is not set. A backend that is
 *                   named and is not available is an error
 *   devices         the names of the devices to use, with commas; each must exist. A backend of which none is named
 *                   uses all of its devices
 *   provider        efa: libfabric's name of the provider: "efa" (default), "tcp", "shm", ...
 *   node            efa: the local address or host name, for providers on sockets
 *   domains         efa: the number of rails of a provider without cards, 1 to 64
 *   queue_pairs     verbs: queue pairs per peer, 1 to 16
 *   gid_index       verbs: 0 to 255
 *   traffic_class   verbs: 0 to 255
 *   service_level   verbs: 0 to 7
 *   staging         memory that a card cannot register goes through a buffer: "0" (never), "1" (if needed), "always"
 *   rail_groups     "nearest", or devices with commas, groups with semicolons: "rdmap79s0,rdmap80s0@5;rdmap96s0"
 *   gpus            the PCI addresses of the GPUs to serve, with commas
 *   token           16 to 4096 bytes: only peers with the same token connect
 *   token_file      the path of a file with the token; not together with `token`
 *   tls_cert, tls_key, tls_ca   the paths of this side's certificates, its key, and the roots that verify peers, in
 *                   PEM: encrypts control connections. All three, or none
 *   listen          the address to listen at: "0.0.0.0:0", "[::]:0", "10.0.0.1:4711". Port 0 is any free port
 *   advertise       the hosts that mr_fabric_metadata tells peers, with commas, each with or without ":port". Without
 *                   it: the address of `listen`, or, if that is 0.0.0.0 or [::], every address of this host
 *   notifications   the bytes of memory for notifications, 4194304 to 17179869184; "0" (default): no notifications
 *   path_policy     the paths that bytes may take, with commas: rdma, gpu-copy, memory-copy, sockets, staged
 *   deadline_ms     the deadline of operations that state none; 30000 by default
 *   heartbeat_ms    between two signs of life; 500 by default
 *   peer_timeout_ms the silence after which a peer counts as dead; 5000 by default
 *   handshake_ms    the time that a new peer has for its first frame; 5000 by default
 *   max_operations  the most operations that may be under way on each worker, 1 to 16777216; 4096 by default
 *   threads         the most worker threads per transport. Without it: one for each rail group
 *   pinning         "near" (default): workers run on cores next to their devices; "off"; or CPU numbers with commas
 *   stall_after_ms  the time without progress after which the library logs an operation; 1000 by default
 *
 * Other MULTIRAIL_ variables of the environment apply as in docs/settings.md; an option is stronger than a variable.
 * An unknown key, a key that is given twice, or a wrong value is MR_ERROR_INVALID_REQUEST, with the known ones. [slow]
 */
mr_status mr_fabric_open(const mr_option *options, size_t count, mr_fabric *fabric);

/* Closes a fabric and releases its handle: peers see it close, operations end with MR_ERROR_CLOSED, threads are joined.
 * Handles of its peers, regions and operations stay valid until they are released; calls with them give
 * MR_ERROR_CLOSED. Do not call it in an owner's release function. [waits, up to some seconds] */
mr_status mr_fabric_close(mr_fabric fabric);

/* Listens at `address`, as the option `listen` does; a fabric listens at one address, once. MR_ERROR_BUSY if it listens
 * already. [waits] */
mr_status mr_fabric_listen(mr_fabric fabric, const char *address);

/* The address that the fabric listens at, as text: "127.0.0.1:41234". MR_ERROR_NOT_FOUND if it does not listen.
 * [brief] */
mr_status mr_fabric_address(mr_fabric fabric, char *buf, size_t len, size_t *needed);

/* Bytes by which other processes connect to this fabric with mr_peer_connect_metadata: its addresses, and the number
 * of this opening. They hold no secret. At most 2048 bytes. MR_ERROR_NOT_FOUND if the fabric does not listen.
 * [brief] */
mr_status mr_fabric_metadata(mr_fabric fabric, void *buf, size_t len, size_t *needed);

/* The next peer that has connected to this fabric and was not taken yet. The library completes connections whether or
 * not a program takes them, so a target that needs no handle need not call this. MR_PENDING if none has come within
 * the time. `timeout_ns` 0 does not wait. [waits] */
mr_status mr_fabric_accept(mr_fabric fabric, uint64_t timeout_ns, mr_peer *peer);

/* A handle of the peer with this number (of mr_fabric_next_notification or mr_outcome), whichever side connected and
 * whether or not mr_fabric_accept has returned it. MR_ERROR_NOT_FOUND if there is none, or if it is gone. [brief] */
mr_status mr_fabric_peer(mr_fabric fabric, uint64_t id, mr_peer *peer);

/* The number of this opening: other openings have other numbers. [fast] */
mr_status mr_fabric_incarnation(mr_fabric fabric, uint64_t *incarnation);

/* The counters of every rail since the fabric was opened, as JSON text: an array of objects with transport, backend,
 * rail, device, posts, doorbells, bytes, completions, errors, queue_full, retries, ... [brief] */
mr_status mr_fabric_counters(mr_fabric fabric, char *buf, size_t len, size_t *needed);

/* The transports and devices that are open, as JSON text: an array of {"label", "backend", "devices"}. [brief] */
mr_status mr_fabric_transports(mr_fabric fabric, char *buf, size_t len, size_t *needed);

/* Takes a device of mr_fabric_transports out of service, for its maintenance: an operation that is over once the
 * operations that use the device now have ended. New operations use other devices, and what running ones have not
 * posted on it goes over other devices of its rail group. The operation fails with MR_ERROR_DEADLINE_EXCEEDED after
 * deadline_ms of mr_fabric_open, and the device stays out of service; so it does if the operation is released.
 * MR_ERROR_INVALID_REQUEST if there is no such device. [brief] */
mr_status mr_fabric_drain_device(mr_fabric fabric, const char *device, mr_op *op);

/* Takes a device back into service. Does nothing if it is in service; a lost device stays lost. [brief] */
mr_status mr_fabric_restore_device(mr_fabric fabric, const char *device);

/* ------------------------------------------------------------------------------------------------------ memory -- */

/* What peers may do with a region; the owner may always use it. */
enum { MR_ACCESS_LOCAL = 0, MR_ACCESS_REMOTE_WRITE = 1, MR_ACCESS_REMOTE_READ = 2, MR_ACCESS_ALL = 3 };

/* Where memory lies. */
enum { MR_MEMORY_HOST = 0, MR_MEMORY_CUDA = 1 };

/* mr_memory.flags: registers GPU memory on every rail, not only on those next to its GPU. */
enum { MR_REGISTER_EVERYWHERE = 1 };

/* mr_memory.device: the GPU that the address belongs to. For MR_MEMORY_HOST the device is not looked at. */
#define MR_DEVICE_ANY ((int32_t)-1)

/* Memory to register. */
typedef struct mr_memory {
    uint32_t size;      /* sizeof(mr_memory) */
    uint32_t kind;      /* MR_MEMORY_HOST or MR_MEMORY_CUDA */
    void *address;      /* the first byte; for CUDA the address on the GPU */
    size_t length;      /* in bytes, at least 1 */
    int32_t device;     /* CUDA's number of the GPU, or MR_DEVICE_ANY */
    uint32_t access;    /* MR_ACCESS_... */
    uint32_t flags;     /* MR_REGISTER_EVERYWHERE, or 0 */
    uint32_t reserved;  /* 0 */
    /* The owner's release function, or NULL. The library calls release(context) exactly once, when neither it nor any
     * device or peer can touch the memory any more. This also holds if mr_region_register fails, before or
     * after it returns, unless `memory` is NULL or its size is wrong. It may come in any thread, and must not
     * block for long. It may call functions of this library save mr_fabric_close and those that wait.
     * Without the function, the memory must stay allocated until the region was revoked, or until the region is
     * released and all of its operations are over and the fabric is closed. */
    void (*release)(void *context);
    void *context;
} mr_memory;

#define MR_MEMORY_INIT                                                                                                 \
    {(uint32_t)sizeof(mr_memory), MR_MEMORY_HOST, NULL, 0, MR_DEVICE_ANY, MR_ACCESS_LOCAL, 0, 0, NULL, NULL}

/* Registers memory that the program has allocated. MR_ERROR_UNSUPPORTED, MR_ERROR_PERMISSION or MR_ERROR_EXHAUSTED if a
 * device cannot register it: the text says why. [slow] */
mr_status mr_region_register(mr_fabric fabric, const mr_memory *memory, mr_region *region);

/* Allocates `length` zeroed bytes and registers them. Host memory of this kind is faster between processes of one host
 * than memory that was allocated elsewhere. `kind` is MR_MEMORY_...; `device` is the GPU's number for MR_MEMORY_CUDA
 * (MR_DEVICE_ANY is 0). [slow] */
mr_status mr_region_alloc(mr_fabric fabric, size_t length, uint32_t access, uint32_t kind, int32_t device,
                          mr_region *region);

/* The address of the first byte, and the length. Either pointer may be NULL. The memory of mr_region_alloc stays
 * allocated at least until mr_region_release. [fast] */
mr_status mr_region_data(mr_region region, void **address, size_t *length);

/* Copies bytes into a region of host or GPU memory, or out of it. [brief] */
mr_status mr_region_copy_in(mr_region region, size_t offset, const void *bytes, size_t length);
mr_status mr_region_copy_out(mr_region region, size_t offset, void *bytes, size_t length);

/* The bytes that a peer needs to reach the region, for mr_peer_import. Send them by any means. They are valid while the
 * region is registered. [brief] */
mr_status mr_region_descriptor(mr_region region, void *buf, size_t len, size_t *needed);

/* Publishes a region under a name of 1 to 255 bytes: peers find it with mr_peer_lookup until mr_fabric_unpublish, or
 * until another region takes the name. The name keeps the region. [brief] */
mr_status mr_fabric_publish(mr_fabric fabric, const char *name, mr_region region);
mr_status mr_fabric_unpublish(mr_fabric fabric, const char *name);

/*
 * Takes a region back from all peers: an operation that is over once no late byte can land. From this call on, the
 * region serves mr_region_copy_in and mr_region_copy_out alone; peers get MR_ERROR_REVOKED, and so do operations under
 * way. The handle must still be released. If `op` is NULL, nobody can ask when it is over. [brief]
 */
mr_status mr_region_revoke(mr_region region, mr_op *op);

/* Releases a region. The registration ends once all its operations are over, lists and prepared transfers that name it
 * are released, and its names are removed. [slow] */
mr_status mr_region_release(mr_region region);

/* ------------------------------------------------------------------------------------------------------- peers -- */

/* Connects to a fabric that listens at `address` ("host:port"), and waits for the connection, at most `timeout_ns`:
 * then it returns MR_ERROR_DEADLINE_EXCEEDED, and there is no connection. Two fabrics may connect several times, and a
 * fabric to itself. [waits] */
mr_status mr_peer_connect(mr_fabric fabric, const char *address, uint64_t timeout_ns, mr_peer *peer);

/* As mr_peer_connect, to the fabric whose mr_fabric_metadata this is. Tries its addresses one after the other.
 * MR_ERROR_PEER_DIED if another opening answers there: its process was restarted; ask for new metadata. [waits] */
mr_status mr_peer_connect_metadata(mr_fabric fabric, const void *metadata, size_t len, uint64_t timeout_ns,
                                   mr_peer *peer);

/* Start connecting, and do not wait. Once the operation is over, mr_op_take_peer has the peer. The attempt ends after
 * the time that the option handshake_ms sets (for metadata: for each address). mr_op_test and mr_op_wait move an
 * attempt with metadata on to its next address. [brief] */
mr_status mr_peer_connect_start(mr_fabric fabric, const char *address, mr_op *op);
mr_status mr_peer_connect_metadata_start(mr_fabric fabric, const void *metadata, size_t len, mr_op *op);

/* Connects two fabrics of this process, or one with itself, without sockets: `there` is `fabric`'s handle of `other`,
 * `here` is `other`'s handle of `fabric`. `here` may be NULL. [slow] */
mr_status mr_peer_connect_local(mr_fabric fabric, mr_fabric other, mr_peer *there, mr_peer *here);

/* The peer's number in its fabric: notifications and received messages name it. [fast] */
mr_status mr_peer_id(mr_peer peer, uint64_t *id);

/* The number of the opening of the peer's fabric: a restarted peer has another. [fast] */
mr_status mr_peer_incarnation(mr_peer peer, uint64_t *incarnation);

/* MR_OK while the peer is connected, as far as this side knows. Otherwise the reason why it is gone:
 * MR_ERROR_PEER_DIED, MR_ERROR_CLOSED, ... [fast] */
mr_status mr_peer_check(mr_peer peer);

/* Says which transport reaches the peer over which rails, why others are not used, and by which paths bytes reach the
 * regions that were imported: text for people. [brief] */
mr_status mr_peer_explain(mr_peer peer, char *buf, size_t len, size_t *needed);

/* Sets the paths that operations with this peer may take from now on, of those that the fabric allows; text as in the
 * option path_policy. [brief] */
mr_status mr_peer_set_path_policy(mr_peer peer, const char *paths);

/* Makes a region of the peer usable here; the bytes are those of its mr_region_descriptor. MR_ERROR_REVOKED if they are
 * of an earlier opening of the peer. [slow; may wait up to 2 s per rail for the peer's process] */
mr_status mr_peer_import(mr_peer peer, const void *descriptor, size_t len, mr_remote *remote);

/* Asks the peer for a region that it has published: an operation; once it is over, mr_op_take_remote has the region.
 * MR_ERROR_NOT_FOUND if the peer has nothing of this name. The mr_op_test or mr_op_wait that finds the peer's answer
 * imports the region, and may wait for that as mr_peer_import does. [brief] */
mr_status mr_peer_lookup(mr_peer peer, const char *name, mr_op *op);

/* An operation that is over once no byte can move any more of all operations that were submitted to this peer before,
 * released and detached ones included. [brief] */
mr_status mr_peer_drain(mr_peer peer, mr_op *op);

/* An operation that touches every rail to the peer, so that the first transfer costs no more than others. [brief] */
mr_status mr_peer_warm_up(mr_peer peer, mr_op *op);

/* Ends the connection, for all handles of the peer. Operations under way end with MR_ERROR_CLOSED. [brief] */
mr_status mr_peer_disconnect(mr_peer peer);

/* Releases a handle. The connection stays, until mr_peer_disconnect or mr_fabric_close. [brief] */
mr_status mr_peer_release(mr_peer peer);

/* The length of an imported region, and what this side may do with it (MR_ACCESS_...). Either may be NULL. [fast] */
mr_status mr_remote_info(mr_remote remote, uint64_t *length, uint32_t *access);

/* Releases an imported region, once its operations are over and no list names it. [brief] */
mr_status mr_remote_release(mr_remote remote);

/* --------------------------------------------------------------------------------------------------- transfers -- */

/* mr_transfer_options.flags */
enum {
    /* `imm` is given: the target gets it after the last byte (mr_imm_count). Writes and sends only. */
    MR_TRANSFER_IMM = 1,
    /* With MR_TRANSFER_IMM, for mr_write and mr_write_pages: every work request delivers the imm: one for each started
     * MiB of mr_write, one for each page of mr_write_pages. */
    MR_TRANSFER_IMM_PER_REQUEST = 2,
    /* `notification` is given: the target gets these bytes after all others (mr_fabric_next_notification). After a read
     * it tells the target that its memory was read. */
    MR_TRANSFER_NOTIFY = 4,
    /* The bytes are in no cache, and nobody reads them soon: a hint for copies. */
    MR_TRANSFER_COLD = 8,
    /* Whether small pages share work requests, and each is copied at both ends: never, where the library expects it to
     * be faster, or always; at most one of the three. Without them, what MULTIRAIL_COALESCE says. The last one is
     * refused with MR_ERROR_UNSUPPORTED if one of the two sides does not coalesce. */
    MR_TRANSFER_COALESCE_NEVER = 16,
    MR_TRANSFER_COALESCE_AUTO = 32,
    MR_TRANSFER_COALESCE_ALWAYS = 64,
    /* No request is posted a second time if a device is lost: then the transfer ends with MR_ERROR_DEVICE_LOST. */
    MR_TRANSFER_NO_REPLAY = 128
};

/* The paths of bytes, as bits. */
enum {
    MR_PATH_RDMA = 1,        /* network cards */
    MR_PATH_GPU_COPY = 2,    /* a GPU copies */
    MR_PATH_MEMORY_COPY = 4, /* a processor of this host copies */
    MR_PATH_SOCKETS = 8,     /* the kernel's network stack */
    MR_PATH_STAGED = 16,     /* through intermediate buffers in host memory */
    MR_PATH_COALESCED = 32   /* several small pages in one work request */
};

/* How a transfer goes. NULL in place of a pointer to it means: no imm, no notification, the fabric's deadline. */
typedef struct mr_transfer_options {
    uint32_t size;             /* sizeof(mr_transfer_options) */
    uint32_t flags;            /* MR_TRANSFER_... */
    uint64_t deadline_ns;      /* the time until the operation fails; 0: the fabric's */
    uint32_t imm;              /* with MR_TRANSFER_IMM */
    uint32_t paths;            /* the paths that the bytes may take, MR_PATH_...; 0: any that fabric and peer allow */
    const void *notification;  /* with MR_TRANSFER_NOTIFY: copied before the call returns; at most 1 MiB */
    size_t notification_len;   /* may be 0 */
} mr_transfer_options;

#define MR_TRANSFER_OPTIONS_INIT {(uint32_t)sizeof(mr_transfer_options), 0, 0, 0, 0, NULL, 0}

/*
 * All functions below that submit a transfer check it at once: bounds, access, the peer's state. A refused transfer
 * returns an error, and there is no operation: MR_ERROR_OUT_OF_BOUNDS, MR_ERROR_REMOTE_ACCESS, MR_ERROR_REVOKED,
 * MR_ERROR_PEER_DIED, MR_ERROR_UNREACHABLE (the path policy), MR_ERROR_TOO_LARGE, MR_ERROR_BUSY (too many operations
 * are under way), ...
 *
 * If it returns MR_OK, `*op` is the operation, which may be over already. `op` may be NULL: then nobody learns of its
 * end, as with mr_op_detach. Small transfers may be carried out in the calling thread. [fast; copies of some KiB]
 */

/* Writes `length` bytes of `region`, from `offset` on, to `remote_offset` of `remote`. */
mr_status mr_write(mr_peer peer, mr_region region, size_t offset, mr_remote remote, size_t remote_offset, size_t length,
                   const mr_transfer_options *options, mr_op *op);

/* Reads `length` bytes of `remote`, from `remote_offset` on, into `region` at `offset`. */
mr_status mr_read(mr_peer peer, mr_region region, size_t offset, mr_remote remote, size_t remote_offset, size_t length,
                  const mr_transfer_options *options, mr_op *op);

/* Pages of a region: page i of a transfer lies at offset + indices[i] * stride bytes. */
typedef struct mr_pages {
    const uint32_t *indices; /* one for each page; copied before the call returns. NULL: 0, 1, 2, ... */
    size_t stride;           /* the bytes from one index to the next; 0: the page size */
    size_t offset;           /* the bytes before index 0 */
} mr_pages;

/* Writes `count` pages of `page_size` bytes: the i-th page of `pages` in `region` to the i-th of `remote_pages` in
 * `remote`. [brief] */
mr_status mr_write_pages(mr_peer peer, mr_region region, const mr_pages *pages, mr_remote remote,
                         const mr_pages *remote_pages, size_t count, size_t page_size,
                         const mr_transfer_options *options, mr_op *op);

/* Reads `count` pages: the i-th of `remote_pages` in `remote` into the i-th of `pages` in `region`. [brief] */
mr_status mr_read_pages(mr_peer peer, mr_region region, const mr_pages *pages, mr_remote remote,
                        const mr_pages *remote_pages, size_t count, size_t page_size,
                        const mr_transfer_options *options, mr_op *op);

/* A piece of a region of this process. */
typedef struct mr_local_entry {
    mr_region region;
    uint64_t offset;
    uint64_t length; /* at least 1 */
} mr_local_entry;

/* A piece of a region of a peer. */
typedef struct mr_remote_entry {
    mr_remote remote;
    uint64_t offset;
    uint64_t length; /* at least 1 */
} mr_remote_entry;

/* Lists of pieces, of any lengths, in any number of regions of one fabric, or of one peer. A list is checked once, when
 * it is made, and keeps its regions. One list serves any number of transfers. At most 2^32 - 2 entries. The error of a
 * wrong entry names its number. [brief] */
mr_status mr_local_list_new(const mr_local_entry *entries, size_t count, mr_local_list *list);
mr_status mr_remote_list_new(const mr_remote_entry *entries, size_t count, mr_remote_list *list);

/* Append to a list. The strided ones append `count` pieces of `length` bytes: the first lies `offset` bytes into the
 * region, each further one `stride` bytes behind the one before. After an error the list has the entries before the
 * wrong one. They wait while another thread submits a transfer with the same list. [brief] */
mr_status mr_local_list_append(mr_local_list list, const mr_local_entry *entries, size_t count);
mr_status mr_remote_list_append(mr_remote_list list, const mr_remote_entry *entries, size_t count);
mr_status mr_local_list_append_strided(mr_local_list list, mr_region region, uint64_t offset, uint64_t length,
                                       uint32_t count, uint64_t stride);
mr_status mr_remote_list_append_strided(mr_remote_list list, mr_remote remote, uint64_t offset, uint64_t length,
                                        uint32_t count, uint64_t stride);

/* The number of entries. [fast] */
mr_status mr_local_list_len(mr_local_list list, size_t *count);
mr_status mr_remote_list_len(mr_remote_list list, size_t *count);

/* Release a list. Transfers under way and prepared transfers do not need it any more. [brief] */
mr_status mr_local_list_release(mr_local_list list);
mr_status mr_remote_list_release(mr_remote_list list);

/*
 * Write or read the pieces of one list to or from those of another, one by one: for i below `count`, entry
 * local_indices[i] of `local` and entry remote_indices[i] of `remote`, which must have the same length. An index may
 * occur several times. If an index array is NULL, the side takes its first `count` entries in order. [brief]
 */
mr_status mr_write_list(mr_peer peer, mr_local_list local, const uint32_t *local_indices, mr_remote_list remote,
                        const uint32_t *remote_indices, size_t count, const mr_transfer_options *options, mr_op *op);
mr_status mr_read_list(mr_peer peer, mr_local_list local, const uint32_t *local_indices, mr_remote_list remote,
                       const uint32_t *remote_indices, size_t count, const mr_transfer_options *options, mr_op *op);

/*
 * Check and plan a transfer, to be posted many times: arguments as above. A prepared transfer keeps its regions. The
 * options are those of every post. [brief]
 */
mr_status mr_prepare_write_pages(mr_peer peer, mr_region region, const mr_pages *pages, mr_remote remote,
                                 const mr_pages *remote_pages, size_t count, size_t page_size,
                                 const mr_transfer_options *options, mr_prepared *prepared);
mr_status mr_prepare_read_pages(mr_peer peer, mr_region region, const mr_pages *pages, mr_remote remote,
                                const mr_pages *remote_pages, size_t count, size_t page_size,
                                const mr_transfer_options *options, mr_prepared *prepared);
mr_status mr_prepare_write_list(mr_peer peer, mr_local_list local, const uint32_t *local_indices, mr_remote_list remote,
                                const uint32_t *remote_indices, size_t count, const mr_transfer_options *options,
                                mr_prepared *prepared);
mr_status mr_prepare_read_list(mr_peer peer, mr_local_list local, const uint32_t *local_indices, mr_remote_list remote,
                               const uint32_t *remote_indices, size_t count, const mr_transfer_options *options,
                               mr_prepared *prepared);

/* Posts a prepared transfer. `options` may be NULL, or change one thing of this post alone: the imm (the transfer must
 * have been prepared with one) or the notification. Anything else in it is MR_ERROR_INVALID_REQUEST. Several posts of
 * one transfer may be under way at once. [fast] */
mr_status mr_prepared_post(mr_prepared prepared, const mr_transfer_options *options, mr_op *op);

/* The bytes of one post. [fast] */
mr_status mr_prepared_bytes(mr_prepared prepared, uint64_t *bytes);

/* What a post would do now: transport, rails, paths, and why; text for people. [brief] */
mr_status mr_prepared_explain(mr_prepared prepared, char *buf, size_t len, size_t *needed);

/* Releases a prepared transfer. Its posts go on. [brief] */
mr_status mr_prepared_release(mr_prepared prepared);

/* What mr_write or mr_read with these arguments would do now: text for people. [brief] */
mr_status mr_explain_write(mr_peer peer, mr_region region, size_t offset, mr_remote remote, size_t remote_offset,
                           size_t length, const mr_transfer_options *options, char *buf, size_t len, size_t *needed);
mr_status mr_explain_read(mr_peer peer, mr_region region, size_t offset, mr_remote remote, size_t remote_offset,
                          size_t length, const mr_transfer_options *options, char *buf, size_t len, size_t *needed);

/* -------------------------------------------------------------------------------------------------- operations -- */

/* MR_PENDING while an operation is under way. Then MR_OK or its error, at every call. A cancelled operation is under
 * way until no byte of it can move any more. [fast] */
mr_status mr_op_test(mr_op op);

/* Waits until an operation is over, at most `timeout_ns`. Returns what mr_op_test returns then; MR_PENDING if the time
 * has passed and the operation goes on. Several threads may wait for one operation. [waits] */
mr_status mr_op_wait(mr_op op, uint64_t timeout_ns);

/* Requests a cancel, and does not wait. The operation is over, with MR_ERROR_CANCELLED or with the result that it had
 * before, once no byte of it can move any more: at its deadline at the latest. MR_OK also if it is over. [brief] */
mr_status mr_op_cancel(mr_op op);

/* Releases an operation, and never waits. One that is under way is cancelled in the background: bytes that were posted
 * may still move, and its regions stay registered until none can. To learn when, cancel and wait before the release,
 * or use mr_peer_drain. What the operation would have returned, such as a peer, is let go. [brief] */
mr_status mr_op_release(mr_op op);

/* Releases the handle, and lets the operation run to its end. A connection, a lookup or a wait is let go. [brief] */
mr_status mr_op_detach(mr_op op);

/* The error of an operation that is over and has failed, as a sentence; "" if it has not failed. [brief] */
mr_status mr_op_error(mr_op op, char *buf, size_t len, size_t *needed);

/* The peer of mr_peer_connect_start, and the region of mr_peer_lookup. They can be taken once. MR_PENDING before the
 * operation is over; its error if it has failed; MR_ERROR_INVALID_REQUEST if it has no such result, or if that was
 * taken. [brief] */
mr_status mr_op_take_peer(mr_op op, mr_peer *peer);
mr_status mr_op_take_remote(mr_op op, mr_remote *remote);

/* mr_outcome.flags */
enum {
    MR_OUTCOME_PEER = 1, /* `peer` is set */
    MR_OUTCOME_IMM = 2   /* `imm` is set */
};

/* The result of a transfer. */
typedef struct mr_outcome {
    uint32_t size;          /* sizeof(mr_outcome), set by the caller */
    uint32_t flags;         /* MR_OUTCOME_... */
    uint64_t bytes;         /* the bytes that were moved; of a receive, those of the message */
    uint32_t work_requests; /* 0 for receives, and for operations that ran in the calling thread */
    uint32_t merged;        /* pages or entries that shared a work request with the one before */
    uint64_t peer;          /* the number of the message's sender (mr_recv) */
    uint32_t imm;           /* the message's immediate data (mr_recv) */
    uint32_t reserved;
} mr_outcome;

#define MR_OUTCOME_INIT {(uint32_t)sizeof(mr_outcome), 0, 0, 0, 0, 0, 0, 0}

/* The outcome of an operation that has succeeded. MR_PENDING before it is over; its error if it has failed. [fast] */
mr_status mr_op_outcome(mr_op op, mr_outcome *outcome);

/* How an operation went. Both times begin with the submission. They are 0 if the calling thread moved the bytes. */
typedef struct mr_receipt {
    uint32_t size;          /* sizeof(mr_receipt), set by the caller */
    uint32_t rail_size;     /* sizeof(mr_rail_receipt), set by the caller */
    uint64_t bytes;         /* the bytes that were moved */
    uint32_t work_requests; /* as in mr_outcome */
    uint32_t merged;        /* as in mr_outcome */
    uint64_t post_ns;       /* the time until the devices had accepted the last work request */
    uint64_t transfer_ns;   /* the time until all bytes were delivered, and the library had noticed it */
} mr_receipt;

/* What one rail carried of an operation. */
typedef struct mr_rail_receipt {
    uint64_t bytes;     /* the bytes that the rail carried */
    uint32_t rail;      /* the rail's position in its transport */
    uint32_t paths;     /* the paths that these bytes took: MR_PATH_... */
    char transport[72]; /* the transport's label; "" if the calling thread moved the bytes itself */
    char device[72];    /* the name of the rail's device; a longer name is cut */
} mr_rail_receipt;

#define MR_RECEIPT_INIT {(uint32_t)sizeof(mr_receipt), (uint32_t)sizeof(mr_rail_receipt), 0, 0, 0, 0, 0}

/* The receipt of a transfer that has succeeded. `rails` has room for `capacity` rails and may be NULL if that is 0;
 * `*count` (may be NULL) is the number of rails that carried something. If these are more than `capacity`, the first
 * are written, and the call still succeeds. MR_PENDING before the operation is over; its error if it has failed;
 * MR_ERROR_NOT_FOUND for operations without one: receives, revocations, connections, notifications alone. [brief] */
mr_status mr_op_receipt(mr_op op, mr_receipt *receipt, mr_rail_receipt *rails, size_t capacity, size_t *count);

/* The same receipt as JSON text: {"bytes", "work_requests", "merged", "post_ns", "transfer_ns", "rails": [{"transport",
 * "rail", "device", "bytes", "path"}]}. [brief] */
mr_status mr_op_receipt_json(mr_op op, char *buf, size_t len, size_t *needed);

/* --------------------------------------------------------------------------- notifications, imms and messages -- */

/* Delivers `len` bytes (0 to 1 MiB) to the peer's program: an operation, over when they are in the peer's memory.
 * Both fabrics must have been opened with the option notifications. Those of one peer arrive in order. `deadline_ns` 0
 * is the fabric's. MR_ERROR_BUSY if this side's memory for them is used up: wait for some. [brief] */
mr_status mr_notify(mr_peer peer, const void *bytes, size_t len, uint64_t deadline_ns, mr_op *op);

/* Takes the next notification, and the number of the peer that has sent it (`peer_id` may be NULL). Waits for one, at
 * most `timeout_ns`; 0 does not wait. MR_PENDING if there is none. MR_ERROR_BUFFER if it has more than `len` bytes:
 * then it stays, and `needed` has its length. [waits; fast with `timeout_ns` 0] */
mr_status mr_fabric_next_notification(mr_fabric fabric, uint64_t timeout_ns, void *buf, size_t len, size_t *needed,
                                      uint64_t *peer_id);

/* The number of arrivals of an imm from this peer that were not taken. Counting begins when the peer is connected.
 * [fast] */
mr_status mr_imm_count(mr_peer peer, uint32_t imm, uint64_t *count);

/* Takes `count` off the count if it is at least that: MR_OK, else MR_PENDING. [fast] */
mr_status mr_imm_take(mr_peer peer, uint32_t imm, uint64_t count);

/* Waits until the count is at least `count`, at most `timeout_ns`: then MR_PENDING. Takes nothing off the count.
 * MR_ERROR_PEER_DIED or MR_ERROR_CLOSED if the peer ends first. [waits] */
mr_status mr_imm_wait(mr_peer peer, uint32_t imm, uint64_t count, uint64_t timeout_ns);

/* As mr_imm_wait, as an operation. [brief] */
mr_status mr_imm_expect(mr_peer peer, uint32_t imm, uint64_t count, mr_op *op);

/* Delivers an imm without bytes: an operation. [fast] */
mr_status mr_write_imm(mr_peer peer, uint32_t imm, mr_op *op);

/* Sends a message, which needs a receive at the peer. Of the options, notification and cold do not apply. [brief] */
mr_status mr_send(mr_peer peer, mr_region region, size_t offset, size_t length, const mr_transfer_options *options,
                  mr_op *op);

/* Posts a receive for one message of any peer: an operation without a deadline, whose outcome names the sender. Cancel
 * it to take it back. `op` must not be NULL. [brief] */
mr_status mr_recv(mr_fabric fabric, mr_region region, size_t offset, size_t length, mr_op *op);

#ifdef __cplusplus
}
#endif

#endif
