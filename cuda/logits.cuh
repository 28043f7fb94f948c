// One row of logits: their order, their weights, and how a block reads them.
//
// A token's weight is a whole number: exp((logit - max) / temperature) * 2^34, rounded to even, in single steps that
// the compiler must not contract. At most 2^19 weights add up to at most 2^53. Logits are compared as integers, because
// the GPU takes tiny ones for 0.
//
// DTYPE is 0 for float32, 1 for float16, 2 for bfloat16. The bits of a 16-bit logit are the upper half of a word.

constexpr float MIN_TEMPERATURE = 7.888609e-31f;  // 2^-100; below it the draw is the argmax
constexpr int DRAWN = -2;                         // in place of a token that has yet to be drawn
constexpr int LOWEST = -0x7fffffff - 1;           // below the order of every logit

// The order of logits by their bits, as signed integers; -0 comes right before 0. Lower bits that do not belong to the
// logit change the order only among equal logits.
__device__ __forceinline__ int order_of(unsigned bits) {
    return (int)(bits ^ ((unsigned)((int)bits >> 31) & 0x7fffffffu));
}

// The same as an unsigned key, equal for 0 and -0.
__device__ __forceinline__ unsigned key_of(unsigned bits) {
    return bits == 0x80000000u ? 0x80000000u : (unsigned)order_of(bits) ^ 0x80000000u;
}

__device__ __forceinline__ unsigned bits_of(unsigned key) { return key >> 31 ? key & 0x7fffffffu : ~key; }

// Adds up weights exactly, up to 256 at a time, with no more than float and 32-bit additions.
struct WeightSum {
    unsigned high, low;  // the weights' multiples of 2^12, and what is left, each beside the bits of its constant
    static constexpr float HIGH = 51539607552.0f, LOW = 12582912.0f;  // 1.5 * 2^35 and 1.5 * 2^23 round by their size

    // Adds a weight that is not rounded yet. The multiple of 2^12 is even, so the rest rounds as the whole does.
    __device__ __forceinline__ void add(float weight) {
        const float shifted = __fadd_rn(weight, HIGH);
        high += __float_as_uint(shifted);
        low += __float_as_uint(__fadd_rn(__fsub_rn(weight, __fsub_rn(shifted, HIGH)), LOW));
    }

    // The sum of the `count` weights that were added.
    __device__ __forceinline__ long long sum(int count) const {
        const int multiples = (int)(high - (unsigned)count * 0x51400000u);
        return ((long long)multiples << 12) + (int)(low - (unsigned)count * 0x4b400000u);
    }
};

// One row of logits.
template <int DTYPE>
struct Row {
    const char* logits;  // [vocab]
    int vocab;
    float greatest;  // of the logits
    float scale;     // the power of two that brings the temperature into [2, 4); no step of a division can underflow
    float divisor;   // temperature * scale
    float inverse;   // 1 / divisor, in two parts
    float rest;
    long long least;  // the least weight that is kept; set once top-k and top-p are done
    // A table holds the weights of the bfloat16 logits of 16 exponents; below are those too small for it.
    bool has_table;
    float smallest, lowest;  // the least absolute value, and the least logit, which weighs 0

    static constexpr int SIZE = DTYPE == 0 ? 4 : 2;         // bytes of a logit
    static constexpr int MANY = 16 / SIZE;                  // logits of one access
    static constexpr unsigned EXTRA = DTYPE == 0 ? 0 : 0xffffu;  // bits of a word that do not belong to the logit
    static constexpr unsigned INFINITE = DTYPE == 1 ? 0x7c000000u : 0x7f800000u;  // greater ones are a NaN

    __device__ __forceinline__ unsigned bits(int id) const {
        return DTYPE == 0 ? ((const unsigned*)logits)[id] : (unsigned)((const unsigned short*)logits)[id] << 16;
    }

    // The bits of logit i of one access; a 16-bit one may have its neighbour's in the lower half.
    __device__ __forceinline__ static unsigned loose_bits(const int4& loaded, int i) {
        const int word = i / (MANY / 4);
        const unsigned bits = word == 0 ? loaded.x : word == 1 ? loaded.y : word == 2 ? loaded.z : loaded.w;
        return DTYPE == 0 || i % 2 ? bits : bits << 16;
    }

    // The same without the neighbour's.
    __device__ __forceinline__ static unsigned bits_of_many(const int4& loaded, int i) {
        return loose_bits(loaded, i) & ~EXTRA;
    }

    // The logit itself.
    __device__ __forceinline__ static float value(unsigned bits) {
        if (DTYPE != 1) return __uint_as_float(bits);
        const unsigned sign = bits & 0x80000000u, moved = (bits & 0x7fff0000u) >> 3;
        const unsigned exponent = bits & 0x7c000000u;
        // Of a tiny one the fraction stands behind a 1, which is taken away again.
        const float tiny = __fsub_rn(__uint_as_float(moved + 0x38800000u), 6.1035156e-5f);
        const unsigned usual = exponent == INFINITE ? moved + 0x70000000u : moved + 0x38000000u;
        return __uint_as_float(sign | (exponent ? usual : __float_as_uint(tiny)));
    }

    // Sets what weights are computed from: the bits of the greatest logit, and a temperature of 2^-100 or more.
    __device__ __forceinline__ void set_temperature(unsigned max_bits, float temperature) {
        greatest = value(max_bits);
        scale = __uint_as_float(0x7f800000u - (__float_as_uint(temperature) & 0x7f800000u));
        divisor = __fmul_rn(temperature, scale);
        inverse = __fdiv_rn(1.0f, divisor);
        rest = __fmul_rn(__fmaf_rn(-divisor, inverse, 1.0f), inverse);
    }

    // A token's share of the distribution by its logit, before it is rounded to a whole number.
    //
    // First (logit - max) / temperature to the nearest float: a quotient by the reciprocal in two parts is off by one
    // unit at most, and one correction with its exact remainder mends that (Markstein 1990). At -64 and below a weight
    // rounds to 0. Then e^x: Cody-Waite reduction and the polynomial of Cephes expf. Two products are fused because
    // they are exact: those by a power of two, and of a small integer and 355 / 512.
    __device__ __forceinline__ float raw_weight(float logit) const {
        const float scaled = __fmul_rn(__fsub_rn(logit, greatest), scale);
        const float distance = max(scaled, -64.0f * divisor);
        const float quotient = __fmaf_rn(distance, inverse, __fmul_rn(distance, rest));
        const float x = __fmaf_rn(__fmaf_rn(-divisor, quotient, distance), inverse, quotient);
        const float round = 12582946.0f;  // 1.5 * 2^23 rounds to the nearest integer, to which 34 is added
        const float shifted = __fadd_rn(__fmul_rn(x, 1.44269504f), round);
        const float n = __fsub_rn(shifted, round);
        const float r = __fsub_rn(__fmaf_rn(n, -0.6933594f, x), __fmul_rn(n, -2.1219444e-4f));
        float p = 1.9875691e-4f;
        p = __fadd_rn(__fmul_rn(p, r), 1.3981999e-3f);
        p = __fadd_rn(__fmul_rn(p, r), 8.333452e-3f);
        p = __fadd_rn(__fmul_rn(p, r), 4.1665796e-2f);
        p = __fadd_rn(__fmul_rn(p, r), 1.6666665e-1f);
        p = __fadd_rn(__fmul_rn(p, r), 0.5f);
        const float mantissa = __fadd_rn(__fadd_rn(__fmul_rn(p, __fmul_rn(r, r)), r), 1.0f);
        return __uint_as_float(__float_as_uint(mantissa) + (__float_as_uint(shifted) << 23));
    }

    // A token's share by its logit's bits, a whole number of at most 2^34; 0 if it is not kept.
    __device__ __forceinline__ long long weight(unsigned bits) const {
        WeightSum one = {0, 0};
        one.add(raw_weight(value(bits)));
        const long long whole = one.sum(1);
        return whole < least ? 0 : whole;
    }

    static constexpr int TABLE = DTYPE == 2 ? 1 << 12 : 1;

    // The place of a logit in the table: its sign, four bits of its exponent, and its fraction.
    __device__ __forceinline__ static int place(unsigned bits) { return bits >> 20 & 0x800 | bits >> 16 & 0x7ff; }

    // Fills the table. All that weighs more than 0 lies between `lowest` and the greatest logit.
    __device__ __forceinline__ void fill(float* table, float temperature) {
        const float least_logit = __fsub_rn(greatest, __fmul_rn(25.0f, temperature));
        const unsigned limit = __float_as_uint(max(fabsf(greatest), fabsf(least_logit))) >> 23;
        const unsigned first = limit > 254 ? 239 : limit > 15 ? limit - 15 : 0;  // exponent
        has_table = true;
        smallest = __uint_as_float(first << 23);
        lowest = __uint_as_float(0x80000000u | (first << 23) + 0x07ff0000u);
        for (int i = threadIdx.x; i < TABLE; i += blockDim.x) {
            const unsigned above = (unsigned)(i - (int)(first << 7)) & 0x7ff;
            table[i] = raw_weight(__uint_as_float(((first << 7) + above | (i & 0x800) << 4) << 16));
        }
        __syncthreads();
    }

    // The sum of the weights of one access, of which none may be left out.
    __device__ __forceinline__ long long sum_of(const int4& loaded, const float* table) const {
        WeightSum weights = {0, 0};
        if (DTYPE != 2 || !has_table) {
#pragma unroll
            for (int i = 0; i < MANY; i++) weights.add(raw_weight(value(bits_of_many(loaded, i))));
            return weights.sum(MANY);
        }
        float weight[MANY];
        bool has_small = false;
#pragma unroll
        for (int i = 0; i < MANY; i++) {
            const float logit = max(value(bits_of_many(loaded, i)), lowest);
            weight[i] = table[place(__float_as_uint(logit))];
            has_small = has_small || fabsf(logit) < smallest;
        }
        if (has_small) {
#pragma unroll
            for (int i = 0; i < MANY; i++) {
                const float logit = value(bits_of_many(loaded, i));
                if (fabsf(logit) < smallest) weight[i] = raw_weight(logit);
            }
        }
#pragma unroll
        for (int i = 0; i < MANY; i++) weights.add(weight[i]);
        return weights.sum(MANY);
    }

    // The lower end of the bits that a pass finds, counted from bit 0. A 16-bit logit takes two passes, float32 three.
    static constexpr int PASSES = DTYPE == 0 ? 3 : 2;
    __device__ __forceinline__ static int lower(int pass) {
        return pass == 0 ? 21 : DTYPE != 0 ? 16 : pass == 1 ? 10 : 0;
    }

    // Reads the logits in [begin, end), shared among `threads` threads, of which this is number `thread`: calls
    // use_many(id, loaded) for MANY of them at once from id on, and use(id, bits) for those at the ends that 16 aligned
    // bytes do not cover. LOADS accesses are under way before one is used.
    template <int LOADS, typename UseMany, typename Use>
    __device__ __forceinline__ void read(
        int begin, int end, int thread, int threads, UseMany use_many, Use use) const {
        const int step = threads * MANY;
        const int skew = (int)((unsigned long long)(logits + (long long)begin * SIZE) % 16) / SIZE;
        const int head = min(end, begin + (MANY - skew) % MANY), whole = head + (end - head) / MANY * MANY;
        for (int id = head + thread * MANY; id < whole; id += LOADS * step) {
            int4 loaded[LOADS];
#pragma unroll
            for (int k = 0; k < LOADS; k++) {
                if (id + k * step < whole) loaded[k] = *(const int4*)(logits + (long long)(id + k * step) * SIZE);
            }
#pragma unroll
            for (int k = 0; k < LOADS; k++) {
                if (id + k * step < whole) use_many(id + k * step, loaded[k]);
            }
        }
        // What is left at both ends is less than one access of a thread.
        const int odd = head - begin + end - whole;
        for (int i = thread; i < odd; i += threads) {
            const int id = i < head - begin ? begin + i : whole + i - (head - begin);
            use(id, bits(id));
        }
    }

    // As `read`, but calls use(id, bits) for every logit: slower, and little code.
    template <typename Use>
    __device__ __forceinline__ void each(int begin, int end, int thread, int threads, Use use) const {
#pragma unroll 1
        for (int id = begin + thread; id < end; id += threads) use(id, bits(id));
    }
};

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
