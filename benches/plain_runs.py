"""What `python -m benches plain` measures: the same work by this engine and by transformers.

The two sides take turns of a few tokens each in one process, so that other work on the machine
slows both. Ratios of wall time and of the process's CPU time are given.
"""

from __future__ import annotations

import copy
import inspect
import logging
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from torch import Tensor

from benches.plain_rows import SIZES, Row
from specpool.engine.assets import resolve
from specpool.engine.attention import AttentionBatch
from specpool.engine.engine import Engine
from specpool.engine.models.target import TargetModel
from specpool.engine.models.target_output import TargetOutput
from specpool.engine.sampling_params import SamplingParams
from specpool.errors import CorruptState

WINDOW = 8  # tokens of a row in one turn of a side

Times = tuple[float, float]  # wall and CPU seconds


def rows_of(
    size: str,
    batch_sizes: Sequence[int],
    contexts: Sequence[int],
    prompts: Sequence[int],
    num_requests: int,
    repeats: int,
) -> Iterator[Row]:
    """Measure one size of model: decoding, prefill, and requests that come at once."""
    _silence()
    theirs = _model(size)
    ours = copy.deepcopy(theirs)
    max_len = theirs.config.max_position_embeddings - (repeats + 2) * WINDOW
    for context in contexts:
        if context > max_len:
            continue
        for batch in batch_sizes:
            kinds = [("fresh", False), ("used", False)] + [("used", True)] * (batch > 1)
            for pool, ragged in kinds:
                yield _decoding(size, ours, theirs, batch, context, pool, ragged, repeats)
    for length in prompts:
        if length <= max_len:
            yield _prefill(size, ours, theirs, length, repeats)
    if num_requests:
        max_len = min(512, max_len // 2)
        yield from _requests(size, ours, theirs, num_requests, max_len, repeats)


def _silence() -> None:
    """Keep transformers from writing: the figures already say what runs here, and how well."""
    for quieten in (
        transformers.logging.set_verbosity_error,
        transformers.logging.disable_progress_bar,
    ):
        quieten()  # type: ignore[no-untyped-call]
    # It has a level of its own, and logs as an error that psutil is missing.
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)


def _model(size: str) -> Any:
    auto: Any = transformers.AutoModelForCausalLM
    if size == "tiny":
        return auto.from_pretrained(resolve("specpool/tiny")).float().eval()
    config = transformers.LlamaConfig(
        max_position_embeddings=1 << 14,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **SIZES[size],
    )
    torch.manual_seed(0)
    return auto.from_config(config).float().eval()


def _engine(
    model: Any, batch: int, length: int, *, scattered: bool = False, prefill_tokens: int = 1024
) -> Engine:
    """An engine with room for `batch` rows of `length` tokens, and a quarter more."""
    num_pages = -(-batch * (length + 32) // 16) * 5 // 4
    engine = Engine.from_pretrained(
        model,
        max_batch=batch,
        max_context_len=length,
        num_pages=num_pages,
        prefill_tokens=prefill_tokens,
        prefix_cache=False,
    )
    if scattered:
        _scatter(engine)
    return engine


def _scatter(engine: Engine) -> None:
    """Have the pool hand out pages in random order, as after many requests; no forward runs."""
    ledger, rng = engine.ledger, random.Random(0)
    size = ledger.groups[0].page_size
    rows = [ledger.admit() for _ in range(ledger.num_free_rows)]
    lens = dict.fromkeys(rows, 0)
    while ledger.free_pages(0):
        able = [row for row in rows if lens[row] + size <= ledger.max_context_len]
        if not able:
            break
        row = rng.choice(able)
        lens[row] += size
        step = ledger.prepare_extend([row], [lens[row]], writes_draft=False).step
        ledger.launch(step)
        engine.cache.apply_delta(step)
        ledger.complete(step)
    rng.shuffle(rows)
    for row in rows:
        ledger.abort(row)


def _tokens(count: int, length: int, vocab: int, *, ragged: bool = False) -> list[list[int]]:
    rng = random.Random(length)
    lens = [length * (i + 1) // count if ragged else length for i in range(count)]
    return [[rng.randrange(3, vocab) for _ in range(max(n, 1))] for n in lens]


def _decoding(
    size: str,
    ours: Any,
    theirs: Any,
    batch: int,
    context: int,
    pool: str,
    ragged: bool,
    repeats: int,
) -> Row:
    """Turns of a few tokens each, over random keys and values on both sides."""
    prompts = _tokens(batch, context, ours.config.vocab_size, ragged=ragged)
    length = context + (repeats + 3) * WINDOW
    # All rows begin in one turn, so that none is ahead of the others.
    options: dict[str, Any] = {"scattered": pool == "used", "prefill_tokens": batch * context}
    with _engine(ours, batch, length, **options) as engine:
        running = _Running(engine, prompts, (repeats + 2) * WINDOW)
        reference = _Cached(theirs, prompts)
        runs: list[Callable[[], Times]] = [running.window, reference.window]
        times = _interleaved(runs, repeats)
        running.stop()
    lens = f"{context // batch} to {context}" if ragged else f"{context}"
    name = f"{size}: decoding, batch {batch}, {lens} tokens, {pool} pages"
    return _row(name, times, batch * WINDOW, "tokens/s", "transformers generate")


class _Running:
    """Requests of ours that decode."""

    def __init__(self, engine: Engine, prompts: list[list[int]], num_tokens: int) -> None:
        params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
        self._engine, self._counts = engine, dict[int, int]()

        def count(number: int, item: Any) -> None:
            self._counts[number] = self._counts.get(number, 0) + len(item.token_ids)

        # As on the other side, the pages hold random numbers: a prefill would take minutes.
        for buffer in (*engine.cache.keys, *engine.cache.values):
            buffer.uniform_(-1, 1)
        target: Any = engine.target
        target.forward = partial(_no_forward, target)
        self._numbers = [engine.submit(p, params, on_item=count) for p in prompts]
        while len(self._counts) < len(prompts):
            engine.turn()
        del target.forward

    def window(self) -> Times:
        start = _now()
        for _ in range(WINDOW):
            self._engine.turn()
        return _since(start)

    def stop(self) -> None:
        for number in self._numbers:
            self._engine.abort(number)


def _no_forward(
    target: TargetModel,
    token_ids: Tensor,
    positions: Tensor,
    batch: AttentionBatch,
    logits_index: Tensor | None = None,
    **_: Any,
) -> TargetOutput:
    num_tokens = len(token_ids)
    num_logits = num_tokens if logits_index is None else len(logits_index)
    logits = torch.zeros(num_logits, target.vocab_size)
    return TargetOutput(logits, torch.zeros(num_tokens, target.hidden_size), None)


class _Cached:
    """transformers' `generate`, going on from a cache of random keys and values.

    Its texts grow from turn to turn as ours do, so that both read as much.
    """

    def __init__(self, model: Any, prompts: list[list[int]]) -> None:
        self._model, self._len = model, max(map(len, prompts))
        size = len(prompts), self._len
        self._ids = torch.zeros(size, dtype=torch.int64)
        self._mask = torch.zeros_like(self._ids)
        for lane, prompt in enumerate(prompts):
            self._ids[lane, self._len - len(prompt) :] = torch.tensor(prompt)
            self._mask[lane, self._len - len(prompt) :] = 1
        config = model.config
        dim = config.hidden_size // config.num_attention_heads
        shape = len(prompts), config.num_key_value_heads, self._len - 1, dim
        self._cache = transformers.DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            self._cache.update(torch.randn(shape), torch.randn(shape), layer)
        # `cache` since transformers 5.24.
        known = "cache" in inspect.signature(model.forward).parameters
        self._argument = "cache" if known else "past_key_values"

    def window(self) -> Times:
        """Note the time from the first token of a call on."""
        marks = _Marks()
        self._model.generate(
            input_ids=self._ids,
            attention_mask=self._mask,
            max_new_tokens=WINDOW + 1,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            streamer=marks,
            **{self._argument: self._cache},
        )
        self._len += WINDOW
        pad = torch.nn.functional.pad
        self._ids, self._mask = pad(self._ids, (0, WINDOW)), pad(self._mask, (0, WINDOW), value=1)
        self._cache.crop(self._len - 1 - self._cache.get_seq_length())
        (first, first_cpu), (last, last_cpu) = marks.times[1], marks.times[-1]
        return last - first, last_cpu - first_cpu


class _Marks:
    """Notes when each token comes; the prompt comes first."""

    def __init__(self) -> None:
        self.times: list[Times] = []

    def put(self, value: Any) -> None:
        self.times.append(_now())

    def end(self) -> None:
        """Return at once: nothing is held back."""


def _prefill(size: str, ours: Any, theirs: Any, length: int, repeats: int) -> Row:
    (prompt,) = _tokens(1, length, ours.config.vocab_size)
    with _engine(ours, 1, length + 16, scattered=True) as engine:
        params = SamplingParams(max_new_tokens=1, ignore_eos=True)
        texts: list[list[int]] = [[], []]

        def run_ours() -> Times:
            start = _now()
            (output,) = engine.generate([prompt], params)
            texts[0] = output.token_ids
            return _since(start)

        def run_theirs() -> Times:
            start = _now()
            texts[1] = _generate(theirs, prompt, 1)
            return _since(start)

        times = _interleaved([run_ours, run_theirs], repeats)
    _check_texts(size, *texts)
    name = f"{size}: prefill of {length} tokens, used pages"
    return _row(name, times, length, "tokens/s", "transformers generate")


def _generate(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def _requests(
    size: str, ours: Any, theirs: Any, count: int, max_len: int, repeats: int
) -> Iterator[Row]:
    """Requests of different lengths that come at once, beside transformers' continuous batching."""
    prompts = _tokens(count, max_len, ours.config.vocab_size, ragged=True)
    random.Random(0).shuffle(prompts)
    new = 32
    make_config: Any = transformers.GenerationConfig  # only some versions have types for it
    greedy = make_config(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    texts: list[Any] = [[], []]

    def run_theirs() -> Times:
        start = _now()
        outputs = theirs.generate_batch(inputs=prompts, generation_config=greedy, warmup=False)
        texts[1] = [outputs[key].generated_tokens for key in sorted(outputs, key=_number)]
        return _since(start)

    try:
        run_theirs()
    except Exception as error:  # only some versions of transformers run it on a CPU
        Console(stderr=True).print(f"continuous batching does not run here: {error!r:.200}")
        return
    if len(texts[1]) != count:
        Console(stderr=True).print("continuous batching does not run here")
        return
    with _engine(ours, 8, max_len + new + 16) as engine:
        params = SamplingParams(max_new_tokens=new, ignore_eos=True)

        def run_ours() -> Times:
            start = _now()
            texts[0] = [output.token_ids for output in engine.generate(prompts, params)]
            return _since(start)

        times = _interleaved([run_ours, run_theirs], repeats)
    same = sum(a == b for a, b in zip(*texts, strict=True))
    lens = f"{max(max_len // count, 1)} to {max_len} tokens"
    name = f"{size}: {count} requests of {lens} ({same} texts equal)"
    yield _row(name, times, count * new, "tokens/s", "transformers continuous batching")


def _number(request_id: str) -> int:
    return int(request_id.rpartition("_")[2])


def _check_texts(size: str, ours: list[int], theirs: list[int]) -> None:
    if ours != theirs:
        raise CorruptState(f"{size}: the texts differ: {ours} and transformers' {theirs}")


def _now() -> Times:
    return time.perf_counter(), time.process_time()


def _since(start: Times) -> Times:
    wall, cpu = _now()
    return wall - start[0], cpu - start[1]


def _interleaved(runs: Sequence[Callable[[], Times]], repeats: int) -> Any:
    """Float [runs, repeats, 2]: seconds, a first turn of each left out."""
    times = [[run() for run in runs] for _ in range(repeats + 1)][1:]
    return np.array(times).transpose(1, 0, 2)


def _row(name: str, times: Any, amount: int, unit: str, reference: str) -> Row:
    ours, theirs = times
    ratios = theirs[:, 0] / ours[:, 0]
    return Row(
        name,
        amount / statistics.median(ours[:, 0]),
        unit,
        reference,
        amount / statistics.median(theirs[:, 0]),
        least_ratio=float(ratios.min()),
        most_ratio=float(ratios.max()),
        cpu_ratio=float(np.median(theirs[:, 1]) / np.median(ours[:, 1])),
    )
