#include "panels.h"

#include "simd_avx512.h"

#include "kernels.inl"

namespace headroom {

extern const Kernels AVX512_KERNELS = make_kernels("avx512");

}  // namespace headroom
