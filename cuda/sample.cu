// The seeded draw: argmax, or inverse CDF over token ids after temperature, top-k, top-p and min-p.
//
// Equals the CPU twin's draw (rust/specpool-core/src/tree/sample.rs) bit for bit, in any order of summation.
//
// Of the tokens that top-k and top-p keep, the last one is found by its logit, 11 bits at a time from the top: a pass
// adds up the tokens by the next bits. Many rows have a block each, for all passes. Few rows have several blocks each,
// and a launch for each pass; the block that arrives last takes the next bits.

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

constexpr int BINS = 1 << 11;  // values of the bits that one pass finds

// Which tokens of a row are kept: those of greater keys than `floor`, and the first `ties` of key `floor`. While the
// last one to keep is looked for, also what is known of it. At first all are kept.
struct Cut {
    unsigned floor;
    int ties;
    unsigned prefix;           // the upper bits of the last key to keep
    unsigned long long above;  // tokens or weight of greater upper bits
    double need;               // tokens or weight to keep
};

// Where the token is that the draw falls on: in [begin, end), at which the weights of lower ids add up to `below`.
struct Aim {
    int begin, end;
    long long below;
    long long left;      // ties that are kept of [begin, end)
    long long each_tie;  // the weight of one
    double at;           // u times the total
};

// Memory that a block shares while it works on one row.
struct Scratch {
    unsigned low[BINS], high[BINS];  // 64-bit sums in two halves, because shared memory adds only 32 bits at once
    long long sums[32];              // one for each warp
    long long ties[32];
    Cut cut;
    Aim aim;

    __device__ __forceinline__ void add(int bin, unsigned long long much) {
        const unsigned least = (unsigned)much, before = atomicAdd(&low[bin], least);
        const unsigned carried = (unsigned)(much >> 32) + (before + least < before);
        if (carried) atomicAdd(&high[bin], carried);
    }

    __device__ __forceinline__ unsigned long long sum(int bin) const {
        return (unsigned long long)high[bin] << 32 | low[bin];
    }
};

// Returns the greatest logit of [begin, end) by its key in the upper 32 bits, among equal ones the lowest id, and sets
// *is_bad if a logit there is NaN or +inf. In every thread. `of_warps` is shared, one cell for each warp.
__device__ unsigned long long greatest(
    const Row& row, int begin, int end, unsigned long long* of_warps, bool* is_bad) {
    unsigned top = 0, bottom = 0xffffffffu;
    int of_top = 0x7fffffff;
    each_logit<4, true>(row, begin, end, threadIdx.x, blockDim.x, [&](int id, unsigned bits) {
        const unsigned key = key_of(bits);
        if (key > top || (key == top && id < of_top)) of_top = id;
        top = max(top, key);
        bottom = min(bottom, key);
    });
    *is_bad = __syncthreads_or(top >= key_of(row.infinity()) || bottom < key_of(row.infinity() | 0x80000000u));
    unsigned long long best = (unsigned long long)top << 32 | (0x7fffffffu - (unsigned)of_top);
    for (int offset = 16; offset > 0; offset /= 2) best = max(best, __shfl_xor_sync(0xffffffffu, best, offset));
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = best;
    __syncthreads();
    for (int warp = 0; warp < (int)blockDim.x / 32; warp++) best = max(best, of_warps[warp]);
    __syncthreads();
    return best;
}

// Adds up the tokens of [begin, end) that are kept and have the cut's upper bits, by the bits that this pass finds:
// their weights, or their number. Leaves out the ties at the floor.
__device__ void add_up(const Row& row, Scratch& scratch, int begin, int end, int pass, bool by_weight) {
    const int upper = pass ? row.lower(pass - 1) : 32, lower = row.lower(pass);
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) scratch.low[bin] = scratch.high[bin] = 0;
    __syncthreads();
    // Neighbours often share a bin: add them up before the atomic.
    int open = 0;
    unsigned long long held = 0;
    const unsigned floor = scratch.cut.floor, prefix = scratch.cut.prefix;
    each_logit<2, false>(row, begin, end, threadIdx.x, blockDim.x, [&](int, unsigned bits) {
        const unsigned key = key_of(bits);
        if (key <= floor || (pass && key >> upper != prefix)) return;
        const int bin = (int)(key >> lower) & ((1 << (upper - lower)) - 1);
        if (bin != open && held) {
            scratch.add(open, held);
            held = 0;
        }
        open = bin;
        held += by_weight ? (unsigned long long)row.weight(bits) : 1;
    });
    if (held) scratch.add(open, held);
    __syncthreads();
}

// Takes into the cut the highest bin at which the sums from the top on reach the need. `need` is what to keep: tokens,
// or a share of the weight. After the last pass the cut holds the last token to keep.
__device__ void take(const Row& row, Scratch& scratch, int pass, int passes, bool by_weight, double need) {
    const int upper = pass ? row.lower(pass - 1) : 32, lower = row.lower(pass);
    Cut& cut = scratch.cut;
    if (threadIdx.x == 0 && by_weight && cut.ties && (pass == 0 || cut.floor >> upper == cut.prefix)) {
        const int bin = (int)(cut.floor >> lower) & ((1 << (upper - lower)) - 1);
        scratch.add(bin, cut.ties * row.weight(bits_of(cut.floor)));
    }
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, each = BINS / blockDim.x;
    int bin = BINS - 1 - threadIdx.x * each;
    unsigned long long own = 0;
    for (int i = 0; i < each; i++) own += scratch.sum(bin - i);
    unsigned long long reached = own;
    for (int offset = 1; offset < 32; offset *= 2) {
        const unsigned long long other = __shfl_up_sync(0xffffffffu, reached, offset);
        if (lane >= offset) reached += other;
    }
    if (lane == 31) scratch.sums[warp] = reached;
    __syncthreads();
    unsigned long long total = 0;
    for (int other = 0; other < (int)blockDim.x / 32; other++) {
        if (other == warp) reached += total;
        total += scratch.sums[other];
    }
    const double goal = pass ? cut.need : by_weight ? need * (double)total : need;
    unsigned long long above = (pass ? cut.above : 0) + reached - own;
    const bool is_mine = (double)above < goal && (double)(above + own) >= goal;
    __syncthreads();
    if (is_mine) {
        while ((double)(above + scratch.sum(bin)) < goal) above += scratch.sum(bin--);
        cut.prefix = (pass ? cut.prefix << (upper - lower) : 0) | (unsigned)bin;
        cut.above = above;
        cut.need = goal;
        if (pass + 1 == passes) {
            // All 32 bits of the key: below the 16 of a short logit are zeros, or ones for a negative one.
            cut.floor = row.dtype == 0 ? cut.prefix : cut.prefix << 16 | (cut.prefix >> 15 ? 0 : 0xffffu);
            const unsigned long long each_tie = by_weight ? row.weight(bits_of(cut.floor)) : 1;
            cut.ties = (int)(((unsigned long long)ceil(goal) - above + each_tie - 1) / each_tie);
        }
    }
    __syncthreads();
}

// Divides [begin, end) into `parts` runs of `each` ids, and takes that run into the aim which holds the token.
template <typename Sums>
__device__ void aim_at(Aim& aim, const Sums& sums, const Sums& ties, int parts, int each) {
    int found = 0;
    for (; found + 1 < parts; found++) {
        const long long kept = min((long long)ties[found], aim.left);
        const long long reached = aim.below + (long long)sums[found] + kept * aim.each_tie;
        if ((double)reached > aim.at) break;
        aim.below = reached, aim.left -= kept;
    }
    aim.begin += found * each;
    aim.end = min(aim.end, aim.begin + each);
}

// Begins to look for the token in [0, vocab), by the sums of `parts` runs of it. In one thread.
template <typename Sums>
__device__ void begin_aim(
    const Row& row, Scratch& scratch, const Sums& sums, const Sums& ties, int parts, int each, double u) {
    const Cut& cut = scratch.cut;
    Aim& aim = scratch.aim;
    aim = {0, row.vocab, 0, cut.ties, cut.ties ? row.weight(bits_of(cut.floor)) : 0, 0.0};
    long long total = 0, all = 0;
    for (int part = 0; part < parts; part++) total += sums[part], all += ties[part];
    aim.at = u * (double)(total + min(all, aim.left) * aim.each_tie);
    aim_at(aim, sums, ties, parts, each);
}

// Returns the token that is drawn. Each warp (two or more) adds up a run of ids, first of [begin, end); then the run
// that holds the token is divided in the same way. The first sums go to meet(run), which begins the aim, or returns
// false if another block goes on. In every thread.
template <typename Meet>
__device__ __forceinline__ int draw(const Row& row, Scratch& scratch, int begin, int end, Meet meet) {
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32;
    for (bool is_first = true;; is_first = false) {
        const int run = (end - begin + warps - 1) / warps, first = min(begin + warp * run, end);
        const unsigned floor = scratch.cut.floor;
        long long sum = 0;
        int ties = 0;
        each_logit<2, false>(row, first, min(first + run, end), threadIdx.x % 32, 32, [&](int, unsigned bits) {
            const unsigned key = key_of(bits);
            if (key > floor) sum += row.weight(bits);
            ties += key == floor;
        });
        for (int offset = 16; offset > 0; offset /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, offset);
            ties += __shfl_xor_sync(0xffffffffu, ties, offset);
        }
        if (threadIdx.x % 32 == 0) scratch.sums[warp] = sum, scratch.ties[warp] = ties;
        __syncthreads();
        if (is_first) {
            if (!meet(run)) return DRAWN;
        } else if (threadIdx.x == 0) {
            aim_at(scratch.aim, scratch.sums, scratch.ties, warps, run);
        }
        __syncthreads();
        begin = scratch.aim.begin, end = scratch.aim.end;
        if (end - begin <= 1) return begin;
    }
}

// What the blocks of a row share, and what one launch hands to the next. The first launch sets what is read.
struct Space {
    unsigned long long* cells;  // [BINS + 3 * parts + 9]
    int parts;

    __device__ __forceinline__ unsigned long long* bins() const { return cells; }
    __device__ __forceinline__ unsigned long long* greatest() const { return cells + BINS; }
    __device__ __forceinline__ volatile long long* sums() const { return (long long*)greatest() + parts; }
    __device__ __forceinline__ volatile long long* ties() const { return sums() + parts; }
    // Of two, because a launch reads one until its end and writes the other.
    __device__ __forceinline__ Cut* cut(int step) const { return (Cut*)(greatest() + 3 * parts + 4 * (step & 1)); }
    __device__ __forceinline__ unsigned* ticket() const { return (unsigned*)(greatest() + 3 * parts + 8); }

    // The greatest logit of the row, as `greatest` returns it.
    __device__ __forceinline__ unsigned long long best(bool* is_bad) const {
        unsigned long long best = 0;
        for (int part = 0; part < parts; part++) {
            const unsigned long long found = greatest()[part];
            *is_bad |= (found & BAD) != 0;
            best = max(best, found & ~BAD);
        }
        return best;
    }

    static constexpr unsigned long long BAD = 1ull << 31;  // above the id, beside the key

    // Returns, in every thread, whether all other blocks of the row are done with this launch. What they wrote is then
    // seen by atomics and volatile reads.
    __device__ bool is_last() const {
        __shared__ bool last;
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) last = atomicInc(ticket(), parts - 1) == (unsigned)parts - 1;
        __syncthreads();
        if (last) __threadfence();
        return last;
    }
};

// The part of a row that a block works on: grid (n, parts).
struct Part {
    Row row;
    Space space;
    int each, begin, end;  // ids; `each` of a part, so that all begin at a multiple of 16 bytes if the row does

    __device__ __forceinline__ Part(const void* logits, int dtype, int vocab, unsigned long long* spaces) {
        const int parts = gridDim.y;
        row = {(const char*)logits + (long long)blockIdx.x * vocab * (dtype == 0 ? 4 : 2), dtype, vocab, 0.0f, 0.0f, 0};
        space = {spaces + (long long)blockIdx.x * (BINS + 3 * parts + 9), parts};
        each = ((vocab + parts - 1) / parts + 7) / 8 * 8;
        begin = min((int)blockIdx.y * each, vocab);
        end = min(begin + each, vocab);
    }
};

// What the block's row asks for.
__device__ __forceinline__ Wish wish_of(
    const float* temperature, const int* top_k, const float* top_p, const float* min_p, const double* u) {
    const int row = blockIdx.x;
    return {temperature[row], top_k[row], top_p[row], min_p ? min_p[row] : 0.0f, u[row]};
}

// The first launch for few rows: finds the greatest logit of each part, and clears what the next launches add to.
//
// grid (n, parts), block of whole warps.
extern "C" __global__ void __launch_bounds__(512, 2) greatest_logits_kernel(
    const void* logits,             // [n, vocab]
    int dtype,                      // 0 = float32, 1 = float16, 2 = bfloat16
    int vocab,                      // 1 .. 2^19
    unsigned long long* spaces) {   // [n, 2048 + 3 * parts + 9]
    __shared__ unsigned long long of_warps[32];
    const Part part(logits, dtype, vocab, spaces);
    for (int bin = blockIdx.y * blockDim.x + threadIdx.x; bin < BINS; bin += gridDim.y * blockDim.x) {
        part.space.bins()[bin] = 0;
    }
    bool is_bad = false;
    const unsigned long long best = greatest(part.row, part.begin, part.end, of_warps, &is_bad);
    if (threadIdx.x != 0) return;
    part.space.greatest()[blockIdx.y] = best | (is_bad ? Space::BAD : 0);
    if (blockIdx.y != 0) return;
    *part.space.cut(0) = {0, 0, 0, 0, 0.0};
    *part.space.ticket() = 0;
}

// The launches between: finds the next bits of the last token that top-k (first half of the steps) or top-p keeps. Does
// nothing for rows that do not ask for it.
//
// grid (n, parts), block of whole warps, two or more.
extern "C" __global__ void __launch_bounds__(512, 2) narrow_logits_kernel(
    const void* logits,  // [n, vocab]
    int dtype,           // 0 = float32, 1 = float16, 2 = bfloat16
    int vocab,           // 1 .. 2^19
    const float* temperature,  // [n], 0 = argmax
    const int* top_k,          // int32 [n], 0 = all
    const float* top_p,        // [n], in (0, 1], 1 = all
    const float* min_p,        // [n], in [0, 1], 0 = all; or null, all
    const double* u,           // [n], in [0, 1)
    unsigned long long* spaces,  // [n, 2048 + 3 * parts + 9]
    int step) {                  // 0 .. 2 * passes - 1
    __shared__ Scratch scratch;
    Part part(logits, dtype, vocab, spaces);
    const Space space = part.space;
    const Wish wish = wish_of(temperature, top_k, top_p, min_p, u);
    bool is_bad = false;
    const unsigned long long best = space.best(&is_bad);
    if (begin_row(part.row, wish, best, is_bad) != DRAWN) return;
    const int passes = dtype == 0 ? 3 : 2, pass = step % passes;
    const bool by_weight = step >= passes;
    if (by_weight ? wish.top_p < 1.0f : wish.top_k > 0 && wish.top_k < vocab) {
        if (threadIdx.x == 0) scratch.cut = *space.cut(step);
        add_up(part.row, scratch, part.begin, part.end, pass, by_weight);
        for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
            if (scratch.sum(bin)) atomicAdd(&space.bins()[bin], scratch.sum(bin));
        }
        if (!space.is_last()) return;
        for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) {
            volatile unsigned long long* const cell = &space.bins()[bin];
            const unsigned long long sum = *cell;
            scratch.low[bin] = (unsigned)sum, scratch.high[bin] = (unsigned)(sum >> 32);
            *cell = 0;
        }
        __syncthreads();
        take(part.row, scratch, pass, passes, by_weight, by_weight ? (double)wish.top_p : (double)wish.top_k);
        if (threadIdx.x == 0) *space.cut(step + 1) = scratch.cut;
    } else if (blockIdx.y == 0 && threadIdx.x == 0) {
        *space.cut(step + 1) = *space.cut(step);
    }
}

// The last launch for few rows: adds up what is kept of each part; the last block of a row draws within one of them.
//
// grid (n, parts), block of whole warps, two or more.
extern "C" __global__ void __launch_bounds__(512, 2) draw_tokens_kernel(
    const void* logits,  // [n, vocab]
    int dtype,           // 0 = float32, 1 = float16, 2 = bfloat16
    int vocab,           // 1 .. 2^19
    const float* temperature,  // [n], 0 = argmax
    const int* top_k,          // int32 [n], 0 = all
    const float* top_p,        // [n], in (0, 1], 1 = all
    const float* min_p,        // [n], in [0, 1], 0 = all; or null, all
    const double* u,           // [n], in [0, 1)
    unsigned long long* spaces,  // [n, 2048 + 3 * parts + 9]
    long long* tokens) {         // int64 [n]
    __shared__ Scratch scratch;
    Part part(logits, dtype, vocab, spaces);
    const Space space = part.space;
    const Wish wish = wish_of(temperature, top_k, top_p, min_p, u);
    bool is_bad = false;
    const unsigned long long best = space.best(&is_bad);
    int token = begin_row(part.row, wish, best, is_bad);
    if (token == DRAWN) {
        part.row.least = wish.least();
        if (threadIdx.x == 0) scratch.cut = *space.cut(0);  // after an even number of steps
        __syncthreads();
        token = draw(part.row, scratch, part.begin, part.end, [&](int) {
            if (threadIdx.x == 0) {
                long long sum = 0, ties = 0;
                for (int warp = 0; warp < (int)blockDim.x / 32; warp++) {
                    sum += scratch.sums[warp], ties += scratch.ties[warp];
                }
                space.sums()[blockIdx.y] = sum, space.ties()[blockIdx.y] = ties;
            }
            const bool goes_on = space.is_last();
            if (threadIdx.x == 0 && goes_on) {
                begin_aim(
                    part.row, scratch, space.sums(), space.ties(), space.parts, part.each, u[blockIdx.x]);
            }
            return goes_on;
        });
        if (token == DRAWN) return;
    } else if (blockIdx.y != 0) {
        return;
    }
    if (threadIdx.x == 0) tokens[blockIdx.x] = token;
}

// The one launch for many rows. Draws one token for each row; -1 if the logits hold a NaN, +inf or nothing but -inf, or
// if a parameter is out of range.
//
// grid n, block of whole warps, two or more.
extern "C" __global__ void __launch_bounds__(512, 2) sample_tokens_kernel(
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
    const Wish wish = wish_of(temperature, top_k, top_p, min_p, u);
    const char* first = (const char*)logits + (long long)blockIdx.x * vocab * (dtype == 0 ? 4 : 2);
    Row row = {first, dtype, vocab, 0.0f, 0.0f, 0};
    bool is_bad = false;
    const unsigned long long best = greatest(row, 0, vocab, (unsigned long long*)scratch.sums, &is_bad);
    int token = begin_row(row, wish, best, is_bad);
    if (token == DRAWN) {
        const int passes = dtype == 0 ? 3 : 2;
        if (threadIdx.x == 0) scratch.cut = {0, 0, 0, 0, 0.0};
        __syncthreads();
#pragma unroll 1
        for (int step = 0; step < 2 * passes; step++) {
            const bool by_weight = step >= passes;
            if (by_weight ? wish.top_p >= 1.0f : wish.top_k == 0 || wish.top_k >= vocab) continue;
            const int pass = step % passes;
            add_up(row, scratch, 0, vocab, pass, by_weight);
            take(row, scratch, pass, passes, by_weight, by_weight ? (double)wish.top_p : (double)wish.top_k);
        }
        row.least = wish.least();
        token = draw(row, scratch, 0, vocab, [&](int run) {
            const int warps = blockDim.x / 32;
            if (threadIdx.x == 0) begin_aim(row, scratch, scratch.sums, scratch.ties, warps, run, u[blockIdx.x]);
            return true;
        });
    }
    if (threadIdx.x == 0) tokens[blockIdx.x] = token;
}
