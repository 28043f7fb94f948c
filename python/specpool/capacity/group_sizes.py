"""`GroupSizes`: the groups of a ledger, and `size_groups`, which computes them from bytes.

An engine and `specpool plan` both size their pools here. This file does not import torch.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol, TypedDict

from specpool._core import (
    Group,
    Ledger,
    Shape,
    sizing_most_window_pages,
    sizing_pages_needed,
    sizing_row_width,
)
from specpool.capacity.state_sizes import StateBytes, StateSize, state_group
from specpool.errors import ConfigError
from specpool.num_bytes import show_bytes

Placement = Literal["split", "shared"]
Policy = Literal["exact", "double_buffer"]
Layout = Literal["auto", "dense", "holey"]

#: The default of `EngineConfig.max_batch` on a CPU.
DEFAULT_BATCH = 8
#: Tokens of a usual row: what a request is reckoned to hold, and the least between two states of a
#: long prompt.
USUAL_ROW_TOKENS = 2048
# The part of the bytes beside the running rows' states that sessions and the prefix cache may take
# for states.
_SHARE_OF_KEPT_STATES = 4
_LEAST_SLOTS = 2  # of a row that runs from its session's checkpoint


class SizingOptions(Protocol):
    """The options that sizes depend on. `EngineConfig` has them, and says what each means."""

    @property
    def placement(self) -> Placement: ...  # noqa: D102
    @property
    def policy(self) -> Policy: ...  # noqa: D102
    @property
    def layout(self) -> Layout: ...  # noqa: D102
    @property
    def page_size(self) -> int: ...  # noqa: D102
    @property
    def draft_window(self) -> int | None: ...  # noqa: D102
    @property
    def draft_sink(self) -> int: ...  # noqa: D102
    @property
    def overlap_depth(self) -> int | None: ...  # noqa: D102
    @property
    def max_batch(self) -> int | None: ...  # noqa: D102
    @property
    def max_sessions(self) -> int: ...  # noqa: D102
    @property
    def prefill_tokens(self) -> int: ...  # noqa: D102
    @property
    def num_pages(self) -> int | None: ...  # noqa: D102
    @property
    def prefix_cache(self) -> bool: ...  # noqa: D102
    @property
    def cached_states(self) -> int | None: ...  # noqa: D102


class _Reserves(TypedDict):
    """The arguments of the core's sizing functions that are the same for all rounds of a group."""

    page_size: int
    overlap_depth: int
    policy: Policy
    hosts_drafts: bool
    layout: Literal["dense", "holey"]


@dataclass(frozen=True, slots=True)
class GroupSize:
    """A group and its size."""

    name: str
    page_size: int  # slots
    page_bytes: int  # bytes of one page in all layers of the group
    pages_per_row: int  # columns of a row in the page table
    num_pages: int  # without page 0
    hosts_drafts: bool
    layout: Literal["dense", "holey"]
    window: int | None = None  # positions that a query sees, its own included; None means all
    sink: int = 0  # first positions that a query sees beside its window

    @property
    def row_width(self) -> int:
        """Slots of a row."""
        return self.pages_per_row * self.page_size

    @property
    def max_pages(self) -> int:
        """The most pages of a group: slot ids are int32."""
        return (1 << 31) // self.page_size - 1

    @property
    def num_bytes(self) -> int:
        """Bytes of the group's buffers, page 0 included."""
        return (self.num_pages + 1) * self.page_bytes


@dataclass(frozen=True, slots=True)
class GroupSizes:
    """All groups of a ledger, and the other options that it is built with.

    Attributes:
        groups: the target's groups first, and of these the full one first.
        draft_group: the index of the group that hosts the draft's layers.
        shapes: shape 0 first.
        num_rows: the most requests that run at once.
        max_sessions: further rows, for sessions between their turns.
        max_context_len: the most tokens of a sequence.
        max_chunk: the most tokens of one prefill step.
        overlap_depth: rounds prepared ahead.
        policy: `exact` or `double_buffer`: how much a round reserves.
        keeps_draft_kv: whether the draft model has layers.
        states: the slots and rings of recurrent layers; None if there are none.
    """

    groups: tuple[GroupSize, ...]
    draft_group: int
    shapes: tuple[Shape, ...]
    num_rows: int
    max_sessions: int
    max_context_len: int
    max_chunk: int
    overlap_depth: int
    policy: Policy
    keeps_draft_kv: bool
    states: StateSize | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers, and of the states."""
        return sum(group.num_bytes for group in self.groups) + self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the slots and rings of recurrent layers."""
        return 0 if self.states is None else self.states.num_bytes

    @property
    def most_rows(self) -> int:
        """The most rows of a ledger: the reads of all rows in one round are indexed by int32."""
        topk = max(shape.topk for shape in self.shapes)
        return min(((1 << 31) - 1) // (topk * group.row_width) for group in self.groups)

    def group_of(self, window: int | None) -> int:
        """Return the index of the group of the target's layers with this window."""
        if window is not None and window >= self.max_context_len:
            window = None  # it hides nothing
        return [group.window for group in self.groups].index(window)

    def with_widths(self) -> GroupSizes:
        """Return a copy in which `pages_per_row` of each group is computed."""
        groups = []
        for group in self.groups:
            width = sizing_row_width(
                self.shapes, max_context_len=self.max_context_len, **self._reserves(group)
            )
            groups.append(replace(group, pages_per_row=width // group.page_size))
        return replace(self, groups=tuple(groups))

    def with_rows(self, num_rows: float, num_windows: int, num_steps: int = 1) -> GroupSizes:
        """Return a copy with the page counts computed.

        Full groups get pages for `num_rows` rows of the whole context. Window groups get pages for
        `num_windows` rows and `num_steps` prefill steps; see `window_pages`.
        """
        groups = []
        for group in self.groups:
            if group.window is None:
                num_pages = int(num_rows * group.pages_per_row)
            else:
                num_pages = self.window_pages(group, num_windows, num_steps)
            groups.append(replace(group, num_pages=min(num_pages, group.max_pages)))
        return replace(self, groups=tuple(groups))

    @property
    def most_steps(self) -> int:
        """The most prefill steps whose chunks hold pages of window groups at the same time.

        These are the step that is being prepared; the step before it, until its rows are prepared
        again; and under overlap one more step, whose pages are fenced.
        """
        return 2 + self.overlap_depth

    def window_pages(self, group: GroupSize, num_rows: int, num_steps: int = 1) -> int:
        """Return the pages of a window group that `num_rows` rows of any length need.

        A row needs the pages of its window and sink, the claim of a round, and one more page
        because a window may begin and end inside a page. One further row's share is for a session's
        checkpoint or a pinned text. The chunks of `num_steps` prefill steps are added.
        """
        of_row = self._most_window_pages(group, 1)
        of_step = self._most_window_pages(group, self.max_chunk) - of_row
        wanted = (num_rows + 1) * (self._settled_pages(group) + 1) + num_steps * of_step
        return min(wanted, num_rows * group.pages_per_row)

    def _settled_pages(self, group: GroupSize) -> int:
        """Return the most pages of a window group that a decoding row holds, fenced included."""
        passed = self._most_window_pages(replace(group, window=1, sink=0), 1)
        return self._most_window_pages(group, 1) + self.overlap_depth * passed

    def pages_needed(self, lo: int, hi: int, shape: int) -> tuple[int, ...]:
        """Return the most pages of each group that a row with roots in `[lo, hi]` can hold.

        It equals `Ledger.pages_needed`, but also allows roots beyond the context. `shape` is an
        index into `shapes`.
        """
        group_pages = []
        for group in self.groups:
            pages = sizing_pages_needed(self.shapes, shape, lo=lo, hi=hi, **self._reserves(group))
            if group.window is not None:
                chunk = max(1, min(lo, self.max_chunk))
                pages = min(pages, self._most_window_pages(group, chunk))
            group_pages.append(pages)
        return tuple(group_pages)

    def most_pages(self, prompt_len: int, hi: int, shape: int) -> tuple[int, ...]:
        """Return the most pages of each group that a request can hold or keep fenced.

        This is `pages_needed` and, under overlap, the pages evicted from a window: they stay fenced
        while a forward that may read them runs.
        """
        group_pages = list(self.pages_needed(prompt_len, hi, shape))
        chunk = min(prompt_len, self.max_chunk)
        for at, group in enumerate(self.groups):
            if group.window is not None:
                passed = self._most_window_pages(replace(group, window=1, sink=0), chunk)
                all_pages = sizing_pages_needed(
                    self.shapes, shape, lo=prompt_len, hi=hi, **self._reserves(group)
                )
                group_pages[at] = min(all_pages, group_pages[at] + self.overlap_depth * passed)
        return tuple(group_pages)

    def shared_pages(
        self, prompt_len: int, hi: int, shape: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Split the pages of `most_pages` into those of each row and those of prefill steps.

        Returns:
            The pages of each group that every request holds, and the pages of each group that all
            prefill steps together hold beyond that.
        """
        all_pages = self.pages_needed(prompt_len, hi, shape)
        behind_chunk = self.pages_needed(0, hi, shape)
        pages, step_pages = list(all_pages), [0] * len(self.groups)
        for at, group in enumerate(self.groups):
            if group.window is None:
                continue
            of_row = self._most_window_pages(group, 1)
            pages[at] = behind_chunk[at] + 1 + self._settled_pages(group) - of_row
            step_pages[at] = self.most_steps * (
                self._most_window_pages(group, self.max_chunk) - of_row
            )
        return tuple(pages), tuple(step_pages)

    def _most_window_pages(self, group: GroupSize, max_chunk: int) -> int:
        assert group.window is not None
        return sizing_most_window_pages(
            self.shapes,
            window=group.window,
            sink=group.sink,
            max_chunk=max_chunk,
            **self._reserves(group),
        )

    def _reserves(self, group: GroupSize) -> _Reserves:
        return {
            "page_size": group.page_size,
            "overlap_depth": self.overlap_depth,
            "policy": self.policy,
            "hosts_drafts": group.hosts_drafts,
            "layout": group.layout,
        }

    def ledger(self, *, digest: bool = False, record: Path | None = None) -> Ledger:
        """Build the ledger of these groups; `Ledger` explains the options."""
        groups = [
            Group(
                group.name,
                page_size=group.page_size,
                num_pages=group.num_pages,
                hosts_drafts=group.hosts_drafts,
                layout=group.layout,
                window=group.window,
                sink=group.sink,
            )
            for group in self.groups
        ]
        states = self.states
        return Ledger(
            groups,
            self.shapes,
            states=[] if states is None else [state_group(states.num_slots, states.flush)],
            num_rows=self.num_rows + self.max_sessions,
            max_batch=self.num_rows,
            max_context_len=self.max_context_len,
            max_chunk=self.max_chunk,
            sessions=True,
            overlap_depth=self.overlap_depth,
            policy=self.policy,
            draft_kv=self.keeps_draft_kv,
            digest=digest,
            record=record,
        )


def size_groups(
    options: SizingOptions,
    target_bytes: Mapping[int | None, int],
    draft_bytes: int,
    *,
    shapes: Sequence[Shape],
    max_context_len: int,
    kv_bytes: int,
    states: StateBytes | None = None,
) -> GroupSizes:
    """Size the groups: a full one, one for each window, the draft's own, and the states.

    Args:
        options: an `EngineConfig`, or anything else that has these options.
        target_bytes: window -> bytes of a token's KV in all layers of the target with that window
            (`bytes_by_window`); a window as long as the context counts as full.
        draft_bytes: bytes of a token's KV in all layers of the draft model; 0 = it keeps none.
        shapes: the shapes that will run beside shape 0.
        max_context_len: the most tokens of a sequence.
        kv_bytes: bytes for all buffers and states; ignored if `options.num_pages` is given.
        states: what the target's recurrent layers keep; None if it has none.

    Raises:
        ConfigError: `kv_bytes` does not hold one row of the whole context, with the states of all
            rows.
    """
    groups, draft_group = _without_pages(
        options, target_bytes, draft_bytes, shapes, max_context_len
    )
    sizes = GroupSizes(
        groups=groups,
        draft_group=draft_group,
        shapes=tuple(dict.fromkeys([Shape.none(), *shapes])),
        num_rows=DEFAULT_BATCH if options.max_batch is None else options.max_batch,
        max_sessions=options.max_sessions,
        max_context_len=max_context_len,
        max_chunk=min(options.prefill_tokens, max_context_len),
        overlap_depth=options.overlap_depth or 0,
        policy=options.policy,
        keeps_draft_kv=draft_bytes > 0,
    ).with_widths()
    if states is not None:
        sizes = replace(sizes, states=_all_states(options, sizes, states))
    if options.num_pages is None:
        return _fit(sizes, kv_bytes)
    return _with_pages(sizes, options.num_pages)


def _all_states(options: SizingOptions, sizes: GroupSizes, states: StateBytes) -> StateSize:
    """Return the states of all rows that run, of all sessions, and of the prefix cache.

    Sessions and the prefix cache share the slots that rows do not use.
    """
    num_cached = sizes.num_rows if options.cached_states is None else options.cached_states
    num_kept = sizes.max_sessions + (num_cached if options.prefix_cache else 0)
    return states.size(
        sizes.shapes,
        num_slots=max(sizes.num_rows + num_kept, _LEAST_SLOTS),
        num_rows=sizes.num_rows,
        num_sessions=sizes.max_sessions,
        overlap_depth=sizes.overlap_depth,
    )


def _without_pages(
    options: SizingOptions,
    target_bytes: Mapping[int | None, int],
    draft_bytes: int,
    shapes: Sequence[Shape],
    max_context_len: int,
) -> tuple[tuple[GroupSize, ...], int]:
    """Return the groups without pages and widths, and which of them hosts the draft's layers."""
    full_bytes, windows = 0, {}
    for window, size in target_bytes.items():
        if window is None or window >= max_context_len:
            full_bytes += size
        else:
            windows[window] = size
    split = options.placement == "split" and draft_bytes > 0
    drafts = any(shape.num_draft_tokens > 1 for shape in shapes)
    layout: Literal["dense", "holey"] = "dense" if options.layout == "auto" else options.layout

    def group(
        name: str, token_bytes: int, hosts: bool, window: int | None = None, sink: int = 0
    ) -> GroupSize:
        return GroupSize(
            name=name,
            page_size=options.page_size,
            page_bytes=options.page_size * token_bytes,
            pages_per_row=0,
            num_pages=0,
            hosts_drafts=hosts,
            layout=layout,
            window=window,
            sink=sink,
        )

    groups = []
    has_own = draft_bytes > 0 and (split or not full_bytes)  # the draft's layers
    if full_bytes and split:
        groups.append(group("target", full_bytes, False))
    elif full_bytes or not (windows or has_own):  # a target of recurrent layers alone has no bytes
        # A shared group hosts the branches of every drafter, as in SGLang.
        hosts = options.placement == "shared" and drafts
        groups.append(group("kv", full_bytes + draft_bytes, hosts))
    groups += [group(f"window {w}", windows[w], False, w) for w in sorted(windows)]
    if has_own:
        window, sink = options.draft_window, options.draft_sink
        if window is not None:
            # One cell more: a catch-up runs the token before the root again.
            window = window + 1 if window + 1 + sink < max_context_len else None
        groups.append(group("draft", draft_bytes, True, window, 0 if window is None else sink))
    return tuple(groups), len(groups) - 1 if has_own else 0


def _with_pages(sizes: GroupSizes, num_pages: int) -> GroupSizes:
    """Give each group `num_pages` pages, but a window group at most all rows' window pages."""
    sized = sizes.with_rows(1, sizes.num_rows + sizes.max_sessions)
    groups = []
    for group in sized.groups:
        max_pages = num_pages if group.window is None else group.num_pages
        groups.append(replace(group, num_pages=min(num_pages, max_pages)))
    return replace(sized, groups=tuple(groups))


def _fit(sizes: GroupSizes, kv_bytes: int) -> GroupSizes:
    """Give the groups as many pages as the bytes hold, at most enough for all rows.

    Raises:
        ConfigError: `kv_bytes` does not hold one row of the whole context, with the states of all
            rows.
    """
    sizes = _fit_states(sizes, kv_bytes)
    kv_bytes -= sizes.state_bytes
    budget = _Budget(sizes, kv_bytes)
    draft = sizes.groups[sizes.draft_group]
    if draft.window is None or not draft.hosts_drafts:
        return sizes.with_rows(*budget.rows_and_windows(), sizes.most_steps)
    return _fit_draft_window(sizes, kv_bytes)


def _fit_states(sizes: GroupSizes, kv_bytes: int) -> GroupSizes:
    """Give the rows that run a state slot each; sessions and the prefix cache get what is left.

    What is left for them is a part of the bytes beside the rows' states, so that most are for KV.

    Raises:
        ConfigError: as `_fit`.
    """
    budget, states, least = _Budget(sizes, kv_bytes), sizes.states, None
    row_bytes = kv_bytes - budget.room + budget.bytes_of_rows(1)
    beside = ""
    if states is not None:
        least = replace(states, num_slots=max(sizes.num_rows, _LEAST_SLOTS))
        beside = f", {sizes.num_rows} rows {show_bytes(least.num_bytes)} of recurrent states"
    spare = kv_bytes - (0 if least is None else least.num_bytes)
    if row_bytes > spare:
        raise ConfigError(
            f"one row of {sizes.max_context_len} tokens needs {show_bytes(row_bytes)} of KV"
            f"{beside}, {show_bytes(kv_bytes)} are to be had: lower max_context_len or the dtype, "
            "or raise kv_bytes"
        )
    if states is None or least is None:
        return sizes
    kept_bytes = min(spare // _SHARE_OF_KEPT_STATES, spare - row_bytes)
    num_slots = least.num_slots + kept_bytes // least.slot_bytes
    return replace(sizes, states=replace(states, num_slots=min(num_slots, states.num_slots)))


def _fit_draft_window(sizes: GroupSizes, kv_bytes: int) -> GroupSizes:
    """Size the groups so that a draft window takes no page from the target.

    Without its window, the draft would have the pages of as many whole contexts as the target. It
    gets no more than these, and no more than the windows of all rows and sessions. The target's
    groups share the bytes that this saves. So none of them has fewer pages than without a draft
    window, however many rows there may be.
    """
    draft = sizes.groups[sizes.draft_group]
    beside = tuple(group for group in sizes.groups if group is not draft)
    keeps_all = replace(sizes, groups=(*beside, replace(draft, window=None, sink=0)))
    target_sizes = replace(sizes, groups=beside)
    target = _Budget(target_sizes, kv_bytes - draft.page_bytes)
    num_rows, num_windows = _Budget(keeps_all, kv_bytes).rows_and_windows()
    max_pages = min(int(num_rows * draft.pages_per_row), draft.max_pages)
    if num_windows == 0:  # without the draft window, the bytes do not hold one whole context
        num_rows = num_windows = 1
        max_pages = (target.room - target.bytes_of_rows(1)) // draft.page_bytes

    def draft_pages(num_windows: int) -> int:
        num_windows = max(num_windows, sizes.num_rows)
        return min(sizes.window_pages(draft, num_windows, sizes.most_steps), max_pages)

    def all_bytes(num_windows: int) -> int:
        whole_rows = max(min(num_windows, sizes.num_rows), num_rows)
        full_bytes = math.ceil(whole_rows * target.row_bytes)
        draft_bytes = draft_pages(num_windows) * draft.page_bytes
        return full_bytes + target.window_bytes(num_windows) + draft_bytes

    more_windows = range(num_windows + 1, sizes.num_rows + sizes.max_sessions + 1)
    num_windows += bisect.bisect_right(more_windows, target.room, key=all_bytes)
    draft = replace(draft, num_pages=draft_pages(num_windows))
    room = target.room - draft.num_pages * draft.page_bytes
    num_rows = target.rows_beside(num_windows, room)
    target_sizes = target_sizes.with_rows(num_rows, num_windows, sizes.most_steps)
    groups = list(target_sizes.groups)
    groups.insert(sizes.draft_group, draft)
    return replace(sizes, groups=tuple(groups))


class _Budget:
    """Bytes, and what rows and windows of some groups take of them.

    Attributes:
        room: bytes beside page 0 of each group.
        row_bytes: bytes of a whole context in the full groups.
    """

    def __init__(self, sizes: GroupSizes, kv_bytes: int) -> None:
        """Keep the groups and the bytes."""
        self._sizes = sizes
        self.room = kv_bytes - sum(group.page_bytes for group in sizes.groups)
        self.row_bytes = sum(
            group.pages_per_row * group.page_bytes for group in sizes.groups if group.window is None
        )

    def window_bytes(self, num_rows: int) -> int:
        """Return the bytes of the window groups for so many rows."""
        sizes = self._sizes
        windows = (group for group in sizes.groups if group.window is not None)
        return sum(
            sizes.window_pages(group, num_rows, sizes.most_steps) * group.page_bytes
            for group in windows
        )

    def bytes_of_rows(self, num_rows: int) -> int:
        """Return the bytes of so many whole contexts; sessions beyond all rows have windows."""
        whole_rows = min(num_rows, self._sizes.num_rows)
        return self.window_bytes(num_rows) + whole_rows * self.row_bytes

    def rows_and_windows(self) -> tuple[float, int]:
        """Return how many whole contexts the full groups hold, and how many windows there are.

        Window groups come first: a row's window pages do not grow with its length, so they limit
        how many short requests run. All `num_rows` rows get window pages if these take at most half
        of the bytes. Otherwise there are as many windows as rows of the whole context. If all rows
        of the whole context fit, sessions between turns get windows too.
        """
        sizes = self._sizes
        running = range(1, sizes.num_rows + 1)
        spare = min(self.room // 2, self.room - self.row_bytes)
        num_windows = max(
            bisect.bisect_right(
                range(1, len(running) + sizes.max_sessions + 1), self.room, key=self.bytes_of_rows
            ),
            bisect.bisect_right(running, spare, key=self.window_bytes),
        )
        return self.rows_beside(num_windows, self.room), num_windows

    def rows_beside(self, num_windows: int, room: int) -> float:
        """Return how many whole contexts the full groups hold in `room` bytes beside windows."""
        if not self.row_bytes:
            return self._sizes.num_rows
        return min((room - self.window_bytes(num_windows)) / self.row_bytes, self._sizes.num_rows)
