// The small steps of a decoder layer, each in one launch.

// How numbers of a type are stored, in 4 or 2 bytes: `value` reads one by its bits, `bits` rounds to the nearest.
struct StoredFloat32 {
    static constexpr int SIZE = 4;
    __device__ __forceinline__ static float value(unsigned bits) { return __uint_as_float(bits); }
    __device__ __forceinline__ static unsigned bits(float value) { return __float_as_uint(value); }
};

struct StoredBfloat16 {
    static constexpr int SIZE = 2;
    __device__ __forceinline__ static float value(unsigned bits) { return __uint_as_float(bits << 16); }
    __device__ __forceinline__ static unsigned bits(float value) { return Bfloat16::pack(value, 0.0f) & 0xffffu; }
};

struct StoredFloat16 {
    static constexpr int SIZE = 2;
    __device__ __forceinline__ static float value(unsigned bits) { return Float16::unpack(bits); }
    __device__ __forceinline__ static unsigned bits(float value) { return Float16::pack(value, 0.0f) & 0xffffu; }
};

// Reads N numbers that follow one another from number `first` on; 16 bytes at a time if they are several.
template <typename Type, int N>
__device__ __forceinline__ void load_numbers(const void* numbers, long long first, float (&values)[N]) {
    const char* bytes = (const char*)numbers + first * Type::SIZE;
    if constexpr (N == 1) {
        values[0] = Type::value(Type::SIZE == 4 ? *(const unsigned*)bytes : *(const unsigned short*)bytes);
    } else {
        constexpr int WORDS = N * Type::SIZE / 4, OF_WORD = 4 / Type::SIZE;
        unsigned words[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; i += 4) {
            const int4 four = ((const int4*)bytes)[i / 4];
            words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            const unsigned word = words[i / OF_WORD];
            values[i] = Type::value(Type::SIZE == 4 ? word : word >> 16 * (i % 2) & 0xffffu);
        }
    }
}

// Writes them.
template <typename Type, int N>
__device__ __forceinline__ void store_numbers(void* numbers, long long first, const float (&values)[N]) {
    char* bytes = (char*)numbers + first * Type::SIZE;
    if constexpr (N == 1) {
        if (Type::SIZE == 4) *(unsigned*)bytes = Type::bits(values[0]);
        else *(unsigned short*)bytes = (unsigned short)Type::bits(values[0]);
    } else {
        constexpr int WORDS = N * Type::SIZE / 4, OF_WORD = 4 / Type::SIZE;
        unsigned words[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            words[i] = Type::bits(values[OF_WORD * i]);
            if constexpr (Type::SIZE == 2) words[i] |= Type::bits(values[OF_WORD * i + 1]) << 16;
        }
#pragma unroll
        for (int i = 0; i < WORDS; i += 4) {
            const int4 four = {(int)words[i], (int)words[i + 1], (int)words[i + 2], (int)words[i + 3]};
            ((int4*)bytes)[i / 4] = four;
        }
    }
}

// The heads of one token, before and after their rotation.
struct Rotation {
    void* q_out;      // [n, q_heads, dim]
    void* k_out;      // [n, k_heads, dim]
    const void* q;    // token i's heads from number i * q_stride on, [q_heads, dim]
    const void* k;    // likewise
    const void* cos;  // [n, width]
    const void* sin;  // [n, width]
    long long q_stride;
    long long k_stride;
    int q_heads;
    int k_heads;
    int dim;
    int rotary_dim;  // even, at most `dim`; dimensions from there on are copied
    int width;       // rotary_dim, or half of it if both halves have the same angles
    int is_rounded;  // products are rounded before they are added

    template <typename Type>
    __device__ __forceinline__ float product(float a, float b) const {
        const float exact = __fmul_rn(a, b);
        return is_rounded ? Type::value(Type::bits(exact)) : exact;
    }

    // Rotates one token with all threads of the block, N dimensions of both halves at a time.
    template <typename Type, typename Angle, int N>
    __device__ __forceinline__ void run(long long token) const {
        const int half = rotary_dim / 2, pairs = half / N, columns = pairs + (dim - rotary_dim) / N;
        for (int item = threadIdx.x; item < (q_heads + k_heads) * columns; item += blockDim.x) {
            const int head = item / columns, column = item - head * columns;
            const bool is_query = head < q_heads;
            const int number = is_query ? head : head - q_heads;
            const void* from = is_query ? q : k;
            void* to = is_query ? q_out : k_out;
            const long long read = token * (is_query ? q_stride : k_stride) + (long long)number * dim;
            const long long written = (token * (is_query ? q_heads : k_heads) + number) * dim;
            float low[N], high[N];
            if (column >= pairs) {
                const int at = rotary_dim + (column - pairs) * N;
                load_numbers<Type>(from, read + at, low);
                store_numbers<Type>(to, written + at, low);
                continue;
            }
            const int at = column * N, other = at + half;
            const long long low_angle = token * width + at, high_angle = low_angle + (width == half ? 0 : half);
            float low_cos[N], low_sin[N], high_cos[N], high_sin[N];
            load_numbers<Type>(from, read + at, low);
            load_numbers<Type>(from, read + other, high);
            load_numbers<Angle>(cos, low_angle, low_cos);
            load_numbers<Angle>(sin, low_angle, low_sin);
            load_numbers<Angle>(cos, high_angle, high_cos);
            load_numbers<Angle>(sin, high_angle, high_sin);
#pragma unroll
            for (int i = 0; i < N; i++) {
                const float a = low[i], b = high[i];
                low[i] = __fadd_rn(product<Type>(a, low_cos[i]), product<Type>(-b, low_sin[i]));
                high[i] = __fadd_rn(product<Type>(b, high_cos[i]), product<Type>(a, high_sin[i]));
            }
            store_numbers<Type>(to, written + at, low);
            store_numbers<Type>(to, written + other, high);
        }
    }

    template <typename Type>
    __device__ __forceinline__ void run_type(long long token, bool is_wide, bool has_float_angles) const {
        constexpr int MANY = 16 / Type::SIZE;
        if (has_float_angles) {
            is_wide ? run<Type, StoredFloat32, MANY>(token) : run<Type, StoredFloat32, 1>(token);
        } else {
            is_wide ? run<Type, Type, MANY>(token) : run<Type, Type, 1>(token);
        }
    }
};

// Rotates the queries and keys of n tokens by their angles (RoPE): dimensions d and d + rotary_dim / 2 of a head are a
// pair. Steps and their order are those of transformers' rotate_half, so the results are equal to the bit.
//
// grid (n), any block. Types: 0 = float32, 1 = float16, 2 = bfloat16; of the angles, that of the heads or float32.
// is_wide: sizes and strides are multiples of 16 bytes, and all arrays begin at one.
extern "C" __global__ void rotate_heads_kernel(
    void* q_out, void* k_out, const void* q, const void* k, const void* cos, const void* sin, long long q_stride,
    long long k_stride, int q_heads, int k_heads, int dim, int rotary_dim, int width, int is_rounded, int type,
    int angle_type, int is_wide) {
    const Rotation rotation = {q_out,   k_out,   q,   k,          cos,   sin,       q_stride, k_stride,
                               q_heads, k_heads, dim, rotary_dim, width, is_rounded};
    const long long token = blockIdx.x;
    const bool has_float_angles = angle_type == 0;
    switch (type) {
        case 0: rotation.run_type<StoredFloat32>(token, is_wide, false); break;
        case 1: rotation.run_type<StoredFloat16>(token, is_wide, has_float_angles); break;
        default: rotation.run_type<StoredBfloat16>(token, is_wide, has_float_angles);
    }
}

// Writes silu(gate) * up in one row, N numbers of a thread at a time. Both results are rounded, as torch rounds them.
template <typename Type, int N>
__device__ __forceinline__ void gate_row(
    void* out, const void* gate, const void* up, long long gate_first, long long up_first, int width) {
    const long long first = (long long)blockIdx.x * width;
    for (int at = (blockIdx.y * blockDim.x + threadIdx.x) * N; at < width; at += gridDim.y * blockDim.x * N) {
        float gates[N], ups[N];
        load_numbers<Type>(gate, gate_first + at, gates);
        load_numbers<Type>(up, up_first + at, ups);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float x = gates[i], silu = __fdiv_rn(x, __fadd_rn(1.0f, expf(-x)));
            gates[i] = __fmul_rn(Type::value(Type::bits(silu)), ups[i]);
        }
        store_numbers<Type>(out, first + at, gates);
    }
}

// Multiplies rows by the silu of others, as the gated layers of most models do.
//
// grid (rows, any), any block. Types and is_wide as above.
extern "C" __global__ void gated_silu_kernel(
    void* out,         // [n, width]
    const void* gate,  // row i from number i * gate_stride on, [width]
    const void* up,    // likewise
    long long gate_stride, long long up_stride, int width, int type, int is_wide) {
    const long long gate_first = blockIdx.x * gate_stride, up_first = blockIdx.x * up_stride;
    const auto run = [&](auto stored) {
        typedef decltype(stored) Type;
        is_wide ? gate_row<Type, 16 / Type::SIZE>(out, gate, up, gate_first, up_first, width)
                : gate_row<Type, 1>(out, gate, up, gate_first, up_first, width);
    };
    switch (type) {
        case 0: run(StoredFloat32()); break;
        case 1: run(StoredFloat16()); break;
        default: run(StoredBfloat16());
    }
}
