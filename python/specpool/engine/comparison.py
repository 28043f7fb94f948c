"""Check whether two runs gave one request the same text, up to the rounding of the model's dtype.

The referee is the model itself. It reads the text of a run with its own attention, without pages,
and each token of the run is compared with the token that the model's logits choose. If they differ,
rounding explains the token if a change of the logits within `noise` would choose it.

Rounding moves a logit in two ways. Storing the logit rounds it once, by at most u * |logit|, where
u is half of the dtype's epsilon. The hidden state behind the logit has been rounded about
`ROUNDINGS_PER_LAYER` times in each of L layers. Such errors add up like a random walk (Higham and
Mary, SIAM J. Sci. Comput. 41, 2019), to a share u * sqrt(ROUNDINGS_PER_LAYER * L) of the hidden
state. The error has no preferred direction, so the logits move by the same share of `spread`, the
standard deviation of the logits over the vocabulary. For two logits in each of two runs, the sum is

    noise = 4 * u * |logit| + DEVIATIONS * u * sqrt(ROUNDINGS_PER_LAYER * L) * spread
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from specpool import kernels
from specpool.checks import shown
from specpool.engine.models import TargetModel
from specpool.engine.output import RequestOutput
from specpool.engine.sampling_params import TRUNCATIONS, SamplingParams
from specpool.engine.scheduler.request import common_len
from specpool.errors import ConfigError

Verdict = Literal["identical", "rounding", "fault"]

#: Results that a layer rounds on the way to the next: norms, projections, attention, sums.
ROUNDINGS_PER_LAYER = 16
#: Standard deviations of the difference of two runs that count as rounding.
DEVIATIONS = 4.0
# The most positions whose logits are in memory at the same time.
_BLOCK = 256
# The truncations that `drawn_gap` reckons with.
_JUDGED_TRUNCATIONS = ("top_k", "top_p")
# The most sizes of the set kept by top-p that are tried.
_MOST_CUTS = 64
# A temperature below this is greedy (cuda/sample.cu).
_LEAST_TEMPERATURE = 2.0**-100


@dataclass(frozen=True, slots=True)
class TokenGap:
    """The distance of a run's token from the token that the model's logits choose at its position.

    Attributes:
        token_id: the run's token.
        gap: by how much logits would have to change for the model to choose the token; 0 = the
            model chooses it. Greedy: the greatest logit minus the token's logit. Drawn: the
            distance between the drawn number and the edge of the token's share, as log odds times
            the temperature.
        noise: a gap up to this is rounding.
    """

    token_id: int
    gap: float
    noise: float

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains the token."""
        return self.gap <= self.noise


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `Engine.compare`.

    Attributes:
        verdict: `identical`; `rounding`: the texts differ, and the dtype's rounding explains it; or
            `fault`.
        dtype: the model's dtype, such as "float32".
        num_same: the number of equal tokens at the start; all, if the texts are identical.
        first: the gap of the first text's token at index `num_same`; None if the texts are
            identical or one of them has ended there.
        second: the same for the second text.
        run_gaps: by how much each run's own log probability of the likeliest token was above the
            next one, at index `num_same`; None unless both runs had `logprobs` of 2 or more.
        fault: a sentence about what rounding does not explain; None if there is no fault.
    """

    verdict: Verdict
    dtype: str
    num_same: int
    first: TokenGap | None = None
    second: TokenGap | None = None
    run_gaps: tuple[float, float] | None = None
    fault: str | None = None

    @property
    def is_same(self) -> bool:
        """Whether the texts are identical or differ by rounding alone."""
        return self.verdict != "fault"

    def __str__(self) -> str:
        """Return the verdict and its figures in one line."""
        if self.verdict == "identical":
            return f"identical: {self.num_same} tokens"
        if self.verdict == "fault":
            return f"fault: {self.fault}; the texts part at token {self.num_same}"
        assert self.first is not None and self.second is not None
        runs = ""
        if self.run_gaps is not None:
            runs = f"; in the runs {self.run_gaps[0]:.2g} and {self.run_gaps[1]:.2g}"
        return (
            f"same up to {self.dtype} rounding: token {self.num_same} is {self.first.token_id} or "
            f"{self.second.token_id}, {max(self.first.gap, self.second.gap):.2g} apart in logits, "
            f"rounding reaches {max(self.first.noise, self.second.noise):.2g}{runs}"
        )


@torch.inference_mode()
def compare(target: TargetModel, first: RequestOutput, second: RequestOutput) -> Comparison:
    """Compare two outputs of one request; `Engine.compare` documents arguments and errors."""
    check_pair(first, second)
    dtype = str(target.dtype).removeprefix("torch.")
    a, b = first.token_ids, second.token_ids
    num_same = common_len(a, b)
    if num_same == len(a) == len(b):
        return Comparison("identical", dtype, num_same)
    unjudged = [name for name in TRUNCATIONS if name not in _JUDGED_TRUNCATIONS]
    for params in (first.params.filled(), second.params.filled()):
        truncates = any(getattr(params, name) != TRUNCATIONS[name] for name in unjudged)
        if params.changes_logits or truncates:
            raise ConfigError(
                f"the texts part at token {num_same}, and the model's own logits cannot judge texts"
                f" with a bias, penalties, bans, a form or {' or '.join(unjudged)}: compare runs "
                "without them"
            )
    if num_same == min(len(a), len(b)):
        shorter, longer = ("first", "second") if len(a) < len(b) else ("second", "first")
        ends = f"the {shorter} text ends after {num_same} tokens, the {longer} one goes on"
        return Comparison("fault", dtype, num_same, fault=ends)
    first_referee, second_referee = Referee(target, first), Referee(target, second)
    gaps = first_referee.at(num_same), second_referee.at(num_same)
    run_gap = _RunGaps.at(first, second, num_same)
    fault = first_referee.fault("first") or second_referee.fault("second")
    if fault is None and run_gap is not None and is_greedy(first.params):
        fault = run_gap.fault(max(gap.noise for gap in gaps))
    verdict: Verdict = "rounding" if fault is None else "fault"
    run_gaps = None if run_gap is None else (run_gap.first, run_gap.second)
    return Comparison(verdict, dtype, num_same, *gaps, run_gaps, fault)


def is_greedy(params: SamplingParams) -> bool:
    """Return whether these parameters always take the likeliest token."""
    return params.temperature < _LEAST_TEMPERATURE


class Referee:
    """A judge that compares each token of an output with the model's logits of the same text."""

    def __init__(self, target: TargetModel, output: RequestOutput) -> None:
        """Run the model once over the prompt and the output, with its own attention."""
        self._target, self._output = target, output
        ids = [*output.prompt_ids, *output.token_ids]
        self._hidden = target.plain_hidden(ids[:-1])[len(output.prompt_ids) - 1 :]

    def at(self, index: int) -> TokenGap:
        """Return the gap of the output's token `index`."""
        (logits,) = self._target.compute_logits(self._hidden[index : index + 1])
        return self._gap(index, logits.double())

    def fault(self, name: str) -> str | None:
        """Describe the first token that rounding does not explain; None if there is none.

        `name` is "first" or "second", for the message.
        """
        for index, logits in self._unlikely():
            if not bool(logits.isfinite().any()) or bool(logits.isnan().any()):
                return f"the model's own logits of the {name} text's token {index} are not finite"
            gap = self._gap(index, logits)
            if not gap.is_rounding:
                return (
                    f"token {index} of the {name} text, {gap.token_id}, is {gap.gap:.3g} in logits "
                    f"from what the model chooses, rounding reaches {gap.noise:.3g}"
                )
        return None

    def _unlikely(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each token that the model would not choose: its index and logits, float64 [V]."""
        tokens = torch.tensor(self._output.token_ids, device=self._hidden.device)
        for start in range(0, len(tokens), _BLOCK):
            logits = self._target.compute_logits(self._hidden[start : start + _BLOCK])
            chosen = self._choose(start, logits)
            (rows,) = (chosen != tokens[start : start + _BLOCK]).nonzero(as_tuple=True)
            for row in rows.tolist():
                yield start + row, logits[row].double()

    def _choose(self, start: int, logits: Tensor) -> Tensor:
        """Sample tokens, int64 [n], from logits [n, V] with the request's own parameters.

        `start` is the index of the first token in the output.
        """
        params, size = self._output.params.filled(), len(logits)
        top_p = max(params.top_p or 0, torch.finfo(torch.float32).tiny)

        def column(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=logits.device)

        return kernels.sample_tokens(
            logits.contiguous(),
            column([params.temperature] * size, torch.float32),
            column([params.top_k or 0] * size, torch.int32),
            column([top_p] * size, torch.float32),
            column([self._draw(start + i) for i in range(size)], torch.float64),
        )

    def _draw(self, index: int) -> float:
        """Return the number in [0, 1) that chooses the output's token `index`."""
        if is_greedy(self._output.params):
            return 0.0
        seed = torch.tensor([self._output.seed], dtype=torch.uint64)
        position = torch.tensor([len(self._output.prompt_ids) + index])
        return float(kernels.uniform(seed, position))

    def _gap(self, index: int, logits: Tensor) -> TokenGap:
        token, params = self._output.token_ids[index], self._output.params
        noise = rounding_noise(self._target, logits, token)
        if is_greedy(params):
            return TokenGap(token, float(logits.max() - logits[token]), noise)
        return drawn_gap(logits, token, params, self._draw(index), noise)


def rounding_noise(target: TargetModel, logits: Tensor, token: int) -> float:
    """Return how far rounding may move two logits apart between two runs.

    The formula is at the top of this file.

    Args:
        target: gives the dtype and the number of layers.
        logits: float64 [V].
        token: one of the two tokens; the other is the likeliest.
    """
    finite = logits[logits.isfinite()]
    greatest = max(abs(float(finite.max())), abs(float(logits[token].nan_to_num(0, 0, 0))))
    walk = math.sqrt(ROUNDINGS_PER_LAYER * target.num_layers) * float(finite.std(correction=0))
    return rounding_unit(target) * (4 * greatest + DEVIATIONS * walk)


def rounding_unit(target: TargetModel) -> float:
    """Return the relative error of one rounding in the target's dtype."""
    if target.dtype == torch.float32 and target.device.type == "cuda":
        if torch.backends.cuda.matmul.allow_tf32:  # TF32 keeps 10 bits of each factor
            return 2.0**-11
    return torch.finfo(target.dtype).eps / 2


def drawn_gap(
    logits: Tensor, token: int, params: SamplingParams, u: float, noise: float
) -> TokenGap:
    """Return the gap between a drawn token and the token that the number `u` draws.

    Tokens are ordered by id, and each has a share of [0, 1). A draw takes the token whose share
    contains u. Let c hold the weights of the tokens below an edge, scaled to sum to 1, and minus
    the weights of the tokens above it, scaled likewise. Errors e of the logits then move the
    edge's log odds by (c . e) / temperature. With two tokens |c| is sqrt(2), as in the greedy
    case; with many tokens the errors average out.

    Args:
        logits: float64 [V].
        token: the token that was drawn.
        params: sampling parameters with a temperature above 0.
        u: the number that was drawn, in [0, 1).
        noise: the result of `rounding_noise`.
    """
    order = torch.argsort(logits, descending=True, stable=True)
    num_kept = min(params.top_k or len(order), len(order))
    weights = torch.softmax(logits[order[:num_kept]] / params.temperature, 0)
    sizes = _cuts(weights.cumsum(0), params.top_p or 1.0, noise / params.temperature)
    # If no cut keeps the token, its gap is how far its logit is below the last kept one.
    shortfall = float(logits[order[max(sizes) - 1]] - logits[token])
    best = TokenGap(token, shortfall, noise) if shortfall > noise else None
    for size in sizes:
        for kept_ids in _kept_sets(logits, order, size, token, noise):
            edge_gap = _edge_gap(logits, kept_ids, token, params.temperature, u, noise)
            if edge_gap.is_rounding:
                return edge_gap
            if best is None or edge_gap.gap * best.noise < best.gap * edge_gap.noise:
                best = edge_gap
    assert best is not None
    return best


def _kept_sets(
    logits: Tensor, order: Tensor, size: int, token: int, noise: float
) -> Iterator[Tensor]:
    """Yield the sets of `size` likeliest tokens that rounding allows and that hold `token`.

    Any token about as likely as the last kept one may take its place. Such tokens weigh about the
    same, so only the number of them with ids below `token` makes a difference.
    """
    if size == len(order):
        yield order
        return
    below_last = logits[order] - logits[order[size - 1]]
    certain, tied = order[below_last > noise], order[below_last.abs() <= noise]
    num_free = size - len(certain)
    if bool((tied == token).any()):
        num_free -= 1
    elif not bool((certain == token).any()):
        return
    below, above = tied[tied < token], tied[tied > token]
    token_id = certain.new_tensor([token])
    for num_below in range(max(0, num_free - len(above)), min(num_free, len(below)) + 1):
        free = below[:num_below], above[: num_free - num_below]
        # `token` may be among the certain ones; do not add it twice.
        yield torch.cat([certain[certain != token], *free, token_id])


def _cuts(mass: Tensor, top_p: float, slack: float) -> Sequence[int]:
    """Return the possible numbers of tokens that top-p keeps, for any logits within rounding.

    Args:
        mass: float64 [n], the probability of the first 1, 2, ... tokens together.
        top_p: top-p keeps the fewest tokens with at least this mass.
        slack: the largest error of the log odds of a mass.
    """
    if top_p >= 1:
        return [len(mass)]
    odds = top_p / (1 - top_p)
    low, high = (x / (1 + x) for x in (odds * math.exp(-slack), odds * math.exp(min(slack, 500))))
    least = int((mass < low).sum()) + 1
    greatest = min(int((mass < high).sum()) + 1, len(mass))
    least = min(least, greatest)
    step = max(1, (greatest - least) // _MOST_CUTS)
    return [*range(least, greatest, step), greatest]


def _edge_gap(
    logits: Tensor, kept_ids: Tensor, token: int, temperature: float, u: float, noise: float
) -> TokenGap:
    """Return the distance between u and the nearer edge of the token's share, 0 inside it."""
    ids = kept_ids.sort().values
    p = torch.softmax(logits[ids] / temperature, 0)
    index = int((ids == token).nonzero())
    lower, upper = float(p[:index].sum()), float(p[: index + 1].sum())
    if lower <= u < upper:
        return TokenGap(token, 0.0, noise)
    split = index if u < lower else index + 1
    below, above = p[:split], p[split:]
    gap = abs(_log_odds(float(below.sum()), float(above.sum())) - _log_odds(u, 1 - u))
    pull = math.hypot(*(float(part.norm() / part.sum()) for part in (below, above)))
    return TokenGap(token, temperature * gap, noise * pull / math.sqrt(2))


def _log_odds(below: float, above: float) -> float:
    tiny = 2.0**-1000
    return math.log(max(below, tiny)) - math.log(max(above, tiny))


@dataclass(frozen=True, slots=True)
class _RunGaps:
    """The log probabilities that two runs recorded at the first token that differs.

    Attributes:
        first: in the first run, the likeliest token's log probability minus the next one's.
        second: the same in the second run.
        apart: log probability of the first run's token minus that of the second run's token, in
            the first run, minus the same difference in the second run.
    """

    first: float
    second: float
    apart: float

    @classmethod
    def at(cls, first: RequestOutput, second: RequestOutput, index: int) -> _RunGaps | None:
        """Read the gaps at token `index`; None unless both runs recorded two tokens there."""
        if first.logprobs is None or second.logprobs is None:
            return None
        first_top, second_top = first.logprobs[index].top, second.logprobs[index].top
        if min(len(first_top), len(second_top)) < 2:
            return None
        a, b = first.token_ids[index], second.token_ids[index]
        (high, low, *_), (other_high, other_low, *_) = first_top.values(), second_top.values()
        # A token outside a run's list is at most as likely as the last one in the list.
        least, other_least = min(first_top.values()), min(second_top.values())
        difference = first_top.get(a, least) - first_top.get(b, least)
        difference += second_top.get(b, other_least) - second_top.get(a, other_least)
        return cls(high - low, other_high - other_low, difference)

    def fault(self, noise: float) -> str | None:
        """Describe the difference of the runs if rounding does not explain it, else None."""
        if self.apart <= noise:
            return None
        return (
            f"the runs' own logits of the two tokens differ by {self.apart:.3g}, rounding reaches "
            f"{noise:.3g}"
        )


def check_pair(first: object, second: object) -> None:
    """Raise `ConfigError` unless these are finished outputs of the same request."""
    for output in (first, second):
        if not isinstance(output, RequestOutput):
            raise ConfigError(f"compare takes two RequestOutput, got {shown(output)}")
        if output.finish_reason not in ("stop", "length"):
            raise ConfigError(
                f"an output that ended with {output.finish_reason!r} is no whole text: "
                f"{output.error or 'it was given up'}"
            )
    assert isinstance(first, RequestOutput) and isinstance(second, RequestOutput)
    if first.prompt_ids != second.prompt_ids:
        num_same = common_len(first.prompt_ids, second.prompt_ids)
        raise ConfigError(
            f"outputs of different prompts cannot be compared: of {len(first.prompt_ids)} and "
            f"{len(second.prompt_ids)} tokens the first {num_same} are the same"
        )
    for name in ("max_new_tokens", "temperature", *TRUNCATIONS, "ignore_eos", "stop"):
        first_value, second_value = getattr(first.params, name), getattr(second.params, name)
        if first_value != second_value:
            raise ConfigError(
                f"outputs with different {name} cannot be compared: {first_value}, {second_value}"
            )
    if first.seed != second.seed and not is_greedy(first.params):
        raise ConfigError(
            f"outputs with different seeds cannot be compared: {first.seed}, {second.seed}: give "
            "SamplingParams a seed"
        )
