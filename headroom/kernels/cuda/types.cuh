// Short names of unsigned types, and GGUF's numbers of the quantisation types (formats/quants.py).
#ifndef HEADROOM_TYPES
#define HEADROOM_TYPES
#include <cuda_fp16.h>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define F32 0
#define F16 1
#define Q4_0 2
#define Q4_1 3
#define Q5_0 6
#define Q5_1 7
#define Q8_0 8
#define Q4_K 12
#define Q5_K 13
#define Q6_K 14
#define IQ4_NL 20
#define BF16 30
#define MXFP4 39
#endif
