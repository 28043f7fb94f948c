"""Laws of the metrics: a scrape says what `Engine.stats` says."""

from __future__ import annotations

import dataclasses
import sys

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import cuda_host
from graph_kit import CHAIN, PARAMS, PROMPTS, graphs_run, make
from specpool import ConfigError, Engine, SamplingParams, corpus
from specpool.metrics import (
    COUNTERS,
    GAUGES,
    GRAPH_COUNTERS,
    GRAPH_GAUGES,
    GROUP_GAUGES,
    register,
)
from specpool.stats import EngineStats, GraphStats, GroupStats


def numbers_of(kind: type) -> set[str]:
    """Fields and properties of a dataclass."""
    properties = {name for name, value in vars(kind).items() if isinstance(value, property)}
    return {field.name for field in dataclasses.fields(kind)} | properties


def test_no_number_is_left_out():
    assert set(GAUGES) | set(COUNTERS) == numbers_of(EngineStats) - {
        "groups",
        "accept_cts",
        "seconds",
        "sessions",
        "host",
        "adaptive",
        "graphs",
    }
    assert set(GRAPH_GAUGES) | set(GRAPH_COUNTERS) == numbers_of(GraphStats) - {"sizes"}
    assert set(GROUP_GAUGES) == numbers_of(GroupStats) - {"name"} | {"used_pages"}
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
        for group in stats.groups:
            for field, (name, _) in GROUP_GAUGES.items():
                assert value(f"group_{name}", group=group.name) == getattr(group, field), field
        for length, ct in enumerate(stats.accept_cts[1:], 1):
            assert value("accepts_total", accept_len=str(length)) == ct
        for phase in ("schedule", "launch", "wait", "finish"):
            seconds = getattr(stats.seconds, phase)
            assert value("phase_seconds_total", phase=phase) == seconds > 0
        assert stats.verify_ct and stats.groups[0].pinned_pages and stats.num_running == 3

        families = list(text_string_to_metric_families(generate_latest(registry).decode()))
        assert len(families) == len(GAUGES) + len(COUNTERS) + len(GROUP_GAUGES) + 2
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
        with pytest.raises(ConfigError, match=r"Duplicated.*choose another prefix than 'specpool'"):
            register(engine, registry)
        register(engine, registry, prefix="second")
        with pytest.raises(ConfigError, match="labels must not be called group"):
            register(engine, CollectorRegistry(), labels={"group": "a"})


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
