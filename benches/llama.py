"""Random Llamas beside transformers, beside torch's attention and beside the bytes of their KV.

`benches.graphs` prints them. The embedded pair is no measure here: its heads of 32 have no fused
kernel, and its prompts are short.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from specpool import Engine, SamplingParams, Shape
from specpool.cli.results import Result, interleaved
from specpool.engine.draft import EagleDrafter
from specpool.engine.models import TargetModel
from specpool.engine.shape_names import name_of
from specpool.errors import SpecpoolError
from specpool.train.head import NewHead, layers_of_features

PROMPT = 4096  # tokens of a prompt that is timed
BATCH, CONTEXT = 64, 1500  # of decoding


@dataclass(frozen=True, slots=True)
class Llama:
    """Sizes of a model, named as in transformers' config."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    num_hidden_layers: int = 4
    vocab_size: int = 32_000


SMALL = Llama(1024, 16, 4, 64, 2816)
WIDE = Llama(4096, 32, 8, 128, 14_336)  # layers as those of an 8B model
WHOLE = replace(WIDE, num_hidden_layers=32, vocab_size=128_256)  # an 8B model
ROUND_BATCHES = (1, 32, 128)


def model_of(
    sizes: Llama, device: str, attention: str = "sdpa", dtype: torch.dtype = torch.float16
) -> Any:
    """Return a model of these sizes with random weights, in `dtype`, or float32 on a CPU."""
    import transformers

    config = transformers.LlamaConfig(
        **asdict(sizes),
        max_position_embeddings=1 << 14,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    dtype = torch.float32 if device == "cpu" else dtype
    with torch.device(device):
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.eval()


def prompts_of(sizes: Llama, count: int, length: int) -> list[list[int]]:
    """Return random prompts, token ids."""
    rng = np.random.default_rng(length)
    return rng.integers(3, sizes.vocab_size, (count, length)).tolist()  # type: ignore[no-any-return]


def _timed(run: Callable[[], object], device: str) -> Callable[[], float]:
    """Return what measures one run in microseconds, until the device is done."""

    def wait() -> None:
        if device != "cpu":
            torch.cuda.synchronize()

    def once() -> float:
        wait()
        began = time.perf_counter_ns()
        run()
        wait()
        return (time.perf_counter_ns() - began) / 1e3

    return once


def prefill_results(
    device: str, repeats: int, sizes: Llama = WIDE, length: int = PROMPT
) -> Iterator[Result]:
    """Measure a prompt until its first token, beside transformers by its own kernels."""
    params, (prompt,) = (
        SamplingParams(max_new_tokens=1, ignore_eos=True),
        prompts_of(sizes, 1, length),
    )
    tokens = torch.tensor([prompt], device=device)
    for attention in ("sdpa", "flash_attention_2"):
        try:
            model = model_of(sizes, device, attention)
        except (ImportError, ValueError) as error:
            print(f"transformers, {attention}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue

        def plain(model: Any = model) -> Any:
            with torch.inference_mode():
                return model(tokens, logits_to_keep=1).logits.argmax(-1)

        with Engine.from_pretrained(
            model_of(sizes, device),
            device=device,
            max_batch=1,
            max_context_len=length + 16,
            prefill_tokens=length,
            prefix_cache=False,
            graph_sizes=(),
        ) as engine:

            def ours(engine: Engine = engine) -> None:
                (output,) = engine.generate([prompt], params)
                assert output.error is None, output.error

            runs = [_timed(ours, device), _timed(plain, device)]
            for run in runs:
                run()
            us, plain_us = interleaved(runs, repeats)
        speeds = [length / duration * 1e6 for duration in (us, plain_us)]
        name = f"a prompt of {length} tokens, {sizes.num_hidden_layers} layers as of an 8B model"
        yield Result(name, speeds[0], "tokens/s", f"transformers, {attention}", speeds[1])


class Reads:
    """The bytes of KV that a round's attention reads and writes, counted where pages are read."""

    def __init__(self, engine: Engine) -> None:
        self.num_bytes = 0
        self._read = engine.cache.read_pages

    def read_pages(self, keys: Any, values: Any, pages: Any) -> Any:
        """Read pages, and count what gather and attention move: read, write, read again."""
        parts = self._read(keys, values, pages)
        self.num_bytes += 3 * sum(part.nbytes for part in parts)
        return parts


def decode_results(
    device: str, repeats: int, sizes: Llama = SMALL, batch: int = BATCH, length: int = CONTEXT
) -> Iterator[Result]:
    """Measure rounds of many long rows: the KV that is moved, and the time, beside the live KV."""
    where = f"batch {batch}, {length} tokens"
    with _decoding(device, repeats, sizes, batch, length, graph_sizes=()) as engine:
        # A graph's replay does not pass here: an eager round reads as far as its rows are long.
        live, reads = _live_bytes(engine), Reads(engine)
        with patch.object(engine.cache, "read_pages", reads.read_pages):
            engine.turn()
        # Back ends that read in place gather nothing: they read whole pages.
        moved = reads.num_bytes or _live_bytes(engine, whole_pages=True)
        yield Result(f"KV moved in an eager round, {where}", moved, "bytes", "live KV", live)
    with _decoding(device, repeats, sizes, batch, length) as engine:
        target, source = torch.ones(
            2, max(_live_bytes(engine) // 2, 1), dtype=torch.uint8, device=device
        )
        runs = [_timed(engine.turn, device), _timed(lambda: target.copy_(source), device)]
        us, copy_us = interleaved(runs, repeats)
        yield Result(f"a round, {where}", us, "us", "a device copy that moves the live KV", copy_us)


def round_results(
    device: str,
    repeats: int,
    sizes: Llama = WHOLE,
    batches: Sequence[int] = ROUND_BATCHES,
    length: int = CONTEXT,
) -> Iterator[Result]:
    """Measure rounds of a large model, plain and of a chain, beside a read of what they need.

    That is the target's weights and the live KV once, and the head's weights once a step. A copy
    reads and writes, so a copy of half as many bytes takes as long.
    """
    model, chain = model_of(sizes, device, dtype=torch.bfloat16), Shape.eagle(3, 1, 4)
    with TargetModel(model) as target:
        tokens = torch.randn(64, target.hidden_size, device=device, dtype=target.dtype)
        features = tokens.repeat(1, len(layers_of_features(target.num_layers)))
        ids = torch.arange(target.vocab_size, device=device)
        head = NewHead.random(target, ids, features, tokens, seed=0)
        assembled = head.assemble(num_positions=2 * length)
    weight_bytes = sum(weight.nbytes for weight in model.parameters())
    head_bytes = sum(weight.numel() for weight in head.weights.values()) * model.dtype.itemsize
    for batch in batches:
        for shape in (Shape.none(), chain):
            options: dict[str, Any] = {"model": model, "graph_sizes": (batch,)}
            if shape.num_steps:  # a drafter is of one engine
                options |= {"draft": EagleDrafter(assembled), "shape": shape}
            with _decoding(device, repeats, sizes, batch, length, **options) as engine:
                num_bytes = weight_bytes + shape.num_steps * head_bytes + _live_bytes(engine)
                read = partial(_copy, num_bytes // 2, device)
                us, read_us = interleaved(
                    [_timed(engine.turn, device), _timed(read, device)], repeats
                )
            name = f"a round of an 8B model, {name_of(shape)}, batch {batch}, {length} tokens"
            yield Result(name, us, "us", "a read of weights and live KV", read_us)


def _copy(num_bytes: int, device: str) -> None:
    """Copy so many bytes on the device, a gibibyte at a time."""
    source, target = torch.empty(2, min(num_bytes, 1 << 30), dtype=torch.uint8, device=device)
    for start in range(0, num_bytes, len(source)):
        end = min(num_bytes - start, len(source))
        target[:end].copy_(source[:end])


@contextlib.contextmanager
def _decoding(
    device: str,
    repeats: int,
    sizes: Llama,
    batch: int,
    length: int,
    *,
    model: Any = None,
    **options: Any,
) -> Iterator[Engine]:
    """An engine all of whose rows decode, for `repeats` turns or more; by default a new model's."""
    params = SamplingParams(max_new_tokens=4 * repeats + 64, ignore_eos=True)
    with Engine.from_pretrained(
        model_of(sizes, device) if model is None else model,
        device=device,
        max_batch=batch,
        overlap_depth=0,  # a turn waits for its own round
        max_context_len=length + params.max_new_tokens + 16,
        prefill_tokens=4 * length,
        prefix_cache=False,
        **options,
    ) as engine:
        begun = set[int]()  # requests that have output
        for prompt in prompts_of(sizes, batch, length):
            engine.submit(prompt, params, on_item=lambda number, _: begun.add(number))
        while len(begun) < batch:
            engine.turn()
        for _ in range(2):
            engine.turn()
        prefill_ct = engine.stats().prefill_ct
        yield engine
        stats = engine.stats()
        assert stats.prefill_ct == prefill_ct, "a prompt was not over"
        assert stats.num_running == batch, "a row ended before its time"


def _live_bytes(engine: Engine, *, whole_pages: bool = False) -> int:
    """Return the bytes of KV of all running rows."""
    lengths = [int(n) for n in engine.ledger.resolved_len if n]
    size = engine.cache.page_sizes[0] if whole_pages else 1
    slots = sum(-(-n // size) * size for n in lengths)
    buffers = engine.cache.buffers(range(len(engine.cache.keys)))
    return slots * sum(buffer.nbytes // len(buffer) for buffer in buffers)


def attention_results(
    device: str, repeats: int, shapes: Sequence[Shape], batches: Sequence[int], rounds_of: Any
) -> Iterator[Result]:
    """Measure rounds by flashinfer beside torch, if flashinfer is there."""
    for shape in shapes:
        for batch in batches:
            where = f"{name_of(shape)}, batch {batch}, heads of {SMALL.head_dim}"
            options: dict[str, Any] = {
                "draft": f"ngram:{shape.num_steps}" if shape.num_steps else None,
                "shape": shape,
                "device": device,
                "max_batch": batch,
                "overlap_depth": 0,  # a turn waits for its own round
                "max_context_len": 2048,
                "prefix_cache": False,
                "graph_sizes": (batch,),
            }
            prompts = prompts_of(SMALL, batch, 40)
            try:
                ours = Engine.from_pretrained(
                    model_of(SMALL, device), attention="flashinfer", **options
                )
            except SpecpoolError as error:
                print(f"flashinfer, {where}: {error}", file=sys.stderr)
                return
            with (
                ours,
                Engine.from_pretrained(model_of(SMALL, device), attention="torch", **options) as by,
            ):
                runs = [rounds_of(engine, batch, prompts) for engine in (ours, by)]
                us, torch_us = interleaved(runs, repeats)
                yield Result(f"a round by flashinfer, {where}", us, "us", "by torch", torch_us)
