// Just enough CUDA C++ for g++ to compile an unchanged kernel for the CPU. Force-included before the .cu file.
// Limits: no inline PTX (tensor.h stands for cuda/tensor.cuh), textures, cp.async, TMA or grid-wide sync; floats may differ in the last bits.
#pragma once
#include <math.h>
#include <string.h>

#include <type_traits>
#include <utility>

#include "../abi.h"

#define CUDA_ON_HOST 1

#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __constant__
#define __shared__ static  // one block runs at a time; `extern __shared__ T x[];` is rewritten by source.py
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
// A function whose own loads and stores the checker must not see.
#define HOST_UNSEEN __attribute__((no_sanitize("thread", "undefined"), noinline))

#include "vectors.h"

// Set by the runtime when it switches to a thread.
extern "C" {
extern const uint3 threadIdx, blockIdx;
extern const dim3 blockDim, gridDim;
}
constexpr int warpSize = 32;

#include "arithmetic.h"
#include "atomics.h"
#include "collectives.h"
#include "exports.h"
#include "tensor.h"
#include "memory.h"
