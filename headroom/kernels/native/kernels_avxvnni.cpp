#include "panels.h"

#include "simd_avx2.h"

#include "kernels.inl"

namespace headroom {

extern const Kernels AVXVNNI_KERNELS = make_kernels("avxvnni");

}  // namespace headroom
