"""`python -m benches grammar`: what the form of a text costs, and what its forced spans bring."""

from __future__ import annotations

import json
import statistics
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from specpool._core import Shape
from specpool.checks import check_int
from specpool.cli.options import checks
from specpool.cli.results import Result, check_plot, draw, machine, report
from specpool.engine.assets import corpus, resolve
from specpool.engine.sampling_params import SamplingParams
from specpool.engine.text.structured.compiler import Compiler
from specpool.engine.text.structured.grammar import Grammar
from specpool.engine.text.structured.matcher import Matcher
from specpool.errors import CorruptState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from specpool.engine.engine import Engine

NUM_NODES = 16  # of a tree whose masks are timed
SPAN = 15  # forced steps of a round
#: Keys as an order has them; the values are short.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "customer_identification_number": {"type": "integer", "minimum": 0, "maximum": 99999},
        "shipping_address_first_line": {"type": "string", "maxLength": 12},
        "order_status": {"enum": ["pending_confirmation", "delivered_to_customer"]},
        "line_items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "product_description": {"type": "string", "maxLength": 12},
                    "quantity_ordered": {"type": "integer", "minimum": 1, "maximum": 99},
                },
                "required": ["product_description", "quantity_ordered"],
                "additionalProperties": False,
            },
            "minItems": 1,
            "maxItems": 2,
        },
    },
    "required": [
        "customer_identification_number",
        "shipping_address_first_line",
        "order_status",
        "line_items",
    ],
    "additionalProperties": False,
}
TEXT = {
    "customer_identification_number": 4711,
    "shipping_address_first_line": "12 Long Road",
    "order_status": "delivered_to_customer",
    "line_items": [{"product_description": "a red chair", "quantity_ordered": 3}],
}


@dataclass(frozen=True, slots=True)
class _Case:
    """An engine, by its drafter and options."""

    name: str
    draft: str | None
    options: dict[str, Any]


def _cases() -> Iterator[_Case]:
    long = {"forced_steps": SPAN}
    chain, tree = Shape.eagle(3, 1, 4), Shape.eagle(4, 4, 16)
    head = "specpool/tiny-eagle3"
    yield _Case("no drafter, spans to 15", None, long)
    yield _Case("EAGLE-3 chain 3x1x4", head, {"shape": chain})
    yield _Case("EAGLE-3 chain 3x1x4, spans to 15", head, {"shape": chain, **long})
    yield _Case("EAGLE-3 tree 4x4x16", head, {"shape": tree})
    yield _Case("EAGLE-3 tree 4x4x16, spans to 15", head, {"shape": tree, **long})


class _Watch:
    """The seconds and calls of a matcher's methods while it is entered."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count within the block."""
        masks, forced = Matcher.masks, Matcher.forced

        def timed_masks(matcher: Matcher, *args: Any) -> Any:
            begin = time.perf_counter()
            mask_lines = masks(matcher, *args)
            self.seconds += time.perf_counter() - begin
            return mask_lines

        def timed_forced(matcher: Matcher, max_tokens: int) -> list[int]:
            begin = time.perf_counter()
            span = forced(matcher, max_tokens)
            self.seconds += time.perf_counter() - begin
            return span

        with (
            mock.patch.object(Matcher, "masks", timed_masks),
            mock.patch.object(Matcher, "forced", timed_forced),
        ):
            yield


def _large_vocabulary(num_tokens: int) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE on Python's standard library, so that nothing is downloaded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    fast: Any = PreTrainedTokenizerFast  # its __init__ has no types
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))[:1500]
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (path.read_text(errors="ignore") for path in files)
    tokenizer.train_from_iterator(texts, trainer)
    wrapped: PreTrainedTokenizerBase = fast(tokenizer_object=tokenizer, eos_token="<eos>")
    return wrapped


def _masks(name: str, tokenizer: PreTrainedTokenizerBase, repeats: int) -> list[Result]:
    """Microseconds of compiling, and of the masks of a chain of nodes along a text."""
    vocab_size = len(tokenizer)
    eos = frozenset([int(tokenizer.eos_token_id or 0)])
    grammar = Grammar.json_schema(SCHEMA)
    reads, compiles = [], []
    for repeat in range(3):
        compiler = Compiler(tokenizer, vocab_size, eos)
        begin = time.perf_counter()
        compiler.matcher(Grammar.choice(["a"]))
        reads.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        compiler.matcher(Grammar.json_schema({**SCHEMA, "title": str(repeat)}))
        compiles.append(time.perf_counter() - begin)
    text = json.dumps(TEXT, separators=(",", ":"))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    links = np.array([*range(1, NUM_NODES), -1], np.int32), np.full(NUM_NODES, -1, np.int32)
    none = np.full(1, -1, np.int32)
    ours, theirs, cold = list[float](), list[float](), list[float]()
    for run in range(1 + repeats):  # the first text fills the library's own caches
        matcher = compiler.matcher(grammar)
        for start in range(0, len(ids) - NUM_NODES, NUM_NODES):
            matcher.follow(ids[: start + 1], 0)
            tokens = np.array(ids[start : start + NUM_NODES])
            begin = time.perf_counter()
            nodes, _ = matcher.masks(tokens, *links)
            (ours if run else cold).append((time.perf_counter() - begin) / len(nodes))
            if len(nodes) != NUM_NODES:
                raise CorruptState(f"{len(nodes)} of {NUM_NODES} nodes have a mask")
            begin = time.perf_counter()
            for end in range(start + 1, start + 1 + NUM_NODES):
                other = matcher.fresh()
                other.follow(ids[:end], 0)
                other.masks(tokens[:1], none, none)
            if run:
                theirs.append((time.perf_counter() - begin) / NUM_NODES)
    read, compiled = (statistics.median(times) * 1e3 for times in (reads, compiles))
    mask, plainly = (statistics.median(times) * 1e6 for times in (ours, theirs))
    first = statistics.mean(cold) * 1e6
    afresh = "each node from the start of the text"
    return [
        Result(f"compile the schema, {name}", compiled, "ms", "reading the vocabulary, once", read),
        Result(f"mask of a node, {name}", mask, "us", afresh, plainly),
        Result(f"mask of a node in the first text, {name}", first, "us", "in later texts", mask),
    ]


def _beside_xgrammar(name: str, tokenizer: PreTrainedTokenizerBase) -> list[Result]:
    """Milliseconds to compile and microseconds of each token's mask, beside xgrammar's.

    Nothing if xgrammar is not installed. Its JSON has blanks after commas and colons.
    """
    try:
        import xgrammar
    except ModuleNotFoundError:
        return []
    vocab_size, eos = len(tokenizer), int(tokenizer.eos_token_id or 0)
    spent: dict[str, list[float]] = {}

    def timed(what: str, call: Any, *arguments: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        result = call(*arguments, **options)
        spent.setdefault(what, []).append(time.perf_counter() - begin)
        return result

    compiler = Compiler(tokenizer, vocab_size, frozenset([eos]))
    compiler.matcher(Grammar.choice(["a"]))  # reads the vocabulary
    known = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=vocab_size, stop_token_ids=[eos]
    )
    other = xgrammar.GrammarCompiler(known, max_threads=1)
    none = np.full(1, -1, np.int32)
    mask = xgrammar.allocate_token_bitmask(1, vocab_size)
    matcher = timed("compile", compiler.matcher, Grammar.json_schema(SCHEMA))
    rules = timed("other's compile", other.compile_json_schema, json.dumps(SCHEMA),
                  any_whitespace=False)  # fmt: skip
    for _ in range(3):
        matcher, theirs = matcher.fresh(), xgrammar.GrammarMatcher(rules, max_rollback_tokens=64)
        text = json.dumps(TEXT, separators=(",", ":"))
        ids = tokenizer.encode(text, add_special_tokens=False)
        for end in range(len(ids)):
            matcher.follow(ids[:end], 0)
            timed("mask", matcher.masks, np.zeros(1, np.int64), none, none)
        for token in tokenizer.encode(json.dumps(TEXT), add_special_tokens=False):
            timed("other's mask", theirs.fill_next_token_bitmask, mask)
            theirs.accept_token(token)
    us, reference = 1e6, "xgrammar"
    columns = (
        ("mask", statistics.median, "the median token"),
        ("mask", statistics.mean, "the mean token"),
    )
    return [
        Result(f"compile the schema beside xgrammar, {name}", spent["compile"][0] * 1e3, "ms",
               reference, spent["other's compile"][0] * 1e3),
        *(
            Result(f"mask of {label} beside xgrammar, {name}", take(spent[what]) * us, "us",
                   reference, take(spent[f"other's {what}"]) * us)
            for what, take, label in columns
        ),
    ]  # fmt: skip


def _engine(case: _Case) -> Engine:
    from specpool.engine.engine import Engine

    return Engine.from_pretrained(
        "specpool/tiny", draft=case.draft, dtype="float32", max_context_len=512, **case.options
    )


def _runs(case: _Case, repeats: int) -> list[Result]:
    """Tokens per round and per second with forced spans, beside the same engine without them."""
    params = SamplingParams(
        max_new_tokens=400, structured=Grammar.json_schema(SCHEMA), logit_bias={34: 4.0}
    )
    prompts = [bytes(text).decode("latin-1") for text in corpus.prompts(4, 40)]
    cases: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
    texts = set()
    watch = _Watch()
    with _engine(case) as engine:
        engine.generate(prompts, params)  # warm up
        for repeat in range(2 * repeats):
            forces = repeat % 2 == 0
            off: Any = mock.patch.object(Matcher, "forced", lambda self, max_tokens: [])
            before = watch.seconds
            begin = time.perf_counter()
            with watch.watching():
                if forces:
                    outputs = engine.generate(prompts, params)
                else:
                    with off:
                        outputs = engine.generate(prompts, params)
            seconds = time.perf_counter() - begin
            texts.add(tuple(tuple(output.token_ids) for output in outputs))
            if any(output.finish_reason != "stop" for output in outputs):
                raise CorruptState(f"a text has no end: {outputs[0].text!r:.200}")
            num_tokens = sum(len(output.token_ids) for output in outputs)
            num_rounds = sum(len(output.accept_lens) for output in outputs)
            share = (watch.seconds - before) / seconds
            cases[forces].append((num_tokens / num_rounds, num_tokens / seconds, share))
    if len(texts) > 1:
        raise CorruptState("the texts with and without forced spans differ")
    medians = {
        forces: [statistics.median(column) for column in zip(*runs, strict=True)]
        for forces, runs in cases.items()
    }
    reference = "without forced spans"
    (ours, speed, share), (theirs, slower, _) = medians[True], medians[False]
    return [
        Result(f"{case.name}: tokens a round", ours, "tokens", reference, theirs),
        Result(f"{case.name}: tokens a second", speed, "tokens/s", reference, slower),
        Result(f"{case.name}: masks' share of the time", 100 * share, "%", "all of it", 100),
    ]


def grammar(*, vocab: int, repeats: int, threads: int, json: bool, plot: Path | None) -> None:
    """Measure, and print the results.

    Raises:
        ConfigError: an option cannot work.
        CorruptState: a text with forced spans differs from that without.
    """
    check_int("repeats", repeats, 1, 1000)
    if vocab:
        check_int("vocab", vocab, 300, 1 << 17)
    checks.check_place(device="cpu", threads=threads)
    if plot is not None:
        check_plot(plot)
    checks.start_torch(threads)
    from transformers import AutoTokenizer

    small = AutoTokenizer.from_pretrained(resolve("specpool/tiny"))
    tokenizers: dict[str, Any] = {"259 tokens": small}
    if vocab:
        tokenizers[f"{vocab:,} tokens"] = _large_vocabulary(vocab)
    results = []
    for name, tokenizer in tokenizers.items():
        results += _masks(name, tokenizer, repeats) + _beside_xgrammar(name, tokenizer)
    for case in _cases():
        results += _runs(case, repeats)
    where = machine("cpu", threads, ("torch", "transformers", "llguidance"))
    report("bench grammar", where, results, json_only=json, plot=None)
    if plot is not None:
        draw("bench grammar", [result for result in results if result.unit == "tokens"], plot)
