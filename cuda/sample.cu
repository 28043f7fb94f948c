// The seeded draw: argmax, or inverse CDF over token ids after temperature, top-k, top-p and min-p.
//
// Equals the CPU twin's draw (rust/specpool-core/src/tree/sample.rs) bit for bit, in any order of summation. A token's
// weight is a whole number: exp((logit - max) / temperature) * 2^34, rounded to even, in single steps that the
// compiler must not contract. At most 2^19 weights add up to below 2^53. Logits are compared as integers, because the
// GPU takes tiny ones for 0.

constexpr float MIN_TEMPERATURE = 7.888609e-31f;  // 2^-100; below it the draw is the argmax

// Philox4x32 with ten rounds; the two upper words of the counter are 0 (Salmon et al., SC 2011).
__device__ __forceinline__ unsigned long long philox(unsigned long long key, unsigned long long counter) {
    unsigned a = (unsigned)counter, b = (unsigned)(counter >> 32), c = 0, d = 0;
    unsigned k0 = (unsigned)key, k1 = (unsigned)(key >> 32);
    for (int round = 0; round < 10; round++) {
        const unsigned long long x = a * 0xD2511F53ull, y = c * 0xCD9E8D57ull;
        a = (unsigned)(y >> 32) ^ b ^ k0;
        b = (unsigned)y;
        c = (unsigned)(x >> 32) ^ d ^ k1;
        d = (unsigned)x;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return (unsigned long long)b << 32 | a;
}

// u[i] = the draw of (seeds[i], positions[i]) in [0, 1), 53 bits. One thread for each.
extern "C" __global__ void uniform_kernel(
    const unsigned long long* seeds,      // [n]
    const unsigned long long* positions,  // [n]
    double* u,                            // [n]
    int n) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < n) u[at] = (double)(philox(seeds[at], positions[at]) >> 11) * (1.0 / 9007199254740992.0);
}

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

// The distribution of one row, after top-k, top-p and min-p.
struct Row {
    const void* logits;  // [vocab]
    int dtype;           // 0 = float32, 1 = float16, 2 = bfloat16
    int vocab;
    float max;  // of the logits
    float temperature;
    unsigned long long floor;  // the least rank that is kept
    long long least;           // the least weight that is kept

    // Bytes of one logit.
    __device__ __forceinline__ int size() const { return dtype == 0 ? 4 : 2; }

    // The bits of a logit as float32.
    __device__ __forceinline__ unsigned bits(int id) const {
        return dtype == 0 ? ((const unsigned*)logits)[id] : widened(((const unsigned short*)logits)[id]);
    }

    // The bits of a 16-bit logit as float32.
    __device__ __forceinline__ unsigned widened(unsigned half) const {
        if (dtype == 2) return half << 16;
        const unsigned sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ffu;
        if (exponent == 31) return sign | 0x7f800000u | fraction << 13;
        if (exponent > 0) return sign | (exponent + 112) << 23 | fraction << 13;
        return sign | __float_as_uint(__fmul_rn((float)(int)fraction, 5.9604645e-8f));  // fraction * 2^-24
    }

    // The rank of a logit by its bits: greater for more likely tokens; among equal ones greater for the lower id; 56 bits.
    __device__ __forceinline__ unsigned long long rank(int id, unsigned key) const {
        if (key << 1 == 0) key = 0;  // -0 equals 0
        key = key >> 31 ? ~key : key | 0x80000000u;
        return (unsigned long long)key << 24 | (unsigned)(0xffffff - id);
    }

    // A token's share of the distribution by its logit's bits, a whole number of at most 2^34.
    __device__ __forceinline__ long long weight(int id, unsigned bits) const {
        if (rank(id, bits) < floor) return 0;
        const float x = __fdiv_rn(__fsub_rn(__uint_as_float(bits), max), temperature);
        const long long whole = __float2ll_rn(__fmul_rn(exp_of(x), 17179869184.0f));
        return whole < least ? 0 : whole;
    }
};

// Calls use(id, bits) for each logit in [begin, end), shared among `threads` threads, of which this is number `thread`.
// Loads 16 bytes at a time where the row is aligned to them.
template <typename Use>
__device__ __forceinline__ void each_logit(
    const Row& row, int begin, int end, int thread, int threads, Use use) {
    const int size = row.size(), many = 16 / size;
    const char* first = (const char*)row.logits;
    const int skew = (int)((unsigned long long)(first + (long long)begin * size) % 16) / size;
    const int head = min(end, begin + (many - skew) % many), whole = head + (end - head) / many * many;
    for (int id = head + thread * many; id < whole; id += threads * many) {
        const int4 loaded = *(const int4*)(first + (long long)id * size);
        const unsigned words[4] = {(unsigned)loaded.x, (unsigned)loaded.y, (unsigned)loaded.z, (unsigned)loaded.w};
#pragma unroll
        for (int word = 0; word < 4; word++) {
            if (size == 4) {
                use(id + word, words[word]);
            } else {
                use(id + 2 * word, row.widened(words[word] & 0xffffu));
                use(id + 2 * word + 1, row.widened(words[word] >> 16));
            }
        }
    }
    // What is left at both ends is less than one access of a thread.
    const int odd = head - begin + end - whole;
    for (int i = thread; i < odd; i += threads) {
        const int id = i < head - begin ? begin + i : whole + i - (head - begin);
        use(id, row.bits(id));
    }
}

// Memory that a block shares while it works on one row.
struct Scratch {
    unsigned long long bins[256];
    long long sums[32];  // one for each warp
    int bin;
    unsigned long long above;
};

// Returns the greatest rank of [begin, end), and sets *is_bad if a logit there is NaN or +inf. In every thread.
// `of_warps` is shared, one cell for each warp.
__device__ unsigned long long greatest(
    const Row& row, int begin, int end, unsigned long long* of_warps, bool* is_bad) {
    unsigned long long best = 0;
    bool bad = false;
    each_logit(row, begin, end, threadIdx.x, blockDim.x, [&](int id, unsigned bits) {
        bad |= (bits & 0x7fffffffu) > 0x7f800000u || bits == 0x7f800000u;
        best = max(best, row.rank(id, bits));
    });
    for (int offset = 16; offset > 0; offset /= 2) best = max(best, __shfl_xor_sync(0xffffffffu, best, offset));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = best;
    *is_bad = __syncthreads_or(bad);
    for (int warp = 0; warp < (int)blockDim.x / 32; warp++) best = max(best, of_warps[warp]);
    __syncthreads();
    return best;
}

// Returns, in the first warp, the highest bin at which `above` and the bins from the top on reach `need`.
__device__ void find_bin(Scratch& scratch, unsigned long long above, double need) {
    const int lane = threadIdx.x, top = 255 - 8 * lane;
    unsigned long long own = 0;
    for (int bin = top; bin > top - 8; bin--) own += scratch.bins[bin];
    unsigned long long reached = own;
    for (int offset = 1; offset < 32; offset *= 2) {
        const unsigned long long other = __shfl_up_sync(0xffffffffu, reached, offset);
        if (lane >= offset) reached += other;
    }
    const unsigned enough = __ballot_sync(0xffffffffu, (double)(above + reached) >= need);
    if (lane != (enough ? __ffs(enough) - 1 : 31)) return;
    above += reached - own;
    int bin = top;
    while (bin > top - 7 && (double)(above + scratch.bins[bin]) < need) above += scratch.bins[bin--];
    scratch.bin = bin;
    scratch.above = above;
}

// Takes tokens, most likely first, until they reach `need`, counted in tokens (top-k) or in weight (top-p), and
// returns the rank of the last one. It finds the rank eight bits at a time, from the top. In every thread.
__device__ unsigned long long last_kept(const Row& row, Scratch& scratch, bool by_weight, double need) {
    unsigned long long prefix = 0, above = 0;
    for (int shift = 48; shift >= 0; shift -= 8) {
        for (int bin = threadIdx.x; bin < 256; bin += blockDim.x) scratch.bins[bin] = 0;
        __syncthreads();
        // Neighbours often share a bin: add them up before the atomic.
        int open = 0;
        unsigned long long held = 0;
        each_logit(row, 0, row.vocab, threadIdx.x, blockDim.x, [&](int id, unsigned bits) {
            const unsigned long long rank = row.rank(id, bits);
            if (rank < row.floor || rank >> shift >> 8 != prefix) return;
            const int bin = (int)(rank >> shift & 255);
            if (bin != open && held) atomicAdd(&scratch.bins[open], held);
            if (bin != open) held = 0;
            open = bin;
            held += by_weight ? (unsigned long long)row.weight(id, bits) : 1;
        });
        if (held) atomicAdd(&scratch.bins[open], held);
        __syncthreads();
        if (threadIdx.x < 32) find_bin(scratch, above, need);
        __syncthreads();
        prefix = prefix << 8 | (unsigned)scratch.bin;
        above = scratch.above;
        const bool is_whole = !by_weight && (double)(above + scratch.bins[scratch.bin]) == need;
        __syncthreads();
        if (is_whole) return prefix << shift;
    }
    return prefix;
}

// Returns the sum of the weights, in every thread.
__device__ long long total_of(const Row& row, Scratch& scratch) {
    long long sum = 0;
    each_logit(row, 0, row.vocab, threadIdx.x, blockDim.x, [&](int id, unsigned bits) { sum += row.weight(id, bits); });
    return block_sum(sum, scratch.sums);
}

// Returns the least id whose cumulative weight exceeds u times the total. Each warp (two or more) adds up a run of
// ids. The run that holds the id is then divided in the same way.
__device__ int draw(const Row& row, Scratch& scratch, double u) {
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
    int begin = 0, end = row.vocab;
    long long below = 0;
    double aim = -1.0;
    while (end - begin > 1 || aim < 0.0) {
        const int run = (end - begin + warps - 1) / warps;
        const int stop = min(end, begin + (warp + 1) * run);
        long long sum = 0;
        each_logit(row, min(begin + warp * run, stop), stop, threadIdx.x % 32, 32, [&](int id, unsigned bits) {
            sum += row.weight(id, bits);
        });
        for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
        if (threadIdx.x % 32 == 0) scratch.sums[warp] = sum;
        __syncthreads();
        if (aim < 0.0) {
            long long total = 0;
            for (int other = 0; other < warps; other++) total += scratch.sums[other];
            aim = u * (double)total;
        }
        int found = 0;
        while (found + 1 < warps && (double)(below + scratch.sums[found]) <= aim) below += scratch.sums[found++];
        begin += found * run;
        end = min(end, begin + run);
        __syncthreads();
    }
    return begin;
}

// Finds the greatest rank of each part of each row, for rows that are too few to fill a GPU with a block each.
//
// grid (n, parts), block of whole warps.
extern "C" __global__ void __launch_bounds__(1024) greatest_logits_kernel(
    const void* logits,                 // [n, vocab]
    int dtype,                          // 0 = float32, 1 = float16, 2 = bfloat16
    int vocab,                          // 1 .. 2^19
    unsigned long long* greatest_of) {  // [n, parts]: the rank; bit 63: a logit is NaN or +inf
    __shared__ unsigned long long of_warps[32];
    const int parts = gridDim.y, part = blockIdx.y, each = (vocab + parts - 1) / parts;
    const char* first = (const char*)logits + (long long)blockIdx.x * vocab * (dtype == 0 ? 4 : 2);
    const Row row = {first, dtype, vocab, 0.0f, 0.0f, 0, 0};
    bool is_bad = false;
    const int begin = min(part * each, vocab);
    const unsigned long long best = greatest(row, begin, min(begin + each, vocab), of_warps, &is_bad);
    if (threadIdx.x == 0) greatest_of[(long long)blockIdx.x * parts + part] = best | (unsigned long long)is_bad << 63;
}

// Draws one token for each row; -1 if the logits hold a NaN, +inf or nothing but -inf, or if a parameter is out of
// range.
//
// grid n, block of whole warps, two or more.
extern "C" __global__ void __launch_bounds__(1024) sample_tokens_kernel(
    const void* logits,  // [n, vocab]
    int dtype,           // 0 = float32, 1 = float16, 2 = bfloat16
    int vocab,           // 1 .. 2^19
    const float* temperature,  // [n], 0 = argmax
    const int* top_k,          // int32 [n], 0 = all
    const float* top_p,        // [n], in (0, 1], 1 = all
    const float* min_p,        // [n], in [0, 1], 0 = all; or null, all
    const double* u,           // [n], in [0, 1)
    const unsigned long long* greatest_of,  // [n, parts], of greatest_logits_kernel, or null
    int parts,
    long long* tokens) {       // int64 [n]
    __shared__ Scratch scratch;
    const float heat = temperature[blockIdx.x], share = top_p[blockIdx.x];
    const float part_of_best = min_p ? min_p[blockIdx.x] : 0.0f;
    const double at = u[blockIdx.x];
    const int most = top_k[blockIdx.x];
    const char* first = (const char*)logits + (long long)blockIdx.x * vocab * (dtype == 0 ? 4 : 2);
    Row row = {first, dtype, vocab, 0.0f, heat, 0, 0};
    bool is_bad = false;
    unsigned long long best = 0;
    if (greatest_of) {
        for (int part = 0; part < parts; part++) {
            const unsigned long long found = greatest_of[(long long)blockIdx.x * parts + part];
            is_bad |= (found >> 63) != 0;
            best = max(best, found & ~(1ull << 63));
        }
    } else {
        best = greatest(row, 0, vocab, scratch.bins, &is_bad);
    }
    const int likeliest = 0xffffff - (int)(best & 0xffffff);
    row.max = __uint_as_float(row.bits(likeliest));
    is_bad |= row.bits(likeliest) == 0xff800000u;
    is_bad |= !(heat >= 0.0f && heat <= 3.4028235e38f && share > 0.0f && share <= 1.0f);
    is_bad |= !(at >= 0.0 && at < 1.0) || most < 0 || !(part_of_best >= 0.0f && part_of_best <= 1.0f);
    int token = is_bad ? -1 : likeliest;
    if (!is_bad && heat >= MIN_TEMPERATURE) {
        if (most > 0 && most < vocab) row.floor = last_kept(row, scratch, false, most);
        if (share < 1.0f) row.floor = last_kept(row, scratch, true, (double)share * (double)total_of(row, scratch));
        const double limit = (double)part_of_best * 17179869184.0;  // the likeliest token weighs 2^34
        row.least = (long long)limit + ((double)(long long)limit < limit);
        token = draw(row, scratch, at);
    }
    if (threadIdx.x == 0) tokens[blockIdx.x] = token;
}
