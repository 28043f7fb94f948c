// Attention of few queries over pages, which it reads in place, once for all rows of a KV head.
//
// A row is one query of one query head: row r of a KV head is query r / group, head r % group. A lane's cells are those
// of its pages up to `prefix`; a tree's own cells follow, at slots of their own. Blocks share a lane's cells by parts;
// `merge_attention` joins what they find, part after part. How many cells a lane has only the device knows, so the host
// chooses how many parts there may be, and parts without cells return at once.
//
// In a block, 16 rows are a tile. A warp takes one tile, and steps of 16 cells: the scores are queries times keys on
// tensor cores, their weights times values add to the result. No cell passes through shared memory: what a thread
// must hold of keys and values is chosen such that it reads 16 bytes that follow one another (see `load_keys`,
// `load_values`). The keys and values of the next step are under way while one is computed.

constexpr int ATTEND_WARPS = 4;
constexpr int CELLS = 16;       // of a warp's step; also the rows of a tile
constexpr int LEAST_PART = 64;  // the fewest cells that are worth a block; parts are multiples of it
constexpr int STEPS_AHEAD = 4;  // from what is computed to what is fetched into the L2 cache
constexpr unsigned WARP = 0xffffffffu;

__device__ __forceinline__ float no_score() { return __int_as_float((int)0xff800000); }

struct Attention {
    const void* q;          // 16 bits [T, kv_heads * group, D]
    const void* keys;       // 16 bits [num_slots, kv_heads, D]
    const void* values;     // 16 bits [num_slots, kv_heads, D]
    void* out;              // as q
    float* sums;            // [lanes, parts, kv_heads * row_blocks * rows, D]: results of parts, not yet divided
    float* stats;           // [lanes, parts, kv_heads * row_blocks * rows, 2]: greatest score, sum of the weights
    const int* pages;       // int32 [lanes, columns]
    const int* lens;        // int32 [lanes]: cells that the last query sees; of a tree, all see before its own
    const int* q_starts;    // int32 [lanes + 1]
    const int* own_slots;   // int32 [lanes, own_width]; or null, queries are causal
    const long long* sees;  // int64 [lanes, queries]: bit j is set if the query sees own cell j
    int num_slots;
    int page_size;
    int columns;
    int kv_heads;
    int group;      // query heads of a KV head
    int queries;    // the most of a lane
    int own_width;  // 0 .. 64
    int window;     // a causal query sees as many cells at most; 0 = all
    int tiles;      // tiles of a block: 1, 2 or 4; at most 2 for heads of 256
    int parts;
    float scale;    // of the scores, to base 2
};

// What the blocks of a lane agree on.
struct LaneCells {
    int num_queries;
    int length;  // cells that the last query sees; of a tree, its prefix
    int prefix;  // cells on pages
    int begin;   // the first cell that a query sees
    int end;     // behind the last one
    int part;    // cells of a part
    int used;    // parts that have cells, or the first

    __device__ __forceinline__ LaneCells(const Attention& a, int lane) {
        num_queries = min(max(a.q_starts[lane + 1] - a.q_starts[lane], 0), a.queries);
        length = max(a.lens[lane], 0);
        prefix = (int)min((long long)length, (long long)a.columns * a.page_size);
        begin = a.window > 0 ? min(max(length - num_queries + 1 - a.window, 0), prefix) : 0;
        end = prefix + a.own_width;
        const int cells = num_queries > 0 ? end - begin : 0;
        const int each = (cells + a.parts - 1) / a.parts;
        part = max((each + LEAST_PART - 1) / LEAST_PART * LEAST_PART, LEAST_PART);
        used = num_queries > 0 ? max((cells + part - 1) / part, 1) : 0;  // one writes zeros if there are no cells
    }

    // The slot of a cell; of the last one for those behind it, so that a step reads no memory that is not live.
    __device__ __forceinline__ int slot(const Attention& a, int lane, int cell, int last) const {
        cell = min(cell, last - 1);
        long long slot;
        if (cell < prefix) {
            const unsigned column = (unsigned)cell / (unsigned)a.page_size;
            const unsigned offset = (unsigned)cell - column * (unsigned)a.page_size;
            slot = (long long)__ldg(a.pages + (long long)lane * a.columns + column) * a.page_size + offset;
        } else {
            slot = __ldg(a.own_slots + (long long)lane * a.own_width + (cell - prefix));
        }
        return slot < 0 || slot >= a.num_slots ? 0 : (int)slot;
    }
};

// Which cells a row sees.
struct RowSight {
    int begin;
    int end;
    unsigned long long own_bits;  // own cells, behind `prefix`

    __device__ __forceinline__ RowSight(const Attention& a, const LaneCells& cells, int lane, int row) {
        const int query = row / a.group;
        begin = end = 0, own_bits = 0;
        if (query >= cells.num_queries) return;
        if (a.own_slots) {
            end = cells.prefix;
            own_bits = (unsigned long long)a.sees[(long long)lane * a.queries + query];
        } else {
            const int last = cells.length - cells.num_queries + query + 1;
            if (a.window > 0) begin = max(last - a.window, 0);
            end = min(last, cells.end);
        }
    }

    __device__ __forceinline__ bool sees(int cell, int prefix) const {
        const bool sees_paged = (cell >= begin) & (cell < end);
        return sees_paged | ((cell >= prefix) & (int)(own_bits >> (cell - prefix & 63) & 1));
    }
};

// Reads the keys of 16 cells as `b` of products with the queries. The columns of the head may come in any order, if the
// queries' do too: a thread takes columns 32 j + 8 t .. + 8, that is `b0` and `b1` of two products.
template <int D>
__device__ __forceinline__ void load_keys(
    uint4 (&loaded)[2][D / 32], const char* first, int token_bytes, int slot, int thread) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int cell_slot = __shfl_sync(WARP, slot, 8 * half + thread / 4);
        const uint4* row = (const uint4*)(first + (long long)cell_slot * token_bytes) + thread % 4;
#pragma unroll
        for (int j = 0; j < D / 32; j++) loaded[half][j] = __ldg(row + 4 * j);
    }
}

// Reads 64 columns of the values of 16 cells: of cells 2t, 2t + 1, 2t + 8 and 2t + 9, columns 8 g .. + 8. Column n of
// product i is then column 8 n + i of the head.
__device__ __forceinline__ void load_values(
    uint4 (&loaded)[4], const char* first, int token_bytes, int slot, int thread) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const int cell_slot = __shfl_sync(WARP, slot, 2 * (thread % 4) + (k & 1) + 8 * (k >> 1));
        const uint4* row = (const uint4*)(first + (long long)cell_slot * token_bytes) + thread / 4;
        loaded[k] = __ldg(row);
    }
}

__device__ __forceinline__ unsigned word_of(const uint4& words, int i) {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// One warp's result: rows g and g + 8 of its tile, N columns of the head.
template <int N>
struct Result {
    float sums[N / 8][4];  // as products give it
    float greatest[2];     // score, to base 2
    float weight[2];       // sum of the weights

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < N / 8; i++) sums[i][0] = sums[i][1] = sums[i][2] = sums[i][3] = 0.0f;
        greatest[0] = greatest[1] = no_score();
        weight[0] = weight[1] = 0.0f;
    }

    // Raises the greatest score; returns what weights are relative to.
    __device__ __forceinline__ void raise(int half, float score) {
        const float before = greatest[half];
        greatest[half] = max(before, score);
        const float factor = exp2f(before - base(half));
        weight[half] *= factor;
#pragma unroll
        for (int i = 0; i < N / 8; i++) sums[i][2 * half] *= factor, sums[i][2 * half + 1] *= factor;
    }

    __device__ __forceinline__ float base(int half) const {
        return greatest[half] == no_score() ? 0.0f : greatest[half];
    }
};

// Attends for one tile over every `step`-th step of cells from `first` on, below `last`; gives one slice of N columns.
template <typename T, int D, int N>
__device__ __forceinline__ void attend_cells(
    Result<N>& result, const Attention& a, const LaneCells& cells, int lane, int kv_head, int tile_row, int slice,
    int first, int step, int last, int sharer, int sharers) {
    constexpr int COLUMNS = D / 32, PARTS_OF_64 = N / 64;
    const int thread = threadIdx.x % 32, g = thread / 4, t = thread % 4;
    result.clear();
    if (first >= last) return;
    // Within these cells, every query of the lane sees all.
    const int seen_from = a.window > 0 ? max(cells.length - a.window, 0) : 0;
    const int seen_to = a.own_slots ? cells.prefix : min(cells.length - cells.num_queries + 1, cells.prefix);

    const int head_bytes = 2 * D, token_bytes = a.kv_heads * head_bytes;
    const char* const keys = (const char*)a.keys + kv_head * head_bytes;
    const char* const all_values = (const char*)a.values + kv_head * head_bytes;
    const char* const values = all_values + 2 * slice * N;
    const uint4* q_row[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = tile_row + g + 8 * half, query = row / a.group;
        const long long token = a.q_starts[lane] + query;
        const long long head = token * a.kv_heads * a.group + kv_head * a.group + row % a.group;
        q_row[half] = query < cells.num_queries ? (const uint4*)((const char*)a.q + head * head_bytes) + t : 0;
    }
    // Of heads of 256, registers hold no queries, and no keys and values of the next step.
    constexpr bool HOLDS_Q = D <= 128, READS_AHEAD = D <= 128;
    uint4 q[2][HOLDS_Q ? COLUMNS : 1];
    auto q_words = [&](int half, int j) { return q_row[half] ? __ldg(q_row[half] + 4 * j) : make_uint4(0, 0, 0, 0); };
    if (HOLDS_Q) {
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) q[0][HOLDS_Q ? j : 0] = q_words(0, j), q[1][HOLDS_Q ? j : 0] = q_words(1, j);
    }

    int slot = cells.slot(a, lane, first + thread % CELLS, last);
    uint4 key[2][COLUMNS], value[PARTS_OF_64][4];
    auto read_values = [&](int h) { load_values(value[h], values + 128 * h, token_bytes, slot, thread); };
    if (READS_AHEAD) {
        load_keys<D>(key, keys, token_bytes, slot, thread);
#pragma unroll
        for (int h = 0; h < PARTS_OF_64; h++) read_values(h);
        slot = cells.slot(a, lane, first + step + thread % CELLS, last);
    }
#pragma unroll 1
    for (int at = first; at < last; at += step) {
        if (!READS_AHEAD) load_keys<D>(key, keys, token_bytes, slot, thread);
        float scores[2][4] = {};
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            const uint4 low = HOLDS_Q ? q[0][HOLDS_Q ? j : 0] : q_words(0, j);
            const uint4 high = HOLDS_Q ? q[1][HOLDS_Q ? j : 0] : q_words(1, j);
            const unsigned even[4] = {low.x, high.x, low.y, high.y}, odd[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
            for (int n = 0; n < 2; n++) {
                T::multiply(scores[n], even, key[n][j].x, key[n][j].y);
                T::multiply(scores[n], odd, key[n][j].z, key[n][j].w);
            }
        }
        if (READS_AHEAD) load_keys<D>(key, keys, token_bytes, slot, thread);

        if (at < seen_from || at + CELLS > min(seen_to, last)) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const RowSight sight(a, cells, lane, tile_row + g + 8 * half);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int cell = at + 8 * (i / 2) + 2 * t + i % 2;
                    float& score = scores[i / 2][2 * half + i % 2];
                    if (cell >= last || !sight.sees(cell, cells.prefix)) score = no_score();
                }
            }
        }
        float best[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float low = max(scores[0][2 * half], scores[0][2 * half + 1]);
            best[half] = a.scale * max(low, max(scores[1][2 * half], scores[1][2 * half + 1]));
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            best[half] = max(best[half], __shfl_xor_sync(WARP, best[half], 1));
            best[half] = max(best[half], __shfl_xor_sync(WARP, best[half], 2));
        }
        if (__any_sync(WARP, best[0] > result.greatest[0] || best[1] > result.greatest[1])) {
            result.raise(0, best[0]);
            result.raise(1, best[1]);
        }
        const float base[2] = {result.base(0), result.base(1)};
#pragma unroll
        for (int n = 0; n < 2; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                scores[n][i] = exp2f(fmaf(scores[n][i], a.scale, -base[i >> 1]));
                result.weight[i >> 1] += scores[n][i];
            }
        }
        const unsigned weights[4] = {
            T::pack(scores[0][0], scores[0][1]), T::pack(scores[0][2], scores[0][3]),
            T::pack(scores[1][0], scores[1][1]), T::pack(scores[1][2], scores[1][3])};
#pragma unroll
        for (int h = 0; h < PARTS_OF_64; h++) {
            if (!READS_AHEAD) read_values(h);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const unsigned order = i % 2 ? 0x7632 : 0x5410;  // the high or the low halves of two words
                const unsigned b0 = __byte_perm(word_of(value[h][0], i / 2), word_of(value[h][1], i / 2), order);
                const unsigned b1 = __byte_perm(word_of(value[h][2], i / 2), word_of(value[h][3], i / 2), order);
                T::multiply(result.sums[8 * h + i], weights, b0, b1);
            }
            if (READS_AHEAD) read_values(h);
        }
        slot = cells.slot(a, lane, at + (READS_AHEAD ? 2 : 1) * step + thread % CELLS, last);
        // Warps that read the same cells have few of them under way, so they fetch more, a share each.
        if (sharers > 1 && at + STEPS_AHEAD * step < last) {
            constexpr int LINES = D / 64;  // of 128 bytes, of a cell's keys
            const int cell = at + STEPS_AHEAD * step + thread % CELLS;
            const long long from = (long long)cells.slot(a, lane, cell, last) * token_bytes;
            for (int line = 2 * sharer + thread / CELLS; line < 2 * LINES; line += 2 * sharers) {
                fetch_line((line < LINES ? keys : all_values) + from + line % LINES * 128);
            }
        }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        result.weight[half] += __shfl_xor_sync(WARP, result.weight[half], 1);
        result.weight[half] += __shfl_xor_sync(WARP, result.weight[half], 2);
    }
}

// Shared memory to join warps in: two results of a warp.
constexpr int held_floats(int dim) { return 2 * 32 * ((dim < 128 ? dim : 128) / 2 + 4); }

// Joins the results of warps that share a tile and a slice, in the order of the warps, in the first of them. Warp w
// works for place w % `places`. Every thread of the block must call it.
template <int N>
__device__ __forceinline__ void join_warps(Result<N>& result, int places, float* held) {
    const int thread = threadIdx.x % 32, warp = threadIdx.x / 32;
    float(*const cells)[32] = (float(*)[32])held + warp % places * (N / 2 + 4);
    for (int other = 1; other < ATTEND_WARPS / places; other++) {
        if (warp / places == other) {
#pragma unroll
            for (int i = 0; i < N / 2; i++) cells[i][thread] = result.sums[i / 4][i % 4];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                cells[N / 2 + half][thread] = result.greatest[half];
                cells[N / 2 + 2 + half][thread] = result.weight[half];
            }
        }
        __syncthreads();
        if (warp < places) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float score = cells[N / 2 + half][thread];
                result.raise(half, score);
                const float factor = exp2f(score - result.base(half));
                result.weight[half] += factor * cells[N / 2 + 2 + half][thread];
#pragma unroll
                for (int i = 0; i < N / 8; i++) {
                    result.sums[i][2 * half] += factor * cells[4 * i + 2 * half][thread];
                    result.sums[i][2 * half + 1] += factor * cells[4 * i + 2 * half + 1][thread];
                }
            }
        }
        __syncthreads();
    }
}

template <typename T, int D>
__device__ __forceinline__ void attend_part(const Attention& a, float* held) {
    const int lane = blockIdx.z, part = blockIdx.y, rows = CELLS * a.tiles;
    const LaneCells cells(a, lane);
    if (part >= cells.used) return;
    const int blocks = (a.queries * a.group + rows - 1) / rows;  // of a KV head
    const int kv_head = blockIdx.x / blocks, first_row = blockIdx.x % blocks * rows;
    const int last_row = min(first_row + rows, cells.num_queries * a.group);
    if (first_row >= last_row) return;
    // Registers hold the results of 128 columns: two warps share a head of 256, and both compute its scores.
    constexpr int N = D < 128 ? D : 128;
    const int warp = threadIdx.x / 32, thread = threadIdx.x % 32, places = a.tiles * (D / N);
    const int tile_row = first_row + CELLS * (warp % a.tiles), slice = warp % places / a.tiles;
    const int turns = ATTEND_WARPS / places;
    const int begin = cells.begin + part * cells.part;
    const int last = tile_row < last_row ? min(begin + cells.part, cells.end) : begin;  // a tile without rows has none
    Result<N> result;
    attend_cells<T, D, N>(
        result, a, cells, lane, kv_head, tile_row, slice, begin + CELLS * (warp / places), CELLS * turns, last,
        warp % places, places);
    if (turns > 1) join_warps<N>(result, places, held);
    if (warp >= places) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = tile_row + thread / 4 + 8 * half;
        if (row >= last_row) continue;
        // A thread holds 16 columns of each 64, side by side.
        const int column = slice * N + 16 * (thread % 4);
        if (cells.used > 1) {
            const long long at =
                ((long long)lane * a.parts + part) * gridDim.x * rows + (long long)blockIdx.x * rows + row - first_row;
            if (slice == 0 && thread % 4 == 0) {
                a.stats[2 * at] = result.greatest[half];
                a.stats[2 * at + 1] = result.weight[half];
            }
            float4* const to = (float4*)(a.sums + at * D + column);
#pragma unroll
            for (int h = 0; h < N / 64; h++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int n = 8 * h + i % 2 * 4, k = 2 * half + i / 2;
                    to[16 * h + i] = make_float4(
                        result.sums[n][k], result.sums[n + 1][k], result.sums[n + 2][k], result.sums[n + 3][k]);
                }
            }
        } else {
            const float factor = result.weight[half] > 0.0f ? 1.0f / result.weight[half] : 0.0f;
            const long long token = a.q_starts[lane] + row / a.group;
            const long long head = token * a.kv_heads * a.group + kv_head * a.group + row % a.group;
            uint4* const to = (uint4*)((char*)a.out + 2 * (head * D + column));
#pragma unroll
            for (int h = 0; h < N / 64; h++) {
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const int n = 8 * h, k = 2 * half + i;
                    to[8 * h + i] = make_uint4(
                        T::pack(result.sums[n][k] * factor, result.sums[n + 1][k] * factor),
                        T::pack(result.sums[n + 2][k] * factor, result.sums[n + 3][k] * factor),
                        T::pack(result.sums[n + 4][k] * factor, result.sums[n + 5][k] * factor),
                        T::pack(result.sums[n + 6][k] * factor, result.sums[n + 7][k] * factor));
                }
            }
        }
    }
}

// The parameters of both kernels; see `Attention`.
#define ATTENTION_PARAMETERS                                                                                          \
    const void *q, const void *keys, const void *values, void *out, float *sums, float *stats, const int *pages,      \
        const int *lens, const int *q_starts, const int *own_slots, const long long *sees, int num_slots,             \
        int page_size, int columns, int kv_heads, int group, int queries, int own_width, int window, int tiles,       \
        int parts, float scale, int is_float16
#define ATTENTION                                                                                                     \
    { q, keys, values, out, sums, stats, pages, lens, q_starts, own_slots, sees, num_slots, page_size, columns,       \
      kv_heads, group, queries, own_width, window, tiles, parts, scale }

// Attends over a part of each lane's cells, for heads of 64, 128 or 256 columns.
//
// grid (kv_heads * row blocks, parts, lanes), block 128.
extern "C" __global__ void __launch_bounds__(128, 2) attend_64_kernel(ATTENTION_PARAMETERS) {
    __shared__ float held[held_floats(64)];
    const Attention a = ATTENTION;
    is_float16 ? attend_part<Float16, 64>(a, held) : attend_part<Bfloat16, 64>(a, held);
}

extern "C" __global__ void __launch_bounds__(128, 2) attend_128_kernel(ATTENTION_PARAMETERS) {
    __shared__ float held[held_floats(128)];
    const Attention a = ATTENTION;
    is_float16 ? attend_part<Float16, 128>(a, held) : attend_part<Bfloat16, 128>(a, held);
}

extern "C" __global__ void __launch_bounds__(128, 2) attend_256_kernel(ATTENTION_PARAMETERS) {
    __shared__ float held[held_floats(256)];
    const Attention a = ATTENTION;
    is_float16 ? attend_part<Float16, 256>(a, held) : attend_part<Bfloat16, 256>(a, held);
}

// Joins the parts of each lane. A lane of one part is done already. A thread takes four columns of a head, and every
// `groups`-th part; the groups' results are added in their order.
//
// grid (heads over the block, queries, lanes), block a multiple of head_dim / 4 * groups, at most 256.
extern "C" __global__ void __launch_bounds__(256) merge_attention_kernel(
    ATTENTION_PARAMETERS, int head_dim, int groups) {
    __shared__ float4 group_sums[256];
    __shared__ float2 group_stats[256];
    const Attention a = ATTENTION;
    const int lane = blockIdx.z, query = blockIdx.y, quads = head_dim / 4, heads = kv_heads * group;
    const LaneCells cells(a, lane);
    if (query >= cells.num_queries || cells.used == 1) return;
    const int threads = quads * groups, quad = threadIdx.x % quads, turn = threadIdx.x / quads % groups;
    const int wanted = (int)(blockIdx.x * (blockDim.x / threads) + threadIdx.x / threads);
    const int head = min(wanted, heads - 1);
    const int rows = CELLS * tiles, blocks = (queries * group + rows - 1) / rows;
    const int row = query * group + head % group;
    const long long stride = (long long)kv_heads * blocks * rows;  // rows of a part
    const long long first = (long long)lane * parts * stride + (long long)(head / group) * blocks * rows + row;
    float greatest = no_score();
#pragma unroll 8
    for (int part = turn; part < cells.used; part += groups) {
        greatest = max(greatest, stats[2 * (first + part * stride)]);
    }
    float base = greatest == no_score() ? 0.0f : greatest, weight = 0.0f;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    auto add = [&](float score, float of_weight, const float4& held) {
        const float factor = exp2f(score - base);
        weight += factor * of_weight;
        sum.x += factor * held.x, sum.y += factor * held.y, sum.z += factor * held.z, sum.w += factor * held.w;
    };
#pragma unroll 8
    for (int part = turn; part < cells.used; part += groups) {
        const long long index = first + part * stride;
        add(stats[2 * index], stats[2 * index + 1], ((const float4*)(sums + index * head_dim))[quad]);
    }
    if (groups > 1) {
        group_sums[threadIdx.x] = sum;
        group_stats[threadIdx.x] = make_float2(greatest, weight);
        __syncthreads();
        if (turn > 0) return;
        for (int i = 1; i < groups; i++) greatest = max(greatest, group_stats[threadIdx.x + i * quads].x);
        base = greatest == no_score() ? 0.0f : greatest;
        sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f), weight = 0.0f;
        for (int i = 0; i < groups; i++) {
            const int from = threadIdx.x + i * quads;
            add(group_stats[from].x, group_stats[from].y, group_sums[from]);
        }
    }
    if (wanted > head) return;
    const float factor = weight > 0.0f ? 1.0f / weight : 0.0f;
    const long long token = q_starts[lane] + query;
    uint2* const to = (uint2*)((char*)out + 2 * ((token * heads + head) * head_dim)) + quad;
    const float x = sum.x * factor, y = sum.y * factor, z = sum.z * factor, w = sum.w * factor;
    *to = is_float16 ? make_uint2(Float16::pack(x, y), Float16::pack(z, w))
                     : make_uint2(Bfloat16::pack(x, y), Bfloat16::pack(z, w));
}
