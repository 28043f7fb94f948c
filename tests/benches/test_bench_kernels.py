"""`benches/kernels.py`: its cases run and do what they are timed for, on the host runner."""

from __future__ import annotations

import contextlib
import json
import sys
import types

import pytest

torch = pytest.importorskip("torch")

import cuda_host  # noqa: E402
from benches import graphs as bench_graphs  # noqa: E402
from benches import kernel_cases, kernel_twins  # noqa: E402
from benches import kernels as bench_kernels  # noqa: E402
from kernel_kit import backend  # noqa: E402
from specpool.cli.results import Result  # noqa: E402
from specpool.kernels import launch  # noqa: E402

CPU = torch.device("cpu")
TINY = kernel_cases.Sizes(
    layers=2, heads=2, head_dim=8, num_steps=3, topk=2, nodes=8, sampled=2, vocab=300, context=64
)


@pytest.fixture
def host():
    if cuda_host.unavailable():
        pytest.skip(cuda_host.unavailable())
    made = backend("fast", "forward")
    made.launches.clear()
    with launch.host_backend(made):
        yield made


def test_every_kernel_is_timed_beside_a_copy(host, tmp_path):
    bench = bench_kernels.Bench(CPU, bench_kernels.HostClock(), 1000.0, 1)
    results = list(bench_kernels.device_results(bench, {"8B": TINY, "70B": TINY}, (1, 4), (1, 2)))
    results += bench_kernels.attention_results(bench, (1,), (100,), has_flash=False)
    # Draft copies between branches are the draft's, of a few slots of one layer.
    # Deltas of several tables come from the host.
    untimed = ("copy_parent_drafts", "apply_table_deltas")
    assert {f"{name}_kernel" for name in untimed} == (set(launch.entries()) - set(host.launches))
    by_name = {(result.name, result.reference): result for result in results}
    assert len(by_name) == len(results)
    for kernel in ("compact_accepted", "move_kv", "gather_kv", "scatter_kv"):
        for where in ("8B, P=1, bs=1", "70B, P=4, bs=2"):
            result = by_name[f"{kernel}, {where}", "device copy"]
            assert result.unit == "GB/s" and result.value > 0 and result.limit == 1000
        assert by_name[f"{kernel}, 8B, P=4, bs=1: a launch", "empty launch"].unit == "us"
    assert by_name["build_tree, bs=2, N=8", "target, at most"].reference_value == 30
    assert by_name["attend_pages, 8B, Q=4, 100 tokens, bs=1", "device copy"].num_bytes == 409_600
    tail = "duplicate_prefix_tail, a draft layer, P=4, bs=2: a call"
    assert by_name[tail, "upstream's torch operations"].value > 0

    where = {"device": "no GPU", "date": "2000-01-01", "memory_bandwidth_gb_s": 1.0, "l2_bytes": 9}
    picture = tmp_path / "kernels.png"
    bench_kernels.picture(where, results, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("bench", [bench_kernels, bench_graphs], ids=["kernels", "graphs"])
def test_a_bench_that_is_stopped_keeps_what_it_measured(bench, monkeypatch, tmp_path, capsys):
    """Its part of `make gpu` has a limit of time."""
    path = tmp_path / f"2000-01-01-no-gpu-{bench.__name__.rpartition('.')[2]}.json"

    def stopped(*args):
        for number in range(2):
            yield Result(f"figure {number}", 1.0, "us", "other", 2.0)
        assert len(json.loads(path.read_text())["results"]) == 2
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    where = {"device": "no GPU", "date": "2000-01-01", "memory_bandwidth_gb_s": 1.0}
    monkeypatch.setattr(bench, "cuda_machine", lambda device: where)
    monkeypatch.setattr(bench_kernels, "device_results", stopped)
    monkeypatch.setattr(bench_graphs, "results", stopped)
    device = ["--device", "cuda"] if bench is bench_kernels else []
    with pytest.raises(KeyboardInterrupt):
        bench.main([*device, "--write", str(tmp_path)])
    names = [result["name"] for result in json.loads(path.read_text())["results"]]
    assert names == ["figure 0", "figure 1"] and [*tmp_path.iterdir()] == [path]


def test_the_moves_move_what_is_counted(host):
    """Each case changes as many bytes as it says that it writes."""
    for p in (1, 4):
        pool = kernel_cases.Pool(TINY, 3, p, CPU)
        flat = pool.kv.view(-1).view(torch.uint8)
        for case in kernel_cases.move_cases(TINY, pool, p, 3, CPU):
            # Every slot's bytes tell where they came from, so that a move changes all it writes.
            slots = torch.arange(1, pool.kv.shape[2] + 1, dtype=torch.int16)
            pool.kv.view(torch.int16).copy_((slots * 257)[:, None, None])
            for buffer in pool.values.buffers:
                buffer.fill_(0)
            before = flat.clone()
            case.run()
            changed = int((flat != before).sum())
            changed += sum(int(buffer.count_nonzero()) for buffer in pool.values.buffers)
            assert 2 * changed == case.num_bytes, case.kernel


def test_upstreams_operations_copy_the_same_tails(host):
    for p in (4, 16):
        one, other = (kernel_cases.Tails.drawn(TINY, p, 5, CPU) for _ in range(2))
        one.kv.normal_(generator=torch.Generator().manual_seed(0))
        other.kv.copy_(one.kv)
        before = one.kv.clone()
        case = one.case()
        case.run()
        other.in_torch()
        assert torch.equal(one.kv, other.kv)
        tokens = int(one.roots.sum()) * (TINY.topk - 1)
        assert case.num_bytes == 2 * tokens * 2 * 2 * 8 * 2
        assert not torch.equal(one.kv, before)


def test_the_twins_side_prints_the_agreed_object(monkeypatch, capsys):
    tiny = kernel_twins.HostSizes(layers=2, num_slots=512, tail=(2, 4), moved=64, page_size=16)
    monkeypatch.setattr(bench_kernels, "HostSizes", lambda: tiny)
    monkeypatch.setattr(bench_kernels, "keep_freed_memory", lambda: None)  # it would stay so
    assert bench_kernels.main(["--device", "cpu", "--repeats", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {"date", "cpu", "torch"} <= set(report["machine"])
    names = {result["name"].split(",")[0] for result in report["results"]}
    moves = {"gather_kv", "scatter_kv", "move_kv", "compact_accepted"}
    assert moves <= names
    assert {result["reference"] for result in report["results"]} == {
        "memcpy", "index_select", "index_select into memory at hand",
        "target for N=16, at most",
    }  # fmt: skip


def test_without_a_gpu_it_says_so_in_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_kernels.main(["--device", "cuda"]) == 2
    out = capsys.readouterr()
    assert out.out == "" and out.err.count("\n") == 1 and "no CUDA device" in out.err


class FakeEvent:
    """Ten microseconds from one record to the next."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        FakeEvent.now += 0.01
        self.at = FakeEvent.now

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return end.at - self.at


def test_a_graph_s_time_is_shared_by_its_launches(monkeypatch):
    """Uses the calls of torch's CUDA graphs; the bytes decide how many launches there are."""
    calls = []
    graph = types.SimpleNamespace(replay=lambda: calls.append("replay"))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    clock = bench_kernels.CudaClock()
    for num_bytes, count in [(0, 20), (1 << 28, 4), (1 << 34, 2)]:
        calls.clear()
        once = clock.graph(lambda: calls.append("run"), num_bytes)
        assert calls == ["run", "wait", *["run"] * count, "replay"]
        assert once() == pytest.approx(10 / count)
    calls.clear()
    assert clock.eager(lambda: calls.append("run"))() > 0
    assert calls == ["run", "wait", *["run"] * 50, "wait"]


def test_the_memory_s_limit_is_its_clock_times_its_width(monkeypatch):
    runtime = types.SimpleNamespace(
        deviceGetAttribute=lambda which, device: {36: 2_619_000, 37: 5120, 38: 50 << 20}[which]
    )
    cupy = types.SimpleNamespace(__version__="14", cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    where = bench_kernels.cuda_machine(torch.device("cuda", 0))
    assert where["memory_bandwidth_gb_s"] == pytest.approx(3352.32)
    assert {"device", "driver", "cuda", "cupy", "torch", "date", "l2_bytes"} <= set(where)
