"""Hypothesis strategies: shapes, groups, whole ledgers, accept lengths, operation sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from hypothesis import strategies as st

from specpool import Group, Ledger, Shape, StateGroup
from specpool._core import sizing_alloc_len_per_decode, sizing_row_width
from specpool.errors import ConfigError
from specpool.testing.operations import OP_BYTES

_Policy: TypeAlias = Literal["exact", "double_buffer"]
_POLICIES: list[_Policy] = ["exact", "exact", "double_buffer"]
_LAYOUTS: list[Literal["dense", "holey"]] = ["dense", "holey"]


@dataclass(frozen=True)
class LedgerConfig:
    """The arguments of a `Ledger`, by their names."""

    groups: tuple[Group, ...]
    shapes: tuple[Shape, ...]
    num_rows: int
    max_context_len: int
    max_batch: int | None = None
    overlap_depth: int = 0
    policy: _Policy = "exact"
    draft_kv: bool = True
    max_chunk: int | None = None
    sessions: bool = False
    page_fencing: bool = True
    states: tuple[StateGroup, ...] = ()

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of `Ledger`."""
        named = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: named[name] for name in named if name not in ("groups", "shapes")}

    def build(self, **more: Any) -> Ledger:
        """Build a ledger; `more` is passed on to it.

        Raises:
            ConfigError: see `Ledger`.
        """
        return Ledger(self.groups, self.shapes, **self.options() | more)


def shapes(
    max_steps: int = 3, max_topk: int = 3, max_draft_tokens: int = 8
) -> st.SearchStrategy[Shape]:
    """Draw shapes that an EAGLE drafter can build, and shape 0."""

    def tree(fields: tuple[int, int, int]) -> Shape:
        steps, topk, tokens = fields
        max_nodes = 1 + topk + (steps - 1) * topk * topk
        return Shape.eagle(steps, topk, steps + 1 if topk == 1 else min(tokens, max_nodes))

    fields = (st.integers(1, max_steps), st.integers(1, max_topk), st.integers(2, max_draft_tokens))
    trees = st.tuples(*fields).map(tree)
    return st.just(Shape.none()) | trees


def any_shapes(max_field: int = 4) -> st.SearchStrategy[Shape]:
    """Draw any shapes that the ledger takes, also shapes that no EAGLE drafter builds."""
    fields = (st.integers(0, max_field), st.integers(1, max_field), st.integers(1, 2 * max_field))
    return st.tuples(*fields).map(lambda fields: Shape(*fields))


def ledger_configs(
    *,
    page_sizes: Sequence[int] = (1, 2, 2, 3, 3, 4, 4, 8, 16),
    max_groups: int = 3,
    max_rows: int = 4,
    max_context_len: int = 40,
    max_overlap_depth: int = 2,
    max_shapes: int = 3,
    windows: bool = True,
    chunks: bool = True,
    spare_pages: int = 12,
) -> st.SearchStrategy[LedgerConfig]:
    """Draw small ledgers that can be built, with pools tight enough to run out of pages.

    Args:
        page_sizes: the page sizes to draw from; a size listed twice is drawn twice as often. At
            least 1 each.
        max_groups: the most groups, at least 1.
        max_rows: the most rows, at least 1.
        max_context_len: the greatest L, at least 4.
        max_overlap_depth: the greatest D, at least 0.
        max_shapes: the most shapes besides shape 0; 0 means plain decoding alone.
        windows: whether some groups have a window.
        chunks: whether some ledgers limit the length of an extend.
        spare_pages: the most pages of a pool beyond what a single row needs, at least 0.

    Raises:
        ConfigError: a limit is below the least value given here.
    """
    bounds = {
        "max_groups": (max_groups, 1),
        "max_rows": (max_rows, 1),
        "max_context_len": (max_context_len, 4),
        "max_overlap_depth": (max_overlap_depth, 0),
        "max_shapes": (max_shapes, 0),
        "spare_pages": (spare_pages, 0),
        "page_sizes": (min(page_sizes, default=0), 1),
    }
    for name, (value, bound) in bounds.items():
        if value < bound:
            raise ConfigError(f"{name} must be at least {bound}, got {value}")
    return _ledger_configs(
        page_sizes=page_sizes,
        max_groups=max_groups,
        max_rows=max_rows,
        max_context_len=max_context_len,
        max_overlap_depth=max_overlap_depth,
        max_shapes=max_shapes,
        windows=windows,
        chunks=chunks,
        spare_pages=spare_pages,
    )


@st.composite
def _ledger_configs(
    draw: st.DrawFn,
    *,
    page_sizes: Sequence[int],
    max_groups: int,
    max_rows: int,
    max_context_len: int,
    max_overlap_depth: int,
    max_shapes: int,
    windows: bool,
    chunks: bool,
    spare_pages: int,
) -> LedgerConfig:
    """Draw a configuration; see `ledger_configs`."""
    context = draw(st.integers(4, max_context_len))
    chunk = draw(st.none() | st.integers(1, context)) if chunks else None
    drafting = (shapes() | any_shapes()).filter(lambda shape: shape != Shape.none())
    rounds = tuple(draw(st.lists(drafting, min_size=min(1, max_shapes), max_size=max_shapes)))
    num_rows = draw(st.integers(1, max_rows))
    config = LedgerConfig(
        (),
        rounds,
        num_rows=num_rows,
        max_context_len=context,
        max_batch=draw(st.none() | st.integers(1, num_rows)),
        overlap_depth=draw(st.integers(0, max_overlap_depth)),
        policy=draw(st.sampled_from(_POLICIES)),
        draft_kv=draw(st.booleans()),
        max_chunk=chunk,
        sessions=draw(st.booleans()),
        page_fencing=draw(st.sampled_from([True, True, True, False])),
    )
    groups = []
    for index in range(draw(st.integers(1, max_groups))):
        size = draw(st.sampled_from(list(page_sizes)))
        hosts_drafts, layout = draw(st.booleans()), draw(st.sampled_from(_LAYOUTS))
        window = draw(st.none() | st.integers(1, context)) if windows else None
        sink = 0 if window is None else draw(st.sampled_from([0, 0, 0, 1, 2, 5]))
        sink = min(sink, context - (window or 0))
        facts: dict[str, Any] = {
            "page_size": size,
            "hosts_drafts": hosts_drafts,
            "layout": layout,
            "window": window,
            "sink": sink,
        }
        pages = _least_pages(config, facts) + draw(st.integers(0, spare_pages))
        groups.append(Group(f"kv{index}", num_pages=pages, **facts))
    return replace(config, groups=tuple(groups))


def _least_pages(config: LedgerConfig, facts: dict[str, Any]) -> int:
    """Return the fewest pages with which a ledger of this one group can be built."""
    size: int = facts["page_size"]
    window: int | None = facts["window"]
    width = sizing_row_width(
        [Shape.none(), *config.shapes],
        max_context_len=config.max_context_len,
        overlap_depth=config.overlap_depth,
        policy=config.policy,
        **{name: facts[name] for name in ("page_size", "hosts_drafts", "layout")},
    )
    if window is None:
        return width // size
    chunk = min(config.max_chunk or config.max_context_len, config.max_context_len)
    ahead_len = max(chunk, _reserve(config, facts))
    checkpoint = -(-(window - 1) // size) + 1 if config.sessions else 0
    sink: int = facts["sink"]
    kept_pages = -(-sink // size) + checkpoint
    return min(width // size, -(-(window - 1 + ahead_len) // size) + 1 + kept_pages)


def _reserve(config: LedgerConfig, facts: dict[str, Any]) -> int:
    """Return the slots beyond `resolved_len` that no round of the config passes in this group."""
    depth, shapes = config.overlap_depth, (Shape.none(), *config.shapes)
    if config.policy == "double_buffer":
        return depth + (depth + 1) * max(_alloc_len(facts, shape, drafts=True) for shape in shapes)
    spread = depth * max(shape.max_accept_len for shape in shapes)
    return spread + max(_alloc_len(facts, shape, drafts=shape.num_steps > 0) for shape in shapes)


def _alloc_len(facts: dict[str, Any], shape: Shape, *, drafts: bool) -> int:
    """Return the slots of one round of the shape; without `drafts`, as if none were hosted."""
    return sizing_alloc_len_per_decode(
        page_size=facts["page_size"],
        num_steps=shape.num_steps,
        topk=shape.topk,
        num_draft_tokens=shape.num_draft_tokens,
        hosts_drafts=facts["hosts_drafts"] and drafts,
        layout=facts["layout"],
    )


def accept_lens(lanes: Sequence[Shape]) -> st.SearchStrategy[list[int]]:
    """Draw accept lengths of a round with these shapes, lane by lane, bonus token included."""
    return st.tuples(*(st.integers(1, shape.max_accept_len) for shape in lanes)).map(list)


def operation_codes() -> st.SearchStrategy[bytes]:
    """Draw bytes that `decode_op(ledger, code)` turns into one operation on the ledger."""
    return st.binary(min_size=OP_BYTES, max_size=OP_BYTES)


def operation_sequences(max_size: int = 50) -> st.SearchStrategy[list[bytes]]:
    """Draw a list of codes, each for `apply(ledger, decode_op(ledger, code))`."""
    return st.lists(operation_codes(), max_size=max_size)
