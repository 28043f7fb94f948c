// The draft tree on the device: select, build, check, verify (docs/contract.md, The draft tree). One block for each lane.
//
// Candidates are numbered level by level: K of step 0, then K * K of each later step. To find the best, each candidate
// counts the better ones (ties: the lower number first). This needs no sort and gives the CPU twin's result bit for
// bit. If a candidate's parent is not chosen, its node hangs on the root. If a link leads nowhere, the walk ends.

// M = K + (S - 1) * K * K
__device__ __forceinline__ int num_candidates(int num_steps, int topk) { return topk + (num_steps - 1) * topk * topk; }

// A probability that cannot raise a child above its parent: NaN counts as 0.
__device__ __forceinline__ float probability(float p) { return p >= 0.0f ? (p <= 1.0f ? p : 1.0f) : 0.0f; }

// A score below 2^-126 counts as 0, because the compiler may flush it; NaN likewise.
__device__ __forceinline__ float score(float p) { return p >= 1.17549435e-38f ? p : 0.0f; }

// How many of scores[first], scores[first + step], ... below `count` come before `at` in the order.
__device__ __forceinline__ int rank_of(const float* scores, int count, int at, int first = 0, int step = 1) {
    const float mine = scores[at];
    int rank = 0;
    for (int other = first; other < count; other += step) {
        rank += scores[other] > mine || (scores[other] == mine && other < at);
    }
    return rank;
}

// Records the candidates of `step` and keeps the K best.
//
// grid batch, block any.
extern "C" __global__ void select_topk_kernel(
    int step,
    int num_steps,
    int topk,
    const float* topk_p,          // float [batch, K] at step 0, [batch * K, K] after
    const long long* topk_index,  // int64, likewise: tokens
    const float* scores,          // float [batch, K] of the step before; not read at step 0
    float* all_scores,            // float [batch, M]
    long long* all_tokens,        // int64 [batch, M]
    long long* all_parents,       // int64 [batch, 1 + K * S]
    long long* input_ids,         // int64 [batch * K]
    int* branch_parents,          // int32 [batch, K]
    float* kept_scores) {         // float [batch, K], not `scores` itself
    const long long lane = blockIdx.x;
    const int count = step == 0 ? topk : topk * topk;
    const int first = step == 0 ? 0 : topk + topk * topk * (step - 1);
    const long long total = num_candidates(num_steps, topk);
    float* level = all_scores + lane * total + first;
    long long* tokens = all_tokens + lane * total + first;
    long long* parents = all_parents + lane * (1 + topk * num_steps);
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const float p = probability(topk_p[lane * count + i]);
        level[i] = score(step == 0 ? p : __fmul_rn(scores[lane * topk + i / topk], p));
        tokens[i] = topk_index[lane * count + i];
    }
    if (step == 0 && threadIdx.x == 0) parents[0] = -1;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        // Keep the model's own order at step 0: its top K come sorted.
        const int branch = step == 0 ? i : rank_of(level, count, i);
        if (branch >= topk) continue;
        input_ids[lane * topk + branch] = tokens[i];
        branch_parents[lane * topk + branch] = step == 0 ? i : i / topk;
        kept_scores[lane * topk + branch] = level[i];
        parents[1 + topk * step + branch] = first + i;
    }
}

// Chooses the N - 1 best candidates and links them to a tree under the root, node 0.
//
// grid batch, block of whole warps; shared: M floats, then 2 * M + N ints.
extern "C" __global__ void build_tree_kernel(
    int num_steps,
    int topk,
    int num_draft_tokens,
    const float* all_scores,          // float [batch, M]
    const long long* all_tokens,      // int64 [batch, M]
    const long long* all_parents,     // int64 [batch, 1 + K * S]
    const long long* root_tokens,     // int64 [batch]
    long long* tokens,                // int64 [batch, N]
    int* parents,                     // int32 [batch, N], -1 for the root
    int* depths,                      // int32 [batch, N]
    unsigned char* mask,              // bool [batch, N, N]: j is i or an ancestor of it
    int* first_child,                 // int32 [batch, N], -1 = none
    int* next_sibling) {              // int32 [batch, N], -1 = none
    extern __shared__ float shared[];
    const int total = num_candidates(num_steps, topk), n = num_draft_tokens;
    float* scores = shared;
    int* is_chosen = (int*)(shared + total);
    int* node_of = is_chosen + total;
    int* parent_of = node_of + total;
    const long long lane = blockIdx.x;
    for (int i = threadIdx.x; i < total; i += blockDim.x) scores[i] = score(all_scores[lane * total + i]);
    for (int node = threadIdx.x; node < n; node += blockDim.x) parent_of[node] = node == 0 ? -1 : 0;
    __syncthreads();
    // Four threads share the work on a candidate, so that no loop is long.
    const int lane_of_four = threadIdx.x % 4;
    for (int first = 0; first < total; first += blockDim.x / 4) {
        const int i = first + (int)threadIdx.x / 4;
        int rank = i < total ? rank_of(scores, total, i, lane_of_four, 4) : 0;
        rank += __shfl_xor_sync(0xffffffffu, rank, 1);
        rank += __shfl_xor_sync(0xffffffffu, rank, 2);
        if (i < total && lane_of_four == 0) is_chosen[i] = rank < n - 1;
    }
    __syncthreads();
    for (int first = 0; first < total; first += blockDim.x / 4) {
        const int i = first + (int)threadIdx.x / 4;
        int before = 0;
        for (int other = lane_of_four; other < min(i, total); other += 4) before += is_chosen[other];
        before += __shfl_xor_sync(0xffffffffu, before, 1);
        before += __shfl_xor_sync(0xffffffffu, before, 2);
        if (i < total && lane_of_four == 0) node_of[i] = 1 + before;
    }
    __syncthreads();
    tokens += lane * n;
    if (threadIdx.x == 0) tokens[0] = root_tokens[lane];
    for (int i = threadIdx.x; i < total; i += blockDim.x) {
        if (!is_chosen[i]) continue;
        const int kept = i / topk;  // which kept candidate it continues; 0 is the root
        const long long parent = kept == 0 ? -1 : all_parents[lane * (1 + topk * num_steps) + kept];
        if (parent >= 0 && parent < i && is_chosen[parent]) parent_of[node_of[i]] = node_of[parent];
        tokens[node_of[i]] = all_tokens[lane * total + i];
    }
    __syncthreads();
    for (int node = threadIdx.x; node < n; node += blockDim.x) {
        int depth = 0;
        for (int above = parent_of[node]; above >= 0; above = parent_of[above]) depth++;
        int child = -1, sibling = -1;
        for (int later = n - 1; later > node; later--) {
            if (parent_of[later] == node) child = later;
            if (node > 0 && parent_of[later] == parent_of[node]) sibling = later;
        }
        parents[lane * n + node] = parent_of[node];
        depths[lane * n + node] = depth;
        first_child[lane * n + node] = child;
        next_sibling[lane * n + node] = sibling;
    }
    for (int cell = threadIdx.x; cell < n * n; cell += blockDim.x) {
        int above = cell / n;
        while (above > cell % n) above = parent_of[above];
        mask[lane * n * n + cell] = above == cell % n;
    }
}

// Whether nodes a < b see `other` alike: a's child b also sees a, its sibling does not, and a never sees b.
__device__ __forceinline__ bool sees_alike(
    const unsigned char* mask, int n, int a, int b, int other, bool is_child) {
    const bool by_a = mask[(long long)a * n + other], by_b = mask[(long long)b * n + other];
    return other == a ? by_b == is_child : other == b ? !by_a : by_a == by_b;
}

// Finds the lanes whose arrays are not a tree of this root. A walk over them could give another text than the
// target's. Such a lane gets the root's token and depth 0 in every node, so that no later kernel reads out of bounds.
// A warp checks a node: what it sees, and that its child and its sibling see the same others.
//
// grid batch, block of whole warps.
extern "C" __global__ void check_tree_kernel(
    int num_draft_tokens,
    long long vocab_size,
    const long long* tokens,       // int64 [batch, N]
    const int* depths,             // int32 [batch, N]
    const unsigned char* mask,     // bool [batch, N, N]
    const int* first_child,        // int32 [batch, N]
    const int* next_sibling,       // int32 [batch, N]
    const long long* root_tokens,  // int64 [batch]
    long long* safe_tokens,        // int64 [batch, N]
    int* safe_depths,              // int32 [batch, N]
    unsigned char* is_broken) {    // bool [batch]
    __shared__ int broken;
    const int n = num_draft_tokens;
    const long long lane = blockIdx.x, first = lane * n;
    tokens += first, depths += first, first_child += first, next_sibling += first;
    mask += first * n;
    if (threadIdx.x == 0) broken = tokens[0] != root_tokens[lane] || depths[0] != 0;
    __syncthreads();
    for (int node = threadIdx.x / 32; node < n; node += blockDim.x / 32) {
        const unsigned char* const seen_by_node = mask + (long long)node * n;
        const int child = first_child[node], sibling = next_sibling[node];
        bool fits = tokens[node] >= 0 && tokens[node] < vocab_size && seen_by_node[node] && depths[node] >= 0;
        fits = fits && (child == -1 || (child > node && child < n));
        fits = fits && (sibling == -1 || (sibling > node && sibling < n));
        int num_seen = 0;
        for (int start = 0; start < n && fits; start += 32) {
            const int other = start + (int)threadIdx.x % 32;
            const bool is_seen = other < n && seen_by_node[other];
            bool is_alike = other >= n || child == -1 || sees_alike(mask, n, node, child, other, true);
            is_alike = is_alike && (other >= n || sibling == -1 || sees_alike(mask, n, node, sibling, other, false));
            num_seen += __popc(__ballot_sync(0xffffffffu, is_seen));
            fits = __all_sync(0xffffffffu, is_alike);
        }
        if ((!fits || depths[node] != num_seen - 1) && threadIdx.x % 32 == 0) atomicExch(&broken, 1);
    }
    __syncthreads();
    for (int node = threadIdx.x; node < n; node += blockDim.x) {
        safe_tokens[first + node] = broken ? root_tokens[lane] : tokens[node];
        safe_depths[first + node] = broken ? 0 : depths[node];
    }
    if (threadIdx.x == 0) is_broken[lane] = broken != 0;
}

// Walks each lane's tree from the root: goes to the first child whose token is the target's, until there is none.
//
// grid batch, block any; shared: 2 * N long longs, then 2 * N ints.
extern "C" __global__ void verify_tree_kernel(
    int num_draft_tokens,
    int width,                       // S + 1
    const long long* tokens,         // int64 [batch, N]
    const int* first_child,          // int32 [batch, N]
    const int* next_sibling,         // int32 [batch, N]
    const long long* target_tokens,  // int64 [batch, N], -1: the logits there were not finite
    int* accept_index,               // int32 [batch, width]: lane * N + node, -1 padded
    int* accept_len,                 // int32 [batch]
    long long* predict) {            // int64 [batch * N]: the target's token at each node of the walk, 0 elsewhere
    extern __shared__ long long walk[];
    const int n = num_draft_tokens;
    const long long first = (long long)blockIdx.x * n;
    long long *token = walk, *target = walk + n;
    int *child = (int*)(walk + 2 * n), *sibling = child + n;
    for (int node = threadIdx.x; node < n; node += blockDim.x) {
        token[node] = tokens[first + node];
        target[node] = target_tokens[first + node];
        child[node] = first_child[first + node];
        sibling[node] = next_sibling[first + node];
        predict[first + node] = 0;
    }
    for (int place = threadIdx.x; place < width; place += blockDim.x) {
        accept_index[(long long)blockIdx.x * width + place] = -1;
    }
    __syncthreads();
    if (threadIdx.x > 0) return;
    int node = 0, len = 0;
    // Links only lead forward, so the walk ends whatever they hold.
    while (true) {
        accept_index[(long long)blockIdx.x * width + len++] = (int)(first + node);
        predict[first + node] = target[node];
        if (target[node] < 0 || len == width) break;
        int next = child[node], at = node;
        while (next > at && next < n && token[next] != target[node]) {
            at = next;
            next = sibling[at];
        }
        if (next <= at || next >= n) break;
        node = next;
    }
    accept_len[blockIdx.x] = len;
}
