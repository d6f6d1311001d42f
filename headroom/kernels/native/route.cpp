// Top-k routing: turns router logits into expert ids and weights, and counts the picks.
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "ops.h"

namespace headroom {
namespace {

// The scores of one row (softmax or sigmoid), in float32, summed in the order of the experts.
void score(const RouterRule& rule, const float* logits, int64_t experts, float* scores) {
    for (int64_t e = 0; e < experts; ++e)
        scores[e] = rule.softcap > 0 ? std::tanh(logits[e] / rule.softcap) * rule.softcap : logits[e];
    if (rule.sigmoid) {
        for (int64_t e = 0; e < experts; ++e) scores[e] = 1.0f / (1.0f + std::exp(-scores[e]));
        return;
    }
    const float peak = *std::max_element(scores, scores + experts);
    float total = 0;
    for (int64_t e = 0; e < experts; ++e) total += scores[e] = std::exp(scores[e] - peak);
    for (int64_t e = 0; e < experts; ++e) scores[e] /= total;
}

// The ids of the `used` largest values of a row, the largest first, and the lower id first on ties.
void choose(float* choice, int64_t experts, int64_t used, int32_t* ids) {
    std::vector<bool> taken(static_cast<size_t>(experts));
    for (int64_t rank = 0; rank < used; ++rank) {
        int64_t best = -1;
        for (int64_t e = 0; e < experts; ++e)
            if (!taken[e] && (best < 0 || choice[e] > choice[best])) best = e;
        taken[best] = true;
        ids[rank] = static_cast<int32_t>(best);
    }
}

}  // namespace

void Ops::route(const RouterRule& rule, const float* logits, int64_t rows, int64_t experts,
                const float* bias, int64_t* counts, int32_t* ids, float* weights) {
    const int64_t used = rule.used;
    if (used < 0 || used > experts)
        throw std::invalid_argument("a row picks " + std::to_string(used) + " experts, but the layer has " +
                                    std::to_string(experts));
    pool_.parallel(rows, 16, [&](int64_t first, int64_t last) {
        std::vector<float> scores(static_cast<size_t>(experts)), choice(scores.size());
        for (int64_t row = first; row < last; ++row) {
            int32_t* own_ids = ids + row * used;
            float* own = weights + row * used;
            score(rule, logits + row * experts, experts, scores.data());
            for (int64_t e = 0; e < experts; ++e) choice[e] = scores[e] + (bias ? bias[e] : 0.0f);
            choose(choice.data(), experts, used, own_ids);
            float total = 0;
            for (int64_t rank = 0; rank < used; ++rank) total += own[rank] = scores[own_ids[rank]];
            for (int64_t rank = 0; rank < used; ++rank)
                own[rank] = (rule.normalise ? own[rank] / total : own[rank]) * rule.scale;
        }
    });
    for (int64_t pick = 0; pick < rows * used; ++pick) ++counts[ids[pick]];
}

}  // namespace headroom
