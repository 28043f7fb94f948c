"""Every code block of the documents runs here, or says in its first line what it needs.

A shell block that begins with `# needs ...` is not run: its commands are parsed against the real
command line. `make` is run with `--dry-run`, and of `pip install` the extras are looked up: both
would install packages. Training is cut to a fraction of a second; no other command is changed.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import warm_kit
from paths import ROOT
from serve_kit import Server

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from benches.__main__ import main as run_bench
from lab.__main__ import main as run_lab
from specpool.cli import main
from specpool.engine.shapes import AdaptiveConfig

#: What runs the commands that begin with these words.
MAINS = {("python", "-m", "benches"): run_bench, ("python", "-m", "lab"): run_lab}
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for pattern in (
        "*.md",
        "docs/*.md",
        "examples/*/*.md",
        "cuda/*.md",
        "fuzz/*.md",
        "benches/results/*.md",
        "lab/*.md",
    )
    for path in ROOT.glob(pattern)
)
FOLDERS = "benches|cuda|docs|examples|fuzz|lab|python|rust|tests"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: What a block that is not run may need, and how one sees that it does.
NEEDS = {
    "a CUDA device": r"cuda|gpu|sanitize",
    "atheris and cargo-fuzz": r"--atheris|cargo fuzz",
    "the model hub": r"--(target|draft) (?!specpool/)[\w.-]+/[\w.-]+",
}


def blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text(encoding="utf-8")
    return [code for name, code in FENCE.findall(text) if name == language]


def having(language: str) -> list[str]:
    return [document for document in DOCUMENTS if blocks(document, language)]


def commands(block: str) -> Iterator[tuple[list[str], str]]:
    """The block's commands in words, each with the comment behind it."""
    for line in block.replace("\\\n", " ").splitlines():
        command, _, comment = re.sub(r"(^|\s)#", "\0", line, count=1).partition("\0")
        if command.strip():
            yield shlex.split(command), comment.strip()


def needs_of(block: str) -> str | None:
    found = re.match(r"# needs (.*)\n", block)
    return found[1] if found else None


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_names_its_language(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    assert len(re.findall(r"^```", text, re.MULTILINE)) == 2 * len(FENCE.findall(text))
    assert {name for name, _ in FENCE.findall(text)} <= {"python", "sh", "json", "text", "diff"}


#: The page of the server calls it at its default address.
SERVED, ADDRESS = "docs/serve.md", "127.0.0.1:8000"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where a server for the page's blocks listens."""
    with Server() as server:
        yield f"127.0.0.1:{server.port}"


@pytest.mark.parametrize("document", having("python"))
def test_python_blocks_run(document, monkeypatch, tmp_path, request):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "examples")  # a page tells its reader to copy a file of it
    names: dict[str, Any] = {"__name__": "document"}
    for code in blocks(document, "python"):
        if ADDRESS in code:
            assert document == SERVED
            code = code.replace(ADDRESS, request.getfixturevalue("address"))
        exec(compile(code, document, "exec", dont_inherit=True), names)


@pytest.mark.parametrize("document", having("json"))
def test_json_blocks_are_what_the_text_says(document):
    for text in blocks(document, "json"):
        AdaptiveConfig.from_dict(json.loads(text))


# Commands that load models again and again; tests of their own run them, some at smaller sizes.
SLOW = (
    "specpool bench serve --requests 32",
    "python examples/checkpoint.py conversation.row",
    "python train_target.py out/target --minutes 3",
    "specpool tune --candidates none",
    "benches reserve --trace",
)


def shell_blocks() -> list[Any]:
    """Each block of shell commands, with its page; the slow ones are marked."""
    found = []
    for document in having("sh"):
        for number, block in enumerate(blocks(document, "sh"), 1):
            marks = [pytest.mark.full] if any(line in block for line in SLOW) else []
            found.append(pytest.param(document, block, marks=marks, id=f"{document}-{number}"))
    return found


def test_the_slow_blocks_are_there():
    texts = [block for document in having("sh") for block in blocks(document, "sh")]
    assert all(sum(line in block for block in texts) == 1 for line in SLOW)


@pytest.mark.parametrize(("document", "block"), shell_blocks())
def test_shell_blocks_run(document, block, monkeypatch, tmp_path, capsys, request):
    """In a folder of its own; a command's comment says an exit code other than 0."""
    monkeypatch.chdir(tmp_path)
    if ADDRESS in block:
        assert document == SERVED
        block = block.replace(ADDRESS, request.getfixturevalue("address"))
    if (needs := needs_of(block)) is not None:
        assert re.search(NEEDS[needs], block), f"{document}: does not need {needs}\n{block}"
    for words, comment in commands(block):
        for code in run(words, document) if needs is None else parse(words):
            expected = re.search(r"exit code (\d)", comment)
            wanted = int(expected[1]) if expected else 0
            assert code == wanted, f"{document}: {words}\n{capsys.readouterr().err}"


def run(words: list[str], document: str) -> Iterator[int]:
    """Run one command; gives its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        if found := re.fullmatch(r"([A-Z_]+)=(.*)", words[0]):  # read once in a process
            is_script = words[1] == "python"
            program = [str(ROOT / words[2]), *words[3:]] if is_script else ["-m", *words[1:]]
            command = [sys.executable, *program]
            environment = os.environ | {found[1]: found[2]}
            yield warm_kit.run(command, env=environment, stdout=subprocess.DEVNULL).returncode
        elif words[0] == "specpool" or tuple(words[:3]) in MAINS:
            patch.setattr(sys, "argv", words if words[0] == "specpool" else words[2:])
            try:
                MAINS.get(tuple(words[:3]), main)()
            except SystemExit as error:
                yield int(error.code or 0)
            else:
                yield 0
        elif words[0] == "python" and document.startswith("examples/"):
            yield train(ROOT / document, words[1:], patch)
        elif words[0] == "curl":
            yield curl(words)
        elif words[0] == "python":
            command = [sys.executable, str(ROOT / words[1]), *words[2:]]
            yield subprocess.run(command, capture_output=True).returncode
        else:
            yield from parse(words)


def curl(words: list[str]) -> int:
    """Run curl; an answer of the server that is an error counts as one."""
    if shutil.which("curl") is None:
        pytest.skip("needs curl")
    done = subprocess.run([*words, "--max-time", "60"], capture_output=True, text=True)
    assert "error" not in json.loads(done.stdout), done.stdout
    return done.returncode


def train(document: Path, words: list[str], patch: pytest.MonkeyPatch) -> int:
    """Run a training script with short windows, next to no time and no compiler."""
    import typer

    patch.syspath_prepend(str(document.parent))
    module = importlib.import_module(words[0].removesuffix(".py"))
    patch.setattr(module, "LENGTH", 24)
    words = [
        "0.01" if before == "--minutes" else word
        for before, word in zip(["", *words], words, strict=False)
    ]
    app = typer.Typer()
    app.command()(module.main)
    try:
        app([word for word in words[1:] if word != "--compile"], standalone_mode=False)
    finally:
        for name in ("corpus", "byte_tokenizer", "train_target", "train_head"):
            sys.modules.pop(name, None)
    return 0


def parse(words: list[str]) -> Iterator[int]:
    """Check a command without running it: its targets, extras or options exist."""
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if words[0] == "make":
        assert shutil.which("make")
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("MAKE")
        }
        command = ["make", "--dry-run", *words[1:]]
        yield subprocess.run(command, cwd=ROOT, env=environment, capture_output=True).returncode
    elif words[:2] == ["pip", "install"]:
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
            "optional-dependencies"
        ]
        (what,) = words[2:]
        found = re.fullmatch(r"(\.|dist/specpool-[\w.-]*\.whl)(?:\[([\w,]+)\])?", what)
        assert found, f"{what} cannot be installed: no release is on an index"
        assert set((found[2] or "").split(",")) <= {*extras, ""}
        yield 0
    elif words[0] in ("python", "cargo"):
        assert (
            (ROOT / words[1]).exists()
            if words[0] == "python"
            else words[1] in ("install", "fuzz", "test")
        )
        yield 0
    elif words[0] in (".venv/bin/pytest", ".venv/bin/python"):
        files = [word for word in words[1:] if word.startswith("tests/")]
        assert files and all((ROOT / name).exists() for name in files)
        yield 0
    else:
        assert words[0] == "specpool", f"nobody checks {words[0]}"
        parse_options(words)
        yield 0


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command of `specpool`, `benches` or `lab` that is called, and the words behind it."""
    import typer

    from benches.__main__ import app as benches
    from lab.__main__ import app as lab
    from specpool.cli.commands import app

    name = words[2] if tuple(words[:3]) in MAINS else "specpool"
    words = words[1 if name == "specpool" else 3 :]
    command: Any = typer.main.get_command({"benches": benches, "lab": lab}.get(name, app))
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        command, words = command.commands[words[0]], words[1:]
    return command, words


def parse_options(words: list[str]) -> None:
    """Parse the words of a command, as it would itself before it runs."""
    command, rest = command_of(words)
    command.make_context("specpool", list(rest))


def inline_commands() -> list[tuple[str, str]]:
    """The commands in the running text that are whole: `specpool bench X` and the like are none."""
    found = set()
    for document in DOCUMENTS:
        text = FENCE.sub("", (ROOT / document).read_text(encoding="utf-8"))
        for span in re.findall(
            r"`((?:specpool|make|python -m benches|python -m lab) [^`]*)`", text
        ):
            if not re.search(r"[A-Z]$|\.\.\.", span):
                found.add((document, " ".join(span.split())))
    return sorted(found)


@pytest.mark.parametrize(("document", "command"), inline_commands())
def test_commands_in_the_text_exist(document, command):
    """Running text may leave arguments out: the command, its options or its targets exist."""
    words = shlex.split(command)
    if words[0] == "make":
        assert list(parse(words)) == [0]
        return
    found, rest = command_of(words)
    options = {name for param in found.params for name in (*param.opts, *param.secondary_opts)}
    assert {word for word in rest if word.startswith("-")} <= {*options, "--help"}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_named_in_the_text_exist(document):
    text = (ROOT / document).read_text(encoding="utf-8")
    named = re.findall(rf"`((?:{FOLDERS})/[\w/.-]+\.\w+)`", text)
    assert not [name for name in named if not (ROOT / name).exists()]


def test_what_cannot_run_says_so_and_what_can_does():
    """The rules above refuse what they should: a false excuse, a wrong option, a missing extra."""
    assert needs_of("# needs a CUDA device\nspecpool generate --device cuda\n") == "a CUDA device"
    assert not re.search(NEEDS["the model hub"], "specpool generate --target specpool/tiny")
    for words in (
        ["specpool", "generate", "--no-such-option"],
        ["specpool", "plan", "--layers", "x"],
    ):
        with pytest.raises(Exception) as refused:
            list(parse(words))
        assert "no-such-option" in str(refused.value) or "integer" in str(refused.value)
    for what in ("specpool[hf]", ".[no_such_extra]"):
        with pytest.raises(AssertionError):
            list(parse(["pip", "install", what]))
    assert list(parse(["make", "no-such-target"])) != [0]
