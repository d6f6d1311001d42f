// ThreadPool: threads that spin between the operations of a step and sleep between requests.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace headroom {

// Tells the CPU that this thread is spinning.
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class ThreadPool {
  public:
    // `pin` binds thread i to the i-th CPU that this process may use.
    ThreadPool(int threads, bool pin);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return static_cast<int>(workers_.size()) + 1; }

    // Calls body(first, last) on all threads for ranges that together cover [0, count), and returns when
    // all are done. A thread that has finished a range takes the next one; all ranges but the last have at
    // least `grain` items. The calling thread takes part.
    template <class Body> void parallel(int64_t count, int64_t grain, const Body& body) {
        if (count <= 0) return;
        if (workers_.empty() || count <= grain) {
            body(int64_t{0}, count);
            return;
        }
        std::lock_guard<std::mutex> turn(caller_);  // one caller at a time
        run([](const void* self, int64_t first, int64_t last) {
            (*static_cast<const Body*>(self))(first, last);
        }, &body, count, grain);
    }

  private:
    using Call = void (*)(const void*, int64_t, int64_t);

    void run(Call call, const void* body, int64_t count, int64_t grain);
    void take_ranges();
    bool join(uint64_t& seen);
    void work(int index, bool pin);

    std::vector<std::thread> workers_;
    std::mutex caller_;
    Call call_ = nullptr;
    const void* body_ = nullptr;
    int64_t count_ = 0, grain_ = 1;
    alignas(64) std::atomic<int64_t> next_{0};
    // One call of `run` is a round. Bits 32..63: its number; bit 31: whether workers may still join; bits
    // 0..30: how many workers are in it. The caller closes the round when no ranges are left, then waits
    // only for the workers that joined.
    alignas(64) std::atomic<uint64_t> round_{0};
    std::atomic<int> asleep_{0};
    std::atomic<bool> stop_{false};
    std::mutex sleep_;
    std::condition_variable wake_;
};

}  // namespace headroom
