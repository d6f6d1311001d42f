// Which instruction sets this CPU can run.
#include <cstring>

#if defined(HEADROOM_X86)
#include <cpuid.h>
#endif
#if defined(HEADROOM_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "ops.h"

namespace headroom {
namespace {

#if defined(HEADROOM_X86)
bool runs_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}

#if defined(HEADROOM_AVXVNNI)
// The 256-bit dot products of CPUs that may lack AVX-512. The compilers' names for it are recent.
bool runs_avxvnni() {
    constexpr unsigned AVX_VNNI = 1 << 4;  // bit of CPUID leaf 7, subleaf 1, eax
    unsigned a, b, c, d;
    return runs_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & AVX_VNNI);
}
#endif

bool runs_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}
#endif

#if defined(HEADROOM_AMX)
// Whether this process may use AMX tiles. Linux saves their large state only for processes that ask, and
// refuses if the CPU has none or the kernel does not support them.
bool granted_tiles() {
    constexpr unsigned TILE = 1 << 24, INT8 = 1 << 25;  // bits of CPUID leaf 7, edx
    constexpr long ASK = 0x1023, TILE_DATA = 18;        // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & TILE) || !(d & INT8)) return false;
    return syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
}
#endif

}  // namespace

const Kernels* find_kernels(const char* name) {
#if defined(HEADROOM_X86)
    __builtin_cpu_init();
#if defined(HEADROOM_AMX)
    static const bool amx = runs_avx512() && granted_tiles();
    if (amx && !std::strcmp(name, "amx")) return &amx_kernels();
#endif
    if (!std::strcmp(name, "avx512") && runs_avx512()) return &AVX512_KERNELS;
#if defined(HEADROOM_AVXVNNI)
    if (!std::strcmp(name, "avxvnni") && runs_avxvnni()) return &AVXVNNI_KERNELS;
#endif
    if (!std::strcmp(name, "avx2") && runs_avx2()) return &AVX2_KERNELS;
#endif
    return std::strcmp(name, "portable") ? nullptr : &PORTABLE_KERNELS;
}

const Kernels& best_kernels() {
    for (const char* name : ISAS)
        if (const Kernels* kernels = find_kernels(name)) return *kernels;
    return PORTABLE_KERNELS;
}

}  // namespace headroom
