// Routed experts of many rows in f16 (sm_75, or `--dtype f16`): activation between the products, and the
// weighted sum. Rows are f16 times a power of two (narrow.cu); sums are float32. GELU: the activation is
// GELU, else silu.
#include "types.cuh"
#include "experts.cuh"
#include "powers.cuh"

// inner [picks, width] * inner_powers = act(gate) * up. `both` [picks, 2 * width] has the gates first, and
// must be multiplied by the power of the pick's row. The group's picks begin at `start` (null: at 0) and
// are ends[last] in number. blockIdx.x: the pick.
extern "C" __global__ void __launch_bounds__(POWER_THREADS)
activate(const float* both, const float* powers, const long long* rows, const int* start, const int* ends,
         __half* inner, float* inner_powers, int last, int width) {
    if (static_cast<int>(blockIdx.x) >= ends[last]) return;
    const float* gates = both + static_cast<size_t>(blockIdx.x) * 2 * width;
    __half* to = inner + static_cast<size_t>(blockIdx.x) * width;
    const float by = powers[rows[blockIdx.x + (start ? *start : 0)]];
    const auto value = [&](int i) { return activated(gates[i] * by) * (gates[width + i] * by); };
    float peak = 0;
    for (int i = threadIdx.x; i < width; i += POWER_THREADS) peak = fmaxf(peak, fabsf(value(i)));
    const float inverse = inverse_power(peak, inner_powers + blockIdx.x);
    for (int i = threadIdx.x; i < width; i += POWER_THREADS) to[i] = __float2half_rn(value(i) * inverse);
}

// The weighted sum of each row's answers [picks, hidden] * powers; the arguments are those of `combine` in
// many_experts.cu.
extern "C" __global__ void __launch_bounds__(POWER_THREADS)
combine(const float* answers, const float* powers, const long long* places, const int* start, const int* ids,
        int first, int last, const float* weights, int used, int hidden, const float* residual,
        const float* shared_out, const float* logits, int stride, float* out) {
    const int row = blockIdx.x;
    const long long before = start ? *start : 0;
    const Addends addends{residual, shared_out, logits, stride};
    for (int column = threadIdx.x; column < hidden; column += POWER_THREADS) {
        float sum = 0;
        for (int j = 0; j < used; ++j) {
            const int pick = row * used + j;
            if (ids[pick] < first || ids[pick] > last) continue;
            const long long place = places[pick] - before;
            sum = fmaf(weights[pick] * powers[place], answers[place * hidden + column], sum);
        }
        const size_t at = static_cast<size_t>(row) * hidden + column;
        out[at] = addends.add(sum, row, at);
    }
}
