"""What a round launches on a card, counted over the fake card of `fake_cuda.py`.

An operator of torch counts as one launch and a view as none, so a kernel that torch splits into
several counts as one. Operators that torch composes of others are counted by their parts, as they
run in inference mode.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from fake_cuda import DEVICE, Card
from specpool import Engine, SamplingParams, Shape
from specpool.capacity.layer_kv import LayerKV
from specpool.engine.assets import resolve
from specpool.engine.worker.graphs.capture import CudaCapture, Recording, Work
from specpool.engine.worker.results import Outcome

# Operators that compute nothing on the device.
_VIEWS = frozenset(
    "_reshape_alias _unsafe_view alias as_strided detach diagonal empty empty_like empty_strided"
    " expand is_pinned lift_fresh new_empty permute select slice split split_with_sizes squeeze t"
    " transpose unbind unsqueeze view".split()
)
# Operators that torch composes of others, for which a card has a kernel.
_KERNELS = frozenset({"_fused_rms_norm"})
_BATCH = 4


class _Operators(TorchDispatchMode):
    """Count the operators whose result lies on the card, in `counts`."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and name not in _KERNELS and func._can_decompose():
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        made = func(*args, **kwargs)
        results = made if isinstance(made, Sequence) else [made]
        if name not in _VIEWS and any(
            isinstance(value, torch.Tensor) and value.device == DEVICE for value in results
        ):
            self._counts[name] += 1
        return made


@contextlib.contextmanager
def launches(card: Card) -> Iterator[Counter[str]]:
    """Count what is launched within the block: operators, and our kernels that `card` checks."""
    before, counts = card.kernels.launches.copy(), Counter[str]()
    with _Operators(counts):
        yield counts
    counts.update(card.kernels.launches - before)


def count_round(card: Card, make: Callable[..., Engine], *, is_captured: bool) -> Counter[str]:
    """Return what a round of `_BATCH` lanes launches: of the last eager round, or of its graph.

    Args:
        card: the fake card, running.
        make: builds the engine, with the options that it is given.
        is_captured: whether to count the capture of a round, in place of an eager round.
    """
    rounds: list[Counter[str]] = []

    def counted(work: Work) -> Work:
        def count() -> tuple[Outcome, Callable[[], None]]:
            with launches(card) as counts:
                outcome, launch_rest = work()
            rounds.append(counts)

            def count_rest() -> None:
                with launches(card) as rest:
                    launch_rest()
                counts.update(rest)

            return outcome, count_rest

        return count

    with pytest.MonkeyPatch.context() as patch:
        record = CudaCapture.record

        def recording(capture: CudaCapture, work: Work, *, follows: bool) -> Recording:
            return record(capture, counted(work), follows=follows)

        patch.setattr(CudaCapture, "record", recording)
        sizes = (_BATCH,) if is_captured else ()
        with make(overlap_depth=0, graph_sizes=sizes, busy_check=0, max_batch=_BATCH) as engine:
            if is_captured:
                return max(rounds, key=Counter.total)  # rounds without drafts are captured too
            worker = engine.core.worker
            run = worker.run

            def running(steps: Any) -> Any:
                is_round = len(steps) == 1 and steps[0].is_decode
                if not is_round or len(steps[0].requests) != _BATCH:
                    return run(steps)
                with launches(card) as counts:
                    pending = run(steps)
                rounds.append(counts)
                return pending

            worker.run = running
            params = SamplingParams(max_new_tokens=12, ignore_eos=True)
            prompts = [[5 + lane, *range(7, 20 + 3 * lane)] for lane in range(_BATCH)]
            outputs = engine.generate(prompts, params)
            errors = [output.error for output in outputs]
            assert errors == [None] * _BATCH, errors
    return rounds[-1]


def tiny_target(card: Card, num_layers: int) -> transformers.PreTrainedModel:
    """Return the tiny target with another number of layers, in bfloat16 on the fake card."""
    config = transformers.AutoConfig.from_pretrained(resolve("specpool/tiny"))
    config.num_hidden_layers, config.pad_token_id = num_layers, None
    layer_kv = LayerKV(config.num_key_value_heads, config.head_dim, config.head_dim)
    card.layer_kv[config.model_type, num_layers, config.hidden_size] = [layer_kv] * num_layers
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def count_layer(
    card: Card, shape: Shape, *, is_captured: bool
) -> tuple[Counter[str], Counter[str]]:
    """Return what one layer of the target launches in a round, and what the rest launches."""

    def count(num_layers: int) -> Counter[str]:
        def make(**options: Any) -> Engine:
            draft = "specpool/tiny-eagle" if shape.num_steps else None
            model = tiny_target(card, num_layers)
            return Engine.from_pretrained(
                model, draft=draft, shape=shape, max_context_len=120, **options
            )

        return count_round(card, make, is_captured=is_captured)

    few, many = count(2), count(4)
    layer = Counter({name: (many[name] - few[name]) / 2 for name in many | few})
    rest = Counter({name: few[name] - 2 * layer[name] for name in few})
    return +layer, +rest
