// Products of small matrices on tensor cores, and what goes with them: the one file with PTX. The tests' host runner
// has functions of its own in its place (CUDA_ON_HOST).
//
// mma.m16n8k16: sum[16, 8] += a[16, 16] * b[16, 8], spread over the 32 threads of a warp. With g = thread / 4 and
// t = thread % 4, a thread holds, two neighbours of 16 bits in a word, the first in the low half:
//   a[0..3]: rows g, g + 8, g, g + 8; columns 2t and 2t + 1, in a[2..3] 8 more
//   b0, b1:  column g; rows 2t and 2t + 1, in b1 8 more
//   sum:     rows g, g, g + 8, g + 8; columns 2t, 2t + 1, 2t, 2t + 1

// Asks for the 128 bytes around an address to come into the L2 cache, and waits for nothing.
__device__ __forceinline__ void fetch_line(const char* address) {
#ifndef CUDA_ON_HOST
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
#endif
}

struct Bfloat16 {
    __device__ __forceinline__ static unsigned pack(float low, float high) {
#ifdef CUDA_ON_HOST
        return host_pack_bfloat16(low, high);
#else
        unsigned word;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
        return word;
#endif
    }

    __device__ __forceinline__ static void multiply(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#ifdef CUDA_ON_HOST
        host_multiply(sum, a, b0, b1, host_from_bfloat16);
#else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
    }
};

struct Float16 {
    __device__ __forceinline__ static unsigned pack(float low, float high) {
#ifdef CUDA_ON_HOST
        return host_pack_float16(low, high);
#else
        unsigned word;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
        return word;
#endif
    }

    // The number in the low half of a word.
    __device__ __forceinline__ static float unpack(unsigned word) {
#ifdef CUDA_ON_HOST
        return host_from_float16(word);
#else
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)word));
        return value;
#endif
    }

    __device__ __forceinline__ static void multiply(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#ifdef CUDA_ON_HOST
        host_multiply(sum, a, b0, b1, host_from_float16);
#else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
    }
};
