// Recurrent layers by lanes: each lane goes on from the state in a slot, by the length that the device has.
//
// A lane's sequence is the recorded inputs of its row from position `begin` on, and after them its own tokens from its
// root on. How many records count, only the device knows: `root - begin`. The tokens below `end` are folded: the state
// after them goes into slot `dst`. The state after later ones is kept nowhere. If the own tokens are a tree, a mask
// says which nodes each node sees; parents precede children.
//
//     begin ---- end ---- root ---- root + N
//     src --------> dst
//
// Arrays of tokens have the records of all lanes first (num_records), then the lanes' own tokens (num_tokens).

// A lane's numbers, int32 each; `StateLanes` in the package builds them.
struct LaneSpan {
    int src;           // slot to read; slot 0 is zeros
    int dst;           // slot to write; 0: nothing is folded
    int begin;         // position after the state in `src`
    int end;           // position after the state in `dst`
    int first_record;  // of the lane's records, as many as its length may need
    int records;
    int first_token;  // of its own tokens
    int tokens;
    int first_seen;  // of its tree's mask, [tokens, tokens]; -1: the tokens are a chain
};

struct LaneBatch {
    const LaneSpan* spans;   // [lanes]
    const int* roots;        // int32 [lanes]: position of each lane's first own token
    const char* seen;        // bool [num_seen]: the masks of trees, or null
    long long num_seen;
    int num_records;
    int num_tokens;
    int num_slots;  // slot 0 included
};

// One lane, with every index inside its array.
struct StateLane {
    int src, dst;
    int past;    // records that count
    int folded;  // elements of the sequence that are folded
    int len;     // elements of the sequence
    long long first_record, first_token;
    const char* seen;  // null: a chain
    int nodes;         // width of the mask

    __device__ __forceinline__ StateLane(const LaneBatch& batch, int lane) {
        const LaneSpan span = batch.spans[lane];
        first_record = min(max(span.first_record, 0), batch.num_records);
        first_token = min(max(span.first_token, 0), batch.num_tokens);
        const int records = min(max(span.records, 0), batch.num_records - (int)first_record);
        nodes = min(max(span.tokens, 0), batch.num_tokens - (int)first_token);
        past = (int)min(max((long long)batch.roots[lane] - span.begin, 0ll), (long long)records);
        len = past + nodes;
        src = span.src > 0 && span.src < batch.num_slots ? span.src : 0;
        dst = span.dst > 0 && span.dst < batch.num_slots ? span.dst : 0;
        folded = dst ? (int)min(max((long long)span.end - span.begin, 0ll), (long long)len) : 0;
        const bool has_mask = batch.seen && span.first_seen >= 0 &&
                              span.first_seen + (long long)nodes * nodes <= batch.num_seen;
        seen = has_mask ? batch.seen + span.first_seen : nullptr;
        first_token += batch.num_records;
    }

    // The place of an element of the sequence in an array of tokens.
    __device__ __forceinline__ long long place(int element) const {
        return element < past ? first_record + element : first_token + (element - past);
    }

    // Whether own token `node` sees the own token `other` before it.
    __device__ __forceinline__ bool sees(int node, int other) const {
        return seen ? seen[(long long)node * nodes + other] != 0 : true;
    }
};

// Numbers of a type that only the launch knows: 0 = float32, 1 = float16, 2 = bfloat16.
__device__ __forceinline__ float load_stored(const void* numbers, long long at, int type) {
    if (type == 0) return ((const float*)numbers)[at];
    const unsigned bits = ((const unsigned short*)numbers)[at];
    return type == 1 ? StoredFloat16::value(bits) : StoredBfloat16::value(bits);
}

__device__ __forceinline__ void store_rounded(void* numbers, long long at, float value, int type) {
    if (type == 0) ((float*)numbers)[at] = value;
    else {
        const unsigned bits = type == 1 ? StoredFloat16::bits(value) : StoredBfloat16::bits(value);
        ((unsigned short*)numbers)[at] = (unsigned short)bits;
    }
}

// The newest inputs of a channel, the newest last.
struct ConvWindow {
    static constexpr int SIZE = 8;
    float inputs[SIZE];

    __device__ __forceinline__ void push(float input) {
#pragma unroll
        for (int i = 0; i + 1 < SIZE; i++) inputs[i] = inputs[i + 1];
        inputs[SIZE - 1] = input;
    }
};

// Convolves the sequence of each lane along time, each channel alone, as `causal_conv1d` without an activation.
// Products are added from the oldest input on, and the bias last. Records that do not count get no output.
//
// grid (channels / 128, lanes), block 128. width and state_width are at most 8.
extern "C" __global__ void convolve_lanes_kernel(
    void* out,           // [num_records + num_tokens, channels]
    const void* inputs,  // token i from number i * stride on, [channels]
    const void* weight,  // [channels, width], of the inputs' type
    const void* bias,    // [channels], likewise; or null
    void* state,         // [num_slots, channels, state_width]: the last inputs before a position
    const LaneSpan* spans, const int* roots, const char* seen, long long num_seen, long long stride, int num_records,
    int num_tokens, int num_slots, int channels, int width, int state_width, int type, int state_type) {
    constexpr int SIZE = ConvWindow::SIZE;
    const int channel = blockIdx.x * blockDim.x + threadIdx.x;
    if (channel >= channels) return;
    const StateLane lane({spans, roots, seen, num_seen, num_records, num_tokens, num_slots}, blockIdx.y);
    float taps[SIZE];
    ConvWindow window, root;
    const long long read = ((long long)lane.src * channels + channel) * state_width;
    const long long written = ((long long)lane.dst * channels + channel) * state_width;
#pragma unroll
    for (int i = 0; i < SIZE; i++) {
        const int tap = i - (SIZE - width), column = i - (SIZE - state_width);
        taps[i] = tap < 0 ? 0.0f : load_stored(weight, (long long)channel * width + tap, type);
        window.inputs[i] = column < 0 ? 0.0f : load_stored(state, read + column, state_type);
    }
    const float added = bias ? load_stored(bias, channel, type) : 0.0f;
    root = window;
    for (int element = 0; element <= lane.len; element++) {
        if (element == lane.folded && lane.dst) {
#pragma unroll
            for (int i = 0; i < SIZE; i++) {
                const int column = i - (SIZE - state_width);
                if (column >= 0) store_rounded(state, written + column, window.inputs[i], state_type);
            }
        }
        if (element == lane.len) break;
        const int node = element - lane.past;
        if (node == 0) root = window;
        if (node > 0 && !lane.sees(node, node - 1)) {  // not the last node's child: its path from the root on
            window = root;
            for (int other = 0; other < node; other++) {
                if (lane.sees(node, other)) {
                    window.push(load_stored(inputs, (lane.first_token + other) * stride + channel, type));
                }
            }
        }
        const long long place = lane.place(element);
        window.push(load_stored(inputs, place * stride + channel, type));
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
            const float product = __fmul_rn(window.inputs[i], taps[i]);
            if (i == SIZE - width) sum = product;
            else if (i > SIZE - width) sum = __fadd_rn(sum, product);
        }
        if (bias) sum = __fadd_rn(sum, added);
        store_rounded(out, place * channels + channel, sum, type);
    }
}

// Returns the sum of `value` over a warp, in every thread.
__device__ __forceinline__ float warp_sum(float value) {
    for (int offset = 16; offset > 0; offset /= 2) {
        value = __fadd_rn(value, __shfl_xor_sync(0xffffffffu, value, offset));
    }
    return value;
}

// What one launch scans. A head's state is a matrix: its rows are dimensions of the keys, its columns of the values.
struct StateScan {
    static constexpr int COLUMNS = 4;  // of a warp
    float* out;                        // [num_records + num_tokens, heads, columns]
    const void* q;                     // token i from number i * q_stride on, [key_heads, rows]
    const void* k;                     // likewise
    const void* v;                     // token i from number i * v_stride on, [heads, columns]
    const float* decay;                // [num_records + num_tokens, heads]: factor of the state
    const float* beta;                 // likewise: factor of what is added
    void* state;                       // [num_slots, heads, rows * columns]
    long long q_stride, k_stride, v_stride;
    int heads, key_heads, rows, columns;
    int row_stride, column_stride;  // of a head's state
    int is_delta;                   // the value that the state has for a key is taken off before a new one is added
    int is_normed;                  // queries and keys are divided by their lengths
    float scale;                    // factor of the queries
    int type, state_type;

    // Reads rows thread, thread + 32, ... of a query or key.
    template <int R>
    __device__ __forceinline__ void load_key(
        const void* numbers, long long first, float factor, float (&key)[R]) const {
        const int thread = threadIdx.x % 32;
        float squares = 0.0f;
#pragma unroll
        for (int i = 0; i < R; i++) {
            const int row = thread + 32 * i;
            key[i] = row < rows ? load_stored(numbers, first + row, type) : 0.0f;
            squares = __fadd_rn(squares, __fmul_rn(key[i], key[i]));
        }
        if (is_normed) {
            const float inverse = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(warp_sum(squares), 1e-6f)));
#pragma unroll
            for (int i = 0; i < R; i++) key[i] = __fmul_rn(key[i], inverse);
        }
#pragma unroll
        for (int i = 0; i < R; i++) key[i] = __fmul_rn(key[i], factor);
    }

    // Returns key * matrix, for one column.
    template <int R>
    __device__ __forceinline__ static float product(
        const float (&matrix)[R][COLUMNS], const float (&key)[R], int column) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < R; i++) sum = __fadd_rn(sum, __fmul_rn(matrix[i][column], key[i]));
        return warp_sum(sum);
    }

    template <int R>
    __device__ __forceinline__ static void add(
        float (&matrix)[R][COLUMNS], const float (&key)[R], const float (&value)[COLUMNS]) {
#pragma unroll
        for (int i = 0; i < R; i++) {
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) matrix[i][c] = __fadd_rn(matrix[i][c], __fmul_rn(key[i], value[c]));
        }
    }

    template <int R>
    __device__ __forceinline__ static void fade(float (&matrix)[R][COLUMNS], float factor) {
#pragma unroll
        for (int i = 0; i < R; i++) {
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) matrix[i][c] = __fmul_rn(matrix[i][c], factor);
        }
    }

    // Scans a lane's sequence, for one head and the COLUMNS columns of this warp. `added` is shared, of this warp
    // alone: what each node added, [nodes, COLUMNS].
    template <int R>
    __device__ __forceinline__ void run(const StateLane& lane, int head, int first_column, float* added) const {
        const int thread = threadIdx.x % 32, key_head = head / (heads / key_heads);
        const long long head_size = (long long)rows * columns;
        float matrix[R][COLUMNS], root[R][COLUMNS];
        const long long read = ((long long)lane.src * heads + head) * head_size;
        const long long written = ((long long)lane.dst * heads + head) * head_size;
#pragma unroll
        for (int i = 0; i < R; i++) {
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                const int row = thread + 32 * i, column = first_column + c;
                const bool is_inside = row < rows && column < columns;
                const long long at = read + (long long)row * row_stride + (long long)column * column_stride;
                root[i][c] = matrix[i][c] = is_inside ? load_stored(state, at, state_type) : 0.0f;
            }
        }
        for (int element = 0; element <= lane.len; element++) {
            if (element == lane.folded && lane.dst) {
#pragma unroll
                for (int i = 0; i < R; i++) {
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) {
                        const int row = thread + 32 * i, column = first_column + c;
                        const long long at = written + (long long)row * row_stride + (long long)column * column_stride;
                        if (row < rows && column < columns) store_rounded(state, at, matrix[i][c], state_type);
                    }
                }
            }
            if (element == lane.len) break;
            const int node = element - lane.past;
            float key[R], value[COLUMNS];
            if (node == 0 && lane.seen) {
#pragma unroll
                for (int i = 0; i < R; i++) {
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) root[i][c] = matrix[i][c];
                }
            }
            if (node > 0 && !lane.sees(node, node - 1)) {  // not the last node's child: its path from the root on
#pragma unroll
                for (int i = 0; i < R; i++) {
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) matrix[i][c] = root[i][c];
                }
                for (int other = 0; other < node; other++) {
                    if (!lane.sees(node, other)) continue;
                    const long long place = lane.first_token + other;
                    fade(matrix, decay[place * heads + head]);
                    load_key(k, place * k_stride + (long long)key_head * rows, 1.0f, key);
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) value[c] = added[other * COLUMNS + c];
                    add(matrix, key, value);
                }
            }
            const long long place = lane.place(element);
            fade(matrix, decay[place * heads + head]);
            load_key(k, place * k_stride + (long long)key_head * rows, 1.0f, key);
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                const int column = first_column + c;
                value[c] = column < columns
                               ? load_stored(v, place * v_stride + (long long)head * columns + column, type)
                               : 0.0f;
                if (is_delta) value[c] = __fsub_rn(value[c], product(matrix, key, c));
                value[c] = __fmul_rn(value[c], beta[place * heads + head]);
            }
            add(matrix, key, value);
            if (node < 0) continue;
            if (lane.seen) {
                if (thread < COLUMNS) {
#pragma unroll
                    for (int c = 0; c < COLUMNS; c++) {
                        if (c == thread) added[node * COLUMNS + c] = value[c];
                    }
                }
                __syncwarp(0xffffffffu);  // later nodes read it; shuffles do not order memory
            }
            load_key(q, place * q_stride + (long long)key_head * rows, scale, key);
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
                const float sum = product(matrix, key, c);
                const int column = first_column + c;
                if (thread == 0 && column < columns) out[(place * heads + head) * columns + column] = sum;
            }
        }
    }
};

// Runs the recurrence of a gated delta rule or of Mamba-2 over the sequence of each lane, one token at a time:
//
//     S = decay * S;   u = beta * (v - k S), or beta * v;   S = S + outer(k, u);   out = scale * q S
//
// A node of a tree goes on from its parent's state: what its ancestors added is added again to the root's state, so
// it computes what a chain of its path would, to the bit. Records get no output.
//
// grid (columns / 16, heads, lanes), block 128. Shared memory: 64 bytes for each node of the largest tree.
// rows is at most 256. Types as in `load_stored`.
extern "C" __global__ void __launch_bounds__(128) scan_lanes_kernel(
    float* out, const void* q, const void* k, const void* v, const float* decay, const float* beta, void* state,
    const LaneSpan* spans, const int* roots, const char* seen, long long num_seen, long long q_stride,
    long long k_stride, long long v_stride, int num_records, int num_tokens, int num_slots, int heads, int key_heads,
    int rows, int columns, int row_stride, int column_stride, int is_delta, int is_normed, float scale, int type,
    int state_type, int most_nodes) {
    extern __shared__ float added_by_nodes[];
    const StateScan scan = {out,       q,    k,       v,          decay,         beta,     state,     q_stride,
                            k_stride,  v_stride, heads, key_heads, rows,          columns,  row_stride, column_stride,
                            is_delta,  is_normed, scale, type,     state_type};
    const int warp = threadIdx.x / 32, first_column = (blockIdx.x * (blockDim.x / 32) + warp) * StateScan::COLUMNS;
    if (first_column >= columns) return;
    StateLane lane({spans, roots, seen, num_seen, num_records, num_tokens, num_slots}, blockIdx.z);
    if (lane.nodes > most_nodes) lane.seen = nullptr;  // no room for what its nodes add
    float* added = added_by_nodes + (long long)warp * most_nodes * StateScan::COLUMNS;
    if (rows <= 32) scan.run<1>(lane, blockIdx.y, first_column, added);
    else if (rows <= 64) scan.run<2>(lane, blockIdx.y, first_column, added);
    else if (rows <= 128) scan.run<4>(lane, blockIdx.y, first_column, added);
    else scan.run<8>(lane, blockIdx.y, first_column, added);
}
