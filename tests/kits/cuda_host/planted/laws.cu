// Small kernels for the runner's own laws: what each intrinsic computes, and one mistake at a time.

// ---- correct -------------------------------------------------------------------------------------------------------

// One warp. out: [14][32], a row per intrinsic.
extern "C" __global__ void warp_kernel(unsigned* out, const unsigned* in) {
  const unsigned all = 0xffffffffu;
  const int lane = threadIdx.x;
  const unsigned v = __ldg(in + lane);
  const unsigned results[14] = {
      __shfl_sync(all, v, 5),
      __shfl_sync(all, v, lane + 1, 8),
      __shfl_up_sync(all, v, 3),
      __shfl_down_sync(all, v, 3, 16),
      __shfl_xor_sync(all, v, 6),
      __ballot_sync(all, v & 1),
      (unsigned)__any_sync(all, v == 7),
      (unsigned)__all_sync(all, v < 100),
      __match_any_sync(all, v % 5),
      __reduce_add_sync(all, v),
      (unsigned)__reduce_min_sync(all, (int)v - 50),
      __reduce_max_sync(all, v),
      __reduce_or_sync(all, v),
      (unsigned)(__popc(v) + 100 * __clz((int)v) + 10000 * __ffs((int)v) + __popcll(v) * 1000000),
  };
  for (int i = 0; i < 14; i++) out[i * 32 + lane] = results[i];
}

// 64 threads a block, any number of blocks; each total starts at 0. Halves meet at a barrier that counts.
extern "C" __global__ void __launch_bounds__(64)
atomics_kernel(int* i, unsigned* u, float* f, unsigned long long* ll, int* most, int* barriers) {
  const int t = threadIdx.x + blockIdx.x * blockDim.x;
  atomicAdd(i, t);
  atomicOr(u, 1u << (t & 31));
  atomicAdd(f, 0.5f);
  atomicAdd(ll, 1ull << 33);
  atomicMax(most, t);
  int seen = *(volatile int*)(most + 1), expected;
  do {  // addition by compare and swap
    expected = seen;
    seen = atomicCAS(most + 1, expected, expected + t);
  } while (seen != expected);
  const int odd = __syncthreads_count(threadIdx.x & 1), any = __syncthreads_or(threadIdx.x == 63);
  const int every = __syncthreads_and(threadIdx.x < 63);
  if (threadIdx.x == 0) barriers[blockIdx.x] = odd * 100 + any * 10 + every;
}

extern "C" __global__ void order_kernel(int* counter, int* turn) {
  turn[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(counter, 1);
}

extern "C" __global__ void scalars_kernel(double* out, bool b, int i, unsigned u, long long ll, float f, double d) {
  const double values[6] = {b ? 1.0 : 0.0, (double)i, (double)u, (double)ll, (double)f, d};
  for (int k = 0; k < 6; k++) out[k] = values[k];
}

// to and from: [num_values][count] of T; a thread moves one row.
template <typename T, int count>
__global__ void copy_kernel(T* to, const T* from, int num_values) {
  const int row = threadIdx.x;
  if (row >= num_values) return;
  for (int i = 0; i < count; i++) to[row * count + i] = from[row * count + i];
}

__device__ int launches;
__constant__ int primes[4] = {2, 3, 5, 7};

// Bit casts, float functions, constants, a global, memcpy, and dynamic shared memory of two types. 4 threads.
extern "C" __global__ void odds_kernel(float* out, char* bytes, const unsigned* bits) {
  extern __shared__ int4 scratch[];
  float* floats = reinterpret_cast<float*>(scratch + 1);
  const int t = threadIdx.x;
  floats[t] = __uint_as_float(bits[t] << 16);  // bf16
  if (t == 0) scratch[0] = make_int4(1, 2, 3, 4);
  __syncwarp(0xf);
  out[t] = floats[3 - t] + scratch[0].w + primes[t] + max(0.0f, __expf(-1e9f)) + __fdividef(1.0f, 2.0f) + min(t, 2);
  const int word = __float_as_int(1.0f) + t;
  memcpy(bytes + 5 * t + 1, &word, 4);  // not aligned
  if (t == 0) launches++;
  __syncwarp(0xf);
  if (t == 3) bytes[0] = (char)launches;
}

// out: [12][n], a row per function.
extern "C" __global__ void floats_kernel(float* out, const float* in, int n) {
  const int i = threadIdx.x;
  const float v = in[i];
  const float results[12] = {
      expf(v), exp2f(v), __expf(v), logf(fabsf(v)), __logf(fabsf(v)), sqrtf(fabsf(v)), rsqrtf(fabsf(v)), floorf(v),
      fmaxf(v, 0.5f), isnan(v) ? 1.0f : 0.0f, isinf(v) ? 1.0f : 0.0f, max(v, 1.0f),
  };
  for (int k = 0; k < 12; k++) out[k * n + i] = results[k];
}

// Reads and writes 16 bytes at `base + slot * slot_bytes`.
extern "C" __global__ void far_kernel(char* base, int slot, long long slot_bytes) {
  int4* there = reinterpret_cast<int4*>(base + slot * slot_bytes);
  int4 v = *there;
  v.x += 1;
  *there = v;
}

// Thread 1 waits until thread 0 of the same block has set the flag.
extern "C" __global__ void wait_kernel(volatile int* flag) {
  if (threadIdx.x == 0) *flag = 1;
  while (threadIdx.x == 1 && *flag == 0) __nanosleep(100);
}

// ---- wrong: each comment MISTAKE marks the line to be found --------------------------------------------------------

extern "C" __global__ void overflow_kernel(char* base, int slot, int slot_bytes) {
  base[slot * slot_bytes] = 1;  // MISTAKE
}

extern "C" __global__ void store_kernel(int* out, long long index) {
  out[index] = 1;  // MISTAKE
}

extern "C" __global__ void blocks_race_kernel(int* out) {
  *out = blockIdx.x;  // MISTAKE
}

// Lanes 1 and 2 read what lane 0 wrote; `mask` says who meets before that. 64 threads: the other warp only reads.
extern "C" __global__ void lanes_kernel(int* out, unsigned mask) {
  __shared__ int word;
  if (threadIdx.x == 0) word = 1;
  if (threadIdx.x < 32 && (mask >> threadIdx.x & 1)) __syncwarp(mask);
  if (threadIdx.x == 1 || threadIdx.x == 2) out[threadIdx.x] = word;  // MISTAKE
}

// Every thread reads, then one writes.
extern "C" __global__ void readers_kernel(int* out, int* word, int writer) {
  out[threadIdx.x] = *word;
  if (threadIdx.x == writer) *word = 1;  // MISTAKE
}

// A plain load races with an atomic of another thread.
extern "C" __global__ void half_atomic_kernel(int* word, int* out) {
  if (threadIdx.x == 0) atomicAdd(word, 1);
  else out[0] = *word;  // MISTAKE
}

// Block 0 sets the counter that all blocks add to: nothing makes the others wait.
extern "C" __global__ void late_counter_kernel(int* counter) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *counter = 0;
  __syncthreads();
  atomicAdd(counter, 1);  // MISTAKE
}

extern "C" __global__ void shared_counter_kernel(int* out) {
  __shared__ int counter;
  atomicAdd(&counter, 1);  // MISTAKE
  __syncthreads();
  if (threadIdx.x == 0) *out = counter;
}

// One thread a block; the first num_writers blocks write before they read.
extern "C" __global__ void stale_kernel(int* out, int num_writers) {
  __shared__ int word;
  if (blockIdx.x < num_writers) word = 1;
  out[blockIdx.x] = word;  // MISTAKE
}

extern "C" __global__ void dynamic_kernel(int* out, int index) {
  extern __shared__ int words[];
  words[index] = 1;  // MISTAKE
  *out = words[index];
}

extern "C" __global__ void local_kernel(int* out, int index) {
  int words[16] = {};
  for (int i = 0; i < 16; i++) words[i * index & 15] = i;
  *out = words[index];  // MISTAKE
}

extern "C" __global__ void vector_kernel(char* bytes) {
  reinterpret_cast<int4*>(bytes)->z = 1;  // MISTAKE
}

extern "C" __global__ void odd_atomic_kernel(char* bytes) {
  atomicAdd(reinterpret_cast<int*>(bytes), 1);  // MISTAKE
}

extern "C" __global__ void masks_kernel(unsigned* out) {
  out[threadIdx.x] = threadIdx.x < 16 ? 0 : __ballot_sync(0xffffu, 1);  // MISTAKE
}

extern "C" __global__ void branches_kernel(int* out) {
  int v = threadIdx.x;
  if (v < 16) v = __shfl_sync(0xffffffffu, v, 0);  // MISTAKE
  else v = __shfl_sync(0xffffffffu, v, 1);
  out[threadIdx.x] = v;
}

// Block 0 waits for block 1.
extern "C" __global__ void livelock_kernel(volatile int* flag) {
  if (blockIdx.x == 1) *flag = 1;
  while (blockIdx.x == 0 && *flag == 0) __nanosleep(100);
}

extern "C" __global__ void divide_kernel(int* out, int by) {
  out[0] = out[1] / by;  // MISTAKE
}

extern "C" __global__ void assert_kernel(int* out) {
  assert(out[0] == 1);  // MISTAKE
}

extern "C" __global__ void assume_kernel(int* out) {
  __builtin_assume(out[0] == 1);  // MISTAKE
  out[1] = 1;
}
