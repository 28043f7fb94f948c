"""Laws of `Engine.compare`: it tells rounding from faults, in every dtype, greedy and drawn."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

import specpool.engine.comparison as comparison
import specpool.engine.worker.draft_round as draft_round
from specpool import ConfigError, Engine, RequestOutput, SamplingParams, Shape, kernels
from specpool.engine.assets import corpus
from specpool.engine.comparison import drawn_gap
from specpool.engine.worker.row_state import RowState

DTYPES = ("bfloat16", "float16", "float32")
GREEDY = SamplingParams(max_new_tokens=64, ignore_eos=True)
DRAWN = dataclasses.replace(GREEDY, temperature=1.0, seed=3)
CUT = dataclasses.replace(DRAWN, temperature=1.3, top_k=12, top_p=0.9)
TREE = Shape.eagle(3, 2, 6)


@pytest.fixture(scope="module")
def engine_of() -> Iterator[Callable[[str], Engine]]:
    """The shipped pair in a dtype; loaded once."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def engine_of(dtype: str) -> Engine:
            options = {"shape": TREE, "max_batch": 5, "max_context_len": 256}
            draft = "specpool/tiny-eagle"
            engine = Engine.from_pretrained("specpool/tiny", draft=draft, dtype=dtype, **options)
            return stack.enter_context(engine)

        yield engine_of


def pairs(
    engine: Engine, params: SamplingParams, num_prompts: int = 5
) -> list[tuple[RequestOutput, RequestOutput]]:
    prompts = corpus.prompts(num_prompts)
    drafted = engine.generate(prompts, params)
    return [*zip(drafted, engine.generate(prompts, params, shape=Shape.none()), strict=True)]


@pytest.fixture(scope="module")
def rounded(engine_of) -> list[tuple[RequestOutput, RequestOutput]]:
    """Greedy texts in bfloat16 that differ, with the log probabilities of the runs."""
    params = dataclasses.replace(GREEDY, logprobs=2)
    several = pairs(engine_of("bfloat16"), params, 12)
    return [pair for pair in several if pair[0].token_ids != pair[1].token_ids]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("params", [GREEDY, DRAWN, CUT], ids=["greedy", "drawn", "cut"])
def test_what_rounding_changes_is_said_to_be_the_same(engine_of, dtype, params):
    engine = engine_of(dtype)
    found = [engine.compare(a, b) for a, b in pairs(engine, params)]
    assert {each.verdict for each in found} <= {"identical", "rounding"}, [*map(str, found)]
    for each in found:
        assert each.is_same and each.fault is None and each.dtype == dtype
        if each.verdict == "rounding":
            assert f"same up to {dtype} rounding: token {each.num_same} is" in str(each)


def test_sixteen_bits_do_change_texts(engine_of, rounded, monkeypatch):
    """Only the bound makes them the same: without it they are a fault."""
    engine = engine_of("bfloat16")
    assert rounded, "no text differs: the law above says nothing"
    for a, b in rounded:
        found = engine.compare(a, b)
        assert found.verdict == "rounding"
        assert found.run_gaps is not None and "; in the runs " in str(found)
        assert found.first is not None and found.second is not None
        assert a.token_ids[: found.num_same] == b.token_ids[: found.num_same]
        assert found.first.token_id == a.token_ids[found.num_same]
        assert found.second.token_id == b.token_ids[found.num_same]
    monkeypatch.setattr(comparison, "rounding_noise", lambda *args: -1.0)
    assert {engine.compare(*pair).verdict for pair in rounded} == {"fault"}


# --- planted faults -------------------------------------------------------------------------------


def spoil_slot(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The prompt's eighth position loses its keys in one layer, once the prompt is there."""
    request = engine.core.scheduler.requests()[0]
    page = int(engine.ledger.page_table(0)[request.row][0])
    engine.cache.keys[1][page * engine.config.page_size + 7] *= -3
    yield


def hide_ancestors(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In verify a node sees the prefix and itself alone."""
    own_view = draft_round.own_view

    def planted(cache, group, lanes, slots, masks, *rest):
        return own_view(cache, group, lanes, slots, torch.eye(masks.shape[1]).bool() & masks, *rest)

    monkeypatch.setattr(draft_round, "own_view", planted)
    yield


def forget_compaction(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Accepted KV stays where the tree had it."""
    monkeypatch.setattr(draft_round.DraftRound, "_compact", lambda *args: None)
    yield


def shift_positions(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Verified nodes stand 24 positions too far."""
    launch = draft_round.DraftRound.launch

    def planted(self):
        nodes = launch(self)
        return dataclasses.replace(nodes, positions=nodes.positions + 24)

    monkeypatch.setattr(draft_round.DraftRound, "launch", planted)
    yield


def shift_draws(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The number of the next position draws."""
    draw = RowState.draw

    def planted(self, lanes, logits, positions, *, greedy):
        return draw(self, lanes, logits, positions + 1, greedy=greedy)

    monkeypatch.setattr(RowState, "draw", planted)
    yield


Plant = Callable[[Engine, pytest.MonkeyPatch], Iterator[None]]


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    "plant", [spoil_slot, hide_ancestors, forget_compaction, shift_positions, shift_draws]
)
def test_a_planted_fault_is_called_a_fault(engine_of, dtype, params, plant, monkeypatch):
    if plant is shift_draws and params is GREEDY:
        pytest.skip("nothing is drawn")
    prompts = corpus.prompts(4)
    engine = engine_of(dtype)
    plain = engine.generate(prompts, params, shape=Shape.none())
    outputs = {}
    planted = None
    for item in engine.stream(prompts, params):
        if planted is None:
            planted = plant(engine, monkeypatch)
            next(planted)
        if isinstance(item, RequestOutput):
            outputs[item.index] = item
    verdicts = [engine.compare(outputs[i], plain[i]) for i in range(4)]
    faults = [each for each in verdicts if each.verdict == "fault"]
    if plant is spoil_slot:  # only the first prompt is spoilt
        assert verdicts[0] in faults, [*map(str, verdicts)]
        assert all(each.is_same for each in verdicts[1:]), [*map(str, verdicts)]
    else:
        assert len(faults) >= 3, [*map(str, verdicts)]
    for each in faults:
        assert each.fault is not None and not each.is_same
        assert str(each).startswith("fault: token ") and "of the first text" in str(each)


def test_a_text_that_ends_early_is_a_fault(engine_of):
    engine = engine_of("float32")
    ((whole, _),) = pairs(engine, GREEDY, 1)
    short = dataclasses.replace(whole, token_ids=whole.token_ids[:10])
    found = engine.compare(short, whole)
    assert found.verdict == "fault" and found.num_same == 10
    assert "the first text ends after 10 tokens" in str(found)


def test_gaps_of_the_runs_are_shown_where_they_were_recorded(engine_of, rounded):
    engine = engine_of("bfloat16")
    a, b = rounded[0]
    found = engine.compare(a, b)
    assert found.run_gaps is not None and "; in the runs " in str(found)
    bare = engine.compare(*(dataclasses.replace(each, logprobs=None) for each in (a, b)))
    assert bare.run_gaps is None and "; in the runs " not in str(bare)


def test_a_disagreement_of_the_runs_beyond_rounding_is_a_fault(engine_of, rounded):
    """This also holds where the model itself has a near-tie, because the runs had none."""
    engine = engine_of("bfloat16")
    a, b = rounded[0]
    at = engine.compare(a, b).num_same
    (best, high), (second, _) = a.logprobs[at].top.items()
    entry = dataclasses.replace(a.logprobs[at], top={best: high, second: high - 5.0})
    sure = dataclasses.replace(a, logprobs=[*a.logprobs[:at], entry, *a.logprobs[at + 1 :]])
    found = engine.compare(sure, b)
    assert found.verdict == "fault" and "the runs' own logits" in str(found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"prompt_ids": [1, 2, 3]},
            "different prompts cannot be compared: of 3 and [0-9]+ tokens the first 0 are the same",
        ),
        ({"finish_reason": "abort"}, "an output that ended with 'abort' is no whole text"),
        ({"seed": 4}, "outputs with different seeds cannot be compared: 4, 3"),
        (
            {"params": dataclasses.replace(DRAWN, temperature=0.5)},
            "outputs with different temperature cannot be compared: 0.5, 1.0",
        ),
        (
            {"params": dataclasses.replace(DRAWN, min_p=0.1).filled()},
            "outputs with different min_p cannot be compared: 0.1, 0.0",
        ),
    ],
)
def test_outputs_of_two_requests_are_refused(engine_of, change, message):
    engine = engine_of("float32")
    (output,) = engine.generate(corpus.prompts(1), DRAWN)
    with pytest.raises(ConfigError, match=message):
        engine.compare(dataclasses.replace(output, **change), output)
    with pytest.raises(ConfigError, match="compare takes two RequestOutput, got \\[1\\]"):
        engine.compare(output, [1])  # type: ignore[arg-type]


def test_texts_that_part_under_min_p_cannot_be_judged(engine_of):
    engine = engine_of("float32")
    (output,) = engine.generate(corpus.prompts(1), dataclasses.replace(DRAWN, min_p=0.1))
    *same, last = output.token_ids
    other = dataclasses.replace(output, token_ids=[*same, last + 1])
    with pytest.raises(ConfigError, match="a form or min_p: compare runs without them"):
        engine.compare(output, other)


def test_a_closed_engine_compares_nothing():
    with Engine.from_pretrained("specpool/tiny") as engine:
        (output,) = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=1))
    with pytest.raises(ConfigError, match="has been closed"):
        engine.compare(output, output)


# --- the gap of a drawn token ---------------------------------------------------------------------


def test_a_drawn_tokens_gap_is_what_has_to_change():
    """For two tokens: raising one logit by the gap draws the other token."""
    logits = torch.tensor([0.3, -0.2], dtype=torch.float64)
    params = SamplingParams(temperature=0.7)
    share = float(torch.softmax(logits / 0.7, 0)[0])
    u = share + 0.05  # draws token 1
    gap = drawn_gap(logits, 0, params, u, 1.0)
    assert drawn_gap(logits, 1, params, u, 1.0).gap == 0
    assert gap.noise == pytest.approx(1.0)
    logits[0] += gap.gap
    assert float(torch.softmax(logits / 0.7, 0)[0]) == pytest.approx(u)


def test_noise_of_a_flat_distribution_averages_out():
    """Errors of many logits move an edge less than those of two: measured against random errors."""
    generator = torch.Generator().manual_seed(0)
    logits = 0.3 * torch.randn(4096, generator=generator, dtype=torch.float64)
    cdf = torch.softmax(logits, 0).cumsum(0)
    token = 1700
    gap = drawn_gap(logits, token, SamplingParams(temperature=1.0), float(cdf[1900]), 1.0)
    moved = []
    for _ in range(200):
        errors = torch.randn(4096, generator=generator, dtype=torch.float64)
        share = torch.softmax(logits + 0.01 * errors, 0).cumsum(0)[token]
        moved.append(float(torch.logit(share) - torch.logit(cdf[token])))
    # A noise of 1 is meant for the difference of two errors with deviation 1 / sqrt(2).
    assert gap.noise * 0.01 * np.sqrt(2) == pytest.approx(np.std(moved), rel=0.15)


@pytest.mark.parametrize(
    ("params", "token", "excused"),
    [
        (SamplingParams(temperature=1.0, top_k=2), 2, True),  # nearly as likely as the second
        (SamplingParams(temperature=1.0, top_k=2), 3, False),
        (SamplingParams(temperature=1.0, top_p=0.8989), 3, True),  # 0.9 without it
        (SamplingParams(temperature=1.0, top_p=0.85), 3, False),
    ],
)
def test_what_a_cut_left_out_is_rounding_only_at_its_edge(params, token, excused):
    shares = torch.tensor([0.3, 0.301, 0.299, 0.1], dtype=torch.float64)
    for u in (0.99, 0.999):
        gap = drawn_gap(shares.log(), token, params, u, 0.02)
        assert gap.is_rounding == excused, gap


def test_errors_within_the_noise_explain_every_draw_that_they_change():
    """Draws from another distribution are recognized, as far as one draw allows."""
    generator = torch.Generator().manual_seed(0)
    several = [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(temperature=1.2, top_k=5),
        SamplingParams(temperature=0.9, top_k=50, top_p=0.8),
    ]
    num_changed = num_faults = num_caught = 0
    for trial in range(600):
        params, scale = several[trial % 4].filled(), (0.3, 2.0, 5.0)[trial % 3]
        size, deviation = (8, 64, 1000)[trial // 3 % 3], (0.002, 0.02, 0.1)[trial // 9 % 3]

        def normal(size=size):
            return torch.randn(size, generator=generator, dtype=torch.float64)

        logits = (scale * normal()).bfloat16().double()  # with ties
        u, noise = float(torch.rand(1, generator=generator)), 4 * deviation * 2**0.5
        token = draw(logits, params, u)
        moved = draw(logits + deviation * normal(), params, u)
        if moved != token:
            num_changed += 1
            assert drawn_gap(logits, moved, params, u, noise).is_rounding
        other = draw(scale * normal(), params, u)
        if other != token:
            num_faults += 1
            num_caught += not drawn_gap(logits, other, params, u, noise).is_rounding
    assert num_changed > 30
    assert num_caught > 0.8 * num_faults


def draw(logits: torch.Tensor, params: SamplingParams, u: float) -> int:
    """What the sampler draws from float64 [V]."""
    return int(
        kernels.sample_tokens(
            logits.float().unsqueeze(0),
            torch.tensor([params.temperature], dtype=torch.float32),
            torch.tensor([params.top_k], dtype=torch.int32),
            torch.tensor([params.top_p], dtype=torch.float32),
            torch.tensor([u], dtype=torch.float64),
        )
    )
