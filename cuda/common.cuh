// What every kernel shares: the page table, the positions of drafts, a sum over a block. It includes nothing, so
// NVRTC, nvcc and g++ compile it alike. The package hands all files to the compiler as one text, this one first.
//
// Ids (rows, pages, slots, positions) are int32; every byte or element offset is 64-bit (sgl#9344). The contents of
// device arrays are not trusted: an invalid row, position or page leads to slot 0 or is skipped, and no access is out
// of bounds.

// The page table of one group. Row 0 and page 0 are padding.
struct PageTable {
    const int* cells;  // int32 [num_rows, pages_per_row]
    int num_rows;      // rows of the ledger + 1
    int pages_per_row;
    int page_size;  // P

    // The page in a column, 0 if there is none.
    __device__ __forceinline__ int page(int row, long long column) const {
        if (row < 0 || row >= num_rows || column < 0 || column >= pages_per_row) return 0;
        const int page = cells[(long long)row * pages_per_row + column];
        return page < 0 || (page + 1ll) * page_size > 1ll << 31 ? 0 : page;
    }

    // The slot of a position; a slot of the sink if there is none.
    __device__ __forceinline__ int slot(int row, long long position) const {
        if (position < 0 || position > 0x7fffffff) return 0;
        const unsigned column = (unsigned)position / (unsigned)page_size;
        return page(row, column) * page_size + (int)((unsigned)position - column * (unsigned)page_size);
    }

    // As `slot`, but -1 in the sink. The sink's bytes are never moved, so padded lanes (row 0) move nothing.
    __device__ __forceinline__ int mapped_slot(int row, long long position) const {
        const int found = slot(row, position);
        return row == 0 || found < page_size ? -1 : found;
    }
};

// Where the drafts of one round lie in their row (docs/contract.md, Layouts).
struct Drafts {
    int num_steps;  // S
    int topk;       // K
    int page_size;  // P
    int is_holey;   // 0 = dense

    // Positions from one branch to the next.
    __device__ __forceinline__ long long stride(int root) const {
        if (!is_holey || page_size == 1 || topk == 1) return num_steps;
        return (root % page_size + (long long)num_steps + page_size - 1) / page_size * page_size;
    }

    // The position of a draft; -1 behind an invalid root.
    __device__ __forceinline__ long long position(int root, int branch, int step) const {
        return root < 0 ? -1 : root + branch * stride(root) + step;
    }
};

// Returns the sum of `value` over the block's threads, in every thread. The block must consist of whole warps.
// `scratch` is shared, one cell for each warp.
__device__ __forceinline__ long long block_sum(long long value, long long* scratch) {
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    __syncthreads();  // a thread may still be reading an earlier sum
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
    __syncthreads();
    value = 0;
    for (int warp = 0; warp < (int)blockDim.x / 32; warp++) value += scratch[warp];
    return value;
}
