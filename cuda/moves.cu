// Moves of KV by bytes, all layers in one launch.
//
// A field is what one slot stores in one buffer: a layer's keys, its values, or the scales of a page-blocked side
// buffer. Slot s of a field starts at base + s / P * page_stride + s % P * width. So plain buffers (page_stride = P *
// width) and page-blocked ones (sgl#31218) are one case. A block works on one field (blockIdx.y), a thread on columns
// of `vec` bytes of it. Slots outside [0, num_slots) are skipped, and so is the sink if a lane or a draft leads there.

struct Field {
    long long base;         // address of slot 0
    long long page_stride;  // bytes from one page to the next
    int width;              // bytes of one slot
    int vec;                // bytes of one access: 1, 2, 4, 8 or 16, a divisor of the three above

    template <typename Unit>
    __device__ __forceinline__ Unit* at(int slot, int page_size) const {
        const unsigned page = (unsigned)slot / (unsigned)page_size, offset = (unsigned)slot - page * (unsigned)page_size;
        char* bytes = (char*)base + page * page_stride + (long long)offset * width;
        __builtin_assume(__isGlobal(bytes));  // or sm_100 asks at run time where it points
        return (Unit*)bytes;
    }
};

// Calls move(Unit()) with a Unit of `vec` bytes.
template <typename Move>
__device__ __forceinline__ void with_unit(int vec, Move move) {
    switch (vec) {
        case 16: move(int4()); break;
        case 8: move(int2()); break;
        case 4: move(int()); break;
        case 2: move(short()); break;
        default: move(char());
    }
}

__device__ __forceinline__ bool is_slot(long long slot, long long num_slots) { return slot >= 0 && slot < num_slots; }

// How many accesses of a thread are on their way at once: one load takes longer than many thread's turns.
constexpr int IN_FLIGHT = 4;

// Copies slots of one field to another: piece i, of n, goes from slot place(i).read to place(i).written. The block
// begins with piece `first` and goes on in steps of `step`; of fields wider than the block it copies the tile-th of
// `tiles` parts. Each thread loads several accesses before it stores any.
template <typename Place>
__device__ __forceinline__ void copy_pieces(
    const Field& from, const Field& to, int from_page_size, int to_page_size, int n, int first, int step, int tile,
    int tiles, Place place) {
    with_unit(min(from.vec, to.vec), [&](auto unit) {
        typedef decltype(unit) Unit;
        const int columns = from.width / (int)sizeof(Unit), threads = blockDim.x;
        const bool is_wide = columns > threads;  // several accesses of one slot, not one of several slots
        const int pieces = is_wide ? 1 : IN_FLIGHT, span = is_wide ? IN_FLIGHT * threads : threads;
        for (long long piece = first; piece < n; piece += (long long)pieces * step) {
            for (int column = tile * span + threadIdx.x; column < columns; column += tiles * span) {
                int read[IN_FLIGHT], written[IN_FLIGHT];
#pragma unroll
                for (int k = 0; k < IN_FLIGHT; k++) {
                    const long long i = is_wide ? piece : piece + (long long)k * step;
                    read[k] = -1;
                    if (i < n && column + (is_wide ? k * threads : 0) < columns) place((int)i, read[k], written[k]);
                }
                Unit held[IN_FLIGHT];
#pragma unroll
                for (int k = 0; k < IN_FLIGHT; k++) {
                    if (read[k] < 0) continue;
                    held[k] = from.at<Unit>(read[k], from_page_size)[column + (is_wide ? k * threads : 0)];
                }
#pragma unroll
                for (int k = 0; k < IN_FLIGHT; k++) {
                    if (read[k] < 0) continue;
                    to.at<Unit>(written[k], to_page_size)[column + (is_wide ? k * threads : 0)] = held[k];
                }
            }
        }
    });
}

// Copies slot src[i] of src_fields[f] to slot dst[i] of dst_fields[f]. A null list means 0, 1, 2, ... The caller must
// make sure that no slot is both read and written, and that each is written at most once. Used for gather, scatter and
// page copies.
//
// grid (any, num_fields, any), block (columns, slots).
extern "C" __global__ void copy_slots_kernel(
    const Field* src_fields,  // [num_fields]
    const Field* dst_fields,  // [num_fields], of the same widths
    int src_page_size,
    int dst_page_size,
    int num_src_slots,
    int num_dst_slots,
    const int* src,  // int32 [n] or null
    const int* dst,  // int32 [n] or null
    int n) {
    const Field from = src_fields[blockIdx.y], to = dst_fields[blockIdx.y];
    copy_pieces(
        from, to, src_page_size, dst_page_size, n, blockIdx.x * blockDim.y + threadIdx.y, gridDim.x * blockDim.y,
        blockIdx.z, gridDim.z, [&](int i, int& read, int& written) {
            const int source = src ? src[i] : i;
            written = dst ? dst[i] : i;
            if (is_slot(source, num_src_slots) && is_slot(written, num_dst_slots)) read = source;
        });
}

// Writes each token's keys and values into its slot of a layer's buffers. A slot outside them is skipped. No slot but
// the sink is named twice.
//
// grid (any, 2, any), block (columns, tokens): blockIdx.y is 0 for keys, 1 for values.
extern "C" __global__ void write_kv_kernel(
    void* k_buffer,  // [num_slots, k_width]
    void* v_buffer,  // [num_slots, v_width]
    const void* k,   // token i from byte i * k_stride on, k_width bytes
    const void* v,   // likewise
    long long k_stride,
    long long v_stride,
    int k_width,
    int v_width,
    int k_vec,  // bytes of one access
    int v_vec,
    int num_slots,
    const long long* slots,  // int64, token i's is slots[i * slots_stride]
    long long slots_stride,
    int n) {
    const bool is_key = blockIdx.y == 0;
    const int width = is_key ? k_width : v_width, vec = is_key ? k_vec : v_vec;
    const Field from = {(long long)(is_key ? k : v), is_key ? k_stride : v_stride, width, vec};
    const Field to = {(long long)(is_key ? k_buffer : v_buffer), width, width, vec};
    copy_pieces(
        from, to, 1, 1, n, blockIdx.x * blockDim.y + threadIdx.y, gridDim.x * blockDim.y, blockIdx.z, gridDim.z,
        [&](int i, int& read, int& written) {
            const long long slot = slots[i * slots_stride];
            if (is_slot(slot, num_slots)) read = i, written = (int)slot;
        });
}

// Moves `n` slots of a field, from source(i) to target(i), one column for each threadIdx.x. The block reads everything
// before it writes, so slots may be both read and written. `held` is shared, int4 [n, blockDim.x].
template <typename Source, typename Target>
__device__ __forceinline__ void move_held(
    const Field& field, int page_size, int num_slots, int n, int column, int4* held, Source source, Target target) {
    const int end = column < field.width / field.vec ? n : 0, step = blockDim.y;
    const auto read_of = [&](int i) {
        const int read = i < n ? source(i) : -1;
        return is_slot(read, num_slots) ? read : -1;
    };
    with_unit(field.vec, [&](auto unit) {
        typedef decltype(unit) Unit;
        for (int first = threadIdx.y; first < end; first += IN_FLIGHT * step) {
            int read[IN_FLIGHT];
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; k++) read[k] = read_of(first + k * step);
            Unit loaded[IN_FLIGHT];
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; k++) {
                if (read[k] >= 0) loaded[k] = field.at<Unit>(read[k], page_size)[column];
            }
#pragma unroll
            for (int k = 0; k < IN_FLIGHT; k++) {
                if (read[k] >= 0) *(Unit*)&held[(first + k * step) * blockDim.x + threadIdx.x] = loaded[k];
            }
        }
    });
    __syncthreads();
    with_unit(field.vec, [&](auto unit) {
        typedef decltype(unit) Unit;
        for (int i = threadIdx.y; i < end; i += step) {
            const int written = read_of(i) < 0 ? -1 : target(i);
            if (is_slot(written, num_slots)) {
                field.at<Unit>(written, page_size)[column] = *(Unit*)&held[i * blockDim.x + threadIdx.x];
            }
        }
    });
}

// Moves slot src[i] of every field to slot dst[i], as gather, then scatter. Each slot is written at most once.
//
// grid (tiles, num_fields), block (columns of a tile, slots); shared: 16 bytes for each slot and column of a tile.
extern "C" __global__ void move_slots_kernel(
    const Field* fields,  // [num_fields]
    int page_size,
    int num_slots,
    const int* src,  // int32 [n]
    const int* dst,  // int32 [n]
    int n) {
    extern __shared__ int4 held[];
    move_held(
        fields[blockIdx.y], page_size, num_slots, n, blockIdx.x * blockDim.x + threadIdx.x, held,
        [&](int i) { return src[i]; }, [&](int i) { return dst[i]; });
}

// Moves the accepted nodes from roots[b] + node to roots[b] + 0, 1, ... in the order of the walk. Reads exactly batch
// * width entries of accept_index (sgl#26866). Nothing is moved for padded lanes (row 0), for nodes that are in their
// place, and for ids that are not a later node of the lane.
//
// A node's target is never behind its source, so in ascending order no source is overwritten before it is read. The
// block moves eight nodes at a time, so that their loads overlap (sgl#40734).
//
// grid (batch, num_fields, any), block (columns), 8 threads or more.
extern "C" __global__ void __launch_bounds__(256) compact_accepted_kernel(
    const Field* fields,  // [num_fields]
    int num_slots,
    const int* cells,
    int num_rows,
    int pages_per_row,
    int page_size,
    const int* rows,          // int32 [batch]
    const int* roots,         // int32 [batch], the roots' positions
    const int* accept_index,  // int32 [batch, width]: lane * N + node, -1 padded
    int width,                // S + 1
    int num_draft_tokens) {   // N
    constexpr int PLACES = 8;
    __shared__ int read[PLACES], written[PLACES];  // slots; read is -1 if nothing moves
    const int lane = blockIdx.x, row = rows[lane];
    const long long root = roots[lane];
    if (row == 0 || root < 0) return;
    const Field field = fields[blockIdx.y];
    const PageTable table = {cells, num_rows, pages_per_row, page_size};
    for (int first = 1; first < width; first += PLACES) {
        if (threadIdx.x < PLACES) {
            const int place = first + threadIdx.x;
            int from = -1, to = -1;
            if (place < width) {
                const long long node = accept_index[(long long)lane * width + place] - (long long)lane * num_draft_tokens;
                const bool moves = node > place && node < num_draft_tokens;
                from = moves ? table.mapped_slot(row, root + node) : -1;
                to = moves ? table.mapped_slot(row, root + place) : -1;
            }
            read[threadIdx.x] = is_slot(from, num_slots) && is_slot(to, num_slots) ? from : -1;
            written[threadIdx.x] = to;
        }
        __syncthreads();
        with_unit(field.vec, [&](auto unit) {
            typedef decltype(unit) Unit;
            const int columns = field.width / field.vec, step = gridDim.z * blockDim.x;
            for (int column = blockIdx.z * blockDim.x + threadIdx.x; column < columns; column += step) {
                Unit held[PLACES];
#pragma unroll
                for (int i = 0; i < PLACES; i++) {
                    if (read[i] >= 0) held[i] = field.at<Unit>(read[i], page_size)[column];
                }
#pragma unroll
                for (int i = 0; i < PLACES; i++) {
                    if (read[i] >= 0) field.at<Unit>(written[i], page_size)[column] = held[i];
                }
            }
        });
        __syncthreads();
    }
}

// Copies the prefix's partial tail page in front of the drafts of branches 1 .. K - 1, holey layout (sgl#7725). Copies
// nothing for branch 0, for a root at the start of a page, and for padded lanes.
//
// grid (batch * (K - 1), num_fields, any), block (columns, slots).
extern "C" __global__ void duplicate_prefix_tail_kernel(
    const Field* fields,  // [num_fields]
    int num_slots,
    const int* cells,
    int num_rows,
    int pages_per_row,
    int page_size,
    const int* rows,   // int32 [batch]
    const int* roots,  // int32 [batch], the roots' positions
    int num_steps,
    int topk) {
    const int lane = blockIdx.x / (topk - 1), branch = blockIdx.x % (topk - 1) + 1;
    const int row = rows[lane], root = roots[lane];
    if (root < 0) return;
    const int last = root % page_size, base = root - last;
    const PageTable table = {cells, num_rows, pages_per_row, page_size};
    const Drafts drafts = {num_steps, topk, page_size, 1};
    const int read = table.mapped_slot(row, base);
    const int written = table.mapped_slot(row, base + branch * drafts.stride(root));
    if (read < 0 || written < 0) return;
    const int end = min(last, num_slots - max(read, written));
    const Field field = fields[blockIdx.y];
    copy_pieces(
        field, field, page_size, page_size, end, blockIdx.z * blockDim.y + threadIdx.y, gridDim.z * blockDim.y, 0, 1,
        [&](int i, int& from, int& to) { from = read + i, to = written + i; });
}

// Copies drafts 0 .. step - 1 of each branch's parent over its own, after the selection of `step`. Branches may swap.
//
// grid (batch * tiles, num_fields), block (columns of a tile, drafts); shared: 16 bytes for each draft and column.
extern "C" __global__ void copy_parent_drafts_kernel(
    const Field* fields,  // [num_fields]
    int num_slots,
    const int* cells,
    int num_rows,
    int pages_per_row,
    int page_size,
    const int* rows,            // int32 [batch]
    const int* roots,           // int32 [batch], the roots' positions
    const int* branch_parents,  // int32 [batch, K]
    int num_steps,
    int topk,
    int is_holey,
    int step,
    int tiles) {
    extern __shared__ int4 held_drafts[];
    const int lane = blockIdx.x / tiles, tile = blockIdx.x % tiles, row = rows[lane], root = roots[lane];
    const int* parents = branch_parents + (long long)lane * topk;
    const PageTable table = {cells, num_rows, pages_per_row, page_size};
    const Drafts drafts = {num_steps, topk, page_size, is_holey};
    move_held(
        fields[blockIdx.y], page_size, num_slots, topk * step, tile * blockDim.x + threadIdx.x, held_drafts,
        [&](int i) {
            const int branch = i / step, parent = parents[branch];
            if (parent == branch || parent < 0 || parent >= topk) return -1;
            return table.mapped_slot(row, drafts.position(root, parent, i % step));
        },
        [&](int i) { return table.mapped_slot(row, drafts.position(root, i / step, i % step)); });
}
