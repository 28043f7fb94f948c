// What the branches of a draft step read: slots for readers of single tokens, pages for readers of whole pages, and
// which drafts are whose ancestors.

// Writes the slots that each branch reads at `step` as CSR: its prefix, then step + 1 drafts. The drafts are those of
// its ancestors, or (ancestors null) its own cells, as upstream. Lane b's branches start at K * (sum of roots before +
// b * (step + 1)). Nothing is written beyond the capacity (sgl#27338), and kv_indptr stops there.
//
// grid (batch * K, tiles), block of whole warps.
extern "C" __global__ void draft_read_indices_kernel(
    const int* cells,
    int num_rows,
    int pages_per_row,
    int page_size,
    const int* rows,       // int32 [batch]
    const int* roots,      // int32 [batch], the roots' positions
    const int* ancestors,  // int32 [batch, K, width > step]: branches; or null
    int width,
    int* kv_indptr,   // int32 [batch * K + 1]
    int* kv_indices,  // int32 [capacity]
    int capacity,
    int num_steps,
    int topk,
    int step,
    int is_holey) {
    __shared__ long long scratch[32];
    const int lane = blockIdx.x / topk, branch = blockIdx.x % topk;
    long long before = 0;
    for (int other = threadIdx.x; other < lane; other += blockDim.x) before += 1ll + step + max(roots[other], 0);
    const int row = rows[lane], root = max(roots[lane], 0);
    const long long reads = 1ll + step + root;
    const long long first = topk * block_sum(before, scratch) + branch * reads;
    if (threadIdx.x == 0 && blockIdx.y == 0) {
        if (blockIdx.x == 0) kv_indptr[0] = 0;
        kv_indptr[blockIdx.x + 1] = (int)min(first + reads, (long long)capacity);
    }
    const PageTable table = {cells, num_rows, pages_per_row, page_size};
    const Drafts drafts = {num_steps, topk, page_size, is_holey};
    const long long end = min(reads, capacity - first);
    for (long long i = blockIdx.y * blockDim.x + threadIdx.x; i < end; i += gridDim.y * blockDim.x) {
        long long position = i;
        if (i >= root) {
            const int draft = (int)(i - root);
            const int holder = ancestors ? ancestors[(long long)blockIdx.x * width + draft] : branch;
            position = holder < 0 || holder >= topk ? -1 : drafts.position(root, holder, draft);
        }
        kv_indices[first + i] = table.slot(row, position);
    }
}

// Writes the pages that each branch reads at `step` in the holey layout: the prefix's full pages, then the branch's
// own, then zeros. One thread for each cell.
extern "C" __global__ void branch_pages_kernel(
    const int* cells,
    int num_rows,
    int pages_per_row,
    int page_size,
    const int* rows,   // int32 [batch]
    const int* roots,  // int32 [batch], the roots' positions
    int* out,          // int32 [batch * K, width]
    int batch,
    int width,
    int num_steps,
    int topk,
    int step) {
    const long long at = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= (long long)batch * topk * width) return;
    const int column = (int)(at % width), line = (int)(at / width), lane = line / topk, branch = line % topk;
    const int root = max(roots[lane], 0), below = root / page_size;
    const long long end = (root + (long long)step) / page_size + 1;
    const PageTable table = {cells, num_rows, pages_per_row, page_size};
    const Drafts drafts = {num_steps, topk, page_size, 1};
    const long long shift = column < below ? 0 : branch * drafts.stride(root) / page_size;
    out[at] = column < end ? table.page(rows[lane], column + shift) : 0;
}

// Advances ancestors to `step`, in place: each branch takes the line of its parent and adds itself. ancestors[b, k, j]
// is the branch whose cell of step j holds the j-th draft on branch k's path. An invalid parent leaves the line as it
// is.
//
// grid batch, block any; shared: K * step ints.
extern "C" __global__ void advance_ancestors_kernel(
    int* ancestors,             // int32 [batch, K, width > step]
    const int* branch_parents,  // int32 [batch, K]
    int topk,
    int width,
    int step) {
    extern __shared__ int lines[];
    int* own = ancestors + (long long)blockIdx.x * topk * width;
    const int* parents = branch_parents + (long long)blockIdx.x * topk;
    for (int i = threadIdx.x; i < topk * step; i += blockDim.x) lines[i] = own[(long long)(i / step) * width + i % step];
    __syncthreads();
    for (int i = threadIdx.x; i < topk * step; i += blockDim.x) {
        const int branch = i / step, parent = parents[branch];
        if (parent >= 0 && parent < topk) own[(long long)branch * width + i % step] = lines[parent * step + i % step];
    }
    for (int branch = threadIdx.x; branch < topk; branch += blockDim.x) own[(long long)branch * width + step] = branch;
}
