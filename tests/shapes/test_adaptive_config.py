"""The adaptive configuration: its forms, its defaults, and every way in which it can be wrong."""

from __future__ import annotations

import json
import re

import pytest

from specpool import ConfigError, Shape
from specpool.engine.shape_names import chain, name_of, parse_shape
from specpool.engine.shapes import AdaptiveConfig, RangeConfig

TREE = Shape.eagle(5, 8, 32)


def test_the_default_table():
    config = AdaptiveConfig.default()
    table = {
        key: (batch_range.candidates, batch_range.down_hysteresis)
        for key, batch_range in config.ranges.items()
    }
    assert table == {
        1: ((chain(1), chain(3), chain(7)), -0.25),
        8: ((chain(1), chain(3)), -0.25),
        32: ((chain(1),), 0.0),
    }
    batch_range = config.ranges[8]
    assert (batch_range.ema_alpha, batch_range.update_interval, batch_range.warmup_batches) == (
        0.2,
        5,
        10,
    )
    assert (batch_range.up_hysteresis, batch_range.ceiling_coeff) == (0.0, 0.0)
    assert (config.policy, config.threshold_rounds) == ("ema", 8)


def test_a_file_with_whole_shapes_and_range_defaults(tmp_path):
    path = tmp_path / "adaptive.json"
    content = {
        "policy": "cost",
        "threshold_rounds": 3,
        "ema_alpha": 0.5,
        "1": {"candidates": ["tree:5x8x32", "chain:3", "none", 7, "4x2x6"], "ema_alpha": 0.1},
        "16": {"candidates": ["chain:1", "none"]},
    }
    path.write_text(json.dumps(content))
    config = AdaptiveConfig.from_file(path)
    assert config == AdaptiveConfig(
        ranges={
            1: RangeConfig(
                candidates=(TREE, chain(3), Shape.none(), chain(7), Shape.eagle(4, 2, 6)),
                ema_alpha=0.1,
            ),
            16: RangeConfig(candidates=(chain(1), Shape.none()), ema_alpha=0.5),
        },
        policy="cost",
        threshold_rounds=3,
    )
    assert [name_of(shape) for shape in config.candidates] == [
        "none", "chain:1", "chain:3", "tree:4x2x6", "tree:5x8x32", "chain:7"
    ]  # fmt: skip
    assert AdaptiveConfig.from_dict({1: {"candidate_steps": (1, 3)}}).candidates == (
        chain(1), chain(3)
    )  # fmt: skip


@pytest.mark.parametrize("shape", [Shape.none(), chain(1), chain(7), TREE])
def test_a_candidate_s_name_reads_back(shape):
    assert parse_shape("candidates", name_of(shape)) == shape


ONE = {"1": {"candidate_steps": [1, 3]}}
BAD = [
    # What the file holds; what the error says: the key and the value.
    ("", "is not JSON"),
    ("{", "is not JSON"),
    (b"\xff\xfe\x00", "is not JSON"),
    ("[" * 100_000, "is not JSON"),
    ("9" * 5000, "is not JSON"),
    ("[]", r"must be an object, got \[\]"),
    ("null", "must be an object, got None"),
    ("{}", "no batch size in it"),
    ('{"1": {"candidate_steps": [1]}, "1": {"candidate_steps": [3]}}', 'key "1" stands there twi'),
    ({"ema_alpha": 0.2}, "no batch size in it"),
    ({"candidate_steps": [1, 3, 7]}, r'"candidate_steps": \[1, 3, 7\] belongs to a batch size'),
    ({"candidate_steps": [1, 3, 7], "ema_alpha": 0.2}, "the flat form of old files"),
    ({"candidate_steps": [1], **ONE}, "belongs to a batch size"),
    ({**ONE, "alpha": 1}, "key 'alpha' is neither a batch size from 1"),
    ({**ONE, "x": {"candidate_steps": [1]}}, "key 'x' is neither a batch size"),
    ({"1.5": {"candidate_steps": [1]}}, "key '1.5' is neither"),
    ({"0": {"candidate_steps": [1]}}, "key '0' is neither"),
    ({"-1": {"candidate_steps": [1]}}, "key '-1' is neither"),
    ({"01": {"candidate_steps": [1]}}, "key '01' is neither"),
    ({"²": {"candidate_steps": [1]}}, "key '²' is neither"),
    ({"99999999": {"candidate_steps": [1]}}, "key '99999999' is neither"),
    ({"1": [1, 3]}, r'"1": must be an object, got \[1, 3\]'),
    ({"1": {}}, '"1": must have one of candidates and candidate_steps, got none'),
    ({"1": {"candidates": [1], "candidate_steps": [1]}}, "got candidates, candidate_steps"),
    ({"1": {"candidate_steps": [1], "alpha": 1}}, "\"1\": key 'alpha': 1 is none of"),
    ({"1": {"candidate_steps": []}}, '"1": candidates must hold at least one'),
    ({"1": {"candidate_steps": 3}}, '"1": candidate_steps must be a list, got 3'),
    ({"1": {"candidate_steps": "13"}}, "must be a list, got '13'"),
    ({"1": {"candidate_steps": [1, -1]}}, "integers from 0 up, as in .*, got -1"),
    ({"1": {"candidate_steps": [True]}}, "got True"),
    ({"1": {"candidate_steps": [1.0]}}, "got 1.0"),
    ({"1": {"candidate_steps": [None]}}, "got None"),
    ({"1": {"candidate_steps": ["chain:1"]}}, "got 'chain:1'"),
    ({"1": {"candidate_steps": [10**30]}}, "got 1000000"),
    ({"1": {"candidate_steps": [3, 1, 3]}}, "candidates hold chain:3 twice"),
    ({"1": {"candidates": ["chain:3", 3]}}, "candidates hold chain:3 twice"),
    ({"1": {"candidates": ["none", 0]}}, "candidates hold none twice"),
    ({"1": {"candidates": ["chain:-1"]}}, "got 'chain:-1'"),
    ({"1": {"candidates": ["chain:3x"]}}, "got 'chain:3x'"),
    ({"1": {"candidates": ["tree:5x8"]}}, "got 'tree:5x8'"),
    ({"1": {"candidates": ["tree:5x8x1"]}}, "candidates: 'tree:5x8x1' cannot be built"),
    ({"1": {"candidates": ["tree:2x2x99"]}}, "candidates: 'tree:2x2x99' cannot be built"),
    ({"1": {"candidates": ["3, 1"]}}, "candidates: a shape is chain:S or its depth S, tree:SxKxN"),
    ({"1": {"candidates": [10**30]}}, "candidates: a shape is .*, got 1000000"),
    ({"1": {"candidates": [[5, 8, 32]]}}, r"got \[5, 8, 32\]"),
    ({"1": {"candidates": ["tree:3x2x4", "chain:3"]}}, "tree:3x2x4 .*chain:3|chain:3 .*tree:3x2x4"),
    ({**ONE, "ema_alpha": 0}, '"1": ema_alpha must be above 0'),
    ({**ONE, "ema_alpha": 1.5}, r"ema_alpha must be a number in \[0, 1\], got 1.5"),
    ({**ONE, "ema_alpha": "0.2"}, "ema_alpha must be a number .*, got '0.2'"),
    ({**ONE, "ema_alpha": True}, "ema_alpha .* got True"),
    ({**ONE, "ema_alpha": float("nan")}, "ema_alpha .* got nan"),
    ({**ONE, "up_hysteresis": float("inf")}, "up_hysteresis .* got inf"),
    ({**ONE, "down_hysteresis": None}, "down_hysteresis .* got None"),
    ({**ONE, "ceiling_coeff": -1}, "ceiling_coeff .* got -1"),
    ({**ONE, "update_interval": 0}, "update_interval must be an integer .*, got 0"),
    ({**ONE, "update_interval": 2.0}, "update_interval .* got 2.0"),
    ({**ONE, "warmup_batches": -1}, "warmup_batches .* got -1"),
    ({**ONE, "warmup_batches": False}, "warmup_batches .* got False"),
    ({**ONE, "policy": "best"}, "policy must be one of ema, cost, budget, got 'best'"),
    ({**ONE, "policy": ["ema"]}, r"policy must be one of ema, cost, budget, got \['ema'\]"),
    ({**ONE, "threshold_rounds": -1}, "threshold_rounds .* got -1"),
    ({**ONE, "threshold_rounds": 1.5}, "threshold_rounds .* got 1.5"),
    # Thresholds that contradict: at no mean would the range stay at that candidate.
    (
        {"1": {"candidate_steps": [1, 2, 3], "up_hysteresis": -0.5, "down_hysteresis": 0.5}},
        "up_hysteresis -0.5 and down_hysteresis 0.5 contradict each other: .* leave chain:2",
    ),
    ({"1": {"candidate_steps": [1, 3], "up_hysteresis": -1}}, "contradict .* leave chain:1"),
    ({"1": {"candidate_steps": [1, 2], "down_hysteresis": 1.5}}, "contradict .* leave chain:2"),
]


@pytest.mark.parametrize(("content", "says"), BAD)
def test_a_bad_file_is_one_error_that_names_it(tmp_path, content, says):
    """Law: any fault of a file is one ConfigError with file, key and value."""
    path = tmp_path / "bad.json"
    if isinstance(content, dict):
        content = json.dumps(content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as caught:
        AdaptiveConfig.from_file(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert re.search(says, message), message
    assert len(message) < 700


def test_a_file_that_is_not_there(tmp_path):
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ConfigError, match=re.escape(f"{path}: cannot be read")):
            AdaptiveConfig.from_file(path)


@pytest.mark.parametrize(
    "content",
    [
        {True: {"candidate_steps": [1]}},
        {None: {"candidate_steps": [1]}},
        {1: {"candidate_steps": [1]}, "1": {"candidate_steps": [1]}},
        {"1": {1: [1]}},
        {"1": {"candidate_steps": {1, 3}}},
    ],
)
def test_a_bad_dict(content):
    with pytest.raises(ConfigError, match=r"^adaptive configuration: "):
        AdaptiveConfig.from_dict(content)


def test_two_candidates_of_one_depth_are_for_the_cost_policy():
    content = {"1": {"candidates": ["tree:3x2x4", "chain:3"]}}
    with pytest.raises(ConfigError, match="both draft 3 deep"):
        AdaptiveConfig.from_dict(content)
    assert len(AdaptiveConfig.from_dict({**content, "policy": "cost"}).candidates) == 2


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RangeConfig(candidates=("chain:3",)), "candidates must be a tuple of Shape"),
        (lambda: AdaptiveConfig(ranges=[1]), "ranges must map batch sizes to RangeConfig"),
        (
            lambda: AdaptiveConfig(ranges={1: {}}, policy="cost"),
            r"ranges\[1\] must be a RangeConfig",
        ),
        (lambda: AdaptiveConfig.from_dict({"1": {"candidates": [10**5000]}}), "the form that"),
        (lambda: AdaptiveConfig.from_dict({10**5000: {}}), "the form that works"),
    ],
)
def test_objects_of_ones_own_are_checked_too(build, message):
    with pytest.raises(ConfigError, match=message):
        build()
