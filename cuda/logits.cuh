// One row of logits: their order, their weights, and how a block reads them.
//
// A token's weight is a whole number: exp((logit - max) / temperature) * 2^34, rounded to even, in single steps that
// the compiler must not contract. At most 2^19 weights add up to at most 2^53. Logits are compared as integers, because
// the GPU takes tiny ones for 0.

constexpr float MIN_TEMPERATURE = 7.888609e-31f;  // 2^-100; below it the draw is the argmax
constexpr int DRAWN = -2;                         // in place of a token that has yet to be drawn

// e^x for x <= 0: Cody-Waite reduction and the polynomial of Cephes expf; 0 below -87.
__device__ __forceinline__ float exp_of(float x) {
    const float clamped = x > -87.0f ? x : -87.0f;
    const float round = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
    const float shifted = __fadd_rn(__fmul_rn(clamped, 1.44269504f), round);
    const float n = __fsub_rn(shifted, round);
    const float r = __fsub_rn(__fsub_rn(clamped, __fmul_rn(n, 0.6933594f)), __fmul_rn(n, -2.1219444e-4f));
    float p = 1.9875691e-4f;
    p = __fadd_rn(__fmul_rn(p, r), 1.3981999e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 8.333452e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 4.1665796e-2f);
    p = __fadd_rn(__fmul_rn(p, r), 1.6666665e-1f);
    p = __fadd_rn(__fmul_rn(p, r), 0.5f);
    const float mantissa = __fadd_rn(__fadd_rn(__fmul_rn(p, __fmul_rn(r, r)), r), 1.0f);
    const float scale = __uint_as_float((__float_as_uint(shifted) << 23) + 0x3F800000u);
    return x < -87.0f ? 0.0f : __fmul_rn(mantissa, scale);
}

// One row of logits.
struct Row {
    const void* logits;  // [vocab]
    int dtype;           // 0 = float32, 1 = float16, 2 = bfloat16
    int vocab;
    float max;  // of the logits
    float temperature;
    long long least;  // the least weight that is kept; set once top-k and top-p are done

    // Bytes of one logit.
    __device__ __forceinline__ int size() const { return dtype == 0 ? 4 : 2; }

    // The bits of a logit; those of a 16-bit one are the upper half.
    __device__ __forceinline__ unsigned bits(int id) const {
        return dtype == 0 ? ((const unsigned*)logits)[id] : (unsigned)((const unsigned short*)logits)[id] << 16;
    }

    // The logit itself.
    __device__ __forceinline__ float value(unsigned bits) const {
        if (dtype != 1) return __uint_as_float(bits);
        const unsigned sign = bits & 0x80000000u, exponent = bits >> 26 & 31, fraction = bits >> 16 & 0x3ffu;
        if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
        if (exponent > 0) return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
        const float tiny = __fmul_rn((float)(int)fraction, 5.9604645e-8f);  // fraction * 2^-24
        return __uint_as_float(sign | __float_as_uint(tiny));
    }

    // The bits of +inf; greater ones without the sign are a NaN.
    __device__ __forceinline__ unsigned infinity() const { return dtype == 1 ? 0x7c000000u : 0x7f800000u; }

    // A token's share of the distribution by its logit's bits, a whole number of at most 2^34; 0 if it is not kept.
    __device__ __forceinline__ long long weight(unsigned bits) const {
        const float x = __fdiv_rn(__fsub_rn(value(bits), max), temperature);
        const long long whole = __float2ll_rn(__fmul_rn(exp_of(x), 17179869184.0f));
        return whole < least ? 0 : whole;
    }

    // The lower end of the bits that a pass finds, counted from bit 0. A 16-bit logit takes two passes, float32 three.
    __device__ __forceinline__ int lower(int pass) const {
        return pass == 0 ? 21 : dtype != 0 ? 16 : pass == 1 ? 10 : 0;
    }
};

// The order of logits by their bits: greater for a greater logit, equal for 0 and -0.
__device__ __forceinline__ unsigned key_of(unsigned bits) {
    if (bits == 0x80000000u) bits = 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ unsigned bits_of(unsigned key) { return key >> 31 ? key & 0x7fffffffu : ~key; }

// What a row asks for.
struct Wish {
    float temperature;
    int top_k;
    float top_p;
    float min_p;
    double u;

    __device__ __forceinline__ bool is_valid() const {
        return temperature >= 0.0f && temperature <= 3.4028235e38f && top_k >= 0 && top_p > 0.0f && top_p <= 1.0f &&
            min_p >= 0.0f && min_p <= 1.0f && u >= 0.0 && u < 1.0;
    }

    // The least weight that min-p keeps; the likeliest token weighs 2^34.
    __device__ __forceinline__ long long least() const {
        const double limit = (double)min_p * 17179869184.0;
        return (long long)limit + ((double)(long long)limit < limit);
    }
};

// Begins a row whose greatest logit is `best`. Returns its token; DRAWN if the token has yet to be drawn.
__device__ __forceinline__ int begin_row(Row& row, const Wish& wish, unsigned long long best, bool is_bad) {
    const unsigned bits = bits_of((unsigned)(best >> 32));
    row.max = row.value(bits);
    row.temperature = wish.temperature;
    if (is_bad || !wish.is_valid() || bits == (row.infinity() | 0x80000000u)) return -1;
    return wish.temperature >= MIN_TEMPERATURE ? DRAWN : 0x7fffffff - (int)(unsigned)best;
}

// Calls use(id, bits) for each logit in [begin, end), shared among `threads` threads, of which this is number `thread`.
// Loads 16 bytes at a time where the row is aligned to them, and LOADS times before it uses any. `use` is repeated for
// each logit that is loaded at once if it is SHORT, and else stands in a loop.
template <int LOADS, bool SHORT, typename Use>
__device__ __forceinline__ void each_logit(const Row& row, int begin, int end, int thread, int threads, Use use) {
    const int size = row.size(), many = 16 / size, step = threads * many, of_word = 4 / size;
    const char* first = (const char*)row.logits;
    const int skew = (int)((unsigned long long)(first + (long long)begin * size) % 16) / size;
    const int head = min(end, begin + (many - skew) % many), whole = head + (end - head) / many * many;
    for (int id = head + thread * many; id < whole; id += LOADS * step) {
        int4 loaded[LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; k++) {
            if (id + k * step < whole) loaded[k] = *(const int4*)(first + (long long)(id + k * step) * size);
        }
        unsigned words[4 * LOADS];
#pragma unroll
        for (int k = 0; k < LOADS; k++) {
            words[4 * k] = loaded[k].x, words[4 * k + 1] = loaded[k].y;
            words[4 * k + 2] = loaded[k].z, words[4 * k + 3] = loaded[k].w;
        }
        if (SHORT) {
#pragma unroll
            for (int word = 0; word < 4 * LOADS; word++) {
                if (id + word / 4 * step >= whole) break;
                const int at = id + word / 4 * step + word % 4 * of_word;
                use(at, size == 4 ? words[word] : words[word] << 16);
                if (size == 2) use(at + 1, words[word] & 0xffff0000u);
            }
            continue;
        }
#pragma unroll 1
        for (int word = 0; word < 4 * LOADS && id + word / 4 * step < whole; word++) {
            const int at = id + word / 4 * step + word % 4 * of_word;
#pragma unroll 1
            for (int half = 0; half < of_word; half++) {
                use(at + half, size == 4 ? words[0] : half ? words[0] & 0xffff0000u : words[0] << 16);
            }
            // Registers have no index that a loop can count.
#pragma unroll
            for (int next = 0; next + 1 < 4 * LOADS; next++) words[next] = words[next + 1];
        }
    }
    // What is left at both ends is less than one access of a thread.
    const int odd = head - begin + end - whole;
    for (int i = thread; i < odd; i += threads) {
        const int id = i < head - begin ? begin + i : whole + i - (head - begin);
        use(id, row.bits(id));
    }
}
