"""`figures_of`: the figures of a run's records, beside those of requests that ran alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specpool.cli.bench_serve.drive import RequestRecord
from specpool.cli.results import Result

#: Percentiles of each time.
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Slo:
    """The service level: a request is good if both times are within it; None means no limit."""

    first_ms: float | None
    token_ms: float | None

    def is_met(self, record: RequestRecord) -> bool:
        """Return whether a request was good."""
        if record.error is not None or record.first is None:
            return False
        token = record.per_token
        in_time = self.first_ms is None or 1e3 * (record.first - record.due) <= self.first_ms
        return in_time and (self.token_ms is None or token is None or 1e3 * token <= self.token_ms)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the least value that `percent` of the values do not exceed; NaN without values."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def times_of(records: Sequence[RequestRecord]) -> dict[str, list[float]]:
    """Return the milliseconds of each kind, of the requests that did not fail."""
    good = [record for record in records if record.error is None]
    return {
        "TTFT": [1e3 * (r.first - r.due) for r in good if r.first is not None],
        "TPOT": [1e3 * r.per_token for r in good if r.per_token is not None],
        "ITL": [1e3 * gap for r in good for gap in r.parts],
        "E2E": [1e3 * (r.last - r.due) for r in good],
    }


def figures_of(
    records: Sequence[RequestRecord],
    seconds: float,
    singles: Sequence[RequestRecord],
    alone_seconds: float,
    slo: Slo,
    accept_len: float | None,
) -> list[Result]:
    """Return the figures of a run, each beside the same figure of requests that ran one by one."""
    reference = "one at a time"
    times, single = times_of(records), times_of(singles)
    results = []
    for name, values in times.items():
        base = percentile(single[name], 50)
        for percent in PERCENTILES:
            value = percentile(values, percent)
            if not math.isnan(value) and base > 0:
                results.append(Result(f"{name} p{percent}", value, "ms", f"p50, {reference}", base))
    good = [record for record in records if record.error is None]
    tokens, base_tokens = sum(r.num_tokens for r in good), sum(r.num_tokens for r in singles)
    rates = [
        ("output", tokens / seconds, "tokens/s", base_tokens / alone_seconds),
        ("requests", len(good) / seconds, "1/s", len(singles) / alone_seconds),
        ("goodput", sum(map(slo.is_met, records)) / seconds, "1/s", len(singles) / alone_seconds),
    ]
    results += [Result(name, value, unit, reference, base) for name, value, unit, base in rates]
    failed = len(records) - len(good)
    results.append(Result("failed", failed, "requests", "sent", len(records)))
    if accept_len is not None:
        results.append(Result("accept length", accept_len, "tokens a round", "plain decoding", 1.0))
    return results
