"""Concurrent sessions at check level 2, over a matrix of settings (docs/engine.md, Sessions).

{plain, v1, v2} x {full, window} x {retract with a large page, retract with a mixed chunk, abort}.
Law: each turn's text and logprobs are those of a fresh prefill of the same tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from lossless import Comparison, Reference
from specpool import Engine, RequestOutput, SamplingParams, Shape
from specpool.engine.assets import resolve
from specpool.engine.config import EngineConfig
from specpool.engine.draft import EagleDrafter, NgramDrafter
from specpool.engine.models import EagleHead, TargetModel
from window_kit import open_targets, prompt, reference_of

WORKERS = ("plain", "v1", "v2")
KINDS = ("full", "window")
# What goes wrong while the sessions talk, and with which pages.
TROUBLES: dict[str, dict[str, Any]] = {
    "retract with a large page": {"page_size": 64, "tight": True},
    "retract with a mixed chunk": {"page_size": 4, "tight": True, "mixed": True},
    "abort": {"page_size": 16, "aborts": True},
}


@pytest.fixture(scope="module")
def targets() -> Iterator[dict[str, TargetModel]]:
    """The shipped model, and of the others one with windows and full layers."""
    with ExitStack() as stack:
        full = TargetModel.from_pretrained(resolve("specpool/tiny"), dtype="float32")
        windows = stack.enter_context(open_targets())
        yield {"full": stack.enter_context(full), "window": windows["gemma2"]}


@pytest.fixture(scope="module")
def head(targets) -> EagleHead:
    return EagleDrafter.from_pretrained(resolve("specpool/tiny-eagle"), targets["full"]).head


@pytest.fixture(scope="module")
def references() -> dict[str, Reference]:
    full = AutoModelForCausalLM.from_pretrained(resolve("specpool/tiny")).float()
    return {"full": Reference(full), "window": reference_of("gemma2")}


def engine_of(
    worker: str, kind: str, trouble: str, depth: int, target: TargetModel, head: EagleHead
) -> Engine:
    """A drafting one drafts trees of 8 branches: with an EAGLE head, or by prompt lookup."""
    options = TROUBLES[trouble]
    config: dict[str, Any] = {
        "worker": "v1" if worker == "v1" else "v2",
        "overlap_depth": depth,
        "page_size": options["page_size"],
        "mixed_chunks": options.get("mixed", False),
        "prefill_tokens": 24 if options.get("tight") else 1024,
        "max_context_len": 240 if options.get("tight") else 320,
        "max_batch": 3,
        "max_sessions": 2,
        "headroom": 0,
        "busy_check": 2,
    }
    drafter: Any = None
    if worker != "plain":
        config["shape"] = Shape.eagle(3, 8, 16)
        drafter = EagleDrafter(head) if kind == "full" else NgramDrafter()
    if options.get("tight"):
        with_room = Engine(target, drafter, config=EngineConfig(**config))
        ledger = with_room.ledger
        drafter = drafter and (EagleDrafter(head) if kind == "full" else NgramDrafter())
        config["num_pages"] = 1 + max(
            ledger.pages_per_row(g) for g, group in enumerate(ledger.groups) if group.window is None
        )
    return Engine(target, drafter, config=EngineConfig(**config))


def check_logprobs(reference: Reference, output: RequestOutput) -> None:
    ids = torch.tensor([output.prompt_ids + output.token_ids])
    with torch.inference_mode():
        logits = reference.model(input_ids=ids, use_cache=False).logits[0].float()
    first = len(output.prompt_ids)
    fresh = torch.log_softmax(logits, -1)[first - 1 : -1]
    fresh = fresh.gather(1, ids[0, first:, None]).squeeze(1)
    ours = torch.tensor([entry.logprob for entry in output.logprobs])
    assert torch.allclose(ours, fresh, atol=5e-4), float((ours - fresh).abs().max())


def talk(engine: Engine, rng: random.Random, *, aborts: bool) -> tuple[list[RequestOutput], int]:
    """Three sessions at once, turn by turn; they are given up on the way, or grow beyond it."""
    outputs: list[RequestOutput] = []
    sessions = [engine.open_session() for _ in range(3)]
    num_aborted = 0
    for _ in range(4 if aborts else 3):
        told: list[RequestOutput] = []
        for session in sessions:
            most = rng.choice([12, 40]) if aborts else 60
            params = SamplingParams(max_new_tokens=most, ignore_eos=True, logprobs=0)
            engine.submit(
                prompt(rng, rng.choice([3, 30]) if aborts else 10),
                params,
                session=session,
                on_item=lambda _, item, told=told: (
                    told.append(item) if isinstance(item, RequestOutput) else None
                ),
            )
        for _ in range(rng.randint(1, 6) if aborts else 0):
            engine.turn()
        before = [session.tokens for session in sessions]
        if aborts:
            for session, tokens in zip(sessions[:2], before, strict=False):
                if session.is_busy:
                    session.abort()
                    num_aborted += 1
                    assert session.tokens == tokens
        while engine.turn():
            pass
        done = [output for output in told if output.finish_reason != "abort"]
        assert all(output.error is None for output in done)
        for session in sessions:
            if session.tokens:
                said = [output.prompt_ids + output.token_ids for output in [*outputs, *done]]
                assert session.tokens in said
        outputs += done
    for session in sessions:
        session.close()
    return outputs, num_aborted


@pytest.mark.sample(1)
@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("worker", "depth"), [("plain", 0), ("plain", 1), ("v1", 0), ("v2", 0), ("v2", 1)]
)
def test_each_turn_is_what_a_fresh_prefill_would_say(
    targets, head, references, worker, depth, kind, trouble
):
    engine = engine_of(worker, kind, trouble, depth, targets[kind], head)
    rng = random.Random(f"{worker} {depth} {kind} {trouble}")
    outputs, num_aborted = talk(engine, rng, aborts="aborts" in TROUBLES[trouble])
    comparison = Comparison()
    for output in outputs:
        comparison.add(references[kind], output.prompt_ids, output.token_ids)
        check_logprobs(references[kind], output)
    comparison.finish()
    stats = engine.stats()
    assert stats.finding_ct == 0
    if "aborts" in TROUBLES[trouble]:
        assert num_aborted
        assert any(output.num_reused for output in outputs)
    else:
        assert len(outputs) == 9 and stats.retracted_ct


def test_a_rewind_below_a_window_goes_further_back(targets, references):
    """Scenario 55, by a session: it says how much KV is left, and the rest is computed."""
    engine = engine_of("plain", "window", "abort", 0, targets["window"], None)  # type: ignore[arg-type]
    rng = random.Random(55)
    params = SamplingParams(max_new_tokens=80, ignore_eos=True)
    with engine.open_session() as session:
        session.append(prompt(rng, 40), params).output()
        assert session.rewind(115) == 115  # its window is held
        left = session.rewind(50)
        assert left < 50
        output = session.append(prompt(rng, 5), params).output()
        assert output.num_reused >= left  # the prefix cache may have more
    comparison = Comparison()
    comparison.add(references["window"], output.prompt_ids, output.token_ids)
    comparison.finish()
