"""What an engine takes where no option says it: the same on every CPU, by memory on a card."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from specpool import EngineConfig
from specpool.capacity.layer_kv import LayerKV
from specpool.capacity.state_sizes import StateBytes
from specpool.engine.assembly.defaults import with_defaults
from specpool.engine.draft import Drafter, NgramDrafter
from specpool.engine.memory.pools import kv_budget

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GIB = 1 << 30
LAYERS = [LayerKV(8, 128, 128)] * 32  # 128 KiB a token in 16 bits
FREE, TOTAL = 60 * GIB, 80 * GIB


@pytest.fixture(autouse=True)
def card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE, TOTAL))


def resolved(
    device: torch.device, *drafters: Drafter, kv_bytes: int = 50 * GIB, **options: Any
) -> tuple[int | None, int | None]:
    how = {"max_context_len": options.pop("max_context_len", 1 << 17)}
    how |= {"states": options.pop("states", None)}
    config = with_defaults(
        EngineConfig(**options), device, drafters, LAYERS, itemsize=2, kv_bytes=kv_bytes, **how
    )
    return config.max_batch, config.overlap_depth


def test_a_cpu_runs_eight_rows_without_overlap():
    assert resolved(CPU) == (8, 0)
    assert resolved(CPU, graph_sizes=(1, 12)) == (12, 0)


@pytest.mark.parametrize(
    ("kv_bytes", "options", "max_batch"),
    [
        (1 * GIB, {}, 8),  # 4 rows of 2,048 tokens
        (10 * GIB, {}, 40),
        (11 * GIB, {}, 40),  # 44, rounded down to a size with a graph
        (50 * GIB, {}, 64),
        (1 * GIB, {"max_context_len": 512}, 16),
        (0, {"num_pages": 4096}, 32),
        (1 * GIB, {"graph_sizes": (1, 24)}, 24),
        (10 * GIB, {"states": StateBytes(slot=256 << 20, record=1 << 10)}, 16),  # 20 of 512 MiB
    ],
)
def test_on_a_card_memory_gives_the_batch(kv_bytes, options, max_batch):
    assert resolved(CUDA, kv_bytes=kv_bytes, **options)[0] == max_batch


def test_rounds_overlap_on_a_card_unless_the_host_must_read_first():
    assert resolved(CUDA, NgramDrafter())[1] == 0
    assert resolved(CUDA, worker="v1")[1] == 0
    assert resolved(CUDA, states=StateBytes(slot=1, record=1))[1] == 0
    assert resolved(CUDA)[1] == 1


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
@pytest.mark.parametrize("depth", [0, 1])
def test_options_win(device, depth):
    assert resolved(device, NgramDrafter(), max_batch=3, overlap_depth=depth) == (3, depth)


def test_one_line_of_the_log_says_what_a_card_takes(caplog):
    caplog.set_level(logging.INFO, "specpool")
    resolved(CPU)
    assert not caplog.records
    resolved(CUDA)
    (record,) = caplog.records
    text = "on cuda:0: max_batch 64, overlap_depth 1, 50 GiB for KV at most"
    assert record.getMessage() == text


def test_kv_takes_all_but_a_part_of_the_card(monkeypatch):
    config = EngineConfig()
    most = FREE - TOTAL * 12 // 100
    assert kv_budget(config, CUDA) == most
    # Graphs read one layer of the pool into memory of their own.
    with_graphs = kv_budget(config, CUDA, graph_layers=32)
    assert most - most // 32 < with_graphs <= most * 32 // 33
    assert kv_budget(config, CUDA, sharers=2) == most // 2
    assert kv_budget(config, CUDA, least=lambda budget: budget - 1) == most - 1
    # Another process has the card, or most of it: half of what is free is more.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * GIB, TOTAL))
    assert kv_budget(config, CUDA) == 4 * GIB


def test_memory_that_an_option_gives_is_taken():
    assert kv_budget(EngineConfig(kv_bytes=5), CUDA) == 5
    assert kv_budget(EngineConfig(num_pages=5), CUDA) == 0
    assert kv_budget(replace(EngineConfig(), kv_bytes=7), CPU) == 7
