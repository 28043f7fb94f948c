"""The report of `specpool generate`: figures, pages, and whether the texts are the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table

from specpool.engine.output import RequestOutput
from specpool.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from specpool.engine.comparison import TokenGap
    from specpool.engine.engine import Engine

# The most texts that are shown one by one because they differ from plain decoding.
_MOST_SHOWN = 3


@dataclass(slots=True)
class Timed:
    """The outputs of one run, and the seconds that the engine took."""

    outputs: list[RequestOutput]
    seconds: float

    @property
    def num_tokens(self) -> int:
        """The number of generated tokens."""
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class Runs:
    """Runs of the same prompts, in turn.

    Attributes:
        drafted: runs with the engine's shape.
        plain: runs without drafts; empty if the engine does not draft.
    """

    drafted: list[Timed]
    plain: list[Timed]


def accept_histogram(outputs: Sequence[RequestOutput]) -> dict[int, int]:
    """Count rounds by accept length, bonus included."""
    counts = Counter(n for output in outputs for n in output.accept_lens)
    return dict(sorted(counts.items()))


def mean_accept_len(outputs: Sequence[RequestOutput]) -> float:
    """Return the mean accept length over all rounds, bonus included; 0 without rounds."""
    rounds = sum(output.verify_ct for output in outputs)
    return sum(sum(output.accept_lens) for output in outputs) / rounds if rounds else 0.0


def report_of(engine: Engine, runs: Runs, peak_pages: Sequence[int]) -> dict[str, Any]:
    """Return all that is printed, as plain values for JSON."""
    first, shape = runs.drafted[0], engine.shape
    outputs = first.outputs
    report: dict[str, Any] = {
        "shape": [shape.num_steps, shape.topk, shape.num_draft_tokens],
        "dtype": str(engine.target.dtype).removeprefix("torch."),
        "rounds": sum(output.verify_ct for output in outputs),
        "accept_len": mean_accept_len(outputs),
        "accept_histogram": accept_histogram(outputs),
        "num_outputs": len(outputs),
        "finish_reasons": dict(Counter(output.finish_reason for output in outputs)),
        "tokens": first.num_tokens,
        "prompt_tokens": sum(len(output.prompt_ids) for output in outputs),
        "reused_tokens": sum(output.num_reused for output in outputs),
        "runs": len(runs.drafted),
        "first_token_seconds": _median(output.first_token_seconds for output in outputs),
        "request_seconds": _median(output.seconds for output in outputs),
        **_speeds(runs),
        **_comparisons(engine, runs),
        "errors": [output.error for output in outputs if output.error is not None],
        "pools": [
            {
                "group": pool.name,
                "pages": pool.num_pages,
                "peak_used": peak,
                "free": pool.free_pages + pool.cached_pages,
                "leaked": pool.num_pages - pool.free_pages - pool.cached_pages,
            }
            for pool, peak in zip(engine.pool_stats(), peak_pages, strict=True)
        ],
    }
    return report


def _median(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return median(numbers) if numbers else None


def _speeds(runs: Runs) -> dict[str, Any]:
    """Return medians and ranges over the runs; None if there were no such runs."""
    drafted = [run.tokens_per_second for run in runs.drafted]
    plain = [run.tokens_per_second for run in runs.plain]
    ratios = [a / (b or 1.0) for a, b in zip(drafted, plain, strict=False)]
    named = {"tokens_per_second": drafted, "plain_tokens_per_second": plain, "speedup": ratios}
    speeds: dict[str, Any] = {}
    for name, values in named.items():
        speeds[name] = median(values) if values else None
        speeds[f"{name}_range"] = [min(values), max(values)] if values else None
    return speeds


def _comparisons(engine: Engine, runs: Runs) -> dict[str, Any]:
    """Compare each drafted text with the plain one; None without plain runs."""
    if not runs.plain:
        return dict.fromkeys(("identical_to_plain", "same_as_plain", "comparisons"))
    pairs = [*zip(runs.drafted[0].outputs, runs.plain[0].outputs, strict=True)]
    comparisons = []
    for drafted, plain in pairs:
        if {drafted.finish_reason, plain.finish_reason} <= {"stop", "length"}:
            comparison = engine.compare(drafted, plain)
            position = {"index": drafted.index, "sample": drafted.sample}
            texts = [_text_of(engine, gap) for gap in (comparison.first, comparison.second)]
            line = {"line": str(comparison), "texts": texts}
            comparisons.append({**position, **asdict(comparison), **line})
    return {
        "identical_to_plain": all(a.token_ids == b.token_ids for a, b in pairs),
        "same_as_plain": all(comparison["verdict"] != "fault" for comparison in comparisons),
        "comparisons": comparisons,
    }


def _text_of(engine: Engine, gap: TokenGap | None) -> str | None:
    if gap is None or engine.tokenizer is None:
        return None
    return str(engine.tokenizer.decode([gap.token_id]))


def summary_of(report: dict[str, Any], params: SamplingParams) -> str:
    """Return the report of a run without comparison in one line."""
    parts = [f"{report['tokens']} tokens"]
    if any(int(length) > 1 for length in report["accept_histogram"]):
        parts.append(f"{report['accept_len']:.2f} a round in {report['rounds']} rounds")
    parts.append(f"{report['tokens_per_second']:.0f} tokens/s in one run")
    if cut := report["finish_reasons"].get("length", 0):
        parts.append(f"{cut} of {report['num_outputs']} cut at -n {params.max_new_tokens}")
    return ", ".join(parts)


def table_of(report: dict[str, Any]) -> Table:
    """Return the report of a run with comparison as a table."""
    table = Table(show_header=False, title="specpool generate")
    steps, topk, nodes = report["shape"]
    if "chosen" in report:
        counts = ", ".join(f"{name} {count}" for name, count in report["chosen"].items())
        table.add_row("shapes, rounds of each", counts)
    else:
        table.add_row("shape", f"num_steps {steps}, topk {topk}, num_draft_tokens {nodes}")
    table.add_row("rounds", str(report["rounds"]))
    table.add_row("accept length", f"{report['accept_len']:.2f} tokens a round, bonus included")
    max_count = max(report["accept_histogram"].values(), default=1)
    for length, count in report["accept_histogram"].items():
        table.add_row(f"  {length}", f"{'█' * max(1, round(24 * count / max_count))} {count}")
    _add_speeds(table, report)
    if report["reused_tokens"]:
        reused = f"{report['reused_tokens']} of {report['prompt_tokens']} prompt tokens"
        table.add_row("found in the prefix cache", reused)
    for pool in report["pools"]:
        table.add_row(
            f"{pool['group']} pages",
            f"{pool['pages']}: {pool['peak_used']} at the peak, {pool['leaked']} leaked",
        )
    _add_comparisons(table, report)
    for error in report["errors"]:
        table.add_row("error", error)
    return table


def _add_speeds(table: Table, report: dict[str, Any]) -> None:
    def speed(name: str) -> str:
        slowest, fastest = report[f"{name}_range"]
        return (
            f"{report[name]:.0f} tokens/s ({slowest:.0f} to {fastest:.0f}, {report['runs']} runs)"
        )

    table.add_row("speed", speed("tokens_per_second"))
    table.add_row("plain decoding, in turn", speed("plain_tokens_per_second"))
    min_ratio, max_ratio = report["speedup_range"]
    table.add_row(
        "drafting against plain", f"{report['speedup']:.2f}x ({min_ratio:.2f}x to {max_ratio:.2f}x)"
    )
    if report["first_token_seconds"] is not None:
        table.add_row(
            "latency, medians",
            f"first token after {1e3 * report['first_token_seconds']:.1f} ms, all after "
            f"{1e3 * report['request_seconds']:.1f} ms",
        )


def _add_comparisons(table: Table, report: dict[str, Any]) -> None:
    """Add a line that says whether the texts are the same, and lines for those that differ."""
    label, several = "identical to plain decoding", report["comparisons"]
    apart = [comparison for comparison in several if comparison["verdict"] != "identical"]
    if report["identical_to_plain"]:
        table.add_row(label, "yes")
    elif not apart:
        table.add_row(label, "not known: a text ended with an error")
    elif report["same_as_plain"]:
        count = f"{len(apart)} of {len(several)} texts differ"
        table.add_row(label, f"same up to {report['dtype']} rounding: {count}")
    else:
        faults = sum(comparison["verdict"] == "fault" for comparison in apart)
        table.add_row(label, f"NO: a fault in {faults} of {len(several)} texts")
    has_samples = any(comparison["sample"] for comparison in several)
    apart.sort(key=lambda comparison: comparison["verdict"] != "fault")
    for comparison in apart[:_MOST_SHOWN]:
        sample = f", sample {comparison['sample'] + 1}" if has_samples else ""
        table.add_row(f"  prompt {comparison['index'] + 1}{sample}", _line(comparison))
    if len(apart) > _MOST_SHOWN:
        table.add_row("", f"and {len(apart) - _MOST_SHOWN} more: --json has them all")


def _line(comparison: dict[str, Any]) -> str:
    if comparison["verdict"] == "fault":
        return str(comparison["line"])
    gaps = comparison["first"], comparison["second"]
    first, second = (
        str(gap["token_id"]) if text is None else repr(text)
        for gap, text in zip(gaps, comparison["texts"], strict=True)
    )
    return (
        f"token {comparison['num_same']} is {first} or {second}, "
        f"{max(g['gap'] for g in gaps):.2g} apart in logits; "
        f"rounding reaches {max(g['noise'] for g in gaps):.2g}"
    )
