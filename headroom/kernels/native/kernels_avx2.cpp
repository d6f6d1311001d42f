#include "panels.h"

#include "simd_avx2.h"

#include "kernels.inl"

namespace headroom {

extern const Kernels AVX2_KERNELS = make_kernels("avx2");

}  // namespace headroom
