// What a plug-in that runs with C libraries since 2.28 must bring itself.

#include <pthread.h>
#include <time.h>

extern "C" {

// Since 2.32 the C library says by this variable that the process has one thread; then the C++ library counts references
// without atomic instructions. multirail has threads of its own: false is always right.
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;

// Since 2.30 the C library waits by a clock of the caller's choice; before, by the system's time. If that is set meanwhile,
// this wait is too short or too long by as much; its callers look at their own clock, and wait again.
__attribute__((visibility("hidden"))) int pthread_cond_clockwait(pthread_cond_t *condition, pthread_mutex_t *mutex,
                                                                 clockid_t clock, const timespec *until) {
    constexpr long second = 1'000'000'000;
    timespec now{}, deadline{};
    clock_gettime(clock, &now);
    clock_gettime(CLOCK_REALTIME, &deadline);
    deadline.tv_sec += until->tv_sec - now.tv_sec;
    deadline.tv_nsec += until->tv_nsec - now.tv_nsec;
    if (deadline.tv_nsec < 0) {
        deadline.tv_nsec += second;
        --deadline.tv_sec;
    } else if (deadline.tv_nsec >= second) {
        deadline.tv_nsec -= second;
        ++deadline.tv_sec;
    }
    return pthread_cond_timedwait(condition, mutex, &deadline);
}
}
