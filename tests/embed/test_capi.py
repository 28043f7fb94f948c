"""The C interface: its examples and its bad input, compiled and run (under valgrind if there)."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from cargo_kit import build

ROOT = Path(__file__).parents[2]
CAPI = ROOT / "rust/specpool-capi"
VALGRIND = [
    "valgrind",
    "--quiet",
    "--error-exitcode=99",
    "--leak-check=full",
    "--errors-for-leak-kinds=definite,indirect",
]
COMPILERS = {".c": ("cc", "-std=c11"), ".cpp": ("c++", "-std=c++17")}


def test_the_page_says_how_long_each_pointer_of_the_header_is_valid():
    """Law: what the header says of a pointer's life, the page's rules say of the same name."""
    header = (CAPI / "include/specpool.h").read_text(encoding="utf-8")
    page = (ROOT / "docs/c_api.md").read_text(encoding="utf-8")
    (rules,) = re.findall(r"\n## Rules\n(.*?)\n## ", page, re.DOTALL)
    lived = {}
    for comment, code in re.findall(r"((?:^// .*\n)+)((?:^[^/\n].*\n)+)", header, re.MULTILINE):
        said = " ".join(line[3:] for line in comment.splitlines())
        if found := re.search(r"[Vv]alid until ([^.]*)\.", said):
            (name,) = re.findall(r"^} (\w+);", code, re.MULTILINE) or re.findall(
                r"(specpool_\w+)\(", code
            )
            lived[name] = " ".join(found[1].split(";")[0].split())
    assert lived.keys() >= {"specpool_error_message", "specpool_plan"}
    for name, end in lived.items():
        rule = next(rule for rule in rules.split("\n- ") if name in rule and "valid until" in rule)
        assert f"valid until {end}" in " ".join(rule.split()), name


@pytest.fixture(scope="module")
def library():
    """The static library of the tree, from cargo's development build."""
    if shutil.which("cargo") is None or not (ROOT / "Cargo.toml").exists():
        pytest.skip("no cargo: the C interface is built from the sources")
    return build("--lib", "--tests") / "libspecpool.a"


@pytest.fixture(
    params=[
        "examples/engine.c",
        "examples/engine.cpp",
        "tests/bad_input.c",
        "tests/hostile.c",
        "tests/lend.cpp",
        "tests/moved.cpp",
        "tests/states.c",
    ]
)
def program(request, library, tmp_path):
    source = CAPI / request.param
    compiler, standard = COMPILERS[source.suffix]
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    command = [
        compiler,
        standard,
        "-Wall",
        "-Wextra",
        "-Werror",
        "-g",
        str(source),
        f"-I{CAPI / 'include'}",
    ]
    command += [str(library), "-lpthread", "-ldl", "-lm", "-o", str(tmp_path / "program")]
    compiled = subprocess.run(command, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr
    return tmp_path / "program"


LAST_LINE = {
    "engine.c": "36 of 36 pages free",
    "engine.cpp": "last tag",
    "bad_input.c": "every bad input was refused",
    "hostile.c": "every call was done or refused",
    "lend.cpp": "every lent page came back",
    "moved.cpp": "every row arrived or came back",
    "states.c": "every state was that of its tokens",
}


@pytest.mark.timeout(600)
def test_the_program_runs_and_leaks_nothing(program, request):
    source = request.node.callspec.params["program"].rsplit("/", 1)[-1]
    plain = subprocess.run([program], capture_output=True, text=True)
    assert plain.returncode == 0, plain.stderr
    assert LAST_LINE[source] in plain.stdout.splitlines()[-1]
    if shutil.which("valgrind") is None:
        pytest.skip("it runs; no valgrind to look for leaks")
    # Of the random calls, half: each takes valgrind milliseconds.
    calls = ["600"] if source == "hostile.c" else []
    checked = subprocess.run([*VALGRIND, program, *calls], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_the_example_stays_within_a_hundred_lines():
    assert len((CAPI / "examples/engine.c").read_text().splitlines()) <= 100
