"""`WorkerRow` and `Lane`: what vLLM's runner knows of a request, and of its part of a step."""

from __future__ import annotations

import dataclasses

from lab.engines.content import Text


@dataclasses.dataclass
class RunningState:
    """Where a row's state is: a column of its blocks, and tokens accepted since it was there."""

    column: int
    accepted: int = 1


@dataclasses.dataclass
class WorkerRow:
    """A request on the worker."""

    name: str
    text: Text
    blocks: list[list[int]]  # of each group
    declared: int  # computed tokens by the last scheduler's output
    computed: int  # by what has run
    known: int  # tokens that the worker knows
    drafts: list[int] = dataclasses.field(default_factory=list)
    #: Drafts rejected by each of its steps, in order.
    rejected: list[int] = dataclasses.field(default_factory=list)
    seen: int = 0  # steps whose results the scheduler has
    state: RunningState | None = None  # of recurrent layers


@dataclasses.dataclass
class Lane:
    """A row's part of a launched step."""

    row: WorkerRow
    blocks: list[list[int]]  # as launched
    count: int  # tokens
    drafts: list[int]  # as scheduled; -1 stands for the worker's own
    #: Where the row starts if this is its first step; else None.
    start: int | None
    declared: int
    seen: int  # of the row's earlier steps, how many results the scheduler had
    said: list[int] = dataclasses.field(default_factory=list)
    state: RunningState | None = None
    is_spoilt: bool = False  # it read what a failed load should have brought
