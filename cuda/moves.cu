// Moves of KV by bytes, all layers in one launch (kernels 4, 7, 8 and 9).
//
// A field is what one slot stores in one buffer: a layer's key, its value, the scales of a page-blocked side buffer.
// Its bytes of slot s start at base + s / P * page_stride + s % P * width, so plain buffers (page_stride = P * width)
// and page-blocked ones (sgl#31218) are the same thing. Every block works on one field (blockIdx.y); every thread owns
// `vec`-byte columns of it and moves them in ascending order, so that sources and targets of a lane may overlap
// (sgl#40734).

struct Field {
    long long base;         // address of slot 0
    long long page_stride;  // bytes from one page to the next
    int width;              // bytes of one slot
    int vec;                // bytes of one access, 1 .. 16: a power of two that divides base, page_stride and width

    __device__ __forceinline__ char* at(long long slot, int page_size) const {
        return (char*)base + slot / page_size * page_stride + slot % page_size * width;
    }
};

// Calls move(column) for each of the field's columns that fall to this thread, as T = 16, 8, 4, 2 or 1 bytes.
template <typename Move>
__device__ __forceinline__ void each_column(const Field& field, int first, int step, Move move) {
    const int columns = field.width / field.vec;
    for (int column = first; column < columns; column += step) {
        switch (field.vec) {
            case 16: move(column, int4()); break;
            case 8: move(column, int2()); break;
            case 4: move(column, int()); break;
            case 2: move(column, short()); break;
            default: move(column, char());
        }
    }
}

// dst_fields[f] slot dst[i] = src_fields[f] slot src[i]; a null list stands for 0, 1, 2, ... No slot is both read and
// written. Gather, scatter, and moves between distinct slots. Slots outside [0, num_slots) are left.
//
// grid (any, num_fields), block (columns, slots): thread x owns columns x, x + blockDim.x, ...
KERNEL copy_slots(
    const Field* src_fields,  // [num_fields]
    const Field* dst_fields,  // [num_fields], the same widths
    int src_page_size,
    int dst_page_size,
    const int* src,  // int32 [n] or null
    const int* dst,  // int32 [n] or null
    int n,
    long long num_src_slots,
    long long num_dst_slots) {
    const Field from = src_fields[blockIdx.y], to = dst_fields[blockIdx.y];
    for (int i = blockIdx.x * blockDim.y + threadIdx.y; i < n; i += gridDim.x * blockDim.y) {
        const long long read = src ? src[i] : i, written = dst ? dst[i] : i;
        if (read < 0 || read >= num_src_slots || written < 0 || written >= num_dst_slots) continue;
        const char* source = from.at(read, src_page_size);
        char* target = to.at(written, dst_page_size);
        each_column(from, threadIdx.x, blockDim.x, [&](int column, auto unit) {
            typedef decltype(unit) Unit;
            ((Unit*)target)[column] = ((const Unit*)source)[column];
        });
    }
}

// Moves the accepted nodes, written at roots[b] + node, to roots[b] + 0, 1, ... in the order of the walk. Reads exactly
// batch * width entries of accept_index (sgl#26866). Padded lanes (row 0), nodes in their place and nodes that are not
// the lane's move nothing.
//
// grid (batch, num_fields), block (columns).
KERNEL compact_accepted(
    const Field* fields,  // [num_fields]
    const int* cells,
    int num_rows,
    int pages_per_row,
    int page_size,
    const int* rows,          // int32 [batch]
    const int* roots,         // int32 [batch]
    const int* accept_index,  // int32 [batch, width]: lane * N + node, -1 padded
    int width,                // S + 1
    int num_draft_tokens) {   // N
    const int lane = blockIdx.x, row = rows[lane], root = roots[lane];
    if (row == 0) return;
    const Field field = fields[blockIdx.y];
    const PageTable table = {cells, num_rows, pages_per_row, page_size};
    const int* walk = accept_index + (long long)lane * width;
    for (int place = 1; place < width; place++) {
        const long long node = walk[place] - (long long)lane * num_draft_tokens;
        if (walk[place] < 0) break;
        if (node <= place || node >= num_draft_tokens) continue;
        const long long read = table.mapped_slot(row, root + (int)node);
        const long long written = table.mapped_slot(row, root + place);
        if (read < 0 || written < 0) continue;
        const char* source = field.at(read, page_size);
        char* target = field.at(written, page_size);
        each_column(field, threadIdx.x, blockDim.x, [&](int column, auto unit) {
            typedef decltype(unit) Unit;
            ((Unit*)target)[column] = ((const Unit*)source)[column];
        });
    }
}

// Copies the prefix's partial tail page before the drafts of branches 1 .. K - 1, holey layout (spec 6). Nothing for
// branch 0, for a root at a page's start, for padded lanes.
//
// grid (batch * (K - 1), num_fields), block (columns, slots).
KERNEL duplicate_prefix_tail(
    const Field* fields,
    const int* cells,
    int num_rows,
    int pages_per_row,
    int page_size,
    const int* rows,   // int32 [batch]
    const int* roots,  // int32 [batch]
    int num_steps,
    int topk) {
    const int lane = blockIdx.x / (topk - 1), branch = blockIdx.x % (topk - 1) + 1;
    const int row = rows[lane], root = roots[lane];
    const int last = root % page_size, base = root - last;
    if (row == 0 || root < 0 || last == 0) return;
    const Field field = fields[blockIdx.y];
    const PageTable table = {cells, num_rows, pages_per_row, page_size};
    const Drafts drafts = {num_steps, topk, page_size, 1};
    const long long read = table.mapped_slot(row, base);
    const long long written = table.mapped_slot(row, base + branch * drafts.stride(root));
    if (read < 0 || written < 0) return;
    for (int i = threadIdx.y; i < last; i += blockDim.y) {
        const char* source = field.at(read + i, page_size);
        char* target = field.at(written + i, page_size);
        each_column(field, threadIdx.x, blockDim.x, [&](int column, auto unit) {
            typedef decltype(unit) Unit;
            ((Unit*)target)[column] = ((const Unit*)source)[column];
        });
    }
}

// Copies drafts 0 .. step - 1 of each branch's parent over its own, after the selection of `step`. Branches may swap:
// a block reads all of its columns into shared memory before it writes one.
//
// grid (batch * tiles, num_fields), block (tile columns, drafts), shared: 16 bytes for each draft and tile column.
KERNEL copy_parent_drafts(
    const Field* fields,
    const int* cells,
    int num_rows,
    int pages_per_row,
    int page_size,
    const int* rows,     // int32 [batch]
    const int* roots,    // int32 [batch]
    const int* parents,  // int32 [batch, K]
    int num_steps,
    int topk,
    int is_holey,
    int step,
    int tiles) {
    extern __shared__ int4 held[];
    const int lane = blockIdx.x / tiles, tile = blockIdx.x % tiles, row = rows[lane], root = roots[lane];
    if (row == 0) return;
    const Field field = fields[blockIdx.y];
    const PageTable table = {cells, num_rows, pages_per_row, page_size};
    const Drafts drafts = {num_steps, topk, page_size, is_holey};
    const int columns = field.width / field.vec, column = tile * blockDim.x + threadIdx.x;
    for (int writing = 0; writing < 2; writing++) {
        for (int draft = threadIdx.y; draft < topk * step; draft += blockDim.y) {
            const int branch = draft / step, j = draft % step, parent = parents[(long long)lane * topk + branch];
            if (column >= columns || parent == branch || parent < 0 || parent >= topk) continue;
            const long long slot = table.mapped_slot(row, drafts.position(root, writing ? branch : parent, j));
            if (slot < 0) continue;
            char* bytes = field.at(slot, page_size) + (long long)column * field.vec;
            int4* mine = &held[draft * blockDim.x + threadIdx.x];
            switch (field.vec) {
                case 16: writing ? *(int4*)bytes = *mine : *mine = *(int4*)bytes; break;
                case 8: writing ? *(int2*)bytes = *(int2*)mine : *(int2*)mine = *(int2*)bytes; break;
                case 4: writing ? *(int*)bytes = *(int*)mine : *(int*)mine = *(int*)bytes; break;
                case 2: writing ? *(short*)bytes = *(short*)mine : *(short*)mine = *(short*)bytes; break;
                default: writing ? *bytes = *(char*)mine : *(char*)mine = *bytes;
            }
        }
        __syncthreads();
    }
}
