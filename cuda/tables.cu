// Page tables on the device: changes to them, and the slots of rows and positions.

// Writes pages[i] into cell (rows[i], columns[i]). Entries outside the table or in row 0 are skipped. The ledger gives
// at most one entry for each cell. One thread for each entry.
extern "C" __global__ void apply_table_delta_kernel(
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
    if (row < 1 || row >= num_rows || column < 0 || column >= pages_per_row || pages[at] < 0) return;
    cells[(long long)row * pages_per_row + column] = pages[at];
}

// One of several page tables.
struct Cells {
    long long base;  // address of the first cell
    int num_rows;
    int pages_per_row;
};

// As apply_table_delta_kernel, for several tables: entry i changes table entries[0][i]. An entry of no table is skipped.
extern "C" __global__ void apply_table_deltas_kernel(
    const Cells* tables,  // [num_tables]
    int num_tables,
    const int* entries,  // int32 [4, n]: tables, rows, columns, pages
    int n) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= n || entries[at] < 0 || entries[at] >= num_tables) return;
    const Cells table = tables[entries[at]];
    const int row = entries[n + (long long)at], column = entries[2ll * n + at], page = entries[3ll * n + at];
    if (row < 1 || row >= table.num_rows || column < 0 || column >= table.pages_per_row || page < 0) return;
    ((int*)table.base)[(long long)row * table.pages_per_row + column] = page;
}

// out[i] = the slot of (rows[i], positions[i]). One thread for each.
extern "C" __global__ void slots_at_kernel(
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
    out[at] = table.slot(rows[at], positions[at]);
}

// Writes the slots of [starts[b], starts[b] + lens[b]) of each row, one lane after the other. Nothing is written
// beyond the capacity.
//
// grid (batch, tiles), block of whole warps.
extern "C" __global__ void slot_ranges_kernel(
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
    const long long end = min((long long)lens[lane], capacity - first);
    for (long long i = blockIdx.y * blockDim.x + threadIdx.x; i < end; i += gridDim.y * blockDim.x) {
        out[first + i] = table.slot(rows[lane], starts[lane] + i);
    }
}

// out[b, k, j] = the slot that step j of branch k writes. One thread for each draft.
extern "C" __global__ void draft_write_slots_kernel(
    const int* cells,
    int num_rows,
    int pages_per_row,
    int page_size,
    const int* rows,   // int32 [batch]
    const int* roots,  // int32 [batch], the roots' positions
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
    out[at] = table.slot(rows[lane], drafts.position(roots[lane], branch, step));
}

// Writes the pages of [0, lens[b]) of each row as CSR. Nothing is written beyond the capacity, and kv_indptr stops
// there.
//
// grid batch, block of whole warps.
extern "C" __global__ void page_csr_kernel(
    const int* cells,
    int num_rows,
    int pages_per_row,
    int page_size,
    const int* rows,        // int32 [batch]
    const int* lens,        // int32 [batch]
    int* kv_indptr,         // int32 [batch + 1]
    int* kv_indices,        // int32 [capacity]
    int* kv_last_page_len,  // int32 [batch], 1 .. P, 0 for a lane of length 0
    int capacity) {
    __shared__ long long scratch[32];
    const int lane = blockIdx.x;
    long long before = 0;
    for (int other = threadIdx.x; other < lane; other += blockDim.x) {
        before += (max(lens[other], 0) + (long long)page_size - 1) / page_size;
    }
    const long long first = block_sum(before, scratch);
    const int len = max(lens[lane], 0);
    const long long pages = (len + (long long)page_size - 1) / page_size;
    if (threadIdx.x == 0) {
        if (lane == 0) kv_indptr[0] = 0;
        kv_indptr[lane + 1] = (int)min(first + pages, (long long)capacity);
        kv_last_page_len[lane] = len == 0 ? 0 : (len - 1) % page_size + 1;
    }
    const PageTable table = {cells, num_rows, pages_per_row, page_size};
    for (long long i = threadIdx.x; i < min(pages, capacity - first); i += blockDim.x) {
        kv_indices[first + i] = table.page(rows[lane], i);
    }
}
