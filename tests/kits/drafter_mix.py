"""Random engines of several drafters, with requests and conversations that mix them by row."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import mtp_checkpoints
from specpool import Engine, EngineConfig, RequestOutput, SamplingParams, Shape
from specpool.engine.assets import corpus, resolve
from specpool.engine.draft import (
    BlockDrafter,
    Drafter,
    EagleDrafter,
    LMDrafter,
    MTPDrafter,
    named_drafter,
)
from specpool.engine.models import EagleHead, TargetModel
from specpool.engine.models.mtp.layer import MtpLayer

CONTEXT = 96
SHAPES = [(3, 1, 4), (4, 4, 12), (2, 2, 4), (6, 1, 7)]
NAMES = ("block", "eagle", "eagle3", "lm", "mtp", "ngram", "suffix", "suffix:shared")
LOOKUPS = {"ngram", "suffix", "suffix:shared"}  # they keep no draft KV, and refuse a window of it


class Models:
    """The shipped target, its heads, the draft model, and a random MTP layer of the target."""

    def __init__(self, folder: Path) -> None:
        shutil.copytree(resolve("specpool/tiny"), folder, dirs_exist_ok=True)
        torch.manual_seed(0)
        mtp_checkpoints.add_layer(folder, "deepseek", 4)
        self.target = TargetModel.from_pretrained(folder, dtype="float32")
        self._mtp = MtpLayer.from_pretrained(folder, self.target)
        self._draft = AutoModelForCausalLM.from_pretrained(resolve("specpool/tiny-draft")).float()
        self._lm = TargetModel(self._draft)
        self._block = BlockDrafter.from_pretrained(resolve("specpool/tiny-block"), self.target).head
        self._heads = {name: self._head(f"specpool/tiny-{name}") for name in ("eagle", "eagle3")}

    def _head(self, name: str) -> EagleHead:
        return EagleDrafter.from_pretrained(resolve(name), self.target).head

    def drafter(self, name: str, ancestry: str) -> Drafter:
        """A new drafter of the same models."""
        if name in self._heads:
            return EagleDrafter(self._heads[name], ancestry=ancestry)
        if name == "block":
            return BlockDrafter(self._block)
        if name == "lm":
            return LMDrafter(self._lm, vocab_size=self.target.vocab_size)
        if name == "mtp":
            return MTPDrafter(self._mtp, ancestry=ancestry)
        named = named_drafter(name)
        assert named is not None, name
        return named

    def close(self) -> None:
        self._mtp.model.close()
        self._lm.close()
        self.target.close()


@dataclass(frozen=True)
class Talk:
    """A request (one turn), or a conversation; each turn has its own drafter and shape."""

    turns: tuple[list[int], ...]
    params: tuple[SamplingParams, ...]
    shapes: tuple[Shape | None, ...]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.turns)) + sum(p.max_new_tokens for p in self.params)


class Mix:
    """An engine and its talks, a function of the seed.

    Attributes:
        names: the drafters, the first of which drafts where a request names none.
        talks: what users say. Some begin alike, so the prefix cache hits.
        ancestry: of the heads: `exact` or `branch`.
        options: of `EngineConfig`.
    """

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.names = rng.sample(NAMES, rng.randint(2, 4))
        self.is_tight = rng.random() < 0.5
        shapes = [Shape.eagle(*shape) for shape in rng.sample(SHAPES, rng.randint(1, 3))]
        self.options: dict[str, Any] = {
            "shape": shapes[0],
            "shapes": tuple(shapes[1:]),
            "page_size": rng.choice([1, 3, 4, 16]),
            "placement": rng.choice(["split", "shared"]),
            "layout": rng.choice(["dense", "holey"]),
            "ancestry": rng.choice(["exact", "branch"]),
            "overlap_depth": rng.randint(0, 1),
            "prefill_tokens": rng.choice([5, 32, 1024]),
            "mixed_chunks": rng.random() < 0.3,
            "max_batch": rng.randint(2, 5),
            "headroom": 0 if self.is_tight else rng.choice([0, 16]),
            "prefix_cache": rng.random() < 0.8,
            "max_context_len": CONTEXT,
        }
        self.ancestry = self.options.pop("ancestry")
        if self.options["placement"] == "split" and rng.random() < 0.25:
            window = {"draft_window": rng.choice([4, 24]), "draft_sink": rng.choice([0, 1, 4])}
            if not {*self.names} <= LOOKUPS:
                self.options |= window
        prompts = corpus.prompts(rng.randint(3, 6), 60)
        common = corpus.prompts(1, 40)[0]
        self.talks = [self._talk(prompt, common, shapes, seed) for prompt in prompts]

    def _talk(self, prompt: list[int], common: list[int], shapes: list[Shape], seed: int) -> Talk:
        rng = self.rng
        num_turns = rng.choice([1, 1, 1, 2, 3])
        max_turn_len = CONTEXT // num_turns
        turns, params, chosen = [], [], []
        for number in range(num_turns):
            text = prompt[: rng.randint(1, max_turn_len // 3)]
            if number == 0 and rng.random() < 0.4:
                text = common[: max_turn_len // 3]
            turns.append(text)
            shape = rng.choice([None, Shape.none(), *shapes])
            chosen.append(shape)
            params.append(
                SamplingParams(
                    max_new_tokens=rng.randint(1, max_turn_len - len(text) - 1),
                    temperature=rng.choice([0.0, 0.0, 1.0]),
                    seed=seed,
                    ignore_eos=True,
                    drafter=rng.choice([None, *self.names]),
                    max_draft_steps=rng.choice([None, None, 2, 0]) if shape is None else None,
                )
            )
        return Talk(tuple(turns), tuple(params), tuple(chosen))

    def engine(self, models: Models) -> Engine:
        """The engine; half of them have few pages, so that rows are retracted."""

        def make(num_pages: int | None) -> Engine:
            drafters = {name: models.drafter(name, self.ancestry) for name in self.names}
            config = EngineConfig(num_pages=num_pages, **self.options)
            return Engine(models.target, drafters, config=config)

        engine = make(None)
        if self.is_tight:
            ledger = engine.ledger
            least = max(ledger.pages_per_row(group) for group in range(len(ledger.groups)))
            engine = make(least + self.rng.randint(0, least // 2))
        return engine

    def expected(self, target: TargetModel) -> list[list[list[int]]]:
        """The tokens of each turn of each talk, by plain decoding."""
        engine = Engine(target, config=EngineConfig(max_context_len=CONTEXT, prefix_cache=False))
        outputs = run_side_by_side(engine, self.talks, random.Random(0), is_plain=True)
        return [[output.token_ids for output in turns] for turns in outputs]


def steps(engine: Engine, talk: Talk, *, is_plain: bool = False) -> Iterator[RequestOutput | None]:
    """Let a talk go on, bit by bit; yield the output of each turn at its end, and None between."""
    session = engine.open_session() if len(talk.turns) > 1 else None
    for text, params, shape in zip(talk.turns, talk.params, talk.shapes, strict=True):
        plain = replace(params, drafter=None, max_draft_steps=None)
        asked: dict[str, Any] = {} if is_plain else {"shape": shape}
        say: Callable[..., Any] = engine.stream if session is None else session.append
        for item in say(text, plain if is_plain else params, **asked):
            yield item if isinstance(item, RequestOutput) else None
    if session is not None:
        session.close()


def run_side_by_side(
    engine: Engine, talks: list[Talk], rng: random.Random, *, is_plain: bool = False
) -> list[list[RequestOutput]]:
    """Run all talks, in a random order of their steps; return the outputs of each one's turns."""
    outputs: list[list[RequestOutput]] = [[] for _ in talks]
    running = {n: steps(engine, talk, is_plain=is_plain) for n, talk in enumerate(talks)}
    while running:
        number = rng.choice(list(running))
        for _ in range(rng.randint(1, 4)):
            try:
                output = next(running[number])
            except StopIteration:
                del running[number]
                break
            if output is not None:
                outputs[number].append(output)
    return outputs
