"""`AdaptiveConfig`: the shapes that each range of batch sizes may use, and how to choose one.

It is read from a JSON file or a dict of the same form. Anything wrong raises one `ConfigError`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

from specpool._core import Shape
from specpool.checks import check_choice, check_int, did_you_mean, shown
from specpool.engine.shape_names import chain, depth_order, name_of, parse_shape
from specpool.errors import ConfigError

# The candidates for every batch size; measurements choose among them.
_MEASURED = {"1": {"candidates": ["none", "chain:1", "chain:2", "chain:3", "chain:5"]}}

MOST_BUDGET_SHAPES = 64  #: shapes that policy `budget` can tell apart

PolicyName = Literal["ema", "cost", "budget"]
POLICIES: tuple[str, ...] = get_args(PolicyName)

_FORM = (
    'the form that works: {"1": {"candidates": ["chain:7", "chain:3", "none"]}, '
    '"8": {"candidate_steps": [1, 3]}}'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeConfig:
    """The candidates of a range of batch sizes, and the options of policy `ema`.

    Attributes:
        candidates: the shapes, no duplicates.
        up_hysteresis: added to the mean of correct drafts above which a deeper shape is tried.
        down_hysteresis: added to the mean at or below which a shallower one is enough.
        ceiling_coeff: a range that does not deepen keeps at most this many times the mean as its
            depth; 0 = no such ceiling.
        ema_alpha: weight of the newest round.
        update_interval: rounds between two decisions.
        warmup_batches: rounds before the first decision.
    """

    candidates: tuple[Shape, ...]
    up_hysteresis: float = 0.0
    down_hysteresis: float = -0.25
    ceiling_coeff: float = 0.0
    ema_alpha: float = 0.2
    update_interval: int = 5
    warmup_batches: int = 10

    def __post_init__(self) -> None:
        if not isinstance(self.candidates, tuple | list) or not all(
            isinstance(shape, Shape) for shape in self.candidates
        ):
            raise ConfigError(f"candidates must be a tuple of Shape, got {shown(self.candidates)}")
        if not self.candidates:
            raise ConfigError("candidates must hold at least one shape, got none")
        for i, shape in enumerate(self.candidates):
            if shape in self.candidates[:i]:
                raise ConfigError(f"candidates hold {name_of(shape)} twice")
        _check_number("up_hysteresis", self.up_hysteresis)
        _check_number("down_hysteresis", self.down_hysteresis)
        _check_number("ceiling_coeff", self.ceiling_coeff, least=0.0)
        _check_number("ema_alpha", self.ema_alpha, least=0.0, greatest=1.0)
        if self.ema_alpha == 0:
            raise ConfigError("ema_alpha must be above 0, or the range would never move; got 0")
        check_int("update_interval", self.update_interval, 1, 1 << 30)
        check_int("warmup_batches", self.warmup_batches, 0, 1 << 30)

    def check_ema(self) -> None:
        """Raise `ConfigError` if the rule on the EMA cannot work with these candidates.

        Two candidates must not have the same depth. Each candidate needs a mean at which the range
        stays; else the range would move up and down for ever.
        """
        shapes = sorted(self.candidates, key=depth_order)
        for shallow, deep in pairwise(shapes):
            if shallow.num_steps == deep.num_steps:
                raise ConfigError(
                    f"candidates {name_of(shallow)} and {name_of(deep)} both draft "
                    f"{deep.num_steps} deep, which policy 'ema' cannot tell apart (policy 'cost' "
                    "can)"
                )
        for i, shape in enumerate(shapes):
            if shape.num_steps == 0:
                continue
            below = shapes[i - 1].num_steps if i else 0
            # The range stays at a mean in (low, high], and a round gives 0 to num_steps. The edge
            # next to plain decoding is not checked, because SGLang has files that fail there.
            low = below - 0.5 + self.down_hysteresis if below else -math.inf
            high = math.inf if i + 1 == len(shapes) else shape.num_steps - 0.5 + self.up_hysteresis
            if high < 0 or low >= min(high, shape.num_steps):
                raise ConfigError(
                    f"up_hysteresis {self.up_hysteresis:g} and down_hysteresis "
                    f"{self.down_hysteresis:g} contradict each other: the range would leave "
                    f"{name_of(shape)} at every mean of correct drafts; take down_hysteresis "
                    "at or below up_hysteresis, both near 0"
                )


_RANGE_DEFAULTS = tuple(f.name for f in fields(RangeConfig) if f.name != "candidates")
_TOP = ("policy", "threshold_rounds")
_LISTS = ("candidates", "candidate_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveConfig:
    """The ranges of batch sizes, each under its smallest batch size, and the policy.

    Attributes:
        ranges: the ranges by key. A batch belongs to the greatest key that is not above its size,
            or to the smallest key.
        policy: `ema` = SGLang's rule on the mean of correct drafts; `cost` = the most expected
            tokens per second, from measured times; `budget` = likewise, with a shape for each row.
        threshold_rounds: rounds in a row that must belong to other ranges before the range
            changes; 0 = it changes at once.
    """

    ranges: Mapping[int, RangeConfig]
    policy: PolicyName = "ema"
    threshold_rounds: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.ranges, Mapping):
            raise ConfigError(
                f"ranges must map batch sizes to RangeConfig, got {shown(self.ranges)}"
            )
        if not self.ranges:
            raise ConfigError(f"there is no batch size in it; {_FORM}")
        check_choice("policy", self.policy, POLICIES)
        check_int("threshold_rounds", self.threshold_rounds, 0, 1 << 30)
        if self.policy == "budget" and len(self.ranges) > 1:
            raise ConfigError(
                "policy 'budget' chooses for each row, so it takes one range of batch sizes, got "
                f"{', '.join(map(str, self.ranges))}"
            )
        for key, batch_range in self.ranges.items():
            check_int("a batch size", key, 1, 1 << 16)
            if not isinstance(batch_range, RangeConfig):
                raise ConfigError(f"ranges[{key}] must be a RangeConfig, got {shown(batch_range)}")
            if self.policy == "ema":
                try:
                    batch_range.check_ema()
                except ConfigError as error:
                    raise ConfigError(f'"{key}": {error}') from None
        # An engine has the plain shape too, whether it is a candidate or not.
        num_shapes = len({Shape.none(), *self.candidates})
        if self.policy == "budget" and num_shapes > MOST_BUDGET_SHAPES:
            raise ConfigError(
                f"policy 'budget' chooses among at most {MOST_BUDGET_SHAPES} shapes, `none` "
                f"included, got {num_shapes}"
            )

    @classmethod
    def default(cls) -> AdaptiveConfig:
        """Return SGLang's table: the fewer rows, the deeper the drafts."""
        return cls.from_dict(
            {
                "1": {"candidate_steps": [1, 3, 7], "down_hysteresis": -0.25},
                "8": {"candidate_steps": [1, 3]},
                "32": {"candidate_steps": [1], "down_hysteresis": 0.0},
            }
        )

    @classmethod
    def from_file(cls, path: str | PathLike[str]) -> AdaptiveConfig:
        """Read a JSON file.

        Raises:
            ConfigError: the file is wrong; the message names the file, the key and the value.
        """
        try:
            content = json.loads(Path(path).read_bytes(), object_pairs_hook=_unique)
        except OSError as error:
            raise ConfigError(
                f"{path!s:.1000}: cannot be read: {error.strerror or error}"
                f"{did_you_mean(path, POLICIES)}"
            ) from None
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}: is not JSON: {error!s:.80}; {_FORM}") from None
        return cls.from_dict(content, source=str(path))

    @classmethod
    def from_dict(
        cls, content: object, *, source: str = "adaptive configuration"
    ) -> AdaptiveConfig:
        """Build a configuration from an object of the same form as a JSON file.

        Raises:
            ConfigError: `content` is wrong; the message names `source`, the key and the value.
        """
        try:
            return cls(**_parse(content))
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None
        except ValueError as error:  # an integer with too many digits to print
            raise ConfigError(f"{source}: {error}; {_FORM}") from None

    @property
    def candidates(self) -> tuple[Shape, ...]:
        """Every shape of every range once, the shallowest first."""
        shapes = {shape for batch_range in self.ranges.values() for shape in batch_range.candidates}
        return tuple(sorted(shapes, key=depth_order))

    def initial_shape(self, initial: Shape | int | None) -> Shape | None:
        """Return the candidate that `initial`, a shape or a chain's depth, names; None stays None.

        Raises:
            ConfigError: no range has it.
        """
        if initial is None:
            return None
        if not isinstance(initial, Shape):
            check_int("the initial number of steps", initial, 0, 1 << 20)
            initial = chain(initial)
        if initial not in self.candidates:
            raise ConfigError(
                f"the initial shape {name_of(initial)} is in no range; the ranges have "
                f"{', '.join(name_of(shape) for shape in self.candidates)}"
            )
        return initial


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise ConfigError(
                f'key "{key:.80}" stands there twice: {shown(values[key])}, {shown(value)}'
            )
        values[key] = value
    return values


def _parse(content: object) -> dict[str, Any]:
    if not isinstance(content, Mapping):
        raise ConfigError(f"must be an object, got {shown(content)}; {_FORM}")
    top: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    entries: dict[int, object] = {}
    for key, value in content.items():
        if key in _LISTS:
            raise ConfigError(
                f'"{key}": {shown(value)} belongs to a batch size, as in {{"1": {{"{key}": '
                f"[1, 3, 7]}}}} (the flat form of old files is no longer read)"
            )
        if key in _TOP:
            top[key] = value
        elif key in _RANGE_DEFAULTS:
            defaults[key] = value
        else:
            size = _batch_size(key)
            if size in entries:
                raise ConfigError(f"batch size {size} stands there twice")
            entries[size] = value
    ranges = {size: _range(size, entries[size], defaults) for size in sorted(entries)}
    return {"ranges": ranges, **top}


def _batch_size(key: object) -> int:
    is_text = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 6
    is_number = isinstance(key, int) and not isinstance(key, bool)
    size = int(key) if is_text or is_number else 0  # type: ignore[call-overload]
    if not 1 <= size <= 1 << 16 or (is_text and str(size) != key):
        raise ConfigError(
            f"key {shown(key)} is neither a batch size from 1 to {1 << 16} nor one of "
            f"{', '.join((*_TOP, *_RANGE_DEFAULTS))}; {_FORM}"
        )
    return int(size)


def _candidate(key: str, value: object) -> Shape:
    """Return the shape that a candidate names; `candidate_steps` takes only depths."""
    is_depth = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1 << 20
    if key == "candidate_steps" and not is_depth:
        raise ConfigError(
            f"candidate_steps must be integers from 0 up, as in [0, 1, 3], got {shown(value)}"
        )
    return parse_shape(key, value)


def _range(size: int, entry: object, defaults: Mapping[str, Any]) -> RangeConfig:
    try:
        if not isinstance(entry, Mapping):
            raise ConfigError(f"must be an object, got {shown(entry)}; {_FORM}")
        for key in entry:
            if key not in (*_LISTS, *_RANGE_DEFAULTS):
                raise ConfigError(
                    f"key {shown(key)}: {shown(entry[key])} is none of "
                    f"{', '.join((*_LISTS, *_RANGE_DEFAULTS))}"
                )
        lists_given = [name for name in _LISTS if name in entry]
        if len(lists_given) != 1:
            raise ConfigError(
                "must have one of candidates and candidate_steps, got "
                f"{', '.join(lists_given) or 'none'}"
                f"; {_FORM}"
            )
        values = entry[lists_given[0]]
        if not isinstance(values, list | tuple):
            raise ConfigError(f"{lists_given[0]} must be a list, got {shown(values)}; {_FORM}")
        shapes = tuple(_candidate(lists_given[0], value) for value in values)
        settings = {k: v for k, v in {**defaults, **entry}.items() if k not in _LISTS}
        return RangeConfig(candidates=shapes, **settings)
    except ConfigError as error:
        raise ConfigError(f'"{size}": {error}') from None


def _check_number(
    name: str, value: object, least: float = -(1 << 20), greatest: float = 1 << 20
) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= greatest:  # type: ignore[operator]  # NaN fails both
        raise ConfigError(
            f"{name} must be a number in [{least:g}, {greatest:g}], got {shown(value)}"
        )


def config_of(value: AdaptiveConfig | str | PathLike[str]) -> AdaptiveConfig:
    """Return the configuration that `EngineConfig.adaptive` names: a policy, or a path.

    Raises:
        ConfigError: `value` is not one of these, or the file is wrong.
    """
    if isinstance(value, AdaptiveConfig):
        return value
    if not isinstance(value, str | PathLike) or not value:
        raise ConfigError(
            f"adaptive must be {', '.join(map(repr, POLICIES))}, the path of a JSON file or an "
            f"AdaptiveConfig, got {shown(value)}"
        )
    if value == "ema":
        return AdaptiveConfig.default()
    if value in ("cost", "budget"):
        return AdaptiveConfig.from_dict({"policy": value, **_MEASURED})
    return AdaptiveConfig.from_file(value)
