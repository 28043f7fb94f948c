"""Laws of the command line: what it prints, and that an error is one line and exit code 2."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import specpool
import warm_kit
from cli_kit import call
from specpool.cli import main
from specpool.cli.options.shapes import shape_of


def test_one_of_several_drafts_drafts_in_a_window(capsys):
    """Law: `--drafter` names who drafts; the text is the same."""
    drafts = ["specpool/tiny-eagle", "ngram"]
    words = ["generate", "--json", "-n", "24", "-p", "seq: 1, 2, 3, 1, 2, 3, "]
    words += [word for name in drafts for word in ("--draft", name)] + ["--draft-window", "12"]
    expected = {}
    with specpool.Engine.from_pretrained(draft=drafts, draft_window=12) as engine:
        for name in (None, *drafts):
            params = specpool.SamplingParams(max_new_tokens=24, drafter=name)
            (expected[name],) = engine.generate("seq: 1, 2, 3, 1, 2, 3, ", params)
    for name in (None, "ngram"):
        code, out, err = call(capsys, *words, *([] if name is None else ["--drafter", name]))
        assert code == 0, err
        (output,) = json.loads(out)["outputs"]
        assert output["token_ids"] == expected[name].token_ids
        assert output["accept_lens"] == expected[name].accept_lens
    assert (
        expected[None].accept_lens
        == expected[drafts[0]].accept_lens
        != expected["ngram"].accept_lens
    )


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--shape", "4x4x16", "--page-size", "3", "--placement", "shared"],
        ["--draft", "specpool/tiny-eagle", "--layout", "holey", "--shape", "3x8x20"],
        ["--policy", "double_buffer", "--temperature", "0.9", "--top-p", "0.9", "--top-k", "50"],
        ["--draft", "none"],
        ["--draft", "ngram"],
        ["--draft", "ngram:6", "--shape", "4x4x16", "--page-size", "3", "--temperature", "0.9"],
        ["--dtype", "bfloat16"],
    ],
)
def test_generate_json_is_one_object(capsys, options):
    compares = [] if "none" in options else ["--compare"]
    words = ["generate", "--json", "-n", "40", "-p", "seq: 1, 2, 3,", *compares, *options]
    code, out, err = call(capsys, *words)
    assert code == 0, err
    report = json.loads(out)
    assert report["tokens"] == 40 == len(report["outputs"][0]["token_ids"])
    assert not err
    slowest, fastest = report["tokens_per_second_range"]
    assert 0 < slowest <= report["tokens_per_second"] <= fastest and 1 <= report["runs"] <= 5
    assert sum(int(n) * c for n, c in report["accept_histogram"].items()) >= 39
    assert all(pool["leaked"] == 0 and pool["free"] == pool["pages"] for pool in report["pools"])
    assert all(0 < pool["peak_used"] <= pool["pages"] for pool in report["pools"])
    if "none" in options:  # there is nothing to compare it with
        names = ("plain_tokens_per_second", "speedup", "identical_to_plain", "same_as_plain")
        assert [report[name] for name in names] == [None] * 4
        return
    assert report["plain_tokens_per_second"] > 0 and report["same_as_plain"]
    if "bfloat16" not in options:
        assert report["identical_to_plain"]


def test_without_drafts_nothing_is_said_of_drafting(capsys):
    code, out, err = call(capsys, "generate", "-n", "8", "-p", "seq: 1,", "--draft", "none")
    assert code == 0, err
    assert re.fullmatch(r"8 tokens, \d+ tokens/s in one run, 1 of 1 cut at -n 8\n", err)
    assert "identical" not in out


def test_prompts_from_a_file_and_from_standard_input(capsys, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("seq: 1, 2, 3,\n\n[min]\n")
    _, out, _ = call(capsys, "generate", "--json", "-n", "5", "--prompt-file", str(path))
    outputs = json.loads(out)["outputs"]
    assert [bytes(o["prompt_ids"]).decode() for o in outputs] == ["seq: 1, 2, 3,", "[min]"]
    _, out, _ = call(capsys, "generate", "--json", "-n", "5", "--prompt-file", "-", stdin="a\nb")
    assert [bytes(o["prompt_ids"]).decode() for o in json.loads(out)["outputs"]] == ["a\nb"]


def test_accept_length_of_the_shipped_pair():
    """Held-out prompts, 96 greedy tokens, bonus included: chain S=3 >= 3.4, tree 4x4x16 >= 4.5."""
    from specpool import Engine, SamplingParams, Shape
    from specpool.cli.generate.report import mean_accept_len
    from specpool.engine.assets import corpus

    prompts = corpus.prompts(12)
    for draft in ("specpool/tiny-eagle", "specpool/tiny-eagle3"):
        for shape, least in ((Shape.eagle(3, 1, 4), 3.4), (Shape.eagle(4, 4, 16), 4.5)):
            with Engine.from_pretrained(draft=draft, shape=shape, max_context_len=512) as engine:
                outputs = engine.generate(
                    prompts, SamplingParams(max_new_tokens=96, ignore_eos=True)
                )
                assert mean_accept_len(outputs) >= least, (draft, shape)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--target", "/no/such/folder", "-p", "a"], "/no/such/folder"),
        (["--draft", "/no/such/folder"], "/no/such/folder"),
        (["--shape", "3x1x9"], "got 9"),
        (["--shape", "banana"], "banana"),
        (["--page-size", "0"], "error: --page-size must be an integer in .1, 1048576., got 0"),
        (["--num-pages", "2"], "2"),
        (["--prompt-file", "/no/such/file"], "/no/such/file"),
        (["-p", ""], "prompt 1 is empty"),
        (["--max-new-tokens", "0"], "error: --max-new-tokens must be"),
        (["--temperature", "-1"], "error: --temperature must be a number in .0, 10000., got -1"),
        (["--top-p", "2"], "error: --top-p must be"),
        (["--dtype", "int3"], "int3"),
        (["--device", "abacus"], "abacus"),
        (["--batch", "0"], "error: --batch must be an integer in .1, 65536., got 0"),
        (["--max-context-len", "64"], "64"),
        (["--draft", "ngram:0"], "must be an integer in .1, 32., got 0"),
        (["--draft", "ngram:x"], "needs a number n in .1, 32., got 'ngram:x'"),
        (["--placement", "nowhere"], "nowhere"),
        (["--no-such-option"], "no-such-option"),
        (["--threads", "0"], "error: --threads must be"),
    ],
)
def test_bad_options_give_one_message_and_exit_code_2(capsys, args, message):
    import re

    code, out, err = call(capsys, "generate", *args)
    assert code == 2
    assert re.search(message, err), err
    assert "Traceback" not in out + err


def test_a_head_for_another_target_is_refused(capsys, tmp_path):
    """The message names both sizes."""
    import shutil

    from specpool.engine.assets import resolve

    shutil.copytree(resolve("specpool/tiny-eagle3"), tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"vocab_size": 300}))
    code, _, err = call(capsys, "generate", "--draft", str(tmp_path / "head"))
    assert code == 2
    assert "300" in err and "259" in err


def test_ctrl_c_ends_cleanly(tmp_path):
    """SIGINT in the middle of the text: exit code 130, one line, no traceback."""
    command = [sys.executable, "-m", "specpool", "generate", "-n", "1900"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with warm_kit.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        while "prompt 1" not in process.stdout.readline():
            assert process.poll() is None, process.stderr.read()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "interrupted: requests aborted, pages returned" in err
    assert "Traceback" not in out + err


def test_version_and_info(capsys):
    assert call(capsys, "--version")[1].strip() == f"specpool {specpool.__version__}"
    _, out, _ = call(capsys, "info", "--json")
    info = json.loads(out)
    assert info["versions"]["specpool"] == specpool.__version__
    assert info["back ends"]["torch, cpu"].startswith("works")
    assert "transformers" in call(capsys, "info")[1]


def test_bench_generate_prints_the_agreed_object(capsys, tmp_path):
    picture = tmp_path / "bench.png"
    args = ("--tokens", "8", "--batch", "1", "--repeats", "1", "--requests", "3")
    args += ("--plot", str(picture))
    code, out, err = call(capsys, "bench", "generate", "--json", *args)
    assert code == 0, err
    report = json.loads(out)
    assert {"date", "cpu", "torch", "threads"} <= set(report["machine"])
    for result in report["results"]:
        assert set(result) == {"name", "value", "unit", "reference", "reference_value", "ratio"}
        assert result["ratio"] == pytest.approx(result["value"] / result["reference_value"])
    assert picture.read_bytes().startswith(b"\x89PNG")
    names = [result["name"] for result in report["results"]]
    assert sum("3 requests of about 8 tokens, 1 rows" in name for name in names) == 4
    assert call(capsys, "bench", "generate", "--repeats", "0")[0] == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--target", "/no/such/folder", "--draft", "x"], "/no/such/folder"),
        (["--target", "no/such-hub-name", "--draft", "x"], "no/such-hub-name"),
        (["--device", "abacus"], "abacus"),
        (["--tokens", "1921"], "prompts of 128 tokens and 1921 new ones .* 2048"),
        (["--plot", "/no/such/folder/x.png"], "/no/such/folder"),
        (["--plot", "picture.nope"], "nope"),
        (["--shape", "none"], "shape none drafts nothing"),
    ],
)
def test_bad_bench_options_are_refused_before_anything_is_measured(capsys, args, message):
    import re

    code, out, err = call(capsys, "bench", "generate", "--batch", "1", "--repeats", "1", *args)
    assert code == 2
    assert re.search(message, err), err
    assert out == ""


def run_raw(*args: bytes | str, stdin: bytes = b"", **environment: str):
    """The command in a process of its own; bytes in, bytes out."""
    command = [sys.executable, "-m", "specpool", "generate", "-n", "6", *args]
    environment = {**os.environ, "PYTHONUTF8": "0", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, input=stdin, capture_output=True, env=environment, check=False)


def test_a_terminal_without_unicode_gets_what_it_can_show(tmp_path, monkeypatch):
    path = tmp_path / "out"
    with path.open("w", encoding="ascii") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", terminal)
        patch.setattr(sys, "argv", ["specpool", "generate", "-n", "6", "-p", "a"])
        with pytest.raises(SystemExit) as end:
            main()
    assert end.value.code == 0
    assert "answer 1" in path.read_text(encoding="ascii")


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("args", "stdin"), [(["-p", b"ab\xff"], b""), (["--prompt-file", "-"], b"ab\xff")]
)
def test_bytes_that_are_no_text_are_refused(args, stdin):
    run = run_raw(*args, stdin=stdin, PYTHONIOENCODING="utf-8", LC_ALL="C.UTF-8")
    assert run.returncode == 2
    assert b"error: " in run.stderr and b"Traceback" not in run.stderr


def test_text_is_printed_as_it_is(capsys):
    """Markup and names of emoji in the text are not interpreted."""
    prompt = "[bold]x[/bold] :smile: [/] \\"
    _, out, _ = call(capsys, "generate", "-n", "4", "-p", prompt)
    assert prompt in out


def test_a_failed_request_ends_with_exit_code_2(capsys, monkeypatch):
    """The other texts are still printed, and the error names the position."""
    import torch

    from specpool.engine.models import TargetModel

    forward = TargetModel.forward

    def failing(self, token_ids, positions, batch, logits_index=None, **options):
        output = forward(self, token_ids, positions, batch, logits_index, **options)
        if logits_index is None:
            output.logits = output.logits.clone()
            output.logits[positions == 9] = torch.nan
        return output

    monkeypatch.setattr(TargetModel, "forward", failing)
    code, out, err = call(capsys, "generate", "-n", "30", "-p", "a", "--draft", "none")
    assert code == 2
    assert "error: prompt 1: " in err and "position 9" in err
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("3", (3, 1, 4)), ("chain:3", (3, 1, 4)), ("4x4x16", (4, 4, 16)),
        ("tree:4x4x16", (4, 4, 16)), ("none", (0, 1, 1)), ("0", (0, 1, 1)),
    ],
)  # fmt: skip
def test_shape_text(text, numbers):
    assert shape_of(text) == specpool.Shape(*numbers)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("4x4", "a shape is chain:S .*, got '4x4'"),
        ("-1", "a shape is .*, got '-1'"),
        ("3_0", "a shape is .*, got '3_0'"),
        ("tree:2x2x99", "'tree:2x2x99' cannot be built: .*99"),
        ("9999999", "'9999999' cannot be built: .*9999999"),
    ],
)
def test_a_shape_that_cannot_be_names_the_option(text, says):
    with pytest.raises(specpool.ConfigError, match=f"^--shape: {says}"):
        shape_of(text)


def test_import_is_light():
    """`import specpool` loads neither torch nor transformers nor CuPy."""
    code = (
        "import sys, specpool; "
        "print([m for m in ('torch', 'transformers', 'cupy', 'rich', 'typer') if m in sys.modules])"
    )
    run = [sys.executable, "-c", code]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_without_the_extra_the_message_says_what_to_install(tmp_path):
    """A bare wheel: `Engine` and the command name the missing package and the extra."""
    for name in ("torch", "typer"):
        (tmp_path / f"{name}.py").write_text(
            f"raise ModuleNotFoundError('no {name}', name='{name}')"
        )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-m", "specpool"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert run.returncode == 2
    assert "the command line needs typer: pip install 'specpool[cli]'" in run.stderr
    code = "import specpool; specpool.Engine"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert "specpool.Engine needs torch: pip install 'specpool[hf]'" in run.stderr


def test_the_package_works_from_any_folder(tmp_path):
    run = subprocess.run(
        [sys.executable, "-m", "specpool", "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.startswith("specpool ")
    assert not list(Path(tmp_path).iterdir())


@pytest.fixture(scope="module")
def long_log(tmp_path_factory) -> Path:
    """A log whose events fill more than one buffer of standard output."""
    path = tmp_path_factory.mktemp("log") / "long.log"
    group = specpool.Group("kv", page_size=4, num_pages=9)
    ledger = specpool.Ledger([group], [], num_rows=1, max_context_len=16, record=path)
    for _ in range(1000):
        ledger.finish(ledger.admit("a tag"))
    ledger.close()
    return path


@pytest.mark.sample(2)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
@pytest.mark.parametrize(
    "args",
    [
        ["replay", "LOG"],
        ["replay", "LOG", "--quiet"],
        ["inspect", "LOG"],
        ["generate", "-n", "4", "-p", "a"],
        ["--help"],
    ],
)
def test_output_to_a_full_disk_is_one_line_and_exit_code_2(long_log, args):
    command = [sys.executable, "-m", "specpool"]
    command += [str(long_log) if arg == "LOG" else arg for arg in args]
    with open("/dev/full", "w") as full:
        run = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=500)
    assert run.returncode == 2, run.stderr
    assert run.stderr == "error: cannot write the output: No space left on device\n"


def test_a_reader_that_has_had_enough_is_no_error(long_log):
    command = [sys.executable, "-m", "specpool", "replay", str(long_log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell")
def test_closed_standard_output_is_no_error():
    command = f"'{sys.executable}' -m specpool --version >&-"
    run = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, timeout=500)
    assert (run.returncode, run.stderr) == (0, "")
