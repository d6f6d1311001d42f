// ColdWorker: a thread that computes cold experts (those in host memory) for a GPU.
//
// The GPU and the worker talk through words in pinned memory, without the CUDA runtime and without Python:
//
//   GPU (kernels/cuda/handover.cu)          worker thread
//   writes layer, rows, ids, weights, x
//   writes the request's number       --->  sees a new number in `request`
//   computes the hot experts                computes the cold ones with the thread pool
//   waits for the number in `answer`  <---  writes `out` and `busy`, then the same number to `answer`
//   adds `out`
//   at the step's end: increments `done`
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ops.h"

namespace headroom {

// The addresses of the words that both sides read and write.
struct ColdMail {
    uint32_t *request, *answer;  // numbers of the last request and of the last answer
    uint32_t* busy() const { return answer + 1; }  // ns from seeing that request to answering it
    const int32_t *layer, *rows;
    uint32_t* done;  // how many steps the GPU has finished
    uint32_t* failed;  // the worker sets it to 1 after an exception
    const int32_t* ids;  // [rows, used]; negative: not a cold expert, the worker skips it
    const float* weights;  // [rows, used]
    const float* x;  // [rows, hidden]
    float* out;  // [rows, hidden]
};

struct ColdLayer {
    Matrix gate, up, down;  // types and sizes only; `data` is not used
    const ExpertWeights* table;  // [experts]; null pointers for experts that are not in host memory
    int64_t experts, used;
    Gate act;
};

struct ColdCounts {
    std::atomic<int64_t> requests{0}, picks{0}, experts{0}, bytes{0}, busy_ns{0}, sleeps{0};
};

// Of one layer: what the CPU's part of the time follows from.
struct ColdLayerCounts {
    std::atomic<int64_t> requests{0}, experts{0}, bytes{0}, busy_ns{0};
};

class ColdWorker {
  public:
    ColdWorker(Ops& ops, const ColdMail& mail, std::vector<ColdLayer> layers, int64_t most_rows);
    ~ColdWorker();
    ColdWorker(const ColdWorker&) = delete;
    ColdWorker& operator=(const ColdWorker&) = delete;

    // Announces a step, which wakes the worker. The GPU reports the step's end by incrementing `done`.
    void begin_step();
    // The message of the first exception; empty if there was none.
    std::string failure();
    const ColdCounts& counts() const { return counts_; }
    // By layer, as many as the worker was given.
    const std::vector<ColdLayerCounts>& layer_counts() const { return layer_counts_; }

  private:
    void run();
    void serve(uint32_t number);
    void answer_layer();
    void sleep(uint32_t begun, uint32_t seen);

    Ops& ops_;
    ColdMail mail_;
    std::vector<ColdLayer> layers_;
    int64_t most_rows_;
    std::vector<int32_t> ids_;
    std::vector<uint8_t> scratch_;
    ColdCounts counts_;
    std::vector<ColdLayerCounts> layer_counts_;
    std::atomic<uint32_t> begun_{0};
    std::atomic<bool> stop_{false}, asleep_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::string failure_;
    std::thread thread_;
};

}  // namespace headroom
