"""Law: greedy fp32 text over pages, drafts and trees equals transformers' own `generate`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import DEVICE
from families import FAMILIES, make_config, make_model
from lossless import Comparison, Reference
from specpool import Engine, SamplingParams, Shape
from specpool.engine.assets import corpus, resolve
from specpool.engine.draft import BlockDrafter, EagleDrafter, ScriptedDrafter
from specpool.engine.models import EagleHead, TargetModel
from specpool.engine.models.block.head import BlockHead

NUM_TOKENS = 208
# On, before and after the edge of a page, for each page size of the grid.
PROMPT_LENS = (64, 15, 49, 63, 2, 48, 17, 65)
PAGE_SIZES = (1, 2, 3, 16, 64)
TOPKS = (1, 2, 4, 8)
PLACEMENTS = ("split", "shared")
LAYOUTS = ("dense", "holey")
BLOCK = "specpool/tiny-block"
HEADS = ("specpool/tiny-eagle", "specpool/tiny-eagle3", BLOCK)
SHAPES = {1: (3, 1, 4), 2: (3, 2, 6), 4: (4, 4, 16), 8: (3, 8, 24)}


@pytest.fixture(scope="module")
def reference() -> Reference:
    model = AutoModelForCausalLM.from_pretrained(resolve("specpool/tiny")).float()
    return Reference(model.to(DEVICE))


@pytest.fixture(scope="module")
def target() -> Iterator[TargetModel]:
    with TargetModel.from_pretrained(
        resolve("specpool/tiny"), dtype="float32", device=DEVICE
    ) as model:
        yield model


@pytest.fixture(scope="module")
def heads(target: TargetModel) -> dict[str, EagleHead | BlockHead]:
    kinds = {n: BlockDrafter if n == BLOCK else EagleDrafter for n in HEADS}
    return {n: kind.from_pretrained(resolve(n), target).head for n, kind in kinds.items()}


def prompts(batch: int, page_size: int) -> list[list[int]]:
    """Ragged held-out prompts; lengths on, before and after an edge of `page_size`."""
    texts = corpus.prompts(batch, 200)
    edge = 3 * page_size if page_size < 64 else page_size
    lens = [*PROMPT_LENS[: batch // 2], edge, edge - 1, edge + 1, *PROMPT_LENS][:batch]
    return [text[: max(1, n)] for text, n in zip(texts, lens, strict=True)]


def run_case(
    target: TargetModel,
    head: EagleHead | BlockHead,
    reference: Reference,
    *,
    page_size: int,
    topk: int,
    placement: str,
    layout: str,
    batch: int,
    num_tokens: int = NUM_TOKENS,
    ancestry: str = "exact",
    **options: object,
) -> float:
    """Generate and compare; returns the mean accept length."""
    from specpool.engine.config import EngineConfig

    config = EngineConfig(
        shape=Shape.eagle(*SHAPES[topk]),
        page_size=page_size,
        placement=placement,
        layout=layout,
        max_batch=batch,
        **{"max_context_len": 320, **options},
    )
    drafter = (
        BlockDrafter(head) if isinstance(head, BlockHead) else EagleDrafter(head, ancestry=ancestry)
    )
    engine = Engine(target, drafter, config=config)
    texts = prompts(batch, page_size)
    outputs = engine.generate(texts, SamplingParams(max_new_tokens=num_tokens, ignore_eos=True))
    comparison = Comparison()
    for prompt, output in zip(texts, outputs, strict=True):
        expected = min(num_tokens, config.max_context_len - len(prompt))
        assert len(output.token_ids) == expected
        comparison.add(reference, prompt, output.token_ids)
    comparison.finish()
    return sum(o.accept_len for o in outputs) / len(outputs)


def _part() -> Iterator[tuple[int, int, str, str, int, str]]:
    """Every page size with every topk, placements, layouts, batches and heads taking turns."""
    for index, (page_size, topk) in enumerate(itertools.product(PAGE_SIZES, TOPKS)):
        head = HEADS[(index + index // 4) % len(HEADS)]
        placement, layout = PLACEMENTS[(index // 2) % 2], LAYOUTS[(index + index // 3) % 2]
        yield page_size, topk, placement, layout, 1 + index * 5 % 8, head


def _grid() -> list[object]:
    """The part that CI runs, with texts of a third of the length; the grid is full only."""
    grid = itertools.product(PAGE_SIZES, TOPKS, PLACEMENTS, LAYOUTS, range(1, 9), HEADS)
    part = [pytest.param(*case, NUM_TOKENS // 3) for case in _part()]
    return part + [pytest.param(*case, NUM_TOKENS, marks=pytest.mark.full) for case in grid]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("page_size", "topk", "placement", "layout", "batch", "head", "num_tokens"), _grid()
)
def test_shipped_pair_speaks_as_transformers_does(
    target, heads, reference, page_size, topk, placement, layout, batch, head, num_tokens
):
    accept_len = run_case(
        target,
        heads[head],
        reference,
        page_size=page_size,
        topk=topk,
        placement=placement,
        layout=layout,
        batch=batch,
        num_tokens=num_tokens,
    )
    assert accept_len > 2  # drafts are really accepted, so compaction is really at work


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("page_size", "topk", "layout"), [(16, 1, "dense"), (64, 8, "holey"), (3, 4, "dense")]
)
def test_generation_up_to_the_context_end(target, heads, reference, page_size, topk, layout):
    """A prompt and its output fill the context to the last token, and not one more."""
    run_case(
        target,
        heads["specpool/tiny-eagle3"],
        reference,
        page_size=page_size,
        topk=topk,
        placement="split",
        layout=layout,
        batch=3,
        num_tokens=10_000,
        max_context_len=150,
    )


@pytest.mark.full
@pytest.mark.parametrize("topk", TOPKS)
def test_generation_up_to_the_model_positions(target, heads, reference, topk):
    """Generation reaches position 2047, the model's last."""
    run_case(
        target,
        heads["specpool/tiny-eagle3"],
        reference,
        page_size=64,
        topk=topk,
        placement="shared",
        layout="holey",
        batch=2,
        num_tokens=10_000,
        max_context_len=2048,
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", ["exact", "double_buffer"])
@pytest.mark.parametrize("ancestry", ["exact", "branch"])
def test_policy_and_ancestry_change_no_text(target, heads, reference, policy, ancestry):
    run_case(
        target,
        heads["specpool/tiny-eagle3"],
        reference,
        page_size=16,
        topk=4,
        placement="split",
        layout="holey",
        batch=4,
        num_tokens=64,
        policy=policy,
        ancestry=ancestry,
    )


def _family_cases() -> list[object]:
    """Each family with three points of the grid; short texts in CI, 200 tokens in the full run."""
    cases = []
    for index, family in enumerate(FAMILIES):
        for turn in range(3):
            i = index + turn * 3
            page_size, topk = PAGE_SIZES[i % 5], TOPKS[(i + turn) % 4]
            case = (family, page_size, topk, LAYOUTS[(index + turn) % 2], 1 + i * 3 % 8)
            cases.append(pytest.param(*case, 48))
            cases.append(pytest.param(*case, 200, marks=pytest.mark.full))
    return cases


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("draft", "shape"), [(None, None), *zip(HEADS, ((3, 1, 4), (4, 4, 16), (7, 1, 8)), strict=True)]
)
def test_bfloat16_stays_within_one_rounding_of_the_logits(draft, shape):
    """In 16 bits a near-tie may go either way, nothing else.

    The same weights in fp32 say how much each token's logit is below the greatest: never more than
    2^-7 of the logits' size (bfloat16 has 8 bits), and above 0 at few positions.
    """
    source = resolve("specpool/tiny")
    with Engine.from_pretrained(
        draft=draft,
        shape=shape and Shape.eagle(*shape),
        dtype="bfloat16",
        device=DEVICE,
        max_batch=8,
    ) as engine:
        params = SamplingParams(max_new_tokens=120, ignore_eos=True)
        outputs = engine.generate(corpus.prompts(6, 100), params)
    exact = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).float().to(DEVICE)
    missed = []
    for output in outputs:
        ids = torch.tensor([output.prompt_ids + output.token_ids], device=DEVICE)
        with torch.inference_mode():
            logits = exact(ids).logits[0, len(output.prompt_ids) - 1 : -1]
        taken = logits.gather(1, ids[0, len(output.prompt_ids) :, None]).squeeze(1)
        below = logits.amax(1) - taken
        assert below.max() <= logits.abs().max() * 2**-7
        missed += (below > 0).tolist()
    assert len(missed) == 720 and sum(missed) <= 0.05 * len(missed)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("family", "page_size", "topk", "layout", "batch", "num_tokens"), _family_cases()
)
def test_families_speak_as_transformers_do(family, page_size, topk, layout, batch, num_tokens):
    """Any decoder, drafts from a drafter that knows the text and errs."""
    config = make_config(family)
    if config is None:
        pytest.skip(f"this transformers has no {family}")
    model = make_model(config).to(DEVICE)
    reference = Reference(model)
    rng = random.Random(f"{family} {page_size} {topk}")
    vocab_size = model.get_output_embeddings().weight.shape[0]
    lens = [max(1, n) for n in (page_size, page_size - 1, page_size + 1, 5, 30, 17, 2, 33)][:batch]
    texts = [[rng.randrange(3, vocab_size) for _ in range(n)] for n in lens]
    drafter = ScriptedDrafter(
        [[*text, *reference.text(text, num_tokens)] for text in texts],
        vocab_size=vocab_size,
        error_rate=0.2,
        seed=page_size,
    )
    with Engine.from_pretrained(
        model,
        draft=drafter,
        shape=Shape.eagle(*SHAPES[topk]),
        page_size=page_size,
        layout=layout,
        placement=PLACEMENTS[batch % 2],
        max_batch=batch,
        max_context_len=300,
    ) as engine:
        outputs = engine.generate(texts, SamplingParams(max_new_tokens=num_tokens, ignore_eos=True))
    comparison = Comparison()
    for text, output in zip(texts, outputs, strict=True):
        comparison.add(reference, text, output.token_ids)
    comparison.finish()
    assert sum(o.accept_len for o in outputs) / batch >= 2
