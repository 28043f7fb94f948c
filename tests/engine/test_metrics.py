"""Laws of the metrics: a scrape says what `Engine.stats` says."""

from __future__ import annotations

import dataclasses
import sys

import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import cuda_host
from graph_kit import CHAIN, PARAMS, PROMPTS, graphs_run, make
from specpool import ConfigError, Engine, SamplingParams
from specpool.engine.assets import corpus
from specpool.engine.scheduler.counts import LatencyStats
from specpool.engine.scheduler.prefix_cache import PrefixStats
from specpool.engine.stats import EngineStats, GroupStats
from specpool.engine.worker.graphs.graphs import GraphStats
from specpool.metrics import (
    COUNTERS,
    GAUGES,
    GRAPH_COUNTERS,
    GRAPH_GAUGES,
    GROUP_GAUGES,
    HISTOGRAMS,
    PREFIX_COUNTERS,
    PREFIX_GAUGES,
    register,
)


def numbers_of(kind: type) -> set[str]:
    """Fields and properties of a dataclass."""
    properties = {name for name, value in vars(kind).items() if isinstance(value, property)}
    return {field.name for field in dataclasses.fields(kind)} | properties


def test_no_number_is_left_out():
    assert set(GAUGES) | set(COUNTERS) == numbers_of(EngineStats) - {
        "groups",
        "accept_cts",
        "seconds",
        "latency",
        "sessions",
        "prefix",
        "host",
        "adaptive",
        "graphs",
    }
    assert set(PREFIX_GAUGES) | set(PREFIX_COUNTERS) == numbers_of(PrefixStats) - {"cached_pages"}
    assert set(GRAPH_GAUGES) | set(GRAPH_COUNTERS) == numbers_of(GraphStats) - {"sizes"}
    assert set(GROUP_GAUGES) == numbers_of(GroupStats) - {"name"} | {"used_pages"}
    assert set(HISTOGRAMS) == numbers_of(LatencyStats)
    assert all(field.endswith("_ct") for field in COUNTERS)
    assert not any(field.endswith("_ct") for field in GAUGES)


@pytest.mark.parametrize("labels", [None, {"model": "tiny", "rank": "0"}])
def test_a_scrape_says_what_the_stats_say(labels):
    registry, fixed = CollectorRegistry(), labels or {}
    with Engine.from_pretrained(draft="specpool/tiny-eagle", max_context_len=128) as engine:
        collector = register(engine, registry, labels=labels, prefix="mine")
        pin = engine.pin(corpus.prompts(1, 40)[0])
        stream = engine.stream(corpus.prompts(3, 40), SamplingParams(max_new_tokens=20))
        for _ in range(9):
            next(stream)
        stats = engine.stats()

        def value(name: str, **more: str) -> float | None:
            return registry.get_sample_value(f"mine_{name}", {**fixed, **more})

        for field, (name, _) in GAUGES.items():
            assert value(name) == getattr(stats, field), field
        for field, (name, _) in COUNTERS.items():
            assert value(f"{name}_total") == getattr(stats, field), field
        assert stats.prefix is not None and stats.prefix.miss_ct
        for field, (name, _) in PREFIX_GAUGES.items():
            assert value(name) == getattr(stats.prefix, field), field
        for field, (name, _) in PREFIX_COUNTERS.items():
            assert value(f"{name}_total") == getattr(stats.prefix, field), field
        for group in stats.groups:
            for field, (name, _) in GROUP_GAUGES.items():
                assert value(f"group_{name}", group=group.name) == getattr(group, field), field
        for length, ct in enumerate(stats.accept_cts[1:], 1):
            assert value("accepts_total", accept_len=str(length)) == ct
        for phase in ("schedule", "launch", "wait", "finish"):
            seconds = getattr(stats.seconds, phase)
            assert value("phase_seconds_total", phase=phase) == seconds > 0
        assert stats.verify_ct and stats.groups[0].pinned_pages and stats.num_running == 3

        for field, (name, _) in HISTOGRAMS.items():
            assert value(f"{name}_count") == getattr(stats.latency, field).ct

        families = list(text_string_to_metric_families(generate_latest(registry).decode()))
        tables = GAUGES, COUNTERS, GROUP_GAUGES, HISTOGRAMS, PREFIX_GAUGES, PREFIX_COUNTERS
        assert len(families) == sum(map(len, tables)) + 2
        for family in families:
            for sample in family.samples:
                assert sample.name.endswith("_total") == (family.type == "counter")
                assert family.documentation
        stream.close()
        registry.unregister(collector)
        assert value("rows") is None
        engine.unpin(pin)


def test_names_that_are_taken_are_refused():
    registry = CollectorRegistry()
    with Engine.from_pretrained(max_context_len=64) as engine:
        register(engine, registry)
        cure = (
            r"give this one labels of its own, such as labels=\{'engine': '2'\}, or another prefix"
        )
        with pytest.raises(ConfigError, match=cure):
            register(engine, registry)
        register(engine, registry, prefix="second")
        for label in ("group", "le"):
            with pytest.raises(ConfigError, match=f"labels must not be called {label}"):
                register(engine, CollectorRegistry(), labels={label: "a"})
        other = CollectorRegistry()
        prometheus_client.Gauge("specpool_rows", "Somebody else's.", registry=other)
        with pytest.raises(ConfigError, match=r"Duplicated.*choose another prefix than 'specpool'"):
            register(engine, other)


def test_what_is_no_engine_is_refused_and_leaves_the_names_free():
    registry = CollectorRegistry()
    with pytest.raises(ConfigError, match="engine must be an Engine, got 5"):
        register(5, registry)
    with Engine.from_pretrained(max_context_len=64) as engine:
        register(engine, registry)


def test_engines_with_labels_of_their_own_share_the_names():
    registry = CollectorRegistry()
    options = {"max_context_len": 64}
    with (
        Engine.from_pretrained(max_batch=2, **options) as one,
        Engine.from_pretrained(max_batch=5, **options) as two,
    ):
        register(one, registry)
        collector = register(two, registry, labels={"engine": "2"})
        assert registry.get_sample_value("specpool_rows") == one.ledger.num_rows
        assert registry.get_sample_value("specpool_rows", {"engine": "2"}) == two.ledger.num_rows
        families = list(text_string_to_metric_families(generate_latest(registry).decode()))
        assert len({family.name for family in families}) == len(families)
        registry.unregister(collector)
        register(two, registry)  # the names are free again
        assert registry.get_sample_value("specpool_rows") == two.ledger.num_rows


def test_latencies_are_told_in_buckets():
    registry = CollectorRegistry()
    with Engine.from_pretrained(max_context_len=128, max_batch=1) as engine:
        register(engine, registry)
        outputs = engine.generate(corpus.prompts(3, 40), SamplingParams(max_new_tokens=5))
        latency = engine.stats().latency
        fields = {
            "queue": [output.queue_seconds for output in outputs],
            "first_token": [output.first_token_seconds for output in outputs],
            "request": [output.seconds for output in outputs],
        }
        for field, seconds in fields.items():
            found, (name, _) = getattr(latency, field), HISTOGRAMS[field]
            assert found.ct == 3 and found.sum_seconds == pytest.approx(sum(seconds))
            for bound in (0.005, 0.1, 10.0):
                total = sum(each <= bound for each in seconds)
                le = {"le": str(bound)}
                assert registry.get_sample_value(f"specpool_{name}_bucket", le) == total
            assert registry.get_sample_value(f"specpool_{name}_sum") == found.sum_seconds
        for output in outputs:
            assert 0 <= output.queue_seconds < output.first_token_seconds < output.seconds
        # One row: each waits for those before it.
        assert outputs[0].seconds <= outputs[1].queue_seconds < outputs[2].queue_seconds


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with (
        Engine.from_pretrained(max_context_len=64) as engine,
        pytest.raises(ConfigError, match=r"pip install 'specpool\[metrics\]'"),
    ):
        register(engine)


def test_what_a_controller_chose_is_told():
    registry = CollectorRegistry()
    with Engine.from_pretrained(
        draft="specpool/tiny-eagle", max_context_len=128, adaptive="ema"
    ) as engine:
        register(engine, registry)
        engine.generate(corpus.prompts(2, 40), SamplingParams(max_new_tokens=60, ignore_eos=True))
        adaptive = engine.stats().adaptive
        assert adaptive.round_cts
        for shape, ct in adaptive.round_cts.items():
            name = {"shape": f"chain:{shape.num_steps}"}
            assert registry.get_sample_value("specpool_chosen_rounds_total", name) == ct
        switches = registry.get_sample_value("specpool_switches_total")
        assert switches == adaptive.switch_ct
        missed = registry.get_sample_value("specpool_missed_row_rounds_total")
        assert missed == adaptive.missed_ct == 0


def test_the_graphs_are_told():
    if cuda_host.unavailable():
        pytest.skip(cuda_host.unavailable())
    registry = CollectorRegistry()
    with graphs_run(), make(CHAIN, graph_sizes=(1,), mixed_chunks=True) as engine:
        register(engine, registry)
        engine.generate(PROMPTS[:2], PARAMS[:2])
        graphs = engine.stats().graphs
    told = {
        name: registry.get_sample_value(f"specpool_{name}")
        for name in ("graphs", "graph_bytes", "replayed_rounds_total", "eager_rounds_total")
    }
    numbers = graphs.num_graphs, graphs.num_bytes, graphs.replay_ct, graphs.eager_ct
    assert tuple(told.values()) == numbers and min(numbers) > 0
