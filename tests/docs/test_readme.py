"""The README keeps its word: its example is short, its files and commands exist.

`test_documents.py` runs the code blocks of every document.
"""

from __future__ import annotations

import json
import re

import pytest

from cli_kit import call
from paths import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_python_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out.count("tokens a round") == 2


def rows_of(text: str) -> dict[str, str]:
    """A table's cells, by what stands before them; figures of time left out."""
    cells = re.findall(r"^│ (.*?) *│ (.*?) *│ *$", text, re.MULTILINE)
    timed = {"speed", "plain decoding, in turn", "drafting against plain", "latency, medians"}
    return {
        name: re.sub(r"[\d.]+", "_", cell.split(" (")[0]) if name in timed else cell
        for name, cell in cells
    }


def test_the_picture_is_what_the_command_prints(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    (picture,) = re.findall(r"```text\n(\d.*?)```", README, re.DOTALL)
    code, out, _ = call(capsys, "generate", "--compare")
    assert code == 0
    assert len(rows_of(picture)) == 14
    assert rows_of(picture) == rows_of(out)
    text = [line for line in picture.splitlines() if line[:1] not in {*" .┌│└─", ""}]
    assert len(text) == 6
    assert not [line for line in text if line not in out]


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#:]+)\)", README))))
def test_links_lead_somewhere(path):
    assert (ROOT / path).exists()


def test_the_kernels_example_gives_what_its_comment_says():
    text = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, "docs/kernels.md", "exec"), names)
    last, expected = code.strip().splitlines()[-1].split("  #")
    assert f"tensor({eval(last, names).tolist()})" == expected.strip()  # type: ignore[attr-defined]


def test_the_two_commands_come_first_and_are_targets():
    commands = re.findall(r"^make (\S+)", README, re.MULTILINE)
    assert commands[:2] == ["run", "test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in set(re.findall(r"make ([a-z-]+)", README)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert re.search(r"^run:.*\n\t\S+specpool generate --compare$", makefile, re.MULTILINE)


def test_the_holey_picture_is_what_the_core_computes():
    """The drafts and copies of the contract's picture are those of the kernels."""
    import numpy as np

    from specpool.kernels import twins as kernels

    contract = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    lines = contract[contract.index("position   0") :].splitlines()
    cells = re.findall(r"[pd]\d", lines[1])
    roots = np.array([7], np.int32)
    positions = kernels.draft_write_positions(
        roots, num_steps=5, topk=8, page_size=4, layout="holey"
    )[0]
    for branch in range(3):
        for step in range(5):
            assert cells[positions[branch, step]] == f"d{step}"
    table = np.arange(0, 40, dtype=np.int32).reshape(1, 40)
    table = np.concatenate([table, table + 1])
    row = np.array([1], np.int32)
    source, target = kernels.prefix_tail_moves(table, 4, row, roots, num_steps=5, topk=8)
    moves = {int(t) - 4: int(s) - 4 for s, t in zip(source, target, strict=True)}
    for position, cell in enumerate(cells):
        if position >= 7 and cell.startswith("p"):
            assert moves[position] == int(cell[1:])


#: The row of each figure of the first screen: its file, the result's name there, and its reference.
FIGURES = {
    "2026-11-26-reserve-trace.json": (
        "5x8x64, prompt 384, output 256; specpool: exact, split, dense: running, mean",
        "SGLang: double_buffer, shared, holey",
        "{ratio:.2f} times the requests",
    ),
    "2026-11-21-cpu-ledger.json": (
        "chain S=4, P=16, 256 rows",
        "plain Python",
        "{value:.1f} µs a step, {inverse:.0f} times less",
    ),
    "2026-11-21-cpu-traffic.json": (
        "specpool/tiny-eagle 3x1x4, batch 1, 96 tokens (accept length 3.59)",
        "plain decoding on our pages",
        "{ratio:.2f} times the tokens",
    ),
}


def test_the_figures_of_the_first_screen_are_those_of_their_files():
    rows = re.findall(r"^\| (.+?) \| .+? \| `(.+?)` \| `(.+?\.json)` \|$", README, re.MULTILINE)
    assert [file for _, _, file in rows] == list(FIGURES)
    for figure, _, file in rows:
        name, reference, form = FIGURES[file]
        results = json.loads((ROOT / "benches" / "results" / file).read_text("utf-8"))["results"]
        (found,) = [r for r in results if (r["name"], r["reference"]) == (name, reference)]
        value, ratio = found["value"], found["ratio"]
        assert figure.startswith(form.format(value=value, ratio=ratio, inverse=1 / ratio)), figure


def test_a_command_of_the_first_screen_stands_beside_each_figure():
    for command in (
        "python -m benches reserve --trace",
        "python -m benches ledger",
        "specpool bench generate",
    ):
        assert f"| `{command}` |" in README[: README.index("## Start")]
