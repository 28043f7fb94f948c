"""`specpool plan` of a target with recurrent layers, from its config alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import mtp_checkpoints
from recurrent_families import make_config, make_model
from specpool import Engine
from specpool.cli import main
from specpool.cli.plan.model import model_of_files
from specpool.cli.plan.question import Question

OPTIONS = {"page_size": 4, "max_context_len": 128, "max_batch": 5, "max_sessions": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return mtp_checkpoints.write_hybrid(tmp_path_factory.mktemp("hybrid"), "qwen3_next")


def ask(monkeypatch, capsys, folder: Path, *args: str) -> tuple[int, str, str]:
    how = ("--target", str(folder), "--workspace", "0", "--weights", "0", "--dtype", "float32")
    monkeypatch.setattr("sys.argv", ["specpool", "plan", *how, *args])
    code = 0
    try:
        main()
    except SystemExit as end:
        code = end.code or 0
    out = capsys.readouterr()
    return code, out.out, out.err


def answer(monkeypatch, capsys, folder: Path, *args: str) -> dict:
    code, out, err = ask(monkeypatch, capsys, folder, *args, "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.parametrize(
    ("memory", "draft"), [("600kB", "ngram"), ("600kB", "mtp"), ("100MB", "mtp")]
)
def test_an_engine_has_the_states_that_were_planned(monkeypatch, capsys, folder, memory, draft):
    """Law: the plan has the config alone; the engine has the model, and allocates."""
    args = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    how = ("--draft", draft, "--memory", memory, "--cached-states", "2")
    plan = answer(monkeypatch, capsys, folder, *how, *args)
    kv_bytes = plan["kv_bytes"]
    with Engine.from_pretrained(
        str(folder),
        dtype="float32",
        draft=draft,
        kv_bytes=kv_bytes,
        cached_states=2,
        **OPTIONS,
    ) as engine:
        states, ledger = plan["states"], engine.ledger
        assert states["num_slots"] == ledger.states[0].num_slots
        assert states["ring_len"] == ledger.state_ring_len(0)
        assert [group["num_pages"] for group in plan["groups"]] == [
            group.num_pages for group in ledger.groups
        ]
        slots = (states["num_slots"] + 1) * states["slot_bytes"]
        rings = states["num_rings"] * states["ring_len"] * states["record_bytes"]
        assert engine.state_bytes == slots + rings
        assert engine.kv_bytes + engine.state_bytes <= kv_bytes


def test_requests_are_counted_beside_those_with_snapshots(monkeypatch, capsys, folder):
    """Law: n requests fit, with a slot and a ring each or with N states, and no n + 1."""
    how = ("--shape", "3", "--draft", "ngram", "--max-sessions", "0", "--cached-states", "0")
    sizes = ("--memory", "8MB", "--page-size", "1", "--headroom", "0", "--live", "40")
    plan = answer(monkeypatch, capsys, folder, *how, *sizes, "--max-context-len", "64")
    (fit, _), states, (group,) = plan["fits"], plan["states"], plan["groups"]
    row_bytes = (40 + 4) * group["page_bytes"] + 4 * 259 * 4  # and logits
    slot = states["slot_bytes"]
    for num_requests, state_bytes, aside in (
        (fit["num_requests"], slot + states["ring_len"] * states["record_bytes"], states),
        (fit["num_with_snapshots"], 4 * slot, None),
    ):
        ring = 0 if aside is None else states["ring_len"] * states["record_bytes"]
        room = 8_000_000 - group["page_bytes"] - slot - ring
        assert num_requests == room // (row_bytes + state_bytes)
    assert fit["limit"] == "logits, states and pages together"


def test_the_tables_have_each_part(monkeypatch, capsys, folder):
    how = ("--memory", "8MB", "--draft", "ngram", "--max-batch", "2", "--max-context-len", "64")
    code, out, err = ask(monkeypatch, capsys, folder, *how)
    assert code == 0 and "Traceback" not in err and "falling back" not in err
    words = " ".join(out.split())
    for part in ("slots of rows that run │ 2", "slots of sessions and of the prefix cache │ 18",
                 "rings of 23 records │ 19", "of KV and states", "with snapshots"):  # fmt: skip
        assert part in words


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--tp", "2"], "error: --tp: a target with recurrent layers runs on one device, not 2"),
        (["--memory", "40kB", "--max-batch", "4"], "4 rows 109.2 KiB of recurrent states, 35.02"),
    ],
)
def test_what_an_engine_would_refuse_is_one_line(monkeypatch, capsys, folder, args, message):
    memory = [] if "--memory" in args else ["--memory", "1MB"]
    code, out, err = ask(monkeypatch, capsys, folder, "--max-context-len", "64", *memory, *args)
    assert (code, out) == (2, "") and message in err


def test_a_file_of_the_targets_own_layers_is_no_mtp_layer(monkeypatch, capsys, folder, tmp_path):
    """Law: layers without KV count, so a copy of a layer beside the weights adds no bytes."""
    path = Path(shutil.copytree(folder, tmp_path / "target"))
    state = load_file(path / "model.safetensors")
    save_file({n: t for n, t in state.items() if "layers.2." in n}, path / "old.safetensors")
    question = Question(memory="1GB", target=str(path), draft="mtp")
    assert model_of_files(question).weight_bytes == (path / "model.safetensors").stat().st_size


def test_a_target_without_attention_has_no_mtp_layer_that_drafts(monkeypatch, capsys, tmp_path):
    make_config("mamba2").save_pretrained(tmp_path)
    code, _, err = ask(monkeypatch, capsys, tmp_path, "--memory", "1MB", "--draft", "mtp")
    assert code == 2 and "--draft mtp: no layer of the target has attention" in err


def test_a_recurrent_model_does_not_draft(monkeypatch, capsys, folder, tmp_path):
    make_model(make_config("lfm2")).save_pretrained(tmp_path)
    code, _, err = ask(monkeypatch, capsys, folder, "--memory", "1MB", "--draft", str(tmp_path))
    assert code == 2 and f"--draft {tmp_path} has recurrent layers" in err
