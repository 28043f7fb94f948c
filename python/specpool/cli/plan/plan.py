"""`specpool plan`: prints pages, row widths, and how many requests fit, without loading a model."""

from __future__ import annotations

import bisect
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from specpool._core import Shape
from specpool.capacity.capacity import Capacity, Fit
from specpool.capacity.group_sizes import GroupSizes, size_groups
from specpool.capacity.state_sizes import StateSize
from specpool.checks import check_choice, check_int
from specpool.cli.options.checks import warn
from specpool.cli.plan.mixed import (
    ACCEPTANCE,
    Mixed,
    candidates_of,
    check_acceptance,
    mixed,
    mixed_object,
    mixed_table,
)
from specpool.cli.plan.model import ITEMSIZES, Model, model_of_files, model_of_numbers
from specpool.cli.plan.question import Question
from specpool.engine.config import EngineConfig
from specpool.engine.shape_names import name_of, parse_shape, width_order
from specpool.errors import ConfigError
from specpool.num_bytes import parse_bytes, show_bytes

MOST_ROWS = 1 << 16

MEANINGS = (
    "at once: requests of so many tokens that an empty pool admits together (they grow, and some "
    "may be retracted later and come back); to the end: requests that run side by side from prompt "
    "to last token and never wait for a page, so none is retracted"
)


@dataclass(frozen=True, slots=True)
class PlanLine:
    """One question about requests, and its answer."""

    question: str
    shape: Shape
    fit: Fit
    num_with_snapshots: int | None = None  # requests with a state for each draft token


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything that the command prints."""

    model: Model
    memory: int
    workspace: int
    assumes_workspace: bool  # whether it is a tenth of the memory because none was given
    logits: int  # bytes of one verify forward's logits, for all rows
    kv_bytes: int
    sizes: GroupSizes
    lines: list[PlanLine]
    mixed: list[Mixed]  # with a budget
    acceptance: float

    @property
    def unused(self) -> int:
        """Bytes of KV that no group gets, because all rows have all the pages that they can use."""
        unused = self.kv_bytes - self.sizes.num_bytes
        return unused if unused > sum(group.page_bytes for group in self.sizes.groups) else 0


def plan(question: Question, *, as_json: bool) -> None:
    """Compute the answer and print it.

    Raises:
        ConfigError: an option is wrong, or the memory holds no KV.
    """
    answer = answered(question)
    if as_json:
        print(json.dumps(_object(answer), indent=1))
        return
    console = Console(highlight=False)
    console = Console(highlight=False, width=max(console.width, 112))
    console.print(_groups_table(answer))
    if answer.sizes.states is not None:
        console.print(_states_table(answer.sizes, answer.sizes.states))
    console.print(_fits_table(answer))
    if answer.mixed:
        console.print(mixed_table(answer.sizes.shapes, answer.mixed, answer.acceptance))


def answered(question: Question) -> Answer:
    """Compute the answer; see `plan` for the errors."""
    memory = parse_bytes("memory", question.memory)
    if question.workspace is None:
        workspace = memory - memory * 9 // 10
    else:
        workspace = parse_bytes("workspace", question.workspace)
    _check(question)  # before anything is read or fetched
    model = model_of_numbers(question) if question.target is None else model_of_files(question)
    if question.draft_window is not None and not model.draft_layers:
        raise ConfigError("--draft-window is of draft KV, and no draft keeps any: leave it out")
    for note in model.notes:
        warn(note)
    kv_bytes = memory - model.weight_bytes - workspace
    if kv_bytes <= 0:
        raise ConfigError(
            f"memory {show_bytes(memory)} holds no KV: the weights take "
            f"{show_bytes(model.weight_bytes)}, the workspace {show_bytes(workspace)}"
        )
    max_context_len = question.max_context_len
    if max_context_len is None:
        max_context_len = model.max_context_len
        if model.context_reason:
            warn(f"the context is {max_context_len} tokens: {model.context_reason}")
    if max_context_len is None:
        raise ConfigError("plain numbers need --max-context-len")
    if model.max_context_len is not None and max_context_len > model.max_context_len:
        raise ConfigError(
            f"max_context_len {max_context_len} is above the model's {model.max_context_len} "
            "positions" + (f": {model.context_reason}" if model.context_reason else "")
        )
    shapes = _shapes(question, model)
    _check_lengths(question, max_context_len)
    row_logits = _row_logits(model, shapes)
    max_rows = question.max_batch
    shares_bytes = row_logits or question.draft_window is not None or model.states is not None
    if max_rows is None and shares_bytes:
        max_rows = _most_rows(question, model, shapes, max_context_len, kv_bytes, row_logits)
    logits = (max_rows or 0) * row_logits
    if logits >= kv_bytes:
        raise ConfigError(
            f"memory {show_bytes(memory)} holds no KV: the weights take "
            f"{show_bytes(model.weight_bytes)}, the workspace {show_bytes(workspace)}, and the "
            f"logits of {max_rows} rows {show_bytes(logits)}: lower --max-batch or the shape"
        )
    kv_bytes -= logits
    try:
        sizes = _sizes(question, model, shapes, max_context_len, kv_bytes, max_rows)
    except ConfigError as error:  # an engine would be given more kv_bytes
        raise ConfigError(str(error).replace("kv_bytes", "--memory")) from None
    capacity = Capacity(sizes, reads_tokens=model.reads_tokens, headroom=question.headroom)
    lines = []
    for index, shape in enumerate(sizes.shapes):
        if shape in shapes:
            fits = _fits(question, capacity, max_context_len, index)
            lines += [
                PlanLine(text, shape, _named(question, model, fit, max_rows, logits))
                for text, fit in fits
            ]
    if model.states is not None:
        lines = _with_snapshots(
            question, model, shapes, max_context_len, kv_bytes + logits, row_logits, lines
        )
    acceptance = ACCEPTANCE if question.acceptance is None else question.acceptance
    mixes = []
    if question.adaptive is not None:
        candidates = sorted(shapes, key=width_order)
        mixes = mixed(capacity, _lengths(question), candidates, acceptance)
    return Answer(
        model,
        memory,
        workspace,
        question.workspace is None,
        logits,
        kv_bytes,
        sizes,
        lines,
        mixes,
        acceptance,
    )


def _check(question: Question) -> None:
    """Raise `ConfigError` for an option that is wrong for every model."""
    if question.weights is not None:
        parse_bytes("weights", question.weights)
    if question.dtype is not None:
        check_choice("dtype", question.dtype, tuple(ITEMSIZES))
    check_int("tp", question.tp, 1, 1 << 16)
    for text in question.shape or ():
        parse_shape("--shape", text)
    if question.adaptive is not None:
        candidates_of(question.adaptive, question.shape)
        check_acceptance(question.acceptance)
    elif question.acceptance is not None:
        raise ConfigError("--acceptance needs --adaptive")
    _config(question, 1 if question.max_batch is None else question.max_batch)
    _check_lengths(question, question.max_context_len or 1 << 30)


def _config(question: Question, max_batch: int) -> EngineConfig:
    """Return the engine's configuration; raise `ConfigError` for a value out of its range."""
    return EngineConfig(
        page_size=question.page_size,
        placement=question.placement,
        policy=question.policy,
        layout=question.layout,
        draft_window=question.draft_window,
        draft_sink=question.draft_sink,
        overlap_depth=question.overlap_depth,
        max_batch=max_batch,
        max_sessions=question.max_sessions,
        cached_states=question.cached_states,
        headroom=question.headroom,
        max_context_len=question.max_context_len,
    )


def _check_lengths(question: Question, max_context_len: int) -> None:
    """Raise `ConfigError` unless the requests that are asked about fit the context."""
    if question.prompt is not None:
        check_int("prompt", question.prompt, 1, max_context_len - 1)
    elif question.output is not None:
        raise ConfigError("--output needs --prompt")
    if question.prompt is not None and question.output is not None:
        check_int("output", question.output, 1, max_context_len - question.prompt)
    if question.common is not None:
        if question.prompt is None:
            raise ConfigError("--common needs --prompt")
        check_int("common", question.common, 1, question.prompt - 1)
    for live in question.live or ():
        check_int("live", live, 1, max_context_len - 1)


def _row_logits(model: Model, shapes: Sequence[Shape]) -> int:
    """Return the bytes of a row's logits in a verify forward; 0 if the vocabulary is not known."""
    max_nodes = max(shape.num_draft_tokens for shape in shapes)
    return max_nodes * (model.vocab_size or 0) * ITEMSIZES[model.dtype]


def _most_rows(
    question: Question,
    model: Model,
    shapes: Sequence[Shape],
    max_context_len: int,
    kv_bytes: int,
    row_logits: int,
) -> int:
    """Return how many rows fit with their logits, for the shortest requests asked about.

    Logits and KV share the memory: more rows have more logits, and leave less for pages. So do the
    windows of draft KV and recurrent states, which all rows have.
    """
    tokens = [length for length in (question.prompt, *(question.live or ())) if length is not None]
    shortest = min(tokens, default=max_context_len - 1)

    def has_room(num_rows: int) -> bool:
        bytes_left = kv_bytes - num_rows * row_logits
        try:
            sizes = _sizes(question, model, shapes, max_context_len, bytes_left, num_rows)
            capacity = Capacity(sizes, reads_tokens=model.reads_tokens, headroom=question.headroom)
        except ConfigError:
            return False
        return capacity.at_once(shortest).num_requests >= num_rows

    max_rows = min(MOST_ROWS, kv_bytes // max(row_logits, 1))
    return max(1, bisect.bisect_left(range(1, max_rows + 1), True, key=lambda n: not has_room(n)))


def _named(question: Question, model: Model, fit: Fit, max_rows: int | None, logits: int) -> Fit:
    """Rename the limit of a fit, if `max_batch` was computed here and not given by the user."""
    if question.max_batch is None and fit.limit == f"max_batch {max_rows}":
        parts = ["logits"] * bool(logits) + ["states"] * (model.states is not None)
        together = f"{', '.join(parts)} and pages" if parts else "pages of all groups"
        return replace(fit, limit=f"{together} together")
    return fit


def _with_snapshots(
    question: Question,
    model: Model,
    shapes: Sequence[Shape],
    max_context_len: int,
    room: int,
    row_logits: int,
    lines: Sequence[PlanLine],
) -> list[PlanLine]:
    """Return the lines with what fits if each draft token has a state; see `StateBytes.snapshots`.

    `room` is the memory for KV, states and logits.
    """
    assert model.states is not None
    theirs = replace(model, states=replace(model.states, snapshots=True))
    max_rows = question.max_batch
    if max_rows is None:
        max_rows = _most_rows(question, theirs, shapes, max_context_len, room, row_logits)
    try:
        kv_bytes = room - max_rows * row_logits
        sizes = _sizes(question, theirs, shapes, max_context_len, kv_bytes, max_rows)
    except ConfigError:
        return [replace(line, num_with_snapshots=0) for line in lines]
    capacity = Capacity(sizes, reads_tokens=model.reads_tokens, headroom=question.headroom)
    fits = [
        fit
        for index, shape in enumerate(sizes.shapes)
        if shape in shapes
        for _, fit in _fits(question, capacity, max_context_len, index)
    ]
    return [
        replace(line, num_with_snapshots=fit.num_requests)
        for line, fit in zip(lines, fits, strict=True)
    ]


def _lengths(question: Question) -> list[tuple[str, int]]:
    """Return the lengths that the answers about a budget are for, each with its text."""
    prompt, output = question.prompt, question.output
    lengths = [] if prompt is None else [(f"prompts of {prompt}", prompt)]
    if prompt is not None and output is not None and output > 1:
        lengths.append((f"half-way: live {prompt + output // 2}", prompt + output // 2))
    return lengths + [(f"live {live}", live) for live in question.live or ()]


def _fits(
    question: Question, capacity: Capacity, max_context_len: int, shape: int
) -> list[tuple[str, Fit]]:
    """Answer the questions about requests of one shape."""
    prompt, output, common = question.prompt, question.output, question.common
    fits = []
    if prompt is not None:
        fits.append((f"at once, prompts of {prompt}", capacity.at_once(prompt, shape)))
        if common:
            text = f"at once, {common} of {prompt} in common"
            fits.append((text, capacity.at_once(prompt, shape, common=common)))
    if output is not None:
        assert prompt is not None
        if output > 1:
            half = prompt + output // 2
            fits.append((f"at once, half-way: live {half}", capacity.at_once(half, shape)))
            if common:
                text = f"at once, half-way: {common} of {half} in common"
                fits.append((text, capacity.at_once(half, shape, common=common)))
        end = prompt + output
        fits.append((f"to the end, {prompt} + {output}", capacity.to_the_end(prompt, end, shape)))
    for live in question.live or ():
        fits.append((f"at once, live {live}", capacity.at_once(live, shape)))
    start = prompt or 1
    full = capacity.to_the_end(start, max_context_len, shape)
    fits.append((f"to the end, full context of {max_context_len}", full))
    return fits


def _sizes(
    question: Question,
    model: Model,
    shapes: Sequence[Shape],
    max_context_len: int,
    kv_bytes: int,
    max_batch: int | None,
) -> GroupSizes:
    config = _config(question, 1 if max_batch is None else max_batch)
    target_bytes, draft_bytes = model.token_bytes()

    def sized(config: EngineConfig) -> GroupSizes:
        return size_groups(
            config,
            target_bytes,
            draft_bytes,
            shapes=shapes,
            max_context_len=max_context_len,
            kv_bytes=kv_bytes,
            states=model.states,
        )

    if max_batch is None:
        # As many rows as a ledger can have: then memory decides, or int32 does.
        max_rows = sized(config).most_rows
        config = replace(config, max_batch=max(1, min(max_rows, MOST_ROWS)))
    return sized(config)


def _shapes(question: Question, model: Model) -> list[Shape]:
    """Return the shapes that were asked for; the default is 3x1x4, or none without a drafter."""
    if question.adaptive is not None:
        candidates = candidates_of(question.adaptive, question.shape)
        if not model.drafts and candidates[-1] != Shape.none():
            raise ConfigError(
                f"--adaptive {question.adaptive} drafts {name_of(candidates[-1])}, but there is no "
                "draft model"
            )
        return [*candidates]
    if not question.shape:
        return [Shape.eagle(3, 1, 4) if model.drafts else Shape.none()]
    shapes: list[Shape] = []
    for text in question.shape or ():
        shape = parse_shape("--shape", text)
        if shape not in shapes:
            shapes.append(shape)
        if shape.num_draft_tokens > 1 and not model.drafts:
            raise ConfigError(f"shape {text} drafts, but there is no draft model")
    return shapes


def _object(answer: Answer) -> dict[str, Any]:
    sizes = answer.sizes
    return {
        "model": answer.model.name,
        "dtype": answer.model.dtype,
        "memory": answer.memory,
        "weights": answer.model.weight_bytes,
        "workspace": answer.workspace,
        "tp": answer.model.tp,
        "logits": answer.logits,
        "notes": list(answer.model.notes),
        "kv_bytes": answer.kv_bytes,
        "unused": answer.unused,
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
                "sink": group.sink,
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
                "num_with_snapshots": line.num_with_snapshots,
            }
            for line in answer.lines
        ],
        "states": None if sizes.states is None else asdict(sizes.states),
        "acceptance": answer.acceptance,
        "mixed": mixed_object(answer.sizes.shapes, answer.mixed),
    }


def _groups_table(answer: Answer) -> Table:
    sizes = answer.sizes
    unused = ""
    if answer.unused:
        unused = f"; {show_bytes(answer.unused)} of it unused: raise --max-batch"
        unused += "" if sizes.num_rows < sizes.most_rows else ", or lower --max-context-len"
    shared = f", each of {answer.model.tp} devices" if answer.model.tp > 1 else ""
    states = "" if sizes.states is None else " and states"
    assumed = " (a tenth of it; --workspace)" if answer.assumes_workspace else ""
    table = Table(
        title=f"plan: {answer.model.name}, {answer.model.dtype}{shared}",
        caption=f"{show_bytes(answer.memory)} - weights {show_bytes(answer.model.weight_bytes)} - "
        f"workspace {show_bytes(answer.workspace)}{assumed} - logits {show_bytes(answer.logits)} = "
        f"{show_bytes(answer.kv_bytes)} of KV{states} "
        f"(kv_bytes={answer.kv_bytes}), page 0 of each group included{unused}; row width in slots",
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


def _states_table(sizes: GroupSizes, states: StateSize) -> Table:
    ratio = states.slot_bytes / states.record_bytes
    table = Table(
        title=f"recurrent states: {show_bytes(states.num_bytes)}",
        caption=f"a draft token takes a record of {states.record_bytes:,} bytes; a whole state for "
        f"each, as vLLM 0.33 keeps 1 + num_speculative_tokens a request, takes {ratio:,.1f} times "
        f"as much; a row folds {states.flush} records at a time",
    )
    table.add_column("what")
    for column in ("number", "bytes each", "bytes"):
        table.add_column(column, justify="right")
    num_kept = states.num_slots - sizes.num_rows
    ring_bytes = states.ring_len * states.record_bytes
    for what, number, num_bytes in (
        ("slots of rows that run", sizes.num_rows, states.slot_bytes),
        ("slots of sessions and of the prefix cache", num_kept, states.slot_bytes),
        ("slot 0, zeros", 1, states.slot_bytes),
        (f"rings of {states.ring_len} records", states.num_rings, ring_bytes),
        ("a row that runs: slot and ring", 1, states.row_bytes),
    ):
        table.add_row(what, f"{number:,}", f"{num_bytes:,}", show_bytes(number * num_bytes))
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
    if sizes.states is not None:
        table.add_column("with snapshots", justify="right")
    table.add_column("limit")
    for line in answer.lines:
        shape = line.shape
        table.add_row(
            line.question,
            f"{shape.num_steps}x{shape.topk}x{shape.num_draft_tokens}",
            " + ".join(f"{pages:,}" for pages in line.fit.pages),
            f"{line.fit.num_requests:,}",
            *([] if line.num_with_snapshots is None else [f"{line.num_with_snapshots:,}"]),
            line.fit.limit,
        )
    return table
