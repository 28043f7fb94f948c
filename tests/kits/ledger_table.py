"""Walks the real ledger: every verb in every state of a row, and what comes of it.

`python tests/kits/ledger_table.py` prints the tables; `--write` puts them into docs/ledger.md
between their marks. `test_ledger_table.py` compares.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator

from paths import ROOT
from specpool import Group, Ledger, NotReady, Shape, SpecpoolError

PAGE = ROOT / "docs" / "ledger.md"
CHAIN = Shape.eagle(3, 1, 4)


class World:
    """A ledger with one row under test, one row that helps, and the newest step of the first."""

    def __init__(self) -> None:
        groups = [
            Group("full", page_size=4, num_pages=40, hosts_drafts=True),
            Group("window", page_size=4, num_pages=40, window=8),
        ]
        self.ledger = Ledger(
            groups, [CHAIN], num_rows=4, max_context_len=24, overlap_depth=1, sessions=True
        )
        self.keeper = self.ledger.admit()
        self.step = 0
        self.row = self.keeper
        self.extend(8)
        self.prefix = self.ledger.pin_prefix(self.keeper, 8)
        self.ledger.lend(self.keeper, 0, 4)
        self.lent = [int(self.ledger.lent_pages(group)[0]) for group in (0, 1)]
        self.ledger.index(self.keeper, [9, 8, 7, 6, 5, 4, 3, 2])
        self.snapshot = self.ledger.snapshot()
        self.row, self.step = 2, 0  # The row that `admit` gives next; no step has the number 0.

    def prepare(self, length: int) -> None:
        self.step = self.ledger.prepare_extend([self.row], [length]).step

    def decode(self, shape: int = 1, *, writes_draft: bool = True) -> None:
        prepare = self.ledger.prepare_decode
        self.step = prepare([self.row], [shape], writes_draft=writes_draft).step

    def launch(self) -> None:
        self.ledger.launch(self.step)

    def end(self, accept_len: int | None = None) -> None:
        if accept_len is not None:
            self.ledger.resolve(self.step, [accept_len])
        self.ledger.complete(self.step)

    def extend(self, length: int) -> None:
        self.prepare(length)
        self.launch()
        self.end()

    def ready(self) -> None:
        """The row holds 6 tokens, all complete."""
        self.ledger.admit("row under test")
        self.extend(6)

    def flying(self) -> None:
        self.ready()
        self.decode()
        self.launch()


def free(world: World) -> None:
    """never taken, or given back and complete"""


def fenced(world: World) -> None:
    """given back; a launched step that it took part in is not complete"""
    world.flying()
    world.ledger.finish(world.row)


def empty(world: World) -> None:
    """admitted, no token yet"""
    world.ledger.admit()


def copied(world: World) -> None:
    """admitted on a prefix or a hit, or forked: the copy of its tail waits"""
    world.ledger.admit(prefix=world.prefix, length=6)


def extending(world: World) -> None:
    """an extend of it is prepared"""
    world.ready()
    world.prepare(10)


def prefilling(world: World) -> None:
    """the extend is launched, not complete: rounds may follow"""
    world.ready()
    world.prepare(10)
    world.launch()


def ready(world: World) -> None:
    """all complete, it has a root"""
    world.ready()


def claimed(world: World) -> None:
    """a round is prepared"""
    world.ready()
    world.decode()


def flying(world: World) -> None:
    """a round is launched, not resolved"""
    world.flying()


def full(world: World) -> None:
    """D + 1 rounds are in flight"""
    world.flying()
    world.decode()
    world.launch()


def landed(world: World) -> None:
    """all rounds are resolved, the last is not complete"""
    world.flying()
    world.ledger.resolve(world.step, [2])


def cut(world: World) -> None:
    """trimmed, or admitted on whole pages: it needs an extend for a new root"""
    world.flying()
    world.end(2)
    world.ledger.trim(world.row, 5)


def cut_early(world: World) -> None:
    """trimmed with a round in flight, whose result is still to come"""
    world.flying()
    world.ledger.trim(world.row, 5)


def lagging(world: World) -> None:
    """a round wrote no draft KV"""
    world.ready()
    world.decode(0, writes_draft=False)
    world.launch()
    world.end(1)


def ended(world: World) -> None:
    """its length has reached L"""
    world.ledger.admit()
    world.extend(24)


def idle(world: World) -> None:
    """between two turns of a session"""
    world.flying()
    world.end(2)
    world.ledger.end_turn(world.row, 7)


def stale(world: World) -> None:
    """cut after a round was prepared: that step must be cancelled"""
    world.ready()
    world.decode()
    world.ledger.trim(world.row, 5)


def closed(world: World) -> None:
    """the ledger is closed"""
    world.ready()
    world.ledger.close()


STATES: list[Callable[[World], None]] = [
    free,
    fenced,
    empty,
    copied,
    extending,
    prefilling,
    ready,
    claimed,
    flying,
    full,
    landed,
    cut,
    cut_early,
    lagging,
    ended,
    idle,
    stale,
    closed,
]


def name_of(world: World) -> str:
    """The row's state, from what can be seen and from what the ledger refuses."""
    ledger, row = world.ledger, world.row
    if ledger.closed:
        return "closed"
    if not ledger.is_live(row):
        num_live = sum(map(ledger.is_live, range(1, ledger.num_rows + 1)))
        return "free" if num_live + ledger.num_free_rows == ledger.num_rows else "fenced"
    states = [state for _, _, state in ledger.steps()]
    if "stale" in states:
        return "stale"
    if ledger.idle[row]:
        return "idle"
    if ("extend", "prepared") in [(kind, state) for _, kind, state in ledger.steps()]:
        return "extending"
    if ledger.in_flight[row] > ledger.overlap_depth:
        return "full"
    if ledger.in_flight[row]:
        return "claimed" if "prepared" in states else "flying"
    if ledger.resolved_len[row] == 0:
        return "empty"
    waiting = ledger.prepare_decode([world.keeper], [0])
    ledger.cancel(waiting.step)
    if any(dst in ledger.page_table(g)[row] for g, _, dst, _ in waiting.page_copies.tolist()):
        return "copied"
    if ledger.resolved_len[row] == ledger.max_context_len:
        return "ended"
    if not has_root(world):
        return "cut_early" if states else "cut"
    if ledger.drafted_len[row] < ledger.resolved_len[row]:
        return "lagging"
    if states:
        return "prefilling" if ledger.steps()[-1][1] == "extend" else "landed"
    return "ready"


def has_root(world: World) -> bool:
    try:
        plan = world.ledger.prepare_decode([world.row], [0])
    except NotReady:
        return False
    world.ledger.cancel(plan.step)
    return True


Verb = Callable[[World], object]

ROW_VERBS: dict[str, Verb] = {
    "prepare_extend": lambda w: w.prepare(max(int(w.ledger.resolved_len[w.row]) + 1, 12)),
    "prepare_decode": lambda w: w.decode(),
    "trim": lambda w: w.ledger.trim(w.row, 5),
    "end_turn": lambda w: w.ledger.end_turn(w.row, 5),
    "retract, finish, abort": lambda w: w.ledger.retract(w.row),
    "fork": lambda w: w.ledger.fork(w.row),
    "pin_prefix": lambda w: w.ledger.pin_prefix(w.row, 4),
    "lend": lambda w: w.ledger.lend(w.row, 0, 4),
    "export": lambda w: w.ledger.export(w.row),
    "rebind": lambda w: w.ledger.rebind(w.row, 0, 4, w.lent),
    "index": lambda w: w.ledger.index(w.row, [1, 2, 3, 4]),
    "tokens_required": lambda w: w.ledger.tokens_required([w.row], [1]),
}
STEP_VERBS: dict[str, Verb] = {
    "launch": lambda w: w.ledger.launch(w.step),
    "resolve": lambda w: w.ledger.resolve(w.step, [1]),
    "complete": lambda w: w.ledger.complete(w.step),
    "cancel": lambda w: w.ledger.cancel(w.step),
    "abandon": lambda w: w.ledger.abandon(w.step),
    "take_delta, ack_delta": lambda w: (
        w.ledger.take_delta(w.step),
        w.ledger.ack_delta(w.step),
    ),
}
LEDGER_VERBS: dict[str, Verb] = {
    "admit": lambda w: w.ledger.admit(),
    "admit on a prefix": lambda w: w.ledger.admit(prefix=w.prefix, length=6),
    "admit_cached": lambda w: w.ledger.admit_cached([9, 8, 7, 6, 5], limit=4),
    "admit_lent": lambda w: w.ledger.admit_lent(w.lent, 4),
    "import_row": lambda w: w.ledger.import_row(4, 4),
    "release_lent": lambda w: w.ledger.release_lent(0, w.lent[:1]),
    "forget": lambda w: w.ledger.forget(),
    "release_prefix": lambda w: w.ledger.release_prefix(w.prefix),
    "snapshot": lambda w: w.ledger.snapshot(),
    "restore": lambda w: w.ledger.restore(w.snapshot),
    "close": lambda w: w.ledger.close(),
}
TABLES = {"row": ROW_VERBS, "step": STEP_VERBS, "ledger": LEDGER_VERBS}


def outcome(build: Callable[[World], None], verb: Verb) -> str:
    """The error's name, the new state's, or `ok` where the state is the same."""
    world = World()
    build(world)
    before = world.ledger.state_hash()
    try:
        verb(world)
    except SpecpoolError as error:
        assert world.ledger.state_hash() == before, (build.__name__, error)
        world.ledger.check()
        return type(error).__name__
    world.ledger.check()
    after = name_of(world)
    return "ok" if after == build.__name__ else f"*{after}*"


def table(verbs: dict[str, Verb]) -> Iterator[str]:
    """A line for the states and a column for the verbs whose outcomes are the same."""
    outcomes = {verb: [outcome(build, call) for build in STATES] for verb, call in verbs.items()}
    columns = grouped(outcomes)
    cells_of_state = map(list, zip(*columns, strict=True))
    names = [build.__name__ for build in STATES]
    lines = grouped(dict(zip(names, cells_of_state, strict=True)))
    yield "| state | " + " | ".join(map(title, columns.values())) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for cells, states in lines.items():
        yield f"| {', '.join(states)} | " + " | ".join(cells) + " |"


def grouped(cells_of_name: dict[str, list[str]]) -> dict[tuple[str, ...], list[str]]:
    """The names that have the same cells, by these cells, in the order of their first."""
    names_of_cells: dict[tuple[str, ...], list[str]] = {}
    for name, cells in cells_of_name.items():
        names_of_cells.setdefault(tuple(cells), []).append(name)
    return names_of_cells


def title(verbs: list[str]) -> str:
    """The head of a column of these verbs; a name like "retract, finish" is of several."""
    words = ", ".join(verbs).split(", ")
    return ", ".join(f"`{word}`" if word.isidentifier() else word for word in words)


def states() -> Iterator[str]:
    yield "| state | of the row |"
    yield "|---|---|"
    for build in STATES:
        yield f"| {build.__name__} | {build.__doc__} |"


def parts() -> dict[str, str]:
    """What stands between `<!-- name -->` and `<!-- end -->` in the page."""
    tables = {name: table(verbs) for name, verbs in TABLES.items()}
    return {name: "\n".join(lines) for name, lines in {"states": states(), **tables}.items()}


def written(text: str, parts: dict[str, str]) -> str:
    """The page with its parts replaced."""
    for name, part in parts.items():
        mark = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, num = mark.subn(lambda match, part=part: match[1] + part + "\n" + match[2], text)
        assert num == 1, f"{num} marks of {name}"
    return text


if __name__ == "__main__":
    made = parts()
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
    else:
        print("\n\n".join(made.values()))
