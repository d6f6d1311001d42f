#include "threads.h"

#include <algorithm>
#include <chrono>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace headroom {
namespace {

// How long a worker spins before it sleeps: longer than the gap between two layers.
constexpr auto SPIN = std::chrono::microseconds(200);

constexpr uint64_t OPEN = uint64_t{1} << 31, WORKERS = OPEN - 1;

uint64_t number_of(uint64_t round) { return round >> 32; }

void pin_to(int index) {
#if defined(__linux__)
    cpu_set_t allowed, one;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &allowed) || index-- > 0) continue;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        pthread_setaffinity_np(pthread_self(), sizeof one, &one);
        return;
    }
#else
    (void)index;
#endif
}

}  // namespace

ThreadPool::ThreadPool(int threads, bool pin) {
    for (int index = 1; index < threads; ++index)
        workers_.emplace_back([this, index, pin] { work(index, pin); });
}

ThreadPool::~ThreadPool() {
    {
        std::lock_guard<std::mutex> lock(sleep_);
        stop_ = true;
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void ThreadPool::run(Call call, const void* body, int64_t count, int64_t grain) {
    call_ = call;
    body_ = body;
    count_ = count;
    grain_ = grain;
    next_.store(0, std::memory_order_relaxed);
    const uint64_t number = number_of(round_.load(std::memory_order_relaxed)) + 1;
    round_.store(number << 32 | OPEN, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst) > 0) {
        std::lock_guard<std::mutex> lock(sleep_);
        wake_.notify_all();
    }
    take_ranges();
    round_.fetch_and(~OPEN, std::memory_order_acq_rel);
    // If a worker was descheduled in the middle of a range, the caller yields its core to it.
    for (int spins = 0; round_.load(std::memory_order_acquire) & WORKERS; ++spins) {
        if (spins < 4096) relax();
        else std::this_thread::yield();
    }
}

// Takes ranges until none are left: large ones first, so that a thread reads long runs of memory, and small
// ones at the end, so that all threads finish at about the same time.
void ThreadPool::take_ranges() {
    const int64_t shares = 2 * size();
    int64_t first = next_.load(std::memory_order_relaxed);
    while (first < count_) {
        const int64_t left = count_ - first;
        const int64_t last = first + std::min(left, std::max(grain_, left / shares));
        if (!next_.compare_exchange_weak(first, last, std::memory_order_relaxed)) continue;
        call_(body_, first, last);
        first = next_.load(std::memory_order_relaxed);
    }
}

bool ThreadPool::join(uint64_t& seen) {
    uint64_t round = round_.load(std::memory_order_acquire);
    while (number_of(round) != seen) {
        if (!(round & OPEN)) {  // too late: the round is closed
            seen = number_of(round);
            return false;
        }
        if (round_.compare_exchange_weak(round, round + 1, std::memory_order_acq_rel)) {
            seen = number_of(round);
            return true;
        }
    }
    return false;
}

void ThreadPool::work(int index, bool pin) {
    if (pin) pin_to(index);
    uint64_t seen = 0;
    const auto is_new = [&] { return number_of(round_.load(std::memory_order_seq_cst)) != seen; };
    while (!stop_.load(std::memory_order_relaxed)) {
        const auto until = std::chrono::steady_clock::now() + SPIN;
        for (int spins = 0; !is_new() && !stop_.load(std::memory_order_relaxed);) {
            relax();
            if (++spins % 64 != 0 || std::chrono::steady_clock::now() < until) continue;
            std::unique_lock<std::mutex> lock(sleep_);
            asleep_.fetch_add(1, std::memory_order_seq_cst);
            wake_.wait(lock, [&] { return stop_.load() || is_new(); });
            asleep_.fetch_sub(1, std::memory_order_seq_cst);
        }
        if (!join(seen)) continue;
        take_ranges();
        round_.fetch_sub(1, std::memory_order_release);
    }
}

}  // namespace headroom
