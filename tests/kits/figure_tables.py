"""The tables of figures in docs/embed.md, docs/sglang.md and docs/vllm.md, from the newest records.

A record is what `python -m benches embed|sglang|vllm --json` printed, in
`benches/results/DATE-cpu-NAME.json`; the newest one of each name counts.
`python tests/kits/figure_tables.py` prints the tables; `--write` puts them into the pages between
their marks. `test_figure_tables.py` compares. So new figures are two commands:

    OMP_NUM_THREADS=1 python -m benches sglang --repeats 9 --json \\
        > benches/results/$(date +%F)-cpu-sglang.json
    python tests/kits/figure_tables.py --write
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ledger_table import written
from paths import ROOT

RESULTS = ROOT / "benches" / "results"
SHAPES = ("5/8/64", "5/4/8", "3/1/4")
COLUMNS = ("1 row", "32 rows", "256 rows", "1,024 rows")
ROWS = (1, 32, 256, 1024)


class Record:
    """The newest record of a bench."""

    def __init__(self, bench: str, results: Path = RESULTS) -> None:
        self.path = sorted(results.glob(f"*-cpu-{bench}.json"))[-1]
        content = json.loads(self.path.read_text(encoding="utf-8"))
        self.machine: dict[str, Any] = content["machine"]
        self._results = {result["name"]: result for result in content["results"]}

    def __contains__(self, name: str) -> bool:
        return name in self._results

    def value(self, name: str) -> float:
        """What ours took, or has."""
        value: float = self._results[name]["value"]
        return value

    def reference(self, name: str) -> float:
        """The same of the other side."""
        value: float = self._results[name]["reference_value"]
        return value

    def ratio(self, *names: str) -> float:
        """Our time by the other's, of these calls together."""
        return sum(map(self.value, names)) / sum(map(self.reference, names))

    def said(self) -> str:
        """Where and when it was measured."""
        at = self.machine
        where = f"{at['date']}, {at['cpu']}, {at['cores']} cores, Python {at['python']}"
        return f"[Record](../benches/results/{self.path.name}): {where}."


def table(first: str, columns: Sequence[str], rows: dict[str, list[str]]) -> Iterator[str]:
    yield "| " + " | ".join([first, *columns]) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for name, cells in rows.items():
        yield "| " + " | ".join([name, *cells]) + " |"


def by_rows(record: Record, names: dict[str, Sequence[str]], shown: Any) -> dict[str, list[str]]:
    """A line for each title: its calls' ratio for each number of rows."""
    return {
        title: [shown(record.ratio(*(name.format(rows=rows) for name in calls))) for rows in ROWS]
        for title, calls in names.items()
    }


def share(ratio: float) -> str:
    """Our time, the other's = 1."""
    return f"{ratio:.2f}"


def times(ratio: float) -> str:
    """The other's time, ours = 1."""
    return f"{1 / ratio:.1f}" if 1 / ratio < 10 else f"{1 / ratio:.0f}"


def pages(record: Record) -> Iterator[str]:
    at = "P=64, {rows} rows: "
    single_slot = ("P=1, {rows} rows: decode", "P=1, {rows} rows: free")
    names = {
        "decode, no row crosses a page's edge, P=64": (at + "decode within pages",),
        "decode, every row crosses one, P=64": (at + "decode across an edge",),
        "growth by 64 tokens, P=64": (at + "reserve of 64",),
        "free of that growth, P=64": (at + "free of a segment",),
        "decode, P=1": single_slot[:1],
        "free, P=1": single_slot[1:],
        "decode and free, P=1": single_slot,
    }
    yield from table("call", COLUMNS, by_rows(record, names, share))
    yield f"\n{record.said()}"


def slots(record: Record) -> Iterator[str]:
    rows = {}
    for shape in SHAPES:
        name = f"P=64, {shape}: slots ahead of a committed token"
        counts = record.reference(name), record.value(name), record.value(name + ", rows")
        rows[shape.replace("/", " / ")] = [f"{count:,.0f}" for count in counts]
    yield from table("steps / branches / nodes", ("SGLang's own", "`reserve`", "`rows`"), rows)


def sizing(record: Record) -> Iterator[str]:
    both = ("P=64, {rows} rows: lengths of a round", "P=64, {rows} rows: estimate of a round")
    names = {
        "lengths of a round": both[:1],
        "estimate of a round": both[1:],
        "both, which each round calls": both,
    }
    yield from table("call", COLUMNS, by_rows(record, names, share))


def steps(record: Record) -> Iterator[str]:
    names = {}
    for shape in ("P=1, 3/1/4", "P=16, 3/1/4", "P=64, 5/8/64"):
        kind = "tree" if "/8/" in shape else "chain"
        for short, what in (("calls", "calls of a step"), ("path", "step inside the prepare path")):
            title = f"{shape.replace(', ', f', {kind} ')}: {short}"
            names[title] = (shape + ", {rows} rows: " + what,)
    yield from table("case", COLUMNS, by_rows(record, names, times))
    yield f"\n{record.said()}"


def vllm_pool(record: Record) -> Iterator[str]:
    calls = ("get_new_blocks", "free_blocks", "touch", "cache_full_blocks")
    titles = {
        f"`{call}`{more}": call + more
        for call in calls
        for more in ("", ", all given up", ", all known")
        if f"8 blocks: {call}{more}" in record
    }
    counts = (1, 8, 64, 512)
    rows = {
        title: [share(record.ratio(f"{count} blocks: {name}")) for count in counts]
        for title, name in titles.items()
    }
    yield from table("call on the pool", ("1 block", *map(str, counts[1:])), rows)


def vllm_scheduler(record: Record) -> Iterator[str]:
    calls = {
        "`allocate_slots`, a round of all": "allocate_slots of a round",
        "admission of 1,000 known tokens": "admission of 1,000 known tokens",
        "free of 1,000 tokens": "free of 1,000 tokens",
    }
    counts = (1, 32, 256)
    rows = {
        title: [
            share(record.ratio(name)) if name in record else ""
            for name in (f"{count} requests: {call}" for count in counts)
        ]
        for title, call in calls.items()
    }
    yield from table("call of the scheduler", ("1 request", *map(str, counts[1:])), rows)
    yield f"\n{record.said()}"


def verbs(record: Record) -> Iterator[str]:
    names = {"`take` and `drop` of 8 blocks": "take and drop of 8 blocks",
             "`match` of 1,000 blocks": "match of 1,000 blocks"}  # fmt: skip
    rows = {
        title: [
            f"{us:,.0f} us" if us >= 10 else f"{us:.2g} us"
            for us in (record.value(name), record.reference(name))
        ]
        for title, name in names.items()
    }
    yield from table("from Python, on one core", ("here", "a pool of Python dicts"), rows)
    yield f"\n{record.said()}"


def managers(record: Record) -> Iterator[str]:
    rows = {}
    for engine in ("nano-vllm", "mini-sglang"):
        for part in ("a prefill", "a decoded token", "a finish"):
            names = [f"{engine}, P={size}: {part}" for size in (1, 16, 256)]
            cells = [share(record.ratio(name)) if name in record else "" for name in names]
            if any(cells):
                rows[f"{engine}: {part}"] = cells
    yield from table("its own manager's time = 1", ("P=1", "P=16", "P=256"), rows)


#: For each page: the bench, and the tables by their marks.
PAGES: dict[str, tuple[str, dict[str, Callable[[Record], Iterator[str]]]]] = {
    "embed": ("embed", {"verbs": verbs, "managers": managers}),
    "sglang": ("sglang", {"pages": pages, "slots": slots, "sizing": sizing, "steps": steps}),
    "vllm": ("vllm", {"pool": vllm_pool, "scheduler": vllm_scheduler}),
}


def parts(page: str) -> dict[str, str]:
    """What stands between `<!-- name -->` and `<!-- end -->` in the page."""
    bench, tables = PAGES[page]
    record = Record(bench)
    return {name: "\n".join(make(record)) for name, make in tables.items()}


def path_of(page: str) -> Path:
    return ROOT / "docs" / f"{page}.md"


if __name__ == "__main__":
    for page in PAGES:
        if sys.argv[1:] == ["--write"]:
            text = path_of(page).read_text(encoding="utf-8")
            path_of(page).write_text(written(text, parts(page)), encoding="utf-8")
        else:
            print("\n\n".join(parts(page).values()))
