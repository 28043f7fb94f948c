// One block: offsets[i] = lens[0] + .. + lens[i - 1] and the total. Tiles of blockDim.x; the warps' sums go through
// shared memory, the base of the tile through one int of dynamic shared memory. A -DBUG_* plants a bug.
template <typename T>
__device__ __forceinline__ T warp_inclusive_sum(T v, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
#ifdef BUG_DIVERGENT_SHUFFLE
    if (lane >= d) v += __shfl_up_sync(0xffffffffu, v, d);
#else
    const T before = __shfl_up_sync(0xffffffffu, v, d);
    if (lane >= d) v += before;
#endif
  }
  return v;
}

extern "C" __global__ void __launch_bounds__(1024)
prefix_sum_kernel(int* __restrict__ offsets, int* __restrict__ total, const int* __restrict__ lens, int n) {
  __shared__ int warp_sum[32];
  extern __shared__ int tile_base[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, num_warps = blockDim.x >> 5;
  if (threadIdx.x == 0) tile_base[0] = 0;
  for (int tile = 0; tile < n; tile += blockDim.x) {
    const int i = tile + threadIdx.x;
    const int len = i < n ? lens[i] : 0;
    const int inclusive = warp_inclusive_sum(len, lane);
    if (lane == 31) warp_sum[warp] = inclusive;
#ifndef BUG_NO_BARRIER_BEFORE_SCAN
    __syncthreads();
#endif
    if (warp == 0) {
#ifdef BUG_UNINITIALISED
      int sum = warp_sum[lane];
#else
      int sum = lane < num_warps ? warp_sum[lane] : 0;
#endif
      sum = warp_inclusive_sum(sum, lane);
#ifdef BUG_SHARED_INDEX
      warp_sum[lane + 1] = sum;
#else
      if (lane < num_warps) warp_sum[lane] = sum;
#endif
    }
    __syncthreads();
    const int base = tile_base[0] + (warp ? warp_sum[warp - 1] : 0);
    const int tile_total = warp_sum[num_warps - 1];
    if (i < n) offsets[i] = base + inclusive - len;
#ifdef BUG_DIVERGENT_BARRIER
    if (threadIdx.x < 32) __syncthreads();
    else
#endif
#ifndef BUG_NO_BARRIER_AFTER_TILE
    __syncthreads();  // all have read tile_base and warp_sum
#endif
#ifdef BUG_READ_AFTER_BARRIER
    if (threadIdx.x == 0) tile_base[0] += warp_sum[num_warps - 1];
#else
    if (threadIdx.x == 0) tile_base[0] += tile_total;
#endif
  }
  if (threadIdx.x == 0) *total = tile_base[0];
}
