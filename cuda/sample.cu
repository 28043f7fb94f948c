// The seeded draw: argmax, or inverse CDF over token ids after temperature, top-k, top-p and min-p.
//
// Equals the CPU twin's draw (rust/specpool-core/src/tree/sample.rs) bit for bit, in any order of summation.
//
// A block draws for one row. It finds the greatest logit in one pass over the row, and mostly the token in a second:
//
// - Without top-k and top-p, the second pass adds up the weights of runs of ids. The run that holds the token is
//   divided in the same way.
// - Else it gathers candidates: all tokens down to a limit that as many threads' greatest logits reach as top-k keeps
//   tokens. So the candidates hold all that top-k keeps. For top-p alone they are a few hundred.
// - If there are too many candidates, or too few for top-p, more passes look for the last token to keep by its logit,
//   11 bits at a time from the top: a pass adds up the tokens by the next bits.

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

constexpr int BINS = 1 << 11;        // values of the bits that one pass finds
constexpr int CANDIDATES = 1 << 10;  // at most

// Which tokens of a row are kept: those of greater keys than `floor`, and the first `ties` of key `floor`. While the
// last one to keep is looked for, also what is known of it. At first all are kept.
struct Cut {
    unsigned floor;
    int ties;
    unsigned prefix;           // the upper bits of the last key to keep
    unsigned long long above;  // tokens or weight of greater upper bits
    double need;               // tokens or weight to keep
};

// Sums of tokens or weights by bins.
struct Bins {
    unsigned low[BINS], high[BINS];  // 64-bit sums in two halves, because shared memory adds only 32 bits at once

    __device__ __forceinline__ void add(int bin, unsigned long long amount) {
        const unsigned least = (unsigned)amount, before = atomicAdd(&low[bin], least);
        const unsigned carried = (unsigned)(amount >> 32) + (before + least < before);
        if (carried) atomicAdd(&high[bin], carried);
    }

    __device__ __forceinline__ unsigned long long sum(int bin) const {
        return (unsigned long long)high[bin] << 32 | low[bin];
    }
};

// A token that may be kept.
struct Candidate {
    unsigned long long rank;  // as `ranking` gives it
    long long weight;
};

struct Candidates {
    Candidate tokens[CANDIDATES];
    long long above[CANDIDATES];  // the weight of better tokens; -1 if top-k does not keep this one
};

// Memory that a block shares while it works on one row.
struct Scratch {
    union {
        Bins bins;
        Candidates candidates;
    };
    Wish wish;
    float table[Row<2>::TABLE];
    long long sums[32];  // one for each warp
    long long ties[32];
    Cut cut;
    int num_candidates;
    int token;  // or the first of the ids that hold it; at lower ids are
    long long below;       // this weight above the floor
    long long ties_below;  // and so many ties at the floor
    double aim;            // u times the weight of all that is kept
};

// Adds up `value` over the threads up to this one; *total gets the sum of all. The block must consist of whole warps.
// `sums` is shared, one cell for each warp, and then holds the warps' sums.
__device__ __forceinline__ long long prefix_sum(long long value, long long* sums, long long* total) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int offset = 1; offset < 32; offset *= 2) {
        const long long other = __shfl_up_sync(0xffffffffu, value, offset);
        if (lane >= offset) value += other;
    }
    __syncthreads();  // a thread may still be reading an earlier sum
    if (lane == 31) sums[warp] = value;
    __syncthreads();
    *total = 0;
    for (int other = 0; other < (int)blockDim.x / 32; other++) {
        if (other == warp) value += *total;
        *total += sums[other];
    }
    return value;
}

// Returns the greatest value of the block's threads, in every thread. `of_warps` is as in prefix_sum.
__device__ __forceinline__ unsigned long long block_max(unsigned long long value, long long* of_warps) {
    for (int offset = 16; offset > 0; offset /= 2) value = max(value, __shfl_xor_sync(0xffffffffu, value, offset));
    __syncthreads();  // a thread may still be reading an earlier one
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = (long long)value;
    __syncthreads();
    for (int warp = 0; warp < (int)blockDim.x / 32; warp++) value = max(value, (unsigned long long)of_warps[warp]);
    return value;
}

// The place of a token in the order: its key, then 2^31 - 1 - id. Greater for a likelier token, no two alike.
__device__ __forceinline__ unsigned long long ranking(int id, unsigned bits) {
    return (unsigned long long)key_of(bits) << 32 | (0x7fffffffu - (unsigned)id);
}

// Returns the bits of the greatest logit in the upper half, and the lowest id that has it in the lower. Sets *is_bad if
// the row holds a NaN or +inf. In every thread. *reached gets the order of the greatest logit that this thread read.
template <int DTYPE>
__device__ unsigned long long greatest(const Row<DTYPE>& row, long long* of_warps, bool* is_bad, int* reached) {
    constexpr int EXTRA = (int)Row<DTYPE>::EXTRA, MANY = Row<DTYPE>::MANY;
    int top = LOWEST, bottom = 0x7fffffff, first = 0x7fffffff;
    const auto note = [&](int id, int order) {
        order |= EXTRA;                  // nothing but the logit itself decides
        if (order == -1) order = EXTRA;  // -0 equals 0
        if (order > top || (order == top && id < first)) top = order, first = id;  // the ends are read last
    };
    const auto use_many = [&](int id, const int4& loaded) {
        int greatest = LOWEST;
#pragma unroll
        for (int i = 0; i < MANY; i++) {
            const int order = order_of(Row<DTYPE>::loose_bits(loaded, i));
            greatest = max(greatest, order), bottom = min(bottom, order);
        }
        note(id, greatest);
    };
    row.template read<4>(0, row.vocab, threadIdx.x, blockDim.x, use_many, [&](int id, unsigned bits) {
        bottom = min(bottom, order_of(bits));
        note(id, order_of(bits));
    });
    *reached = top;
    constexpr unsigned INFINITE = Row<DTYPE>::INFINITE;
    *is_bad = __syncthreads_or(top >= order_of(INFINITE) || (bottom | EXTRA) < order_of(INFINITE | 0x80000000u));
    unsigned long long best = (unsigned long long)((unsigned)top ^ 0x80000000u) << 32 | (0x7fffffffu - (unsigned)first);
    best = block_max(best, of_warps);
    // It is known by the first id of an access.
    const unsigned bits = bits_of((unsigned)(best >> 32)) & ~(unsigned)EXTRA;
    first = 0x7fffffff - (int)(unsigned)best;
    int id = first;
#pragma unroll
    for (int i = MANY - 1; i >= 0; i--) {
        if (first + i < row.vocab && key_of(row.bits(first + i)) == key_of(bits)) id = first + i;
    }
    return (unsigned long long)bits << 32 | (unsigned)id;
}

// Returns the greatest order with zeros in the lower 16 bits that `count` threads reach, at most as many as there are.
__device__ __forceinline__ int limit_of(int reached, int count) {
    const int upper = (reached >> 16) + 0x8000;
    int limit = 0;
    for (int bit = 0x8000; bit > 0; bit /= 2) {
        if (__syncthreads_count(upper >= limit + bit) >= count) limit += bit;
    }
    return (limit - 0x8000) * 0x10000;
}

// Gathers the tokens whose order is `limit` or more, as far as there is room. WEIGHS: returns the weight of all tokens,
// in every thread.
template <int DTYPE, bool WEIGHS>
__device__ long long gather(const Row<DTYPE>& row, Scratch& scratch, int limit) {
    constexpr int MANY = Row<DTYPE>::MANY;
    const float* const table = scratch.table;
    if (limit == 0) limit = -0x10000;  // -0 equals 0
    if (threadIdx.x == 0) scratch.num_candidates = 0;
    __syncthreads();
    const auto note = [&](int id, unsigned bits) {
        if (order_of(bits) < limit) return;
        const int index = atomicAdd(&scratch.num_candidates, 1);
        if (index >= CANDIDATES) return;
        scratch.candidates.tokens[index].rank = ranking(id, bits);
    };
    long long sum = 0, total = 0;
    const auto use_many = [&](int id, const int4& loaded) {
        if (WEIGHS) sum += row.sum_of(loaded, table);
        int greatest = LOWEST;
#pragma unroll
        for (int i = 0; i < MANY; i++) greatest = max(greatest, order_of(Row<DTYPE>::loose_bits(loaded, i)));
        if (greatest < limit) return;
#pragma unroll
        for (int i = 0; i < MANY; i++) note(id + i, Row<DTYPE>::bits_of_many(loaded, i));
    };
    row.template read<WEIGHS ? 1 : 4>(0, row.vocab, threadIdx.x, blockDim.x, use_many, [&](int id, unsigned bits) {
        if (WEIGHS) sum += row.weight(bits);
        note(id, bits);
    });
    if (WEIGHS) prefix_sum(sum, scratch.sums, &total);
    else __syncthreads();
    return total;
}

// Returns the token that is drawn among the candidates, or DRAWN if there are too many or too few. Each is held against
// all others. `total` is the weight that top-p keeps a share of; -1: of what top-k keeps. In every thread.
template <int DTYPE>
__device__ int draw_among(const Row<DTYPE>& row, Scratch& scratch, long long total) {
    const Wish& wish = scratch.wish;
    const int count = scratch.num_candidates, top_k = wish.top_k > 0 ? wish.top_k : row.vocab;
    if (count > CANDIDATES) return DRAWN;
    Candidate* const tokens = scratch.candidates.tokens;
    long long* const above = scratch.candidates.above;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        tokens[i].weight = row.weight(bits_of((unsigned)(tokens[i].rank >> 32)));
    }
    __syncthreads();
    long long sum = 0, kept = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const unsigned long long rank = tokens[i].rank;
        long long weight = 0;
        int better = 0;
        for (int other = 0; other < count; other++) {
            if (tokens[other].rank <= rank) continue;
            weight += tokens[other].weight;
            better++;
        }
        above[i] = better < top_k ? weight : -1;
        if (better < top_k) sum += tokens[i].weight;
    }
    prefix_sum(sum, scratch.sums, &kept);
    const double need = wish.top_p * (double)(total < 0 ? kept : total);
    if ((double)kept < need) return DRAWN;
    sum = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const bool is_kept = above[i] >= 0 && (wish.top_p >= 1.0f || (double)above[i] < need);
        if (!is_kept || tokens[i].weight < wish.least()) tokens[i].weight = 0;
        sum += tokens[i].weight;
    }
    prefix_sum(sum, scratch.sums, &kept);
    const double aim = wish.u * (double)kept;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const long long weight = tokens[i].weight;
        if (weight == 0) continue;
        const unsigned id_rank = (unsigned)tokens[i].rank;
        long long below = 0;
        for (int other = 0; other < count; other++) {
            if ((unsigned)tokens[other].rank > id_rank) below += tokens[other].weight;
        }
        if ((double)below <= aim && (double)(below + weight) > aim) scratch.token = (int)(0x7fffffffu - id_rank);
    }
    __syncthreads();
    return scratch.token;
}

// Adds up the tokens that are kept and have the cut's upper bits, by the bits that this pass finds: their weights, or
// their number. Leaves out the ties at the floor.
template <int DTYPE>
__device__ void add_up(const Row<DTYPE>& row, Scratch& scratch, int pass, bool by_weight) {
    const int upper = pass ? row.lower(pass - 1) : 32, lower = row.lower(pass);
    Bins& bins = scratch.bins;
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) bins.low[bin] = bins.high[bin] = 0;
    __syncthreads();
    // Neighbours often share a bin: add them up before the atomic.
    int open = 0;
    unsigned long long held = 0;
    const unsigned floor = scratch.cut.floor, prefix = scratch.cut.prefix;
    row.each(0, row.vocab, threadIdx.x, blockDim.x, [&](int, unsigned bits) {
        const unsigned key = key_of(bits);
        if (key <= floor || (pass && key >> upper != prefix)) return;
        const int bin = (int)(key >> lower) & ((1 << (upper - lower)) - 1);
        if (bin != open && held) {
            bins.add(open, held);
            held = 0;
        }
        open = bin;
        held += by_weight ? (unsigned long long)row.weight(bits) : 1;
    });
    if (held) bins.add(open, held);
    __syncthreads();
}

// Takes into the cut the highest bin at which the sums from the top on reach the need. `need` is what to keep: tokens,
// or a share of the weight. After the last pass the cut holds the last token to keep.
template <int DTYPE>
__device__ void take(const Row<DTYPE>& row, Scratch& scratch, int pass, bool by_weight, double need) {
    const int upper = pass ? row.lower(pass - 1) : 32, lower = row.lower(pass);
    Cut& cut = scratch.cut;
    Bins& bins = scratch.bins;
    if (threadIdx.x == 0 && by_weight && cut.ties && (pass == 0 || cut.floor >> upper == cut.prefix)) {
        const int bin = (int)(cut.floor >> lower) & ((1 << (upper - lower)) - 1);
        bins.add(bin, cut.ties * row.weight(bits_of(cut.floor)));
    }
    __syncthreads();
    const int each = BINS / blockDim.x;
    int bin = BINS - 1 - threadIdx.x * each;
    unsigned long long own = 0;
    for (int i = 0; i < each; i++) own += bins.sum(bin - i);
    long long total = 0;
    const unsigned long long reached = prefix_sum((long long)own, scratch.sums, &total);
    const double goal = pass ? cut.need : by_weight ? need * (double)total : need;
    unsigned long long above = (pass ? cut.above : 0) + reached - own;
    const bool is_mine = (double)above < goal && (double)(above + own) >= goal;
    __syncthreads();
    if (is_mine) {
        while ((double)(above + bins.sum(bin)) < goal) above += bins.sum(bin--);
        cut.prefix = (pass ? cut.prefix << (upper - lower) : 0) | (unsigned)bin;
        cut.above = above;
        cut.need = goal;
        if (pass + 1 == row.PASSES) {
            // All 32 bits of the key: below the 16 of a short logit are zeros, or ones for a negative one.
            cut.floor = DTYPE == 0 ? cut.prefix : cut.prefix << 16 | (cut.prefix >> 15 ? 0 : 0xffffu);
            const unsigned long long each_tie = by_weight ? row.weight(bits_of(cut.floor)) : 1;
            cut.ties = (int)(((unsigned long long)ceil(goal) - above + each_tie - 1) / each_tie);
        }
    }
    __syncthreads();
}

// Returns this thread's share of the weight above the floor in [begin, end), and adds to *ties the tokens at it.
template <int DTYPE>
__device__ __forceinline__ long long weigh(
    const Row<DTYPE>& row, const Scratch& scratch, int begin, int end, int thread, int threads, int* ties) {
    const float* const table = scratch.table;
    const unsigned floor = scratch.cut.floor;
    long long sum = 0;
    const auto use = [&](int, unsigned bits) {
        const unsigned key = key_of(bits);
        if (key > floor) sum += row.weight(bits);
        *ties += key == floor;
    };
    if (floor > 0 || row.least > 0) {
        row.each(begin, end, thread, threads, use);
    } else {
        const auto use_many = [&](int, const int4& loaded) { sum += row.sum_of(loaded, table); };
        row.template read<1>(begin, end, thread, threads, use_many, use);
    }
    return sum;
}

// Returns the token that is drawn of those in the cut. Each warp adds up a run of ids; then each thread adds up a part
// of the run that holds the token, until a part is a token. In every thread.
template <int DTYPE>
__device__ int draw(const Row<DTYPE>& row, Scratch& scratch) {
    int begin = 0, end = row.vocab;
    if (threadIdx.x == 0) scratch.below = scratch.ties_below = 0;
    for (bool by_warps = true;; by_warps = false) {
        const int sharers = by_warps ? 32 : 1, runs = blockDim.x / sharers;
        int run = (end - begin + runs - 1) / runs;
        if (run > 1) run = (run + Row<DTYPE>::MANY - 1) / Row<DTYPE>::MANY * Row<DTYPE>::MANY;
        const int first = min(begin + (int)threadIdx.x / sharers * run, end), last = min(first + run, end);
        int tie_count = 0;
        long long sum = weigh(row, scratch, first, last, threadIdx.x % sharers, sharers, &tie_count);
        long long ties = tie_count, total = 0, all_ties = 0;
        long long sum_end = prefix_sum(sum, scratch.sums, &total);
        sum_end += scratch.below;
        long long ties_end = scratch.ties_below;
        ties_end += prefix_sum(ties, scratch.ties, &all_ties);
        const long long kept_ties = scratch.cut.ties;
        const long long each_tie = kept_ties ? row.weight(bits_of(scratch.cut.floor)) : 0;
        if (by_warps) {
            if (threadIdx.x == 0) scratch.aim = scratch.wish.u * (double)(total + min(all_ties, kept_ties) * each_tie);
            sum = scratch.sums[threadIdx.x / 32], ties = scratch.ties[threadIdx.x / 32];
            __syncthreads();
        }
        const long long before = sum_end - sum + min(ties_end - ties, kept_ties) * each_tie;
        const long long after = sum_end + min(ties_end, kept_ties) * each_tie;
        // The last of those who share a run knows its end.
        if (threadIdx.x % sharers == sharers - 1 && (double)before <= scratch.aim && (double)after > scratch.aim) {
            scratch.token = first, scratch.below = sum_end - sum, scratch.ties_below = ties_end - ties;
        }
        __syncthreads();
        begin = scratch.token, end = min(begin + run, end);
        if (end - begin <= 1) return begin;
    }
}

// Returns the token of one row; -1 if it has none. In every thread.
template <int DTYPE>
__device__ int draw_row(const void* logits, int vocab, Scratch& scratch) {
    const Wish& wish = scratch.wish;
    Row<DTYPE> row = {};
    row.logits = (const char*)logits + (long long)blockIdx.x * vocab * Row<DTYPE>::SIZE;
    row.vocab = vocab;
    bool is_bad = false;
    int reached = 0;
    const unsigned long long best = greatest(row, scratch.sums, &is_bad, &reached);
    const unsigned bits = (unsigned)(best >> 32);
    if (is_bad || !wish.is_valid() || bits == (Row<DTYPE>::INFINITE | 0x80000000u)) return -1;
    if (wish.temperature < MIN_TEMPERATURE) return (int)(unsigned)best;
    row.set_temperature(bits, wish.temperature);
    const bool by_number = wish.top_k > 0 && wish.top_k < vocab, by_weight = wish.top_p < 1.0f;
    const int threads = blockDim.x;
    if (DTYPE == 2 && !by_number && vocab >= 4 * row.TABLE) row.fill(scratch.table, wish.temperature);
    if (by_number ? wish.top_k <= threads : by_weight) {
        const int limit = limit_of(reached, by_number ? wish.top_k : threads / 4);
        long long total = -1;
        if (by_number) gather<DTYPE, false>(row, scratch, limit);
        else total = gather<DTYPE, true>(row, scratch, limit);
        const int token = draw_among(row, scratch, total);
        if (token != DRAWN) return token;
        __syncthreads();
    }
    if (threadIdx.x == 0) scratch.cut = {0, 0, 0, 0, 0.0};
    __syncthreads();
#pragma unroll 1
    for (int step = 0; step < 2 * row.PASSES; step++) {
        const bool is_weight = step >= row.PASSES;
        if (is_weight ? !by_weight : !by_number) continue;
        const int pass = step % row.PASSES;
        add_up(row, scratch, pass, is_weight);
        take(row, scratch, pass, is_weight, is_weight ? (double)wish.top_p : (double)wish.top_k);
    }
    row.least = wish.least();
    return draw(row, scratch);
}

// Draws one token for each row; -1 if the logits hold a NaN, +inf or nothing but -inf, or if a parameter is out of
// range.
//
// grid n, block a power of two, 64 or more.
extern "C" __global__ void __launch_bounds__(1024, 1) sample_tokens_kernel(
    const void* logits,  // [n, vocab]
    int dtype,           // 0 = float32, 1 = float16, 2 = bfloat16
    int vocab,           // 1 .. 2^19
    const float* temperature,  // [n], 0 = argmax
    const int* top_k,          // int32 [n], 0 = all
    const float* top_p,        // [n], in (0, 1], 1 = all
    const float* min_p,        // [n], in [0, 1], 0 = all; or null, all
    const double* u,           // [n], in [0, 1)
    long long* tokens) {       // int64 [n]
    __shared__ Scratch scratch;
    const int row = blockIdx.x;
    if (threadIdx.x == 0) {
        scratch.wish = {temperature[row], top_k[row], top_p[row], min_p ? min_p[row] : 0.0f, u[row]};
    }
    __syncthreads();
    const int token = dtype == 0 ? draw_row<0>(logits, vocab, scratch)
        : dtype == 1             ? draw_row<1>(logits, vocab, scratch)
                                 : draw_row<2>(logits, vocab, scratch);
    if (threadIdx.x == 0) tokens[row] = token;
}

// Writes the k most probable tokens of each row, best first, and their probabilities. Of equally probable tokens the
// lower id comes first. A row of NaN counts as one of zeros.
//
// grid n, block a power of two, 64 or more.
extern "C" __global__ void __launch_bounds__(1024, 1) likeliest_kernel(
    const float* p,    // [n, vocab], rows of a softmax
    int vocab,         // 1 .. 2^19
    int k,             // 1 .. vocab
    float* top_p,      // [n, k]
    long long* ids) {  // int64 [n, k]
    __shared__ Scratch scratch;
    Row<0> row = {};
    row.logits = (const char*)(p + (long long)blockIdx.x * vocab), row.vocab = vocab;
    top_p += (long long)blockIdx.x * k, ids += (long long)blockIdx.x * k;
    const auto write = [&](int index, unsigned long long rank) {
        top_p[index] = row.value(bits_of((unsigned)(rank >> 32)));
        ids[index] = 0x7fffffff - (int)(unsigned)rank;
    };
    bool is_bad = false;
    int reached = 0;
    greatest(row, scratch.sums, &is_bad, &reached);
    if (is_bad) {
        for (int i = threadIdx.x; i < k; i += blockDim.x) top_p[i] = 0.0f, ids[i] = i;
        return;
    }
    gather<0, false>(row, scratch, limit_of(reached, k));
    const Candidate* const tokens = scratch.candidates.tokens;
    const int count = scratch.num_candidates;
    if (count <= CANDIDATES) {
        for (int i = threadIdx.x; i < count; i += blockDim.x) {
            int better = 0;
            for (int other = 0; other < count; other++) better += tokens[other].rank > tokens[i].rank;
            if (better < k) write(better, tokens[i].rank);
        }
        return;
    }
    // Too many ties: find one token after the other.
    unsigned long long last = ~0ull;
    for (int index = 0; index < k; index++) {
        unsigned long long best = 0;
        row.each(0, vocab, threadIdx.x, blockDim.x, [&](int id, unsigned bits) {
            const unsigned long long rank = ranking(id, bits);
            if (rank < last) best = max(best, rank);
        });
        last = block_max(best, scratch.sums);
        if (threadIdx.x == 0) write(index, last);
    }
}
