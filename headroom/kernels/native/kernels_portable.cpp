#include "panels.h"

#include "simd_portable.h"

#include "kernels.inl"

namespace headroom {

extern const Kernels PORTABLE_KERNELS = make_kernels("portable");

}  // namespace headroom
