/* What rdma-sys binds: everything below is in rdma-core 44. */
#include <infiniband/verbs.h>
