// The instruction sets: which of them this CPU runs.
#include <cstring>

#include "kernels.h"
#include "ops.h"

namespace headroom {

const Kernels* find_kernels(const char* name) {
#if defined(HEADROOM_X86)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("f16c");
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512vnni");
    if (avx512 && !std::strcmp(name, "avx512")) return &AVX512_KERNELS;
    if (avx2 && !std::strcmp(name, "avx2")) return &AVX2_KERNELS;
#endif
    return std::strcmp(name, "portable") ? nullptr : &PORTABLE_KERNELS;
}

const Kernels& best_kernels() {
    for (const char* name : {"avx512", "avx2"})
        if (const Kernels* kernels = find_kernels(name)) return *kernels;
    return PORTABLE_KERNELS;
}

}  // namespace headroom
