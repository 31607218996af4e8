// What the kernels ask of the operating system: threads that sleep until a word changes, cores, and large pages.
#pragma once
#include <pthread.h>
#include <sys/mman.h>

#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>

#define TEAM_SYSTEM  // there are teams of threads (team.h) on this system

// Sleeps while the word has this value, or is woken; of one process, so its memory need not be shared.
inline void sleep_while(const void* word, uint32_t value) { syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0); }
inline void wake_all(const void* word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0); }

// The same among processes that share the word's memory. False: so much time has passed.
inline bool sleep_while_shared(const void* word, uint32_t value, long nanoseconds) {
    const timespec patience{0, nanoseconds};
    return !syscall(SYS_futex, word, FUTEX_WAIT, value, &patience, nullptr, 0) || errno != ETIMEDOUT;
}
inline void wake_all_shared(const void* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

inline int current_core() { return sched_getcpu(); }

// The cores that this thread may run on.
class Cores {
   public:
    Cores() { sched_getaffinity(0, sizeof(set_), &set_); }

    // Keeps threads away from a core, if enough others are left for them.
    void leave_free(int core, const std::vector<pthread_t>& threads) const {
        cpu_set_t others = set_;
        CPU_CLR(core, &others);
        if (CPU_COUNT(&others) < int(threads.size())) return;
        for (pthread_t thread : threads) pthread_setaffinity_np(thread, sizeof(others), &others);
    }

   private:
    cpu_set_t set_;
};

inline void prefer_large_pages(void* memory, size_t bytes) { madvise(memory, bytes, MADV_HUGEPAGE); }

#elif defined(__APPLE__)
#define TEAM_SYSTEM

// What libc++ waits with; the public os_sync_wait_on_address came with macOS 14.4.
extern "C" int __ulock_wait(uint32_t operation, void* word, uint64_t value, uint32_t microseconds);  // 0: for ever
extern "C" int __ulock_wake(uint32_t operation, void* word, uint64_t unused);

constexpr uint32_t ULOCK_WAIT = 1, ULOCK_WAIT_SHARED = 3, ULOCK_WAKE_ALL = 0x100;

inline void sleep_while(const void* word, uint32_t value) { __ulock_wait(ULOCK_WAIT, const_cast<void*>(word), value, 0); }
inline void wake_all(const void* word) { __ulock_wake(ULOCK_WAIT | ULOCK_WAKE_ALL, const_cast<void*>(word), 0); }
inline bool sleep_while_shared(const void* word, uint32_t value, long nanoseconds) {
    return __ulock_wait(ULOCK_WAIT_SHARED, const_cast<void*>(word), value, uint32_t(nanoseconds / 1000)) >= 0 || errno != ETIMEDOUT;
}
inline void wake_all_shared(const void* word) { __ulock_wake(ULOCK_WAIT_SHARED | ULOCK_WAKE_ALL, const_cast<void*>(word), 0); }

inline int current_core() { return -1; }  // it is not told, and threads cannot be kept away from one

class Cores {
   public:
    void leave_free(int, const std::vector<pthread_t>&) const {}
};

inline void prefer_large_pages(void*, size_t) {}
#else
inline void prefer_large_pages(void*, size_t) {}
#endif
