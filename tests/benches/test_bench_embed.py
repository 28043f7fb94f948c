"""`python -m benches embed` measures the calls; refusals are one line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from benches import embed_mini
from benches.__main__ import main
from benches.embed import NEW, REQUESTS, NanoLoad, PlainPool
from specpool import BlockPool

MANAGER = """
from nanovllm.engine.sequence import Sequence

class BlockManager:
    def __init__(self, num_blocks, block_size):
        self.size, self.free = block_size, list(range(num_blocks))
    def can_allocate(self, seq):
        return 0
    def allocate(self, seq, found):
        seq.num_cached_tokens = 0
        seq.block_table = [self.free.pop() for _ in range(-(-seq.num_tokens // self.size))]
    def can_append(self, seq):
        return True
    def may_append(self, seq):
        if seq.num_tokens > len(seq.block_table) * self.size:
            seq.block_table.append(self.free.pop())
    def hash_blocks(self, seq):
        pass
"""
SEQUENCE = """
class Sequence:
    block_size = 1
    def __init__(self, tokens):
        self.token_ids, self.num_tokens, self.block_table = tokens, len(tokens), []
        self.num_cached_tokens = self.num_scheduled_tokens = 0
    def append_token(self, token):
        self.token_ids.append(token)
        self.num_tokens += 1
"""


def bench(monkeypatch, capsys, *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["benches", "embed", *args])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code, *capsys.readouterr()


def test_the_calls_are_measured_beside_plain_dicts(monkeypatch, capsys):
    code, out, _ = bench(monkeypatch, capsys, "--repeats", "1", "--json")
    results = {result["name"]: result["value"] for result in json.loads(out)["results"]}
    assert code == 0
    assert results["take and drop of 8 blocks"] > 0
    assert results["match of 1,000 blocks"] > 0


def test_an_engines_own_manager_is_measured(monkeypatch, capsys, tmp_path: Path):
    engine = tmp_path / "nanovllm" / "engine"
    engine.mkdir(parents=True)
    (engine / "block_manager.py").write_text(MANAGER)
    (engine / "sequence.py").write_text(SEQUENCE)
    args = ("--repeats", "1", "--json", "--nano-vllm", str(tmp_path))
    code, out, err = bench(monkeypatch, capsys, *args)
    for name in [name for name in sys.modules if name.startswith("nanovllm")]:
        del sys.modules[name]
    assert code == 0, err
    names = [result["name"] for result in json.loads(out)["results"]]
    for size in (16, 256):
        for what in ("a prefill", "a decoded token"):
            assert f"nano-vllm, P={size}: {what}" in names


def test_a_load_ends_with_every_token_noted():
    space: dict[str, type] = {}
    exec(SEQUENCE, space)
    module = ModuleType("nano")
    exec((Path("examples/engines/nano_vllm.py")).read_text(), module.__dict__)
    manager = module.BlockManager(REQUESTS * 81, 16)
    load = NanoLoad(manager, space["Sequence"], 16)
    assert load.prefill() > 0
    assert load.decode() > 0
    for sequence in load._sequences:
        known = manager.pool.match(sequence.token_ids)
        assert len(known) == sequence.num_tokens // 16 == (1024 + NEW) // 16


def test_the_plain_pool_finds_what_the_real_one_does():
    plain, pool = PlainPool(8, 2), BlockPool(8, 2)
    for tokens in ([1, 2, 3, 4, 5], [1, 2, 9, 9], [7, 7]):
        for each in (plain, pool):
            blocks = each.take(-(-len(tokens) // 2))
            each.put(tokens, blocks)
            each.drop(blocks)
    for tokens in ([1, 2, 3, 4], [1, 2, 9, 9, 9], [7, 7], [8, 8]):
        assert len(plain.match(tokens)) == len(pool.match(tokens))


def test_a_folder_that_is_no_checkout_is_refused(monkeypatch, capsys, tmp_path: Path):
    code, out, err = bench(monkeypatch, capsys, "--nano-vllm", str(tmp_path))
    says = f"error: --nano-vllm: {tmp_path} has no nanovllm/engine/block_manager.py\n"
    assert (code, out, err) == (2, "", says)


CACHE = """
import contextlib

class CacheManager:
    def __init__(self, num_pages, page_size, page_table, type):
        self.size, self.table, self.free = page_size, page_table, list(range(num_pages))
        self.lazy_free_region = contextlib.nullcontext
    def match_req(self, req):
        class Found:
            cached_len = 0
        class Result:
            cuda_handle = Found()
        return Result()
    def lock(self, handle):
        pass
    def allocate_paged(self, reqs):
        for req in reqs:
            for at in range(req.cached_len, req.device_len):
                if at % self.size == 0:
                    page = self.free.pop()
                self.table[req.table_idx, at] = 1
    def cache_req(self, req, finished):
        pass
    def check_integrity(self):
        pass
"""
CORE = """
import dataclasses
import torch

@dataclasses.dataclass
class Context:
    page_size: int

class Req:
    def __init__(self, tokens, line, known, new, uid, params, handle):
        self.input_ids, self.table_idx, self.cached_len = tokens, line, known
        self.device_len, self.cache_handle = len(tokens), handle
    def complete_one(self):
        self.cached_len, self.device_len = self.device_len, self.device_len + 1
    def append_host(self, token):
        self.input_ids = torch.cat([self.input_ids, token])
"""
UTILS = "def align_down(a, b): pass\ndef div_ceil(a, b): pass\n"


@pytest.fixture
def mini(tmp_path: Path) -> Path:
    """What stands for a checkout of mini-sglang."""
    for name, text in {
        "core.py": CORE,
        "scheduler/cache.py": CACHE,
        "utils/misc.py": UTILS,
        "utils/registry.py": "class Registry: pass\n",
        "kernel/radix.py": "def fast_compare_key(a, b): return 1\n",
    }.items():
        path = tmp_path / "python" / "minisgl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("minisgl")]:
        del sys.modules[name]


def test_mini_sglangs_manager_is_measured(monkeypatch, capsys, mini: Path):
    for name, value in {"REQUESTS": 8, "PROMPT": 64, "COMMON": 32, "NEW": 8}.items():
        monkeypatch.setattr(embed_mini, name, value)
    args = ("--repeats", "1", "--json", "--mini-sglang", str(mini))
    code, out, err = bench(monkeypatch, capsys, *args)
    assert code == 0, err
    names = [result["name"] for result in json.loads(out)["results"]]
    assert [name for name in names if name.startswith("mini-sglang")] == [
        f"mini-sglang, P={size}: {part}" for size in (1, 16, 256) for part in embed_mini.PARTS
    ]


def test_a_load_of_mini_sglang_fills_the_table(mini: Path):
    ours, _, core = embed_mini._modules(mini)
    load = embed_mini.MiniLoad(ours.CacheManager, core, 16)
    assert min(load.prefill(), load.decode()) > 0
    pool, req = load.manager.pool, load.reqs[9]
    slots = load._table[req.table_idx]
    assert len(slots.unique()) == len(slots) == embed_mini.PROMPT + embed_mini.NEW
    # The first block is shared with a request of the same beginning, the last one is not.
    other = load._table[load.reqs[1].table_idx]
    assert (slots == other).tolist() == [True] * embed_mini.COMMON + [False] * (
        len(slots) - embed_mini.COMMON
    )
    assert load.finish() > 0
    assert len(pool.match(req.input_ids)) == req.cached_len // 16
    load.manager.check_integrity()


def test_a_folder_that_is_no_mini_sglang_is_refused(monkeypatch, capsys, tmp_path: Path):
    code, out, err = bench(monkeypatch, capsys, "--mini-sglang", str(tmp_path))
    says = f"error: --mini-sglang: {tmp_path} has no python/minisgl/scheduler/cache.py\n"
    assert (code, out, err) == (2, "", says)
