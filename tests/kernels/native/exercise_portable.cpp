// Multiplies random weights of every packed type with the portable kernels, compares with sums in double, and
// prints the bits of all 24-bit products as one number: they are the same on every instruction set.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels.h"

using namespace headroom;

namespace {

uint32_t state = 1;
uint32_t next() { return (state = state * 1664525u + 1013904223u) >> 8; }  // 24 bits

// Random blocks; bytes are small, so that f16 scales stay finite.
std::vector<uint8_t> random_file(Kind kind, int64_t rows, int64_t columns) {
    const KindInfo info = kind_info(kind);
    std::vector<uint8_t> file(rows * columns / info.block * info.block_bytes);
    for (uint8_t& byte : file) byte = static_cast<uint8_t>(next() % 0x3B);
    return file;
}

double worst = 0;

void compare(const std::vector<float>& found, const std::vector<double>& wanted,
             const std::vector<double>& terms) {
    for (size_t i = 0; i < found.size(); ++i) {
        const double error = std::fabs(found[i] - wanted[i]) / (terms[i] + 1e-30);
        worst = error > worst || std::isnan(error) ? error : worst;
    }
}

uint64_t multiply(Kind kind, int64_t rows, int64_t columns, int64_t out) {
    const std::vector<uint8_t> file = random_file(kind, out, columns);
    std::vector<uint8_t> panels(panel_bytes(kind, out, columns));
    pack_panels(kind, out, columns, file.data(), panels.data(), 0, (out + PANEL_ROWS - 1) / PANEL_ROWS);
    const Matrix w{panels.data(), kind, out, columns};
    std::vector<float> x(rows * columns), weights(out * columns), result(rows * PANEL_ROWS), sums(rows * columns / 16);
    for (float& value : x) value = (static_cast<float>(next()) - 8388608.0f) / 4194304.0f;
    for (int64_t i = 0; i < out; ++i) unpack_row(w, i, &weights[i * columns]);
    std::vector<DigitCell> cells(rows * columns / CELL);
    std::vector<int8_t> bytes(rows * columns);
    std::vector<float> byte_scales(rows * columns / CELL);
    std::vector<int32_t> byte_sums(rows * columns / 16);
    const Kernels& kernels = PORTABLE_KERNELS;
    for (int64_t r = 0; r < rows; ++r) {
        kernels.split(&x[r * columns], columns, &cells[r * columns / CELL]);
        kernels.quantise(&x[r * columns], columns, &bytes[r * columns], &byte_scales[r * columns / CELL],
                         &byte_sums[r * columns / 16]);
        kernels.sum_columns(&x[r * columns], columns, &sums[r * columns / 16]);
    }
    const auto as_digits = [&](int64_t at) {
        const auto digit = [&](int j) { return cells[at / CELL].digits[j][at % CELL]; };
        return static_cast<double>(digit(0) * 65536 + digit(1) * 256 + digit(2)) * cells[at / CELL].scale;
    };
    const auto as_byte = [&](int64_t at) { return static_cast<double>(bytes[at]) * byte_scales[at / CELL]; };
    const auto as_float = [&](int64_t at) { return static_cast<double>(x[at]); };
    uint64_t bits = 0;
    for (int64_t panel = 0; panel < w.panels(); ++panel) {
        const auto check = [&](const auto& value) {
            std::vector<double> wanted(rows * PANEL_ROWS), terms(rows * PANEL_ROWS);
            for (int64_t r = 0; r < rows; ++r)
                for (int64_t i = 0; i < PANEL_ROWS && panel * PANEL_ROWS + i < out; ++i)
                    for (int64_t k = 0; k < columns; ++k) {
                        const double term =
                            value(r * columns + k) * weights[(panel * PANEL_ROWS + i) * columns + k];
                        wanted[r * PANEL_ROWS + i] += term;
                        terms[r * PANEL_ROWS + i] += std::fabs(term);
                    }
            compare(result, wanted, terms);
        };
        kernels.panel_int24(w, panel, cells.data(), rows, result.data());
        check(as_digits);
        for (const float& found : result) {
            uint32_t word;
            std::memcpy(&word, &found, 4);
            bits = (bits ^ word) * 1099511628211ull;
        }
        kernels.panel_int8(w, panel, {bytes.data(), byte_scales.data(), byte_sums.data()}, rows, result.data());
        check(as_byte);
        kernels.panel_float(w, panel, {x.data(), sums.data()}, rows, result.data());
        check(as_float);
    }
    return bits;
}

}  // namespace

int main() {
    uint64_t bits = 0;
    for (const Kind kind : {Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, MXFP4, Q4_K, Q5_K, Q6_K})
        for (const int64_t rows : {1, 3, 16})
            bits ^= multiply(kind, rows, kind_info(kind).block == 256 ? 512 : 352, 37) * rows;
    std::printf("%016llx\n", static_cast<unsigned long long>(bits));
    if (!(worst < 1e-6)) std::printf("an error of %g of the terms\n", worst);
    return worst < 1e-6 ? 0 : 1;
}
