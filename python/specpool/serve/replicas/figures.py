"""`publish`: a replica's metrics at the metrics port of its Ray node, with its tag.

Serve's proxies choose a replica for `/metrics` too, so its page is of no use to Prometheus here.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from specpool.serve.bridge.client import EngineGone
from specpool.serve.exposition import exposition
from specpool.serve.routes.figures import stats_of
from specpool.serve.service import Service

log = logging.getLogger("specpool.serve")

#: Seconds between two looks.
_PERIOD = 5.0


async def publish(service: Service) -> None:
    """Give Ray the samples of `/metrics` every few seconds, until the engine is gone.

    Ray puts `ray_` before the names, and `_` for `:`. All are gauges there; what counts keeps its
    name with `_total`, and histograms their `_bucket`, so that PromQL's functions work on them.
    """
    gauges: dict[str, Any] = {}
    while True:
        try:
            page, _ = exposition(service.counters, await stats_of(service))
            for name, labels, value in samples_of(page.decode()):
                if name not in gauges:
                    gauges[name] = _gauge(name, tuple(labels))
                gauges[name].set(value, labels)
        except EngineGone:
            return
        except Exception:
            log.exception("the figures could not be published")
        await asyncio.sleep(_PERIOD)


def samples_of(page: str) -> list[tuple[str, dict[str, str], float]]:
    """Return names, labels and values of a page of metrics, with names that Ray takes."""
    return [
        (sample.name.replace(":", "_"), dict(sample.labels), sample.value)
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if not sample.name.endswith("_created")
    ]


def _gauge(name: str, labels: tuple[str, ...]) -> Any:
    from ray.serve.metrics import Gauge

    return Gauge(name, tag_keys=labels)
