/* Loops over the pages of a copy, so that what is measured of CUDA is not Python's. Built at run time by
 * peers.py, without CUDA's headers: it is handed the driver's functions. */
#include <stddef.h>
#include <stdint.h>

/* CUresult cuMemcpyAsync(CUdeviceptr, CUdeviceptr, size_t, CUstream) */
typedef int (*copy_async)(uint64_t to, uint64_t from, size_t len, void *stream);

/* One call per page; the first status that is an error. */
int copy_pages(copy_async copy, const uint64_t *to, const uint64_t *from, size_t count, size_t len, void *stream)
{
    for (size_t page = 0; page < count; page++) {
        int status = copy(to[page], from[page], len, stream);
        if (status != 0)
            return status;
    }
    return 0;
}
