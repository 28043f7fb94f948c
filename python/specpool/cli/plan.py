"""`specpool plan`: pages, row widths, and how many requests fit; nothing is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from specpool._core import Shape
from specpool.adaptive.shapes import parse_shape
from specpool.assets import resolve
from specpool.config import EngineConfig, Layout, Placement, Policy, check_choice, check_int
from specpool.errors import ConfigError
from specpool.layer_kv import LayerKV, bytes_by_window
from specpool.num_bytes import parse_bytes, show_bytes
from specpool.plan import Fit, Plan
from specpool.plan_groups import GroupSizes, size_groups

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float16": 2}

MEANINGS = (
    "at once: requests of so many tokens that an empty pool admits together (they grow, and some "
    "may be retracted later and come back); to the end: requests that run side by side from prompt "
    "to last token and never wait for a page, so none is retracted"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the command line asked."""

    target: str | None
    draft: str | None
    layers: int | None
    kv_heads: int | None
    head_dim: int | None
    draft_layers: int | None
    draft_kv_heads: int | None
    draft_head_dim: int | None
    dtype: str | None
    memory: str
    weights: str | None
    workspace: str
    shapes: list[str]
    max_context_len: int | None
    page_size: int
    placement: Placement
    policy: Policy
    layout: Layout
    overlap_depth: int
    max_batch: int | None
    headroom: int
    prompt: int | None
    output: int | None
    live: list[int]
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """What memory must know of the models."""

    name: str
    target_layers: tuple[LayerKV, ...]
    draft_layers: tuple[LayerKV, ...]
    drafts: bool
    reads_tokens: bool  # the drafter does
    dtype: str
    weight_bytes: int
    max_context_len: int | None  # None = not said

    def token_bytes(self) -> tuple[dict[int | None, int], int]:
        """Bytes of a token's KV in the target's layers, by window, and in the draft's."""
        size = ITEMSIZES[self.dtype]
        draft = sum(layer.bytes_per_token(size) for layer in self.draft_layers)
        return bytes_by_window(self.target_layers, size), draft


@dataclass(frozen=True, slots=True)
class Line:
    """One question about requests, and its answer."""

    question: str
    shape: Shape
    fit: Fit


@dataclass(frozen=True, slots=True)
class Answer:
    """All that the command prints."""

    model: Model
    memory: int
    workspace: int
    kv_bytes: int
    sizes: GroupSizes
    lines: list[Line]


def plan(question: Question, *, as_json: bool) -> None:
    """Work out and print.

    Raises:
        ConfigError: a question without an answer.
    """
    answer = answered(question)
    if as_json:
        print(json.dumps(_object(answer), indent=1))
        return
    console = Console(highlight=False)
    console = Console(highlight=False, width=max(console.width, 112))
    console.print(_groups_table(answer))
    console.print(_fits_table(answer))


def answered(question: Question) -> Answer:
    """The answer; see `plan` for what is raised."""
    model = _model_of_numbers(question) if question.target is None else _model_of_files(question)
    memory = parse_bytes("memory", question.memory)
    workspace = parse_bytes("workspace", question.workspace)
    kv_bytes = memory - model.weight_bytes - workspace
    if kv_bytes <= 0:
        raise ConfigError(
            f"memory {show_bytes(memory)} holds no KV: the weights take "
            f"{show_bytes(model.weight_bytes)}, the workspace {show_bytes(workspace)}"
        )
    max_context_len = question.max_context_len
    if max_context_len is None:
        max_context_len = model.max_context_len
    if max_context_len is None:
        raise ConfigError("plain numbers need --max-context-len")
    check_int("max_context_len", max_context_len, 2, 1 << 30)
    check_int("headroom", question.headroom, 0, 1 << 30)
    if model.max_context_len is not None and max_context_len > model.max_context_len:
        raise ConfigError(
            f"max_context_len {max_context_len} is above the model's {model.max_context_len} "
            "positions"
        )
    shapes = _shapes(question, model)
    sizes = _sizes(question, model, shapes, max_context_len, kv_bytes)
    asked = Plan(sizes, reads_tokens=model.reads_tokens, headroom=question.headroom)
    lines = []
    for index, shape in enumerate(sizes.shapes):
        if shape in shapes:
            lines += [
                Line(text, shape, fit)
                for text, fit in _fits(question, asked, max_context_len, index)
            ]
    return Answer(model, memory, workspace, kv_bytes, sizes, lines)


def _fits(
    question: Question, asked: Plan, max_context_len: int, shape: int
) -> list[tuple[str, Fit]]:
    """What was asked about requests of one shape."""
    prompt, output = question.prompt, question.output
    fits = []
    if prompt is not None:
        fits.append((f"at once, prompts of {prompt}", asked.at_once(prompt, shape)))
    if output is not None:
        if prompt is None:
            raise ConfigError("--output needs --prompt")
        check_int("output", output, 1, max_context_len - prompt)
        if output > 1:
            half = prompt + output // 2
            fits.append((f"at once, half-way: live {half}", asked.at_once(half, shape)))
        end = prompt + output
        fits.append((f"to the end, {prompt} + {output}", asked.to_the_end(prompt, end, shape)))
    for live in question.live:
        fits.append((f"at once, live {live}", asked.at_once(live, shape)))
    start = prompt or 1
    full = asked.to_the_end(start, max_context_len, shape)
    fits.append((f"to the end, full context of {max_context_len}", full))
    return fits


def _sizes(
    question: Question,
    model: Model,
    shapes: Sequence[Shape],
    max_context_len: int,
    kv_bytes: int,
) -> GroupSizes:
    config = EngineConfig(
        page_size=question.page_size,
        placement=question.placement,
        policy=question.policy,
        layout=question.layout,
        overlap_depth=question.overlap_depth,
        max_batch=1 if question.max_batch is None else question.max_batch,
    )
    target_bytes, draft_bytes = model.token_bytes()

    def sized(config: EngineConfig) -> GroupSizes:
        return size_groups(
            config,
            target_bytes,
            draft_bytes,
            shapes=shapes,
            max_context_len=max_context_len,
            kv_bytes=kv_bytes,
        )

    if question.max_batch is None:
        # As many rows as a ledger can have: then memory decides, or int32 does.
        most = sized(config).most_rows
        config = replace(config, max_batch=max(1, min(most, 1 << 16)))
    return sized(config)


def _shapes(question: Question, model: Model) -> list[Shape]:
    """Those that were asked for; `Shape.none()` alone without a drafter."""
    if not question.shapes:
        return [Shape.eagle(3, 1, 4) if model.drafts else Shape.none()]
    shapes: list[Shape] = []
    for text in question.shapes:
        shape = parse_shape("--shape", text)
        if shape not in shapes:
            shapes.append(shape)
        if shape.num_draft_tokens > 1 and not model.drafts:
            raise ConfigError(f"shape {text} drafts, but there is no draft model")
    return shapes


def _model_of_numbers(question: Question) -> Model:
    sizes = {
        "layers": question.layers,
        "kv_heads": question.kv_heads,
        "head_dim": question.head_dim,
    }
    missing = [f"--{name.replace('_', '-')}" for name, value in sizes.items() if value is None]
    if missing:
        raise ConfigError(
            f"a plan is for --target, or for plain numbers: these lack {', '.join(missing)}"
        )
    draft, draft_layers = question.draft, question.draft_layers
    is_ngram = draft is not None and draft.partition(":")[0] == "ngram"
    if draft not in (None, "none") and not is_ngram:
        raise ConfigError("beside plain numbers, --draft is 'ngram' or 'none': give --draft-layers")
    if draft_layers and draft is not None:
        raise ConfigError(f"--draft {draft} has no layers: leave out --draft-layers")
    if draft_layers is None:
        draft_layers = 1 if draft is None else 0
    heads, head_dim = question.draft_kv_heads, question.draft_head_dim
    heads = question.kv_heads if heads is None else heads
    head_dim = question.head_dim if head_dim is None else head_dim
    given = {
        **sizes,
        "draft_kv_heads": heads,
        "draft_head_dim": head_dim,
    }
    for name, value in given.items():
        check_int(name, value, 1, 1 << 16)
    check_int("draft_layers", draft_layers, 0, 1 << 16)
    dtype = "bfloat16" if question.dtype is None else question.dtype
    check_choice("dtype", dtype, tuple(ITEMSIZES))
    return Model(
        name=f"{question.layers} + {draft_layers} layers",
        target_layers=_layers(question.layers, question.kv_heads, question.head_dim),
        draft_layers=_layers(draft_layers, heads, head_dim),
        drafts=draft_layers > 0 or is_ngram,
        reads_tokens=is_ngram,
        dtype=dtype,
        weight_bytes=parse_bytes("weights", "0" if question.weights is None else question.weights),
        max_context_len=None,
    )


def _layers(count: int | None, heads: int | None, dim: int | None) -> tuple[LayerKV, ...]:
    assert count is not None and heads is not None and dim is not None
    return (LayerKV(heads, dim, dim),) * count


def _model_of_files(question: Question) -> Model:
    numbers = ("layers", "kv_heads", "head_dim", "draft_layers", "draft_kv_heads", "draft_head_dim")
    for name in numbers:
        if getattr(question, name) is not None:
            raise ConfigError(f"--target states it: leave out --{name.replace('_', '-')}")
    import torch

    from specpool.draft import named_drafter
    from specpool.models.outline import head_outline, target_outline

    assert question.target is not None
    target = target_outline(resolve(question.target), trust_remote_code=question.trust_remote_code)
    dtype = question.dtype
    if dtype is None:
        dtype = str(target.dtype or torch.float32).removeprefix("torch.")
    check_choice("dtype", dtype, tuple(ITEMSIZES))
    parsed: torch.dtype = getattr(torch, dtype)
    draft = question.draft
    if draft is None and question.target == "specpool/tiny":
        draft = "specpool/tiny-eagle"
    drafter = None if draft is None else named_drafter(draft)
    has_head = draft not in (None, "none") and drafter is None
    head = head_outline(resolve(draft)) if has_head and draft is not None else None
    if question.weights is not None:
        weight_bytes = parse_bytes("weights", question.weights)
    else:
        known = target.loaded_bytes(parsed)
        if known is None:
            raise ConfigError(
                f"the size of {question.target}'s weights is not known here: give --weights, such "
                "as 16GB"
            )
        weight_bytes = known + ((head.loaded_bytes(parsed) or 0) if head is not None else 0)
    return Model(
        name=question.target + (f" + {draft}" if draft not in (None, "none") else ""),
        target_layers=target.layers,
        draft_layers=() if head is None else head.layers,
        drafts=head is not None or drafter is not None,
        reads_tokens=drafter is not None and drafter.reads_tokens,
        dtype=dtype,
        weight_bytes=weight_bytes,
        max_context_len=target.max_context_len,
    )


def _object(answer: Answer) -> dict[str, Any]:
    sizes = answer.sizes
    return {
        "model": answer.model.name,
        "dtype": answer.model.dtype,
        "memory": answer.memory,
        "weights": answer.model.weight_bytes,
        "workspace": answer.workspace,
        "kv_bytes": answer.kv_bytes,
        "max_context_len": sizes.max_context_len,
        "max_batch": sizes.num_rows,
        "overlap_depth": sizes.overlap_depth,
        "policy": sizes.policy,
        "groups": [
            {
                "name": group.name,
                "hosts_drafts": group.hosts_drafts,
                "layout": group.layout,
                "window": group.window,
                "page_size": group.page_size,
                "page_bytes": group.page_bytes,
                "num_pages": group.num_pages,
                "row_width": group.row_width,
                "pages_per_row": group.pages_per_row,
            }
            for group in sizes.groups
        ],
        "fits": [
            {
                "question": line.question,
                "shape": [line.shape.num_steps, line.shape.topk, line.shape.num_draft_tokens],
                "num_requests": line.fit.num_requests,
                "pages": list(line.fit.pages),
                "limit": line.fit.limit,
            }
            for line in answer.lines
        ],
    }


def _groups_table(answer: Answer) -> Table:
    sizes = answer.sizes
    table = Table(
        title=f"plan: {answer.model.name}, {answer.model.dtype}",
        caption=f"{show_bytes(answer.memory)} - weights {show_bytes(answer.model.weight_bytes)} - "
        f"workspace {show_bytes(answer.workspace)} = {show_bytes(answer.kv_bytes)} of KV "
        f"(kv_bytes={answer.kv_bytes}), page 0 of each group included; row width in slots",
    )
    table.add_column("group")
    columns = ("page size", "bytes per page", "pages", "bytes", "row width", "pages per row")
    for column in columns:
        table.add_column(column, justify="right")
    for group in sizes.groups:
        table.add_row(
            group.name + (f", {group.layout}" if group.hosts_drafts else ""),
            f"{group.page_size:,}",
            f"{group.page_bytes:,}",
            f"{group.num_pages:,}",
            show_bytes(group.num_bytes),
            f"{group.row_width:,}",
            f"{group.pages_per_row:,}",
        )
    return table


def _fits_table(answer: Answer) -> Table:
    sizes = answer.sizes
    table = Table(
        title=f"how many requests fit: context {sizes.max_context_len}, {sizes.policy}, D="
        f"{sizes.overlap_depth}",
        caption=MEANINGS,
    )
    table.add_column("requests of")
    table.add_column("shape")
    table.add_column("pages each", justify="right")
    table.add_column("fit", justify="right")
    table.add_column("limit")
    for line in answer.lines:
        shape = line.shape
        table.add_row(
            line.question,
            f"{shape.num_steps}x{shape.topk}x{shape.num_draft_tokens}",
            " + ".join(f"{pages:,}" for pages in line.fit.pages),
            f"{line.fit.num_requests:,}",
            line.fit.limit,
        )
    return table
