// A thread that computes cold experts for a GPU: requests and answers go through shared memory, so
// that neither side waits for the other's runtime.
#pragma once

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "ops.h"

namespace headroom {

// Where the words lie that both sides see. The GPU writes a request, then its number; the worker
// writes the answers, then the same number.
struct ColdMail {
    uint32_t *request, *answer;  // numbers
    const int32_t *layer, *rows;
    uint32_t* done;  // steps that the GPU has ended
    uint32_t* failed;
    const int32_t* ids;  // [rows, used], negative where a pick is not asked for
    const float* weights;  // [rows, used]
    const float* x;  // [rows, hidden]
    float* out;  // [rows, hidden]
};

struct ColdLayer {
    Matrix gate, up, down;  // their data is not looked at
    const ExpertWeights* table;  // null pointers where an expert is not in host memory
    int64_t experts, used;
    Gate act;
};

struct ColdCounts {
    std::atomic<int64_t> requests{0}, picks{0}, experts{0}, bytes{0}, busy_ns{0}, sleeps{0};
};

class ColdWorker {
  public:
    ColdWorker(Ops& ops, const ColdMail& mail, std::vector<ColdLayer> layers, int64_t most_rows);
    ~ColdWorker();
    ColdWorker(const ColdWorker&) = delete;
    ColdWorker& operator=(const ColdWorker&) = delete;

    // Tells that a step is about to run, whose end the GPU will tell.
    void begin_step();
    // What went wrong; empty while nothing did.
    std::string failure();
    const ColdCounts& counts() const { return counts_; }

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
    std::atomic<uint32_t> begun_{0};
    std::atomic<bool> stop_{false}, asleep_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::string failure_;
    std::thread thread_;
};

}  // namespace headroom
