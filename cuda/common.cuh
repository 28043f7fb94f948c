// What every kernel shares: the page table, the bytes of a slot. No includes: NVRTC, nvcc and g++ compile it alike.
//
// Ids (rows, pages, slots, positions) are int32, every byte or element offset is 64-bit (sgl#9344).

#define KERNEL extern "C" __global__ void

// The page table of one group, int32 [num_rows, pages_per_row], device. Row 0 and page 0 are padding.
struct PageTable {
    const int* cells;
    int num_rows;
    int pages_per_row;
    int page_size;

    // The slot of a position, or -1 where the row or the position is outside the table.
    __device__ __forceinline__ long long slot(int row, int position) const {
        const int column = position / page_size;
        if (row < 0 || row >= num_rows || position < 0 || column >= pages_per_row) return -1;
        return (long long)cells[(long long)row * pages_per_row + column] * page_size + position % page_size;
    }

    // As `slot`, but -1 also where the row has no page there, so that nobody moves the sink's bytes.
    __device__ __forceinline__ long long mapped_slot(int row, int position) const {
        const long long found = slot(row, position);
        return found < page_size && row != 0 ? -1 : found;
    }
};

// Where the drafts of one round lie in their row (spec 6).
struct Drafts {
    int num_steps;  // S
    int topk;       // K
    int page_size;  // P
    int is_holey;

    // Positions from one branch to the next.
    __device__ __forceinline__ int stride(int root) const {
        if (!is_holey || page_size == 1 || topk == 1) return num_steps;
        return (root % page_size + num_steps + page_size - 1) / page_size * page_size;
    }

    __device__ __forceinline__ int position(int root, int branch, int step) const {
        return root + branch * stride(root) + step;
    }
};

// Sum of `value` over the block's threads, in every thread. `scratch` is shared, one cell for each warp.
__device__ __forceinline__ long long block_sum(long long value, long long* scratch) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    value = 0;
    for (int warp = 0; warp < (blockDim.x + 31) / 32; warp++) value += scratch[warp];
    return value;
}
