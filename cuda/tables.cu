// Page tables on the device: changes to them, and the slots of rows and positions (kernels 1, 2, 3 and 6).

// Writes pages[i] into cell (rows[i], columns[i]). At most one entry for each cell; entries outside the table are left.
// One thread for each entry.
KERNEL apply_table_delta(
    int* cells,  // int32 [num_rows, pages_per_row]
    int num_rows,
    int pages_per_row,
    const int* rows,     // int32 [n]
    const int* columns,  // int32 [n]
    const int* pages,    // int32 [n]
    int n) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n) return;
    const int row = rows[at], column = columns[at];
    if (row < 1 || row >= num_rows || column < 0 || column >= pages_per_row) return;
    cells[(long long)row * pages_per_row + column] = pages[at];
}

// out[i] = the slot of (rows[i], positions[i]); slot 0, in the sink, where there is none. One thread for each.
KERNEL slots_at(
    const int* cells,
    int num_rows,
    int pages_per_row,
    int page_size,
    const int* rows,       // int32 [n]
    const int* positions,  // int32 [n]
    int* out,              // int32 [n]
    int n) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n) return;
    const PageTable table = {cells, num_rows, pages_per_row, page_size};
    const long long slot = table.slot(rows[at], positions[at]);
    out[at] = slot < 0 ? 0 : (int)slot;
}

// The slots of [starts[b], starts[b] + lens[b]) of each row, one lane after the other. One block for each lane.
KERNEL slot_ranges(
    const int* cells,
    int num_rows,
    int pages_per_row,
    int page_size,
    const int* rows,    // int32 [batch]
    const int* starts,  // int32 [batch]
    const int* lens,    // int32 [batch]
    int* out,           // int32 [capacity]
    int capacity) {
    __shared__ long long scratch[32];
    const int lane = blockIdx.x;
    long long before = 0;
    for (int other = threadIdx.x; other < lane; other += blockDim.x) before += max(lens[other], 0);
    const long long first = block_sum(before, scratch);
    const PageTable table = {cells, num_rows, pages_per_row, page_size};
    for (int i = threadIdx.x; i < lens[lane] && first + i < capacity; i += blockDim.x) {
        const long long slot = table.slot(rows[lane], starts[lane] + i);
        out[first + i] = slot < 0 ? 0 : (int)slot;
    }
}

// out[b, k, j] = the slot that step j of branch k writes; slot 0 where there is none. One thread for each draft.
KERNEL draft_write_slots(
    const int* cells,
    int num_rows,
    int pages_per_row,
    int page_size,
    const int* rows,   // int32 [batch]
    const int* roots,  // int32 [batch], device lengths: the root's position
    int* out,          // int32 [batch, K, S]
    int batch,
    int num_steps,
    int topk,
    int is_holey) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= batch * topk * num_steps) return;
    const int step = at % num_steps, branch = at / num_steps % topk, lane = at / num_steps / topk;
    const Drafts drafts = {num_steps, topk, page_size, is_holey};
    const PageTable table = {cells, num_rows, pages_per_row, page_size};
    const long long slot = table.slot(rows[lane], drafts.position(roots[lane], branch, step));
    out[at] = slot < 0 ? 0 : (int)slot;
}

// The pages of [0, lens[b]) of each row as CSR. One block for each lane.
KERNEL page_csr(
    const int* cells,
    int num_rows,
    int pages_per_row,
    int page_size,
    const int* rows,         // int32 [batch]
    const int* lens,         // int32 [batch]
    int* kv_indptr,          // int32 [batch + 1]
    int* kv_indices,         // int32 [capacity]
    int* kv_last_page_len,   // int32 [batch], 1..P, 0 for a lane of length 0
    int batch,
    int capacity) {
    __shared__ long long scratch[32];
    const int lane = blockIdx.x;
    long long before = 0;
    for (int other = threadIdx.x; other < lane; other += blockDim.x) {
        before += (max(lens[other], 0) + (long long)page_size - 1) / page_size;
    }
    const long long first = block_sum(before, scratch);
    const int len = max(lens[lane], 0);
    const int pages = (int)((len + (long long)page_size - 1) / page_size);
    if (threadIdx.x == 0) {
        if (lane == 0) kv_indptr[0] = 0;
        kv_indptr[lane + 1] = (int)(first + pages);
        kv_last_page_len[lane] = len == 0 ? 0 : (len - 1) % page_size + 1;
    }
    const int row = rows[lane];
    const bool is_row = row >= 0 && row < num_rows;
    for (int i = threadIdx.x; i < pages && first + i < capacity; i += blockDim.x) {
        kv_indices[first + i] = is_row && i < pages_per_row ? cells[(long long)row * pages_per_row + i] : 0;
    }
}
