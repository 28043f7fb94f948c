// Moves rows between slots of every buffer. blockIdx.y picks the buffer, blockIdx.x strides over rows; a thread
// copies 16-byte vectors. bufs: address per buffer; src, dst: slots, [num_rows], all different. A -DBUG_* plants a bug.
extern "C" __global__ void __launch_bounds__(256)
move_rows_kernel(const long long* __restrict__ bufs, const int* __restrict__ src, const int* __restrict__ dst,
                 int num_rows, long long row_bytes, long long slot_bytes) {
  char* base = reinterpret_cast<char*>(bufs[blockIdx.y]);
  __builtin_assume(__isGlobal(base));
  const int num_vectors = static_cast<int>(row_bytes >> 4);
  for (int i = blockIdx.x; i < num_rows; i += gridDim.x) {
    const int4* from = reinterpret_cast<const int4*>(base + __ldg(src + i) * slot_bytes);
    int4* to = reinterpret_cast<int4*>(base + __ldg(dst + i) * slot_bytes);
#if defined(BUG_TOO_FAR)
    for (int v = threadIdx.x; v <= num_vectors; v += blockDim.x) to[v] = from[v];
#elif defined(BUG_WRONG_SOURCE)
    for (int v = threadIdx.x; v < num_vectors; v += blockDim.x) to[v] = from[v + (i == num_rows - 1)];
#elif defined(BUG_MISALIGNED)
    char* late = reinterpret_cast<char*>(to) + 4;
    for (int v = threadIdx.x; v < num_vectors - 1; v += blockDim.x) reinterpret_cast<int4*>(late)[v] = from[v];
#else
    for (int v = threadIdx.x; v < num_vectors; v += blockDim.x) to[v] = from[v];
#endif
  }
}
