#include "cold.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <stdexcept>

namespace headroom {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

// While a step runs the worker spins. It gives the pool's threads an empty task every KEEP_AWAKE, so that
// they do not fall asleep between layers. After PATIENCE without a request (the GPU works on a long prompt)
// it polls every LOOK_AGAIN, and after LATE (the step may have failed) every LOOK_RARELY.
constexpr auto KEEP_AWAKE = microseconds(100), PATIENCE = microseconds(3000);
constexpr auto LOOK_AGAIN = microseconds(30), LOOK_RARELY = microseconds(1000);
constexpr auto LINGER = microseconds(1000);  // spins this long after a step: mostly the next one follows
constexpr auto LATE = std::chrono::seconds(1);
constexpr auto LOOK_ASLEEP = std::chrono::milliseconds(50);  // polls asleep: a step may be unannounced

// The words are plain memory that the GPU also writes; std::atomic_ref does not exist in C++17.
uint32_t load_acquire(const uint32_t* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
void store_release(uint32_t* at, uint32_t value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }

}  // namespace

ColdWorker::ColdWorker(Ops& ops, const ColdMail& mail, std::vector<ColdLayer> layers, int64_t most_rows)
    : ops_(ops), mail_(mail), layers_(std::move(layers)), most_rows_(most_rows), layer_counts_(layers_.size()) {
    size_t bytes = 0, picks = 0;
    for (const ColdLayer& layer : layers_) {
        bytes = std::max(bytes, Ops::experts_scratch(most_rows, layer.used, layer.gate.columns,
                                                     layer.gate.rows, layer.experts, layer.gate.tiles));
        picks = std::max(picks, static_cast<size_t>(most_rows * layer.used));
    }
    ids_.resize(picks);
    scratch_.resize(bytes + 64);
    begun_.store(load_acquire(mail_.done), std::memory_order_relaxed);
    thread_ = std::thread([this] { run(); });
}

ColdWorker::~ColdWorker() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_.store(true);
    }
    wake_.notify_all();
    thread_.join();
}

void ColdWorker::begin_step() {
    // `done` also counts steps that were not announced. Start from the larger number, so that such a step
    // does not count as the end of this one.
    const uint32_t done = load_acquire(mail_.done), begun = begun_.load(std::memory_order_relaxed);
    begun_.store((static_cast<int32_t>(done - begun) > 0 ? done : begun) + 1, std::memory_order_seq_cst);
    if (!asleep_.load(std::memory_order_seq_cst)) return;
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
}

std::string ColdWorker::failure() {
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
}

void ColdWorker::run() {
    uint32_t seen = load_acquire(mail_.answer);
    Clock::time_point since = Clock::now(), kept = since;
    for (int64_t spins = 0; !stop_.load(std::memory_order_relaxed); ++spins) {
        // Read `done` before `request`: when a step is done, all of its requests have been written.
        const uint32_t begun = begun_.load(std::memory_order_seq_cst), done = load_acquire(mail_.done);
        const uint32_t number = load_acquire(mail_.request);
        if (number != seen) {
            serve(number);
            seen = number;
            since = kept = Clock::now();
            continue;
        }
        relax();
        if (spins % 32 != 0) continue;
        const Clock::time_point now = Clock::now();
        if (static_cast<int32_t>(begun - done) <= 0) {
            if (now - since <= LINGER) continue;
            sleep(begun, seen);
            since = kept = Clock::now();
            ops_.wake();
        } else if (now - since > PATIENCE) {
            std::this_thread::sleep_for(now - since > LATE ? LOOK_RARELY : LOOK_AGAIN);
        } else if (now - kept > KEEP_AWAKE) {
            ops_.wake();
            kept = now;
        }
    }
}

void ColdWorker::sleep(uint32_t begun, uint32_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    asleep_.store(true, std::memory_order_seq_cst);
    counts_.sleeps.fetch_add(1, std::memory_order_relaxed);
    // Wake up for any step after those that were known when the worker decided to sleep.
    const auto called = [&] { return stop_.load() || begun_.load(std::memory_order_seq_cst) != begun; };
    while (!wake_.wait_for(lock, LOOK_ASLEEP, called) && load_acquire(mail_.request) == seen) {
    }
    asleep_.store(false, std::memory_order_seq_cst);
}

void ColdWorker::serve(uint32_t number) {
    const Clock::time_point start = Clock::now();
    try {
        answer_layer();
    } catch (const std::exception& error) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (failure_.empty()) failure_ = error.what();
        }
        store_release(mail_.failed, 1);
    }
    const int64_t index = *mail_.layer;  // the GPU may write the next request after this answer
    const int64_t spent =
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
    *mail_.busy() = static_cast<uint32_t>(std::min<int64_t>(spent, UINT32_MAX));
    store_release(mail_.answer, number);  // also after a failure: the GPU must not wait for ever
    counts_.requests.fetch_add(1, std::memory_order_relaxed);
    counts_.busy_ns.fetch_add(spent, std::memory_order_relaxed);
    if (index < 0 || index >= static_cast<int64_t>(layer_counts_.size())) return;
    layer_counts_[index].requests.fetch_add(1, std::memory_order_relaxed);
    layer_counts_[index].busy_ns.fetch_add(spent, std::memory_order_relaxed);
}

void ColdWorker::answer_layer() {
    const int64_t index = *mail_.layer, rows = *mail_.rows;
    if (index < 0 || index >= static_cast<int64_t>(layers_.size()) || rows < 1 || rows > most_rows_)
        throw std::out_of_range("a request is for cold layer " + std::to_string(index) + " and " +
                                std::to_string(rows) + " rows; there are " +
                                std::to_string(layers_.size()) + " cold layers, and a request has 1 to " +
                                std::to_string(most_rows_) + " rows");
    const ColdLayer& layer = layers_[index];
    // Copy the ids before checking them: the GPU could change the shared ones in between.
    const int64_t picks = rows * layer.used;
    int64_t asked = 0, experts = 0;
    for (int64_t i = 0; i < picks; ++i) {
        const int32_t id = ids_[i] = mail_.ids[i];
        if (id < 0) continue;
        if (id >= layer.experts || !layer.table[id].gate)
            throw std::out_of_range("a request for cold layer " + std::to_string(index) + " picks expert " +
                                    std::to_string(id) + ", which is not in host memory");
        ++asked;
        experts += std::find(ids_.begin(), ids_.begin() + i, id) == ids_.begin() + i;
    }
    uint8_t* aligned = scratch_.data() + (64 - reinterpret_cast<uintptr_t>(scratch_.data()) % 64) % 64;
    ops_.experts(layer.gate, layer.up, layer.down, layer.table, layer.experts, ids_.data(), mail_.weights,
                 layer.used, mail_.x, rows, layer.act, Products::int24, mail_.out,
                 Scratch(aligned, scratch_.size() - 64));
    int64_t bytes = 0;
    for (const Matrix* part : {&layer.gate, &layer.up, &layer.down})
        bytes += part->panels() * static_cast<int64_t>(tile_size(part->kind, part->columns));
    counts_.picks.fetch_add(asked, std::memory_order_relaxed);
    counts_.experts.fetch_add(experts, std::memory_order_relaxed);
    counts_.bytes.fetch_add(experts * bytes, std::memory_order_relaxed);
    layer_counts_[index].experts.fetch_add(experts, std::memory_order_relaxed);
    layer_counts_[index].bytes.fetch_add(experts * bytes, std::memory_order_relaxed);
}

}  // namespace headroom
