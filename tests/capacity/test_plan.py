"""`specpool plan` says what the real scheduler will do, from numbers or a model's config alone."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from families import FAMILIES, make_config, make_model
from plan_kit import MAX_BATCHES, SHAPES, Case, Server
from specpool import ConfigError, Engine, Shape
from specpool.capacity.group_sizes import GroupSizes, size_groups
from specpool.capacity.page_needs import row_pages, step_pages
from specpool.cli import main
from specpool.engine.assets import resolve
from specpool.engine.config import EngineConfig
from specpool.engine.models import TargetModel
from specpool.engine.models.files.names import fetch_config
from specpool.engine.models.files.plain_config import FAMILIES as PLAIN
from specpool.engine.models.files.plain_config import PlainConfig
from specpool.engine.models.gate import context_limit
from specpool.engine.models.outline import stated_layers
from specpool.num_bytes import parse_bytes, show_bytes

# Among the first, every limit binds somewhere; the pages of drafts alone do in 266.
seeds = pytest.mark.parametrize(
    "seeds",
    [[*range(150), 266], pytest.param(range(150, 1000), marks=pytest.mark.full)],
    ids=["first", "rest"],
)


def admitted(case: Case, num_requests: int) -> int:
    """How many of so many requests the scheduler admits to an empty pool."""
    server = Server(case)
    asks = replace(case, prompt_len=case.num_tokens, max_len=case.sizes.max_context_len)
    for number in range(num_requests):
        server.scheduler.submit(asks.arrival(number + 1, 0.5).request())
    server.scheduler.schedule()
    return server.scheduler.num_running


def admitted_on_a_common_text(case: Case, common: int, num_requests: int) -> int:
    """The same, of requests whose first `common` tokens were computed before."""
    server = Server(case, prefix_cache=True)
    ledger, scheduler = server.ledger, server.scheduler
    row, text = ledger.admit(), list(range(common))
    chunk = case.sizes.max_chunk
    for end in [*range(chunk, common, chunk), common]:
        plan = ledger.prepare_extend([row], [end])
        ledger.launch(plan.step)
        ledger.complete(plan.step)
        assert ledger.index(row, text[:end]) == end
    ledger.finish(row)
    asks = replace(case, prompt_len=case.num_tokens, max_len=case.sizes.max_context_len)
    for number in range(num_requests):
        request = asks.arrival(number + 1, 0.5).request()
        request.tokens[:] = [*text, *[1000 + number] * (case.num_tokens - common)]
        scheduler.submit(request)
    scheduler.schedule()
    # One alone gives the text up if there is no page to copy its end to.
    alone = scheduler.num_running == 1
    assert alone or all(request.shared_len == common for request in scheduler.running)
    return scheduler.num_running


def test_as_many_as_planned_are_admitted_on_a_common_text():
    """Law: what the prefix cache is worth in requests at once is what the scheduler makes of it."""
    num_more = 0
    for seed in range(300):
        case = Case.of(seed)
        if case.num_tokens < 2 or any(group.window for group in case.sizes.groups):
            continue
        common = random.Random(seed).randint(1, case.num_tokens - 1)
        fit = case.plan.at_once(case.num_tokens, case.shape, common=common)
        n = fit.num_requests
        found = admitted_on_a_common_text(case, common, n + 3)
        # A partly filled page must stay until it is copied: one request may come a turn later.
        is_copied = any(common % group.page_size for group in case.sizes.groups)
        assert n - is_copied <= found <= n, (seed, common, fit)
        alone = case.at_once().num_requests
        assert n >= alone
        num_more += n > alone
    assert num_more > 20


def grown(sizes: GroupSizes, names: list[str], pages: tuple[int, ...]) -> GroupSizes:
    """The same, with the pages of one more request in these groups."""
    groups = [
        replace(group, num_pages=group.num_pages + (n if group.name in names else 0))
        for group, n in zip(sizes.groups, pages, strict=True)
    ]
    return replace(sizes, groups=tuple(groups))


@seeds
def test_scenario_50_as_many_as_planned_are_admitted(seeds):
    """More than fit are submitted; the scheduler admits as many as the plan said."""
    limits = set()
    for seed in seeds:
        case = Case.of(seed)
        fit = case.at_once()
        n, sizes = fit.num_requests, case.sizes
        assert admitted(case, n + 3) == n, (seed, fit)
        limits.add(fit.limit)
        # More of what binds lets one more in, more of all else does not.
        names = [group.name for group in sizes.groups]
        wider = replace(sizes, num_rows=n + 3)
        if fit.limit.startswith("pages of "):
            short = fit.limit.removeprefix("pages of ").split(" and ")
            enough = grown(sizes, short, fit.pages)
            in_vain = grown(wider, [name for name in names if name not in short], fit.pages)
            enough = replace(enough, num_rows=n + 3)
        else:
            enough, in_vain = (grown(s, names, fit.pages) for s in (wider, sizes))
        assert admitted(replace(case, sizes=enough), n + 3) > n, (seed, fit)
        assert admitted(replace(case, sizes=in_vain), n + 3) == n, (seed, fit)
    assert limits == {
        "pages of kv",
        "pages of target",
        "pages of draft",
        "pages of target and draft",
        *(f"max_batch {n}" for n in MAX_BATCHES),
    }


@seeds
def test_scenario_50_as_many_as_planned_are_admitted_behind_windows(seeds):
    limits = set()
    for seed in seeds:
        case = Case.of(seed, windows=True)
        fit = case.at_once()
        assert admitted(case, fit.num_requests + 3) == fit.num_requests, (seed, fit)
        limits.add(fit.limit.rstrip("0123456789"))
    assert {"pages of window ", "pages of draft", "max_batch "} < limits


@seeds
def test_scenario_50_as_many_as_planned_never_wait_behind_windows(seeds):
    """A plan for windows is on the safe side: each with a chunk of its own, and its fences."""
    num_beside = num_slid = 0
    for seed in seeds:
        case, rng = Case.of(seed, windows=True), random.Random(seed)
        n = case.to_the_end().num_requests
        arrivals = [case.arrival(i + 1, rng.choice([0.0, 0.5, 1.0])) for i in range(n)]
        server = Server(case).serve(arrivals)
        assert (server.ledger.num_refused, server.scheduler.num_retracted) == (0, 0), seed
        assert server.most_running == n, seed
        num_beside += n > 1
        windows = [g.window for g in case.sizes.groups if g.window is not None]
        num_slid += bool(windows) and case.max_len > min(windows) + case.sizes.groups[0].page_size
    assert num_beside > len(seeds) / 5 and num_slid > len(seeds) / 10


def short_windows(seed: int) -> Case:
    """Chunks much longer than the windows, whose pages are as many as the sizing gives."""
    rng = random.Random(seed)
    drafter = rng.choice(["eagle", "ngram", "none"])
    window = rng.randint(1, 12)
    config = EngineConfig(
        page_size=rng.choice([1, 2, 4, 8]),
        placement=rng.choice(["split", "shared"]),
        policy=rng.choice(["exact", "double_buffer"]),
        layout=rng.choice(["auto", "holey"]),
        max_batch=rng.choice([6, 12, 30]),
        overlap_depth=rng.randint(0, 1),
        prefill_tokens=rng.choice([16, 40, 64]),
        max_sessions=0,
    )
    sizes = size_groups(
        config,
        rng.choice([{None: 16, window: 64}, {window: 32}, {None: 4, window: 4, window + 3: 9}]),
        4 if drafter == "eagle" else 0,
        shapes=[] if drafter == "none" else [Shape(*rng.choice(SHAPES))],
        max_context_len=rng.choice([150, 300]),
        kv_bytes=10**7,
    )
    max_len = rng.randint(60, sizes.max_context_len)
    return Case(
        sizes,
        drafter == "ngram",
        rng.randrange(len(sizes.shapes)),
        10,
        rng.randint(1, max_len - 2),
        max_len,
        config.prefill_tokens,
        rng.choice([0, 4, 16]),
        seed,
    )


def test_rows_behind_windows_share_the_chunks_of_prefill_steps():
    """All rows have their windows, and each chunk belongs to one row: none waits for a page."""
    for seed in range(30):
        case, rng = short_windows(seed), random.Random(seed)
        fit = case.to_the_end()
        assert fit.limit == f"max_batch {case.sizes.num_rows}", (seed, fit)
        arrivals = [
            case.arrival(i + 1, rng.choice([0.0, 0.5, 1.0])) for i in range(fit.num_requests)
        ]
        server = Server(case).serve(arrivals)
        assert (server.ledger.num_refused, server.scheduler.num_retracted) == (0, 0), seed
        assert server.most_running == fit.num_requests, seed


def test_needs_behind_windows_are_the_ledgers():
    """`pages_needed`, `pages_ahead` and `step_pages`, with a ledger and without."""
    for seed in range(100):
        sizes = Case.of(seed, windows=True).sizes
        ledger, rng = sizes.ledger(), random.Random(seed)
        for _ in range(20):
            hi = rng.randrange(sizes.max_context_len)
            lo, shape = rng.randint(0, hi), rng.randrange(len(sizes.shapes))
            roots = (lo, hi, shape)
            assert list(sizes.pages_needed(*roots)) == ledger.pages_needed(*roots).tolist()
            lo, hi, shape = roots
            pages = ledger.pages_ahead([lo], shape, hi - lo)[0]
            assert row_pages(sizes, *roots) == pages.tolist()
        assert step_pages(sizes) == step_pages(ledger)


@seeds
def test_scenario_50_as_many_as_planned_never_wait_for_a_page(seeds):
    """Runs as many as planned side by side, then as many again behind them."""
    num_beside = 0
    for seed in seeds:
        case, rng = Case.of(seed), random.Random(seed)
        n = case.to_the_end().num_requests
        arrivals = [case.arrival(i + 1, rng.choice([0.0, 0.5, 1.0])) for i in range(2 * n)]
        server = Server(case).serve(arrivals[:n])
        assert (server.ledger.num_refused, server.scheduler.num_retracted) == (0, 0), seed
        assert server.most_running == n, seed
        assert Server(case, max_batch=n).serve(arrivals).scheduler.num_retracted == 0, seed
        num_beside += n > 1
    assert num_beside > 0.3 * len(seeds)


@seeds
def test_scenario_50_one_more_waits_for_a_page(seeds):
    """If pages bind, one more is not admitted, or some round finds no pages."""
    num_waiting = num_refused = 0
    for seed in seeds:
        # In step with one another, a token a round: all are longest at once.
        case = replace(Case.of(seed), prefill_tokens=1 << 14, headroom=0)
        fit = case.to_the_end()
        if not fit.limit.startswith("pages"):
            continue
        server = Server(case)
        arrivals = [case.arrival(i + 1, 0.0) for i in range(fit.num_requests + 1)]
        server.serve(arrivals)
        is_waiting = server.most_running <= fit.num_requests
        assert is_waiting or server.ledger.num_refused, (seed, fit)
        if case.sizes.overlap_depth == 0 and not is_waiting:
            assert server.scheduler.num_retracted, (seed, fit)
        num_waiting += is_waiting
        num_refused += not is_waiting
    assert min(num_waiting, num_refused) > len(seeds) / 10


@seeds
def test_a_request_holds_as_many_pages_as_planned_and_no_more(seeds):
    """Alone, a token a round: it passes every root."""
    num_decoded = 0
    for seed in seeds:
        case = replace(Case.of(seed), headroom=0)
        server = Server(case).serve([case.arrival(1, 0.0)])
        if server.rounds:  # a prompt and one token may be all
            assert tuple(server.peak) == case.to_the_end().pages, seed
            num_decoded += 1
    assert num_decoded > 0.7 * len(seeds)


# --- The command --------------------------------------------------------------------------------

NUMBERS = ("--layers", "32", "--kv-heads", "8", "--head-dim", "128", "--max-context-len", "4096")


def ask(monkeypatch, capsys, *args: str, workspace: str | None = "0") -> tuple[int, str, str]:
    words = [] if workspace is None or "--workspace" in args else ["--workspace", workspace]
    monkeypatch.setattr("sys.argv", ["specpool", "plan", *words, *args])
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    out = capsys.readouterr()
    return code, out.out, out.err


def answer(monkeypatch, capsys, *args: str, workspace: str | None = "0") -> dict:
    code, out, err = ask(monkeypatch, capsys, *args, "--json", workspace=workspace)
    assert code == 0, err
    return json.loads(out)


def test_the_json_has_groups_and_fits(monkeypatch, capsys):
    asked = ("--shape", "5x8x64", "--page-size", "64", "--prompt", "384", "--output", "256")
    sizes = ("--memory", "24GiB", "--weights", "8GB", "--workspace", "1GiB")
    found = answer(monkeypatch, capsys, *NUMBERS, *asked, *sizes, "--live", "1000")
    assert found["kv_bytes"] == 23 * 2**30 - 8 * 10**9
    target, draft = found["groups"]
    assert (target["name"], draft["name"]) == ("target", "draft")
    assert target["page_bytes"] == 64 * 32 * 4096 and draft["page_bytes"] == 64 * 4096
    assert target["row_width"] == 4160 == 64 * target["pages_per_row"]  # 4095 + 64, whole pages
    used = sum((g["num_pages"] + 1) * g["page_bytes"] for g in found["groups"])
    page = target["page_bytes"] + draft["page_bytes"]
    assert found["kv_bytes"] - page < used <= found["kv_bytes"]
    fits = {fit["question"]: fit for fit in found["fits"]}
    assert list(fits) == [
        "at once, prompts of 384",
        "at once, half-way: live 512",
        "to the end, 384 + 256",
        "at once, live 1000",
        "to the end, full context of 4096",
    ]
    for fit in found["fits"]:
        pages = [g["num_pages"] // n for g, n in zip(found["groups"], fit["pages"], strict=True)]
        assert fit["num_requests"] == min(pages)
        assert fit["limit"] == "pages of target and draft" and fit["shape"] == [5, 8, 64]
        assert fits["at once, prompts of 384"]["pages"] == [8, 8]  # 384 + 16 + 64 slots


def test_the_table_says_what_fit_means(monkeypatch, capsys):
    code, out, err = ask(monkeypatch, capsys, *NUMBERS, "--memory", "16G", "--max-batch", "3")
    assert code == 0, err
    (line,) = [line for line in out.splitlines() if "full context of 4096" in line]
    assert " 3 " in line and "max_batch 3" in line
    assert "an empty pool admits together" in " ".join(out.split())


def test_int32_binds_where_memory_does_not(monkeypatch, capsys):
    found = answer(monkeypatch, capsys, *NUMBERS, "--memory", "1PB", "--shape", "5x8x64")
    width = max(group["row_width"] for group in found["groups"])
    assert found["max_batch"] == ((1 << 31) - 1) // (8 * width)
    assert {fit["limit"] for fit in found["fits"]} == {"int32 indices, 2^31"}
    refused = str(found["max_batch"] + 1)
    code, _, err = ask(
        monkeypatch,
        capsys,
        *NUMBERS,
        *("--memory", "1PB", "--shape", "5x8x64", "--max-batch", refused),
    )
    assert code == 2 and f"--max-batch {refused} must be at most {found['max_batch']}" in err


@pytest.mark.parametrize("draft", ["specpool/tiny-eagle3", "ngram", "none", None])
def test_an_engine_has_the_pages_that_were_planned(monkeypatch, capsys, draft):
    """The plan uses only the config; the engine loads the model and measures."""
    options = {"page_size": 4, "max_context_len": 128, "max_batch": 5, "overlap_depth": 1}
    args = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    args = [arg.replace("--overlap-depth", "--depth") for arg in args]
    args += [] if draft is None else ["--draft", draft]
    how = (
        "--target",
        "specpool/tiny",
        "--dtype",
        "float32",
        "--memory",
        "5MB",
        "--layout",
        "holey",
    )
    found = answer(monkeypatch, capsys, *how, *args)
    if draft is None:
        draft = "specpool/tiny-eagle"
    engine = Engine.from_pretrained(
        "specpool/tiny",
        draft=None if draft == "none" else draft,
        layout="holey",
        kv_bytes=found["kv_bytes"],
        **options,
    )
    with engine:
        planned = [
            (g["name"], g["page_size"], g["num_pages"], g["pages_per_row"]) for g in found["groups"]
        ]
        ledger = engine.ledger
        assert planned == [
            (group.name, group.page_size, group.num_pages, ledger.pages_per_row(g))
            for g, group in enumerate(ledger.groups)
        ]
        token_bytes = [g["page_bytes"] * (g["num_pages"] + 1) for g in found["groups"]]
        assert sum(token_bytes) == engine.kv_bytes


def test_a_tenth_of_the_memory_is_left_to_all_else(monkeypatch, capsys):
    args = (*NUMBERS, "--memory", "80GiB", "--weights", "16GB")
    found = answer(monkeypatch, capsys, *args, workspace=None)
    assert found["workspace"] == 8 * 2**30
    assert found["kv_bytes"] == 72 * 2**30 - 16 * 10**9
    _, out, _ = ask(monkeypatch, capsys, *args, workspace=None)
    assert "workspace 8 GiB (a tenth of it; --workspace)" in " ".join(out.split())
    assert "a tenth" not in ask(monkeypatch, capsys, *args)[1]


def test_devices_share_heads_and_weights(monkeypatch, capsys):
    """Law: of two devices, each has half of the target's heads and weights, and a whole head."""
    args = (*NUMBERS, "--memory", "40GiB", "--weights", "16GB")
    alone, shared = (answer(monkeypatch, capsys, *args, "--tp", tp) for tp in ("1", "2"))
    assert (alone["tp"], shared["tp"]) == (1, 2)
    assert shared["weights"] == alone["weights"] // 2
    target, draft = (
        [found["groups"][group]["page_bytes"] for found in (alone, shared)] for group in (0, 1)
    )
    assert target[0] == 2 * target[1] and draft[0] == draft[1]
    assert " each of 2 devices" in ask(monkeypatch, capsys, *args, "--tp", "2")[1]


def test_a_head_that_is_not_there_is_planned(monkeypatch, capsys):
    """Law: its layers are of the target's width unless it is said; so the plan is the head's."""
    how = ("--target", "specpool/tiny", "--dtype", "float32", "--memory", "64MB")
    real = answer(monkeypatch, capsys, *how, "--draft", "specpool/tiny-eagle3", "--weights", "0")
    planned = answer(monkeypatch, capsys, *how, "--draft-layers", "1", "--weights", "0")
    assert planned["model"] == "specpool/tiny + 1 draft layer"
    assert planned["groups"] == real["groups"] and planned["fits"] == real["fits"]
    assert any("not counted" in note for note in planned["notes"])
    sizes = ("--draft-layers", "2", "--draft-kv-heads", "1", "--draft-head-dim", "64")
    draft = answer(monkeypatch, capsys, *how, *sizes)["groups"][1]
    assert draft["page_bytes"] == 16 * 2 * 64 * 2 * 4 and draft["name"] == "draft"


def test_a_draft_window_is_planned(monkeypatch, capsys):
    """Law: a row's draft pages stop growing at the window and the sink; the target's do not."""
    how = (*NUMBERS, "--memory", "16G", "--max-batch", "8", "--live", "1000", "--live", "4000")
    whole = answer(monkeypatch, capsys, *how)
    bounded = answer(monkeypatch, capsys, *how, "--draft-window", "256", "--draft-sink", "4")
    # One token more than the option says: a catch-up runs the token before the root again.
    assert [(g["window"], g["sink"]) for g in bounded["groups"]] == [(None, 0), (257, 4)]
    assert bounded["groups"][1]["page_bytes"] == whole["groups"][1]["page_bytes"]
    for before, after in zip(whole["fits"], bounded["fits"], strict=True):
        assert after["pages"][0] == before["pages"][0] == before["pages"][1]
    (short, long, _) = (fit["pages"][1] for fit in bounded["fits"])
    assert 257 // 16 <= short == long <= 257 // 16 + 4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_states_what_the_model_keeps(family):
    config = make_config(family)
    if config is None:
        pytest.skip("this transformers does not have it")
    with TargetModel(make_model(config)) as target:
        assert stated_layers(config) == target.layer_kv


def test_a_config_of_other_keys_is_not_guessed_at():
    for config in (
        transformers.GPTBigCodeConfig(multi_query=True),
        transformers.PretrainedConfig(model_type="x"),
    ):
        with pytest.raises(ConfigError, match="give --layers, --kv-heads and --head-dim"):
            stated_layers(config)


def test_weights_are_counted_as_they_will_be_loaded(monkeypatch, capsys, tmp_path):
    how = ("--target", "specpool/tiny", "--draft", "none", "--memory", "64MiB")
    (file,) = Path(resolve("specpool/tiny")).glob("*.safetensors")
    stored = answer(monkeypatch, capsys, *how)
    assert (stored["weights"], stored["dtype"]) == (file.stat().st_size, "float16")
    assert answer(monkeypatch, capsys, *how, "--dtype", "float32")["weights"] == (
        2 * file.stat().st_size
    )
    config = Path(resolve("specpool/tiny")) / "config.json"
    (tmp_path / "config.json").write_text(config.read_text())
    index = {"metadata": {"total_size": 12_345_678}, "weight_map": {}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    shards = answer(monkeypatch, capsys, "--target", str(tmp_path), "--memory", "64MiB")
    assert shards["weights"] == 12_345_678


def folder_of(tmp_path: Path, **config: object) -> Path:
    """A model of which there is only the config: gpt-oss's, with its windows."""
    raw = {
        "model_type": "gpt_oss",
        "head_dim": 64,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "sliding_window": 128,
        "vocab_size": 201088,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw | config))
    return tmp_path


def test_windows_do_not_keep_rows_out_while_memory_is_left(monkeypatch, capsys, tmp_path):
    """150 rows of gpt-oss, where the whole context of all of them takes less than half."""
    how = ("--target", str(folder_of(tmp_path)), "--dtype", "bfloat16", "--weights", "13GB")
    how += ("--memory", "80GiB", "--max-batch", "150", "--max-context-len", "8192")
    found = answer(monkeypatch, capsys, *how, "--prompt", "2000", "--output", "500")
    assert {(fit["num_requests"], fit["limit"]) for fit in found["fits"]} == {
        (150, "max_batch 150")
    }
    assert found["unused"] > 30 << 30
    code, out, err = ask(monkeypatch, capsys, *how)
    assert code == 0, err
    assert "39.05 GiB of it unused: raise --max-batch" in " ".join(out.split())


def test_what_is_assumed_is_said(monkeypatch, capsys, tmp_path):
    """Without dtype and weights it assumes float32, and the bytes of the config's matrices."""
    how = ("--target", str(folder_of(tmp_path)), "--memory", "200GB", "--max-batch", "2")
    code, out, err = ask(monkeypatch, capsys, *how, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["dtype"] == "float32"
    dtype, weights, copies = found["notes"]
    assert "float32 is assumed: the config names no dtype" in dtype
    assert "estimated from the config: 20,9" in weights
    assert copies.startswith("on a CPU up to 1 GiB more hold a second copy of weights")
    assert err.splitlines() == [f"warning: {note}" for note in (dtype, weights, copies)]
    asked = answer(monkeypatch, capsys, *how, "--dtype", "bfloat16", "--weights", "13GB")
    assert asked["notes"] == [] and asked["weights"] == 13 * 10**9


def test_the_weights_say_the_dtype_that_the_config_does_not(monkeypatch, capsys, tmp_path):
    source = Path(resolve("specpool/tiny"))
    raw = json.loads((source / "config.json").read_text())
    raw = {key: value for key, value in raw.items() if key not in ("dtype", "torch_dtype")}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    found = answer(monkeypatch, capsys, "--target", str(tmp_path), "--memory", "64MiB")
    assert found["dtype"] == "float16"
    assert found["notes"] == ["float16 is the weights': the config names no dtype"]


def test_logits_of_a_verify_forward_are_counted(monkeypatch, capsys):
    """Rows, nodes and the vocabulary: 15 GiB in this plan, which pages do not get."""
    how = ("--memory", "80GiB", "--shape", "5x8x64", "--prompt", "300")
    without = answer(monkeypatch, capsys, *NUMBERS, *how)
    found = answer(monkeypatch, capsys, *NUMBERS, *how, "--vocab-size", "128256")
    rows = found["max_batch"]
    assert without["logits"] == 0 and found["logits"] == rows * 64 * 128256 * 2 > 15 << 30
    assert found["kv_bytes"] == without["kv_bytes"] - found["logits"]
    fit, full = found["fits"]
    assert (fit["num_requests"], fit["limit"]) == (rows, "logits and pages together")
    assert full["limit"] == "pages of target and draft"
    pages = [g["num_pages"] // n for g, n in zip(found["groups"], fit["pages"], strict=True)]
    row = 64 * 128256 * 2 + sum(
        n * g["page_bytes"] for g, n in zip(found["groups"], fit["pages"], strict=True)
    )
    used = rows * row + sum(g["page_bytes"] for g in found["groups"])
    assert rows == min(pages) and 80 << 30 >= used > (80 << 30) - 2 * row
    given = answer(
        monkeypatch, capsys, *NUMBERS, *how, "--vocab-size", "128256", "--max-batch", "10"
    )
    assert given["logits"] == 10 * 64 * 128256 * 2


def written(model_type: str, **changes: object) -> tuple[object, dict]:
    """A config of transformers' own defaults, changed, and what it writes into config.json."""
    config = transformers.AutoConfig.for_model(model_type, **changes)
    return config, json.loads(config.to_json_string())


@pytest.mark.parametrize("model_type", PLAIN)
def test_a_plain_config_is_what_transformers_makes_of_it(model_type):
    """With the file as it is, and with each key that a file may lack left out."""
    num_read = 0
    for changes in (
        {},
        {"num_hidden_layers": 12, "sliding_window": 77, "use_sliding_window": True},
    ):
        config, raw = written(model_type, **changes)
        found = PlainConfig.parse(raw)
        if not changes:
            assert found is not None
            assert (found.max_context_len, found.vocab_size) == (
                context_limit(config)[0],
                config.vocab_size,
            )
        for key in (None, *raw):
            if key == "model_type":
                continue
            less = {name: value for name, value in raw.items() if name != key}
            found = PlainConfig.parse(less)
            if found is not None:
                beside = transformers.AutoConfig.for_model(**less)
                assert found.layers == stated_layers(beside), key
                assert found.max_context_len == context_limit(beside)[0], key
                num_read += 1
    assert num_read > 10


@pytest.mark.parametrize("model_type", PLAIN)
def test_parameters_are_counted_within_two_percent(model_type):
    import torch

    config, raw = written(model_type)
    found = PlainConfig.parse(raw)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert found is not None and found.num_parameters == pytest.approx(counted, rel=0.02)


def test_a_config_that_decides_otherwise_is_left_to_transformers():
    _, raw = written("mistral")
    for change in ({"model_type": "deepseek_v3"}, {"auto_map": {"AutoConfig": "x.Y"}}):
        assert PlainConfig.parse(raw | change) is None
    for change in ({"num_hidden_layers": 1.5}, {"sliding_window": "x"}, {"hidden_size": -1}):
        assert PlainConfig.parse(raw | change) is None
    dynamic = raw | {"rope_scaling": {"type": "dynamic", "original_max_position_embeddings": 99}}
    assert PlainConfig.parse(dynamic).max_context_len == 99


def test_numbers_need_no_torch():
    code = (
        "import sys; sys.argv[1:] = sys.argv[1].split()\n"
        "import specpool.cli\n"
        "try: specpool.cli.main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'imported'"
    )
    args = " ".join(["plan", *NUMBERS, "--memory", "80GiB", "--json"])
    run = subprocess.run([sys.executable, "-c", code, args], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["groups"][0]["num_pages"] > 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--layers", "3"], "these lack --kv-heads, --head-dim"),
        ([*NUMBERS[:6]], "plain numbers need --max-context-len"),
        ([*NUMBERS, "--memory", "80 gigs"], "memory must be bytes, such as 80GiB"),
        ([*NUMBERS, "--memory", "80EiB"], "memory must be bytes, such as 80GiB"),
        ([*NUMBERS, "--weights", "-3"], "weights must be bytes"),
        (
            [*NUMBERS, "--weights", "1GiB"],
            "memory 1 GiB holds no KV: the weights take 1 GiB, the workspace 0 B",
        ),
        ([*NUMBERS, "--memory", "1MiB"], "one row of 4096 tokens needs"),
        ([*NUMBERS, "--dtype", "int4"], "dtype must be one of float32, bfloat16, float16"),
        (
            [*NUMBERS, "--kv-heads", "0"],
            "error: --kv-heads must be an integer in [1, 65536], got 0",
        ),
        ([*NUMBERS, "--draft-layers", "0", "--shape", "3"], "there is no draft model"),
        (
            [*NUMBERS, "--draft-layers", "0", "--draft-window", "64"],
            "error: --draft-window is of draft KV, and no draft keeps any",
        ),
        (
            [*NUMBERS, "--draft-window", "64", "--placement", "shared"],
            "error: --draft-window 64 needs placement 'split'",
        ),
        (
            [*NUMBERS, "--draft-sink", "4"],
            "error: --draft-sink 4 needs a --draft-window of at least as many tokens",
        ),
        ([*NUMBERS, "--draft-window", "1"], "--draft-window must be"),
        ([*NUMBERS, "--draft", "x/y"], "--draft is 'ngram', 'suffix' or 'none'"),
        ([*NUMBERS, "--draft", "ngram", "--draft-layers", "1"], "leave out --draft-layers"),
        (
            [*NUMBERS, "--prompt", "4096"],
            "error: --prompt must be an integer in [1, 4095], got 4096",
        ),
        ([*NUMBERS, "--live", "5000"], "error: --live must be an integer in [1, 4095], got 5000"),
        ([*NUMBERS, "--vocab-size", "0"], "error: --vocab-size must be an integer in [1, "),
        (
            [*NUMBERS, "--draft", "none", "--draft-kv-heads", "2"],
            "--draft-kv-heads is of a draft model's layers, and there are none",
        ),
        (
            ["--target", "specpool/tiny", "--draft", "ngram", "--draft-layers", "2"],
            "error: --draft states it: leave out --draft-layers",
        ),
        (
            ["--target", "specpool/tiny", "--draft-kv-heads", "2"],
            "error: --draft-kv-heads needs --draft-layers",
        ),
        (
            ["--target", "specpool/tiny", "--draft-layers", "0"],
            "error: --draft-layers must be an integer in [1, 65536], got 0",
        ),
        ([*NUMBERS, "--tp", "0"], "error: --tp must be an integer in [1, 65536], got 0"),
        ([*NUMBERS, "--tp", "3"], "error: --tp: 3 devices cannot share 8 KV heads"),
        ([*NUMBERS, "--output", "5"], "--output needs --prompt"),
        ([*NUMBERS, "--common", "5"], "--common needs --prompt"),
        (
            [*NUMBERS, "--prompt", "9", "--common", "9"],
            "--common must be an integer in [1, 8], got 9",
        ),
        (
            [*NUMBERS, "--prompt", "5", "--output", "0"],
            "error: --output must be an integer in [1, 4091]",
        ),
        ([*NUMBERS, "--shape", "3x2"], "--shape: a shape is chain:S"),
        ([*NUMBERS, "--depth", "2"], "error: --depth must be an integer in [0, 1], got 2"),
        ([*NUMBERS, "--draft-head-dim", "0"], "--draft-head-dim must be an integer in [1, 65536]"),
        ([*NUMBERS, "--max-context-len", "0"], "--max-context-len must be an integer in [2, "),
        ([*NUMBERS, "--weights", ""], "weights must be bytes"),
        ([*NUMBERS, "--max-batch", "0"], "--max-batch must be an integer in [1, 65536], got 0"),
        (["--target", "specpool/tiny", "--layers", "3"], "--target states it: leave out --layers"),
        (["--target", "/no/such/folder"], "no such folder"),
        (["--target", "specpool/tiny", "--draft", "/no/such"], "no such folder"),
        (["--target", "specpool/tiny", "--max-context-len", "4096"], "above the model's 2048"),
    ],
)
def test_a_bad_option_is_one_line(monkeypatch, capsys, args, message):
    memory = [] if "--memory" in args else ["--memory", "1GiB"]
    code, out, err = ask(monkeypatch, capsys, *args, *memory)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--memory", "80GX"], "--memory must be bytes"),
        (["--workspace", "x"], "--workspace must be bytes"),
        (["--weights", "x"], "--weights must be bytes"),
        (["--dtype", "int4"], "--dtype must be one of float32, bfloat16, float16"),
        (["--shape", "9x9"], "--shape: a shape is chain:S"),
        (["--headroom", "-1"], "--headroom must be"),
        (["--max-context-len", "1"], "--max-context-len must be"),
        (["--page-size", "0"], "--page-size must be"),
        (["--max-batch", "0"], "--max-batch must be"),
        (["--depth", "2"], "--depth must be"),
        (["--output", "5"], "--output needs --prompt"),
        (["--live", "0"], "--live must be"),
    ],
)
def test_a_bad_option_is_refused_before_the_hub_is_asked(monkeypatch, capsys, args, message):
    memory = [] if "--memory" in args else ["--memory", "1GiB"]
    code, _, err = ask(monkeypatch, capsys, "--target", "no/where", *args, *memory)
    assert code == 2 and err.startswith(f"error: {message}") and err.count("\n") == 1


def test_what_the_hub_says_is_not_cut(monkeypatch):
    """The first cause of the answer is printed too."""
    import huggingface_hub

    def fails(*_: object, **__: object) -> None:
        try:
            raise OSError("Name or service not known")
        except OSError as error:
            raise FileNotFoundError("not found. " + "word " * 50 + "the end.") from error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fails)
    with pytest.raises(ConfigError, match=r"the end: Name or service not known$"):
        fetch_config("no/where")


def test_bytes_are_read_as_written():
    for text, num_bytes in {
        "80GiB": 80 << 30,
        "24G": 24 * 10**9,
        "24GB": 24 * 10**9,
        "24Gi": 24 << 30,
        "1.5 MiB": 3 << 19,
        "512k": 512_000,
        "8589934592": 1 << 33,
        "7B": 7,
        "0": 0,
    }.items():
        assert parse_bytes("memory", text) == num_bytes, text
    for text in ("", "G", "1e9", "-1", "1,000", "80GiBs", "2000P", "٣G"):
        with pytest.raises(ConfigError, match="memory must be"):
            parse_bytes("memory", text)
    assert [show_bytes(n) for n in (0, 1023, 1024, 3 << 29)] == [
        "0 B",
        "1,023 B",
        "1 KiB",
        "1.5 GiB",
    ]


PLAN = ["specpool", "plan", "--target", "specpool/tiny", "--memory", "1GiB"]


@pytest.mark.parametrize("headroom", ["-1", "1099511627776"])
def test_a_headroom_that_cannot_be_is_one_line(monkeypatch, capsys, headroom):
    monkeypatch.setattr("sys.argv", [*PLAN, "--headroom", headroom])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    assert "headroom must be an integer in" in capsys.readouterr().err
