"""Kernels of `cuda/states.cu` beside their twins, to the bit, and beside transformers' own code."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn.functional import conv1d

from kernel_kit import Kit, i32
from specpool.errors import ShapeError
from specpool.kernels import launch, states, twin_states
from specpool.kernels.state_lanes import MAX_NODES, StateLanes

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NUM_SLOTS = 9
# key heads, heads, rows, columns: published widths, and some that fill no warp
SIZES = [(2, 4, 128, 128), (1, 2, 64, 64), (1, 1, 256, 64), (2, 2, 16, 64), (1, 3, 8, 5)]


@dataclasses.dataclass
class Case:
    """Random lanes: some fold nothing, some own tokens; chains and trees; late lengths."""

    rng: np.random.Generator
    size: int
    with_trees: bool = True

    def __post_init__(self):
        rng, size = self.rng, self.size
        self.begin = i32(rng.integers(0, 50, size))
        self.past = i32(rng.integers(0, 5, size))  # records that count
        self.num_records = i32(self.past + rng.integers(0, 3, size))
        self.num_tokens = i32(rng.integers(1, 6, size))
        self.trees = [self._parents(n) for n in self.num_tokens]
        slots = rng.permutation(NUM_SLOTS - 1)[:size] + 1
        others = rng.permutation(NUM_SLOTS - 1)[:size] + 1
        self.src = i32(np.where(rng.random(size) < 0.3, 0, slots))
        self.dst = i32(np.where(rng.random(size) < 0.3, 0, slots))
        if size == 1:
            self.dst = i32(others)
        folded = rng.integers(0, self.past + 1)
        for lane, parents in enumerate(self.trees):
            if parents is None and rng.random() < 0.4:  # own tokens are certain too
                folded[lane] = self.past[lane] + rng.integers(0, self.num_tokens[lane] + 1)
        self.folded = np.where(self.dst > 0, folded, 0)
        self.length = int(self.num_records.sum() + self.num_tokens.sum())

    def _parents(self, num_nodes):
        if not self.with_trees or num_nodes < 3 or self.rng.random() < 0.3:
            return None
        return [-1] + [int(self.rng.integers(0, node)) for node in range(1, num_nodes)]

    def lanes(self, place):
        """Return the lanes; `place` puts a tensor on the device."""
        masks, first_seen, first = [], [], 0
        for parents in self.trees:
            first_seen.append(-1 if parents is None else first)
            if parents is not None:
                seen = torch.eye(len(parents), dtype=torch.bool)
                for node, parent in enumerate(parents[1:], 1):
                    seen[node] |= seen[parent]
                masks.append(seen.view(-1))
                first += seen.numel()
        return StateLanes.build(
            src=self.src,
            dst=self.dst,
            begin=self.begin,
            end=i32(self.begin + self.folded),
            num_records=self.num_records,
            num_tokens=self.num_tokens,
            roots=place(torch.from_numpy(self.begin + self.past)),
            seen=place(torch.cat(masks)) if masks else None,
            first_seen=i32(first_seen),
        )

    def sequences(self):
        """Yield (lane, places of the records, places of the path, output place) of each token."""
        records = np.cumsum(self.num_records) - self.num_records
        tokens = int(self.num_records.sum()) + np.cumsum(self.num_tokens) - self.num_tokens
        for lane, parents in enumerate(self.trees):
            past = [int(records[lane]) + i for i in range(self.past[lane])]
            for node in range(self.num_tokens[lane]):
                path, at = [node], node
                while at:
                    at = at - 1 if parents is None else parents[at]
                    path.insert(0, at)
                yield lane, past, [int(tokens[lane]) + i for i in path]


def numbers(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got, want, dtype):
    limit = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    assert (got.float() - want.float()).norm() <= limit * (1e-3 + want.float().norm())


def state_of(seed, *shape, dtype):
    state = numbers(seed, NUM_SLOTS, *shape, dtype=dtype)
    state[0] = 0
    return state


def scan_inputs(case, sizes, dtype, seed):
    key_heads, heads, rows, columns = sizes
    whole = numbers(seed, case.length, key_heads * rows * 2 + heads * columns, dtype=dtype)
    decay = torch.rand(case.length, heads, generator=torch.Generator().manual_seed(seed + 1))
    beta = torch.rand(case.length, heads, generator=torch.Generator().manual_seed(seed + 2))
    return whole, 0.5 + 0.5 * decay, beta


def heads_of(whole, sizes):
    """Return queries, keys and values, parts of wider rows as a model has them."""
    key_heads, heads, rows, columns = sizes
    widths = [key_heads * rows, key_heads * rows, heads * columns]
    q, k, v = torch.split(whole, widths, 1)
    n = len(whole)
    return (
        q.view(n, key_heads, rows),
        k.view(n, key_heads, rows),
        v.view(n, heads, columns),
    )


def sizes_of(kit: Kit):
    """The largest in one order of threads, and where no access is judged."""
    return SIZES if kit.order in ("forward", None) and not kit.is_checked else SIZES[3:]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_delta", [True, False])
def test_a_scan_is_its_twins(kit, dtype, is_delta):
    for seed, sizes in enumerate(sizes_of(kit)):
        case = Case(np.random.default_rng(seed), (3, 1, 6, 4, 5)[seed])
        whole, decay, beta = scan_inputs(case, sizes, dtype, seed)
        _, heads, rows, columns = sizes
        for state_dtype in {torch.float32, dtype}:
            shape = (rows, columns) if is_delta else (columns, rows)
            before = state_of(seed, heads, *shape, dtype=state_dtype)
            options = {"is_delta": is_delta, "is_normed": is_delta, "scale": rows**-0.5}
            given = kit.var(before.clone())
            got = states.scan_lanes(
                *heads_of(kit.put(whole), sizes),
                *(kit.put(part) for part in (decay, beta)),
                given if is_delta else given.transpose(2, 3),
                case.lanes(kit.put),
                **options,
            )
            twin_state, twin_out = before.clone(), torch.zeros_like(got, device="cpu")
            twin_states.scan_lanes(
                *heads_of(whole, sizes),
                decay,
                beta,
                twin_state if is_delta else twin_state.transpose(2, 3),
                case.lanes(lambda tensor: tensor),
                out=twin_out,
                **options,
            )
            assert torch.equal(got.cpu(), twin_out), (sizes, state_dtype)
            assert torch.equal(given.cpu(), twin_state), (sizes, state_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_convolution_is_its_twins(kit, dtype):
    for seed, (channels, width, state_width) in enumerate([(5, 4, 4), (200, 3, 3), (33, 4, 3)]):
        case = Case(np.random.default_rng(seed + 10), (5, 1, 4)[seed])
        whole = numbers(seed, case.length, channels + 3, dtype=dtype)
        weight, bias = numbers(1, channels, width, dtype=dtype), numbers(2, channels, dtype=dtype)
        for state_dtype in {torch.float32, dtype}:
            before = state_of(seed, channels, state_width, dtype=state_dtype)
            for added in (bias, None):
                given = kit.var(before.clone())
                got = states.convolve_lanes(
                    kit.put(whole)[:, 1:-2],
                    kit.put(weight),
                    None if added is None else kit.put(added),
                    given,
                    case.lanes(kit.put),
                )
                twin_state, twin_out = before.clone(), torch.zeros_like(got, device="cpu")
                lanes = case.lanes(lambda tensor: tensor)
                twin_states.convolve_lanes(
                    whole[:, 1:-2], weight, added, twin_state, lanes, out=twin_out
                )
                assert torch.equal(got.cpu(), twin_out), (channels, state_dtype)
                assert torch.equal(given.cpu(), twin_state), (channels, state_dtype)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_delta_rule_is_transformers_along_every_path(dtype, seed):
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    sizes = SIZES[seed]
    case = Case(np.random.default_rng(seed + 20), 6)
    whole, decay, beta = scan_inputs(case, sizes, dtype, seed)
    q, k, v = heads_of(whole, sizes)
    key_heads, heads, rows, columns = sizes
    before = state_of(seed, heads, rows, columns, dtype=torch.float32)
    state = before.clone()
    # Older releases of transformers want a key for each head.
    keys_of_heads = [part.repeat_interleave(heads // key_heads, 1) for part in (q, k)]
    options = {"is_delta": True, "is_normed": True, "scale": rows**-0.5}
    lanes = case.lanes(lambda tensor: tensor)
    got = states.scan_lanes(q, k, v, decay, beta, state, lanes, **options)

    def plain(lane, places):
        at = torch.tensor(places, dtype=torch.long)
        parts = [part[at].unsqueeze(0) for part in (*keys_of_heads, v, decay.log(), beta)]
        return modeling.torch_recurrent_gated_delta_rule(
            *parts,
            initial_state=before[case.src[lane]].unsqueeze(0),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )

    folded = set()
    for lane, past, path in case.sequences():
        out, _ = plain(lane, past + path)
        close(got[path[-1]], out[0, -1], dtype)
        if case.dst[lane] and case.folded[lane] <= len(past + path):
            places = (past + path)[: case.folded[lane]]
            want = plain(lane, places)[1][0] if places else before[case.src[lane]]
            close(state[case.dst[lane]], want, dtype)
            folded.add(lane)
    assert folded == set(np.flatnonzero(case.dst))
    kept = np.setdiff1d(np.arange(NUM_SLOTS), case.dst[case.dst > 0])
    assert torch.equal(state[kept], before[kept])


@pytest.mark.parametrize("state_size", [16, 128, 256])
def test_mamba2_is_transformers_along_every_path(state_size):
    modeling = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    groups, heads, dim = 2, 4, 64
    case = Case(np.random.default_rng(state_size), 6)
    x = numbers(1, case.length, heads, dim)
    b, c = (numbers(seed, case.length, groups, state_size) for seed in (2, 3))
    dt = numbers(4, case.length, heads).exp()
    a = -numbers(5, heads).exp()
    before = state_of(6, heads, dim, state_size, dtype=torch.float32)
    state = before.clone()
    decay = (dt * a).exp()
    lanes = case.lanes(lambda tensor: tensor)
    got = states.scan_lanes(c, b, x, decay, dt, state.transpose(2, 3), lanes, is_delta=False)
    for lane, past, path in case.sequences():
        at = torch.tensor(past + path)
        out, _ = modeling.mamba2_chunk_scan(
            *(part[at].unsqueeze(0) for part in (x, dt)),
            a,
            *(part[at].unsqueeze(0) for part in (b, c)),
            chunk_size=4,
            initial_states=before[case.src[lane]].unsqueeze(0),
            return_final_states=True,
        )
        close(got[path[-1]], out[0, -1], torch.float32)
        if case.dst[lane] and 0 < case.folded[lane] <= len(at):
            _, want = modeling.mamba2_chunk_scan(
                *(part[at[: case.folded[lane]]].unsqueeze(0) for part in (x, dt)),
                a,
                *(part[at[: case.folded[lane]]].unsqueeze(0) for part in (b, c)),
                chunk_size=4,
                initial_states=before[case.src[lane]].unsqueeze(0),
                return_final_states=True,
            )
            close(state[case.dst[lane]], want[0], torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_convolution_is_torchs_along_every_path(dtype):
    channels, width = 12, 4
    case = Case(np.random.default_rng(30), 7)
    inputs = numbers(1, case.length, channels, dtype=dtype)
    weight, bias = numbers(2, channels, width, dtype=dtype), numbers(3, channels, dtype=dtype)
    before = state_of(4, channels, width, dtype=dtype)
    state = before.clone()
    lanes = case.lanes(lambda tensor: tensor)
    got = states.convolve_lanes(inputs, weight, bias, state, lanes)
    for lane, past, path in case.sequences():
        history = torch.cat([before[case.src[lane]], inputs[past + path].T], 1)
        want = conv1d(history.unsqueeze(0), weight.unsqueeze(1), bias, groups=channels)
        close(got[path[-1]], want[0, :, -1], dtype)
        if case.dst[lane] and case.folded[lane] <= len(past + path):
            kept = history[:, : width + case.folded[lane]][:, -width:]
            assert torch.equal(state[case.dst[lane]], kept)


def test_a_node_computes_what_a_chain_of_its_path_would(kit):
    """Law: to the bit, so a tree's text is that of a chain."""
    sizes = SIZES[3]
    parents = [-1, 0, 0, 1, 2, 4, 1]
    tree, chain = (Case(np.random.default_rng(1), 1) for _ in range(2))
    for case in (tree, chain):
        case.begin, case.past, case.num_records = i32([3]), i32([2]), i32([3])
        case.src, case.dst, case.folded = i32([1]), i32([2]), i32([1])
    tree.trees, tree.num_tokens, tree.length = [parents], i32([7]), 10
    whole, decay, beta = scan_inputs(tree, sizes, torch.bfloat16, 1)
    state = state_of(1, 2, 16, 64, dtype=torch.float32)

    def scan(case, places):
        lanes = case.lanes(kit.put)
        parts = [kit.put(part[places]) for part in (whole, decay, beta)]
        q, k, v = heads_of(parts[0], sizes)
        given = kit.var(state.clone())
        return states.scan_lanes(q, k, v, *parts[1:], given, lanes, is_delta=True, is_normed=True)

    got = scan(tree, list(range(10)))
    for node, path in ((3, [0, 1, 3]), (5, [0, 2, 4, 5]), (6, [0, 1, 6])):
        chain.trees, chain.num_tokens, chain.length = [None], i32([len(path)]), 3 + len(path)
        alone = scan(chain, [0, 1, 2, *(3 + i for i in path)])
        assert torch.equal(got[3 + node], alone[-1]), node


def test_device_numbers_that_are_wrong_stay_inside_the_arrays(kit):
    """Law: a wrong root or span reads and writes nothing outside of the arrays."""
    case = Case(np.random.default_rng(3), 4)
    channels, sizes = 6, (1, 2, 8, 16)
    whole, decay, beta = scan_inputs(case, sizes, torch.float32, 1)
    lanes = case.lanes(lambda tensor: tensor)
    assert lanes.max_nodes < 6  # shared memory has no room for more

    def one_lane(*span):
        """Lanes of which only the first has records and tokens: two that write the same race."""
        return torch.tensor([span, *[[0] * 8 + [-1]] * 3], dtype=torch.int32)

    spans = lanes.spans
    for roots, wrong_spans in (
        (2**31 - 1, spans),
        (-(2**31), spans),
        (40, torch.full_like(spans, 2**31 - 1)),
        (40, torch.full_like(spans, -(2**31))),
        (40, one_lane(1, 2, 0, 2**31 - 1, 0, 999, 0, 999, 0)),
        (40, one_lane(1, 2, 0, 9, 0, 9, 0, 3, 395)),
        (2**31 - 1, one_lane(1, NUM_SLOTS, 0, 9, 0, 2, 0, 3, -1)),
    ):
        wrong = dataclasses.replace(
            lanes,
            spans=kit.put(wrong_spans),
            roots=kit.put(torch.full_like(lanes.roots, roots)),
            seen=kit.put(torch.zeros(400, dtype=torch.bool)),
        )
        inputs = kit.put(numbers(1, case.length, channels))
        weight = kit.put(numbers(2, channels, 4))
        conv_state = kit.var(state_of(3, channels, 4, dtype=torch.float32))
        states.convolve_lanes(inputs, weight, None, conv_state, wrong)
        state = kit.var(state_of(4, 2, 8, 16, dtype=torch.float32))
        parts = heads_of(kit.put(whole), sizes)
        states.scan_lanes(
            *parts, kit.put(decay), kit.put(beta), state, wrong, is_delta=True, is_normed=True
        )
        assert not conv_state[0].any() and not state[0].any()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"k": torch.zeros(5, 1, 7)}, r"k must be as q, \[5, 1, 8\], got \[5, 1, 7\]"),
        ({"v": torch.zeros(4, 2, 4)}, r"v must be float32 \[5, heads, D\]"),
        (
            {"v": torch.zeros(5, 3, 4), "k": torch.zeros(5, 2, 8), "q": torch.zeros(5, 2, 8)},
            "got 3",
        ),
        ({"decay": torch.zeros(5, 3)}, r"decay must be contiguous float32 \[5, 2\]"),
        ({"state": torch.zeros(3, 2, 4, 8)}, r"state must be contiguous .* \[any, 2, 8, 4\]"),
        ({"q": torch.zeros(5, 1, 300), "k": torch.zeros(5, 1, 300)}, r"in \[1, 256\], got 300"),
    ],
)
def test_scans_that_do_not_fit_are_refused(change, text):
    lanes = StateLanes.build(
        src=i32([1]),
        dst=i32([0]),
        begin=i32([0]),
        end=i32([0]),
        num_records=i32([2]),
        num_tokens=i32([3]),
        roots=torch.tensor([2], dtype=torch.int32),
    )
    args = {
        "q": torch.zeros(5, 1, 8),
        "k": torch.zeros(5, 1, 8),
        "v": torch.zeros(5, 2, 4),
        "decay": torch.zeros(5, 2),
        "beta": torch.zeros(5, 2),
        "state": torch.zeros(3, 2, 8, 4),
    }
    with pytest.raises(ShapeError, match=text):
        states.scan_lanes(**{**args, **change}, lanes=lanes, is_delta=True)


def test_lanes_that_do_not_fit_are_refused():
    ones = i32([1, 1])
    numbers_of = dict.fromkeys(("src", "begin", "end", "num_records"), ones)
    how = {
        **numbers_of,
        "dst": i32([0, 0]),
        "num_tokens": i32([2, 900]),
        "roots": torch.zeros(2, dtype=torch.int32),
    }
    with pytest.raises(ShapeError, match=r"masks end at 4, and seen has 3"):
        StateLanes.build(**how, seen=torch.ones(3) > 0, first_seen=i32([0, -1]))
    with pytest.raises(ShapeError, match=rf"at most {MAX_NODES} nodes, got 900"):
        StateLanes.build(**how, seen=torch.ones(810000) > 0, first_seen=i32([-1, 0]))
    with pytest.raises(ShapeError, match=r"begin must be int32 \[2\] and at least 0"):
        StateLanes.build(**{**how, "begin": i32([0, -1])})
    for src, dst in (([1, 1], [2, 3]), ([1, 2], [1, 0])):
        StateLanes.build(**{**how, "src": i32(src), "dst": i32(dst), "num_tokens": ones})
    for src, dst in (([1, 2], [3, 3]), ([1, 1], [1, 2]), ([1, 2], [2, 3]), ([1, 2], [2, 0])):
        with pytest.raises(ShapeError, match=r"must be of that lane alone, others use \[[123]\]"):
            StateLanes.build(**{**how, "src": i32(src), "dst": i32(dst), "num_tokens": ones})
    lanes = StateLanes.build(**{**how, "num_tokens": ones})
    assert launch.SHARED_BYTES >= 64 * MAX_NODES
    with pytest.raises(ShapeError, match=r"inputs must be .* \[4, channels\], got .* \[3, 2\]"):
        states.convolve_lanes(
            torch.zeros(3, 2), torch.zeros(2, 4), None, torch.zeros(2, 2, 4), lanes
        )
    with pytest.raises(ShapeError, match=r"greatest slot of a lane must be in \[0, 0\], got 1"):
        states.convolve_lanes(
            torch.zeros(4, 2), torch.zeros(2, 4), None, torch.zeros(1, 2, 4), lanes
        )
    with pytest.raises(ShapeError, match=r"width of weight must be in \[1, 8\], got 9"):
        states.convolve_lanes(
            torch.zeros(4, 2), torch.zeros(2, 9), None, torch.zeros(2, 2, 4), lanes
        )
