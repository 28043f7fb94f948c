"""The tables of figures in the docs, from the newest records.

A record is what `python -m benches embed|held-states|sglang|states|vllm --json` printed, in
`benches/results/DATE-cpu-NAME.json`, or what `make gpu` or `make engine-releases` wrote; the newest
one of each name counts.
`python tests/kits/figure_tables.py` prints the tables; `--write` puts them into the pages between
their marks. `test_figure_tables.py` compares. So new figures are two commands:

    OMP_NUM_THREADS=1 python -m benches sglang --repeats 9 --json \\
        > benches/results/$(date +%F)-cpu-sglang.json
    python tests/kits/figure_tables.py --write
"""

from __future__ import annotations

import json
import re
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
    """The newest record of a bench on a machine, such as `cpu-embed`."""

    def __init__(self, name: str, results: Path = RESULTS) -> None:
        self.path = sorted(results.glob(f"????-??-??-{name}.json"))[-1]
        content = json.loads(self.path.read_text(encoding="utf-8"))
        self.machine: dict[str, Any] = content["machine"]
        self.results: list[dict[str, Any]] = content["results"]
        # Of several references to one name, the first counts.
        self._results = {result["name"]: result for result in reversed(self.results)}

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

    def differences(self, engine: str) -> dict[str, dict[str, list[str]]]:
        """For each release and level of an engine: in what it differs from what is needed."""
        found: dict[str, dict[str, list[str]]] = {}
        for name, result in self._results.items():
            named, _, level = name.partition(": ")
            if named.startswith(f"{engine} "):
                release = named.removeprefix(f"{engine} ")
                found.setdefault(release, {})[level] = result["differences"]
        return dict(
            sorted(found.items(), key=lambda item: list(map(int, re.findall(r"\d+", item[0]))))
        )

    def said(self) -> str:
        """Where and when it was measured."""
        at = self.machine
        cores = f"{at['cpu']}, {at['cores']} cores, Python {at['python']}"
        if "cupy" in at:
            cores = f"{at['device']}, CUDA {at['cuda']}, torch {at['torch']}, CuPy {at['cupy']}"
        where = f"{at['date']}, {cores}"
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


def vllm_tests(record: Record) -> Iterator[str]:
    """How many of vLLM's own tests pass, and why others cannot."""
    (result,) = record.results
    passed, of_all = result["value"], result["reference_value"]
    yield (
        f"Of {of_all:,} tests of `tests/v1/core` that pass on a CPU with vLLM's own pool, "
        f"{passed:,} pass at level `speculative`, if wrong frees raise.\nOf the others a test "
        "cannot pass because"
    )
    yield ""
    for reason, count in sorted(result["reasons"].items(), key=lambda item: (-item[1], item[0])):
        yield f"- {reason} ({count})"
    yield f"\n{record.said()}"


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


def accepted_releases(engine: str, levels: Sequence[str]) -> Callable[[Record], Iterator[str]]:
    """Return what writes the table of an engine's releases, and why those are refused that are."""

    def lines(record: Record) -> Iterator[str]:
        found = record.differences(engine)
        rows = {
            release: ["no" if by_level[level] else "yes" for level in levels]
            for release, by_level in found.items()
        }
        count = [
            f"{sum(not by_level[level] for by_level in found.values())} of {len(found)}"
            for level in levels
        ]
        columns = [f"`{level}`" for level in levels]
        yield from table("release", columns, rows | {"accepted": count})
        reasons: dict[str, list[str]] = {}
        for release, by_level in found.items():
            for level, differences in by_level.items():
                if differences:
                    text = differences[0].replace("|", "/").replace("<", "(").replace(">", ")")
                    reasons.setdefault(text, []).append(f"{release} `{level}`")
        yield ""
        for text, where in reasons.items():
            yield f"- {', '.join(where)}: {text}"
        yield f"\n{record.said()}"

    return lines


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


def device_rounds(record: Record) -> Iterator[str]:
    rows = {}
    for shape, title in (("none", "plain"), ("chain:3", "chain of 3, EAGLE head")):
        for batch in (1, 32, 128):
            name = f"a round of an 8B model, {shape}, batch {batch}, 1500 tokens"
            times_ms = record.value(f"{name}, before"), record.value(name), record.reference(name)
            rows[f"{title}, {batch} row{'s' * (batch > 1)}"] = [
                f"{us / 1e3:.1f} ms" for us in times_ms
            ]
    columns = (
        "torch's flash, transformers' layers",
        "our kernels",
        "weights and live KV read once",
    )
    yield from table("a round of a random 8B model, 1,500 tokens a row", columns, rows)
    yield f"\n{record.said()}"


def device_kernels(record: Record) -> Iterator[str]:
    names = {
        "`attend_pages`, 4 queries, 128 rows, 1,500 tokens": "attend_pages, 8B, Q=4, 1500 tokens",
        "`sample_tokens`, greedy": "sample_tokens, argmax",
        "`sample_tokens`, temperature": "sample_tokens, temperature",
        "`sample_tokens`, top-k and top-p": "sample_tokens, top-k, top-p",
        "`likeliest`": "likeliest, k=8",
        "`gated_silu`": "gated_silu",
        "`rotate_heads`": "rotate_heads",
        "`write_kv`": "write_kv",
        "`gather_kv`": "gather_kv, 8B, P=16",
        "`compact_accepted`": "compact_accepted, 8B, P=16",
    }
    rows = {}
    for title, name in names.items():
        where = f"{name}, bs={128 if 'attend' in name else 256}"
        rows[title] = [f"{record.value(where):,.0f} GB/s", share(record.ratio(where))]
    yield from table("kernel, 256 rows unless said", ("speed", "a device copy = 1"), rows)
    yield f"\n{record.said()}"


HYBRIDS = ("Qwen3-Next-80B-A3B", "Qwen3.5-397B-A17B", "Nemotron-H-8B", "Nemotron-3-Nano-30B-A3B",
           "Falcon-Mamba-7B", "LFM2-1.2B")  # fmt: skip


def size(num_bytes: float) -> str:
    if num_bytes < 1e6:
        return f"{num_bytes / 2**10:,.0f} KiB"
    return f"{num_bytes / 2**20:,.{0 if num_bytes > 1e8 else 1}f} MiB"


def states(record: Record) -> Iterator[str]:
    rows = {}
    for model in HYBRIDS:
        token = f"{model}: bytes of a draft token"
        in_rows = [f"{model}: a row, {shape}" for shape in ("chain of 4", "tree of 32")]
        rows[model] = [
            size(record.value(token)),
            size(record.reference(token)),
            times(record.ratio(token)),
            *(f"{size(record.value(row))}, {size(record.reference(row))}" for row in in_rows),
        ]
    columns = ("a record", "a state", "times", "a row with a chain of 4: here, with snapshots",
               "with a tree of 32")  # fmt: skip
    yield from table("model, bfloat16", columns, rows)
    name = "Qwen3-Next, 3x1x4, prompt 2048, output 256: running, mean"
    ours, theirs = record.value(name), record.reference(name)
    yield (
        f"\nOn 32 GiB of KV and states, {ours:.0f} requests run at once on Qwen3-Next with chains"
        f" of 4, and {theirs:.0f} with snapshots ({ours / theirs:.2f} times; a trace of prompts of"
        " 2,048"
        "\nand outputs of 256 tokens on average, on the scheduler and a simulated device)."
    )
    yield f"\n{record.said()}"


def held_states(record: Record) -> Iterator[str]:
    alone = ("vLLM", "vLLM with ReplaySSM", "SGLang", "SGLang with ReplaySSM")
    cached = ("vLLM, prefix cache", "SGLang, prefix cache")

    def cells(model: str, unit: str, shown: Callable[[float], str]) -> Iterator[str]:
        for ways in (alone, cached):
            yield shown(record.value(f"{model}: {unit}, {ways[0]}"))
            for name in (f"{model}: {unit}, {way}" for way in ways):
                yield shown(record.reference(name)) if name in record else "-"

    rows = {model: [*cells(model, "B", size)] for model in HYBRIDS}
    columns = ("here", *alone, "here, prefix cache", *cached)
    yield from table("of a running request", columns, rows)
    yield f"\n{record.said()}"


def peers(record: Record) -> Iterator[str]:
    traces = {"one": "one request of 256 tokens", "ragged-8": "8 of 32 to 512",
              "ragged-24": "24 of 32 to 512", "shared": "24 that share 600",
              "repeating": "24 that repeat themselves", "long": "8 of 2,000"}  # fmt: skip
    cells: dict[str, dict[str, str]] = {}
    for result in record.results:
        size, kind, drafts, threads, policy = re.fullmatch(
            r"(\w+): ([\w-]+), drafts (\d+), threads (\d)(?:, (\w+))?", result["name"]
        ).groups()  # type: ignore[union-attr]
        if result["unit"] == ("tokens/CPU s" if threads == "1" else "tokens/s"):
            way = f"{drafts} drafts" if int(drafts) else "plain"
            way = f"policy `{policy}`, at most {way}" if policy else way
            column = f"{size}, {way}, {threads} thread{'s' * (threads != '1')}"
            ratio = result["value"] / result["reference_value"]
            cells.setdefault(column, {})[kind] = f"{ratio:.2f}"
    rows = {
        title: [column.get(kind, "-") for column in cells.values()]
        for kind, title in traces.items()
        if any(kind in column for column in cells.values())
    }
    yield from table(f"our speed, {record.results[0]['reference']} = 1", list(cells), rows)
    yield f"\n{record.said()}"


def profile(record: Record) -> Iterator[str]:
    shares: dict[str, dict[str, str]] = {}
    for result in record.results:
        size, kind, part = result["name"].split(": ")
        share = result["value"] / result["reference_value"]
        shares.setdefault(f"{size}, {kind}", {})[part] = f"{100 * share:.0f} %"
    rows = {
        part: [column[part] for column in shares.values()] for part in next(iter(shares.values()))
    }
    yield from table("share of the time", list(shares), rows)
    yield f"\n{record.said()}"


def recurrent_rates(record: Record) -> Iterator[str]:
    rows: dict[str, list[str]] = {}
    for result in record.results:
        family, batch, _, accepted = result["name"].split(", ")
        row = rows.setdefault(f"{family}, {batch}", [accepted.removeprefix("accept length ")])
        row.append(f"{result['ratio']:.2f}")
    speeds = dict.fromkeys(f"speed, {result['reference']} = 1" for result in record.results)
    yield from table("a chain of 3", ["accept length", *speeds], rows)
    yield f"\n{record.said()}"


#: For each page: its tables by their marks, each with the record that it is of.
PAGES: dict[str, dict[str, tuple[str, Callable[[Record], Iterator[str]]]]] = {
    "embed": {
        "held-states": ("cpu-held-states", held_states),
        "verbs": ("cpu-embed", verbs),
        "managers": ("cpu-embed", managers),
    },
    "recurrent": {
        "states": ("cpu-states", states),
        "recurrent": ("cpu-recurrent", recurrent_rates),
    },
    "cpu_speed": {
        "peers": ("cpu-peers", peers),
        "peers-llama-cpp": ("cpu-peers-llama-cpp", peers),
        "peers-plain": ("cpu-peers-plain", peers),
        "profile": ("cpu-profile", profile),
    },
    "gpu": {
        "rounds": ("nvidia-h200-rounds", device_rounds),
        "kernels": ("nvidia-h200-kernels", device_kernels),
    },
    "sglang": {
        "pages": ("cpu-sglang", pages),
        "slots": ("cpu-sglang", slots),
        "sizing": ("cpu-sglang", sizing),
        "steps": ("cpu-sglang", steps),
        "releases": ("cpu-releases", accepted_releases("sglang", ("pages", "reserve", "rows"))),
    },
    "vllm": {
        "pool": ("cpu-vllm", vllm_pool),
        "scheduler": ("cpu-vllm", vllm_scheduler),
        "tests": ("cpu-vllm-tests", vllm_tests),
        "releases": ("cpu-releases", accepted_releases("vllm", ("blocks", "speculative"))),
    },
}


def parts(page: str) -> dict[str, str]:
    """What stands between `<!-- name -->` and `<!-- end -->` in the page."""
    return {mark: "\n".join(make(Record(name))) for mark, (name, make) in PAGES[page].items()}


def path_of(page: str) -> Path:
    return ROOT / "docs" / f"{page}.md"


if __name__ == "__main__":
    for page in PAGES:
        if sys.argv[1:] == ["--write"]:
            text = path_of(page).read_text(encoding="utf-8")
            path_of(page).write_text(written(text, parts(page)), encoding="utf-8")
        else:
            print("\n\n".join(parts(page).values()))
