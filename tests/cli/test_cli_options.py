"""Laws of the command line's options: checked at once, named as typed, each with help."""

from __future__ import annotations

import inspect
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import specpool
from benches.__main__ import app as benches_app
from cli_kit import call
from lab.__main__ import app as lab_app
from paths import ROOT
from specpool import ConfigError
from specpool.cli.commands import app
from specpool.cli.options.checks import check_prompts, start_torch
from specpool.cli.options.derived import grouped
from specpool.cli.options.groups import PlaceOptions
from specpool.cli.options.names import with_option_names
from specpool.cli.options.prompts import Given, read_prompts
from specpool.engine.assets import resolve

# Runs commands one after the other in one process: [code, stdout, stderr, heavy modules] of each.
RUNNER = """
import contextlib, functools, importlib.abc, io, json, sys

blocked = json.loads(sys.argv[2])

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"no {name}", name=name)

sys.meta_path.insert(0, Block())
from benches.__main__ import main as run_bench
from lab.__main__ import main as run_lab
from specpool.cli import main
import typer.main

typer.main.get_command = functools.cache(typer.main.get_command)  # see cli_kit
found = []
for args in json.loads(sys.argv[1]):
    run = {"benches": run_bench, "lab": run_lab}.get(args[0] if args else "", main)
    sys.argv = args if run is not main else ["specpool", *args]
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run()
        except SystemExit as end:
            code = end.code or 0
    heavy = [name for name in ("torch", "transformers") if name in sys.modules]
    found.append([code, out.getvalue(), err.getvalue(), heavy])
print(json.dumps(found))
"""
LONG = "x" * 300  # no file may have so long a name
NO_FORM = str(ROOT / "README.md")  # a file, but neither a schema nor a grammar
HEAVY = ["torch", "transformers", "safetensors", "huggingface_hub"]


def run_all(commands: list[list[str]], blocked: list[str]) -> list[tuple[int, str, str, list[str]]]:
    run = subprocess.run(
        [sys.executable, "-c", RUNNER, json.dumps(commands), json.dumps(blocked)],
        capture_output=True,
        text=True,
        timeout=550,
        cwd=ROOT,  # where `benches` and `lab` are
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


MODEL = [
    (["--target", "/no/such"], "--target: no model at '/no/such': there is no such folder"),
    (
        ["--target", "specpool/tony"],
        "--target: no model at 'specpool/tony': there is no such folder",
    ),
    (["--target", ""], "--target: the name of a model is empty: give a folder or a hub name"),
    (["--draft", ""], "--draft: the name of a model is empty: give a folder or a hub name"),
    (["--target", "a b"], "--target: no model at 'a b': there is no such folder"),
    (["--draft", "/no/such"], "--draft: no model at '/no/such': there is no such folder"),
    (["--draft", "ngrm"], "--draft: there is none named 'ngrm': did you mean 'ngram'?"),
    (
        ["--draft", "sufix:shared"],
        "--draft: there is none named 'sufix:shared': did you mean 'suffix'?",
    ),
    (["--target", "specpool/tniy"], "no such folder: did you mean 'specpool/tiny'? embedded are"),
    (["--draft", "ngram:99"], "the n of ngram:n must be an integer in [1, 32], got 99"),
    (["--shape", "3x1x9"], "--shape: '3x1x9' cannot be built"),
    (["--device", "gpu"], "--device must be cpu, cuda or cuda:N, got 'gpu'"),
    (["--threads", "0"], "--threads must be an integer in [1, 1024], got 0"),
    (["--page-syze", "3"], "No such option: --page-syze"),
]
ENGINE = [
    *MODEL,
    (["--dtype", "int3"], "--dtype must be one of float32, bfloat16, float16, auto, got 'int3'"),
    (["--page-size", "0"], "--page-size must be an integer in [1, 1048576], got 0"),
    (["--page-size", "x"], "Invalid value for '--page-size': must be of type integer"),
    (["--placement", "x"], "Invalid value for '--placement': 'x' is not one of 'split', 'shared'"),
    (["--overlap-depth", "2"], "--overlap-depth must be an integer in [0, 1], got 2"),
    (["--prefill-tokens", "0"], "--prefill-tokens must be an integer in [1, "),
    (["--max-context-len", "1"], "--max-context-len must be an integer in [2, "),
    (["--num-pages", "0"], "--num-pages must be an integer in [1, "),
    (["--kv-bytes", "lots"], "--kv-bytes must be bytes, such as 80GiB (2^30)"),
    (["--host-bytes", "-1"], "--host-bytes must be bytes, such as 80GiB (2^30)"),
    (["--num-pages", "9", "--kv-bytes", "1GiB"], "--num-pages and --kv-bytes both say"),
    (["--offload", "always"], "--offload says what goes to host memory: give --host-bytes too"),
    (["--attention", "flash"], "--attention must be one of auto, torch, flashinfer, got 'flash'"),
    (["--attention", "flashinfer"], "pip install 'specpool[flashinfer]'; 'torch' works"),
    (["--graph-sizes", "1;2"], "--graph-sizes must be batch sizes with commas between"),
    (["--graph-sizes", "1,2"], "--graph-sizes [1, 2] need CUDA graphs: give --device cuda"),
    (["--headroom", "-1"], "--headroom must be an integer in [0, "),
    (["--busy-check", "3"], "--busy-check must be an integer in [0, 2], got 3"),
    (["--on-finding", "quarantine"], "--on-finding says what a busy check does: give --busy-check"),
    (["--max-new-tokens", "0"], "--max-new-tokens must be an integer in [1, "),
    (["--temperature", "nan"], "--temperature must be a number in [0, 10000], got nan"),
    (["--top-k", "5"], "--top-k 5 does nothing at temperature 0"),
    (["--top-p", "0.5"], "--top-p 0.5 does nothing at temperature 0"),
    (["--min-p", "0.5"], "--min-p 0.5 does nothing at temperature 0"),
    (["--repetition-penalty", "0"], "--repetition-penalty must be a number in [0.01, 10], got 0"),
    (["--presence-penalty", "3"], "--presence-penalty must be a number in [-2, 2], got 3"),
    (["--frequency-penalty", "nan"], "--frequency-penalty must be a number in [-2, 2], got nan"),
    (["--logit-bias", "5"], "--logit-bias must be TOKEN:VALUE, such as 257:-5, got '5'"),
    (["--logit-bias", "5:101"], "--logit-bias of token 5 must be a number in [-100, 100], got 101"),
    (["--logit-bias", "5:1", "--logit-bias", "5:2"], "--logit-bias of token 5 is given twice"),
    (["--stop", ""], "--stop must hold strings that are not empty, got ''"),
    (["--regex", "[a-"], "unclosed character class"),
    (["--regex", ""], "structured: the text of a regex is empty"),
    (["--regex", "a", "--json-object"], "--json-object and --regex both say what the text must be"),
    (["--json-schema", "/no/such"], "--json-schema /no/such cannot be read: No such file"),
    (["--json-schema", NO_FORM], "the schema is no JSON: Expecting value at line 1, column 1"),
    (["--grammar", NO_FORM], "structured: "),
    (["--choice", ""], "strings that are not empty"),
    (["--adaptive", "cost", "--shape", "3"], "--adaptive chooses the shape of each round, --shape"),
    (["--adaptive", "/no/such.json"], "/no/such.json"),
    (["--adaptive", "coost"], "coost: cannot be read: No such file or directory: did you mean 'c"),
    (["--attention", "torhc"], "got 'torhc': did you mean 'torch'?"),
    (["--draft", "none", "--shape", "3"], "--shape drafts, but there is no draft model"),
    (["--draft", "none", "--adaptive", "cost"], "--adaptive chooses what to draft: give --draft"),
    (["--draft", "none", "--draft", "ngram"], "--draft: none goes with no other, got none, ngram"),
    (["--draft", "ngram", "--draft", "ngram"], "--draft: 'ngram' is named 2 times"),
    (["--draft", "ngram", "--draft", "/no/such"], "--draft: no model at '/no/such'"),
    (
        ["--draft", "ngram", "--drafter", "suffix"],
        "--drafter: no draft is named 'suffix'; there is 'ngram'",
    ),
    (
        ["--draft", "none", "--drafter", "ngram"],
        "--drafter: no draft is named 'ngram'; there is none",
    ),
    (["--drafter", ""], "--drafter must be a name or None, got ''"),
    (["--draft", "ngram", "--draft", ""], "--draft: the name of a model is empty"),
    (["--draft-sink", "4"], "--draft-sink 4 needs a --draft-window of at least as many tokens"),
    (["--draft-window", "1"], "--draft-window must be an integer in [2, "),
    (["--draft-window", "8", "--placement", "shared"], "--draft-window"),
    (["--draft", "none", "--draft-window", "8"], "--draft-window is of draft KV, and there is no"),
    (["--draft", "ngram", "--draft-window", "8"], "--draft-window is of draft KV, and ngram keeps"),
]
GENERATE = [
    (["--batch", "0"], "--batch must be an integer in [1, 65536], got 0"),
    (["--samples", "0"], "--samples must be an integer in [1, 65536], got 0"),
    (["--worker", "v3"], "Invalid value for '--worker': 'v3' is not one of 'auto', 'v1', 'v2'"),
    (["--worker", "v1", "--overlap-depth", "1"], "it needs --overlap-depth 0, got 1"),
    (["--prompt-ids", "1,x"], "--prompt-ids must be token ids with commas between"),
    (["--prompt-ids", "1,,2"], "--prompt-ids must be token ids with commas between"),
    (["--prompt-ids", ""], "--prompt-ids must be token ids with commas between"),
    (["--prompt-file", ""], "cannot read the prompt file '': Is a directory"),
    (["--prompt-file", "/no/such"], "cannot read the prompt file /no/such"),
    (["--prompt-format", "jsonl"], "--prompt-format jsonl needs a file: give --prompt-file"),
    (
        ["-p", "a", "--prompt-ids", "1,259"],
        "prompt 2 has token id 259 at position 1; the vocabulary is [0, 259)",
    ),
    (["--chat", "-p", "a"], "prompt 1 is a chat, but the tokenizer has no chat template"),
    (["--compare", "--draft", "none"], "--compare compares drafting with plain decoding: give --d"),
    (["--compare", "--shape", "none"], "--compare compares drafting with plain decoding: give a "),
    (["--logprobs", "-1"], "--logprobs must be an integer in [0, "),
    (["--force"], "--force says to write over a file: give --out too"),
    (["--out", "/no/such/x.jsonl"], "cannot write /no/such/x.jsonl: there is no folder /no/such"),
    (["--out", "/"], "cannot write /: it is a folder"),
]
TUNE = [
    (["--candidates", "tree:1"], "--candidates: a shape is"),
    (["--batch", "0"], "--batch must be an integer in [1, 65536], got 0"),
    (["--tokens", "0"], "--tokens must be an integer in [1, 1048576], got 0"),
    (["--repeats", "0"], "--repeats must be an integer in [1, 65536], got 0"),
    (["--policy", "best"], "--policy must be one of"),
    (["--prompt-ids", "300"], "prompt 1 has token id 300 at position 0; the vocabulary is"),
    (["--force"], "--force says to write over a file: give --out too"),
    (["--out", "/no/such/x.json"], "cannot write /no/such/x.json: there is no folder /no/such"),
    (["--out", LONG], "x: File name too long"),
    (["--out", LONG[:250]], "x: File name too long"),  # one is written beside it first
    (["--plot", LONG], "x: File name too long"),
    (["--draft", "none"], "tune needs a draft model: give --draft"),
    (["--draft", "ngram", "--draft", "suffix"], "--draft: one is measured, got 2: ngram, suffix"),
    *(case for case in MODEL if case[0][0] != "--shape"),
]
BENCH_GENERATE = [
    *MODEL,
    (["--repeats", "0"], "--repeats must be an integer in [1, 65536], got 0"),
    (["--tokens", "0"], "--tokens must be an integer in [1, 1048576], got 0"),
    (["--batch", "0"], "--batch must be an integer in [1, 65536], got 0"),
    (["--requests", "-1"], "--requests must be an integer in [0, 1024], got -1"),
    (["--draft", "none"], "bench generate needs a draft model"),
    (["--adaptive", "cost", "--shape", "3"], "--adaptive chooses the shape of each round"),
    (["--plot", "/no/such/x.png"], "there is no folder /no/such"),
    (["--plot", "/"], "cannot write the picture /: it is a folder"),
    (["--plot", LONG], "x: File name too long"),
]
BENCHES = {
    "host": [
        *MODEL,
        (["--repeats", "0"], "--repeats must be"),
        (["--draft", "none", "--shape", "3"], "--shape drafts, but there is no draft model"),
    ],
    "session": [
        *MODEL,
        (["--history", "3"], "--history must be"),
        (["--new", "0"], "--new must be"),
    ],
    "windows": [
        (["--family", "lama"], "--family must be one of mistral"),
        (["--window", "0"], "--window must be"),
    ],
    "reserve": [
        (["--page-size", "0"], "--page-size must be"),
        (["--seed", "1"], "only --trace takes"),
    ],
    "ledger": [(["--batch", "0"], "--batch must be"), (["--layout", "x"], "--layout must be")],
    "scheduler": [(["--shape", "x"], "--shape: a shape is"), (["--depth", "2"], "--depth must be")],
}
NUMBERS = ["--layers", "2", "--kv-heads", "2", "--head-dim", "8", "--max-context-len", "64"]
OTHERS = [
    (["generat"], "No such command 'generat'"),
    (["plan"], "Missing option '--memory'"),
    (
        ["plan", "--memory", "1GiB", *NUMBERS, "--depth", "2"],
        "--depth must be an integer in [0, 1]",
    ),
    (["plan", "--memory", "1MiB", *NUMBERS[:-1], "65536"], "or raise --memory"),
    (["plan", "--memory", "1GiB", *NUMBERS, "--headroom", "-1"], "--headroom must be an integer"),
    (["plan", "--memory", "1GiB", "--target", "/no"], "no model at '/no': there is no such folder"),
    (["plan", "--memory", "1GiB", "--target", "~no-such-user/x"], "no model at '~no-such-user/x'"),
    (["plan", "--memory", "1GiB", "--layout", "x" * 100_000], " characters) ... xxx"),
    (["deploy", "--target", LONG, "--page-size", "0"], "--page-size must be"),
    (["replay", "/no/such"], "/no/such"),
    (["replay", "x", "--at", "1", "--against", "y"], "--against and --at exclude each other"),
    (["replay", "x", "--at", "1", "--quiet"], "--quiet is for a whole log"),
    (["inspect", "x", "--frames", "9"], "--frames needs a page: give --html too"),
    (["inspect", "x", "--html", "y", "--frames", "1"], "--frames must be an integer in [2, "),
    (["serve", "--name", ""], "--name must be one name or several, none of them empty"),
    (["serve", "--name", "a", "--name", "a"], "--name: 'a' is given twice"),
    (["serve", "--max-sessions", "-1"], "--max-sessions must be an integer in [0, 65536], got -1"),
    (["serve", "--max-open-sessions", "-1"], "--max-open-sessions must be an integer in [0, 104"),
    (["serve", "--max-body", "x"], "--max-body must be bytes, such as 80GiB"),
    (["serve", "--request-timeout", "-1"], "--request-timeout must be seconds above 0, got -1.0"),
    (["serve", "--trust-proxy", "x"], "--trust-proxy must be addresses or networks such as"),
    (["serve", "--host", ""], "--host must be an address, got ''"),
    (["serve", "--allow-origin", ""], "or the scheme's own port, got ''"),
    *(
        (["serve", "--allow-host", "a", "--allow-host", name], f"without a port, got {name!r}")
        for name in ("", " ", "a b", "http://a", "a:80", "::1", "a/b")
    ),
    (
        ["serve", "--host", "0.0.0.0", "--allow-host", "a"],
        "--allow-host: names protect a",
    ),
    (["lab", "sim", "--rounds", "5", "--turns", "5"], "--rounds and --turns both say"),
    (["lab", "adaptive", "--rounds", "-1"], "--rounds must be"),
    (["lab", "adaptive", "--rounds", "0", "--repeats", "0"], "there is nothing to measure"),
    (["lab", "adaptive", "--device", "gpu"], "--device must be cpu, cuda or cuda:N"),
    (["lab", "ancestry", "--shape", "3"], "--shape must be a tree, topk above 1, got 3"),
    (["lab", "sim", "--check", "3"], "--check must be an integer in [0, 2], got 3"),
]
TRAIN = [
    (["--data", "missing.txt"], "--data: missing.txt cannot be read: No such file"),
    (["--length", "8"], "--length must be an integer in [16, 1048576], got 8"),
    (["--batch", "0"], "--batch must be an integer in [1, 4096], got 0"),
    (["--unroll", "17"], "--unroll must be an integer in [1, 16], got 17"),
    (["--draft-vocab", "1"], "--draft-vocab must be an integer"),
    (["--minutes", "0"], "--minutes must be a number above 0, got 0.0"),
    (["--epochs", "nan"], "--epochs must be a number above 0, got nan"),
    (["--lr", "2"], "--lr must be a number in (0, 1], got 2.0"),
    (["--held-out", "0.7"], "--held-out must be a number in (0, 0.5], got 0.7"),
    (["--temperature", "-1"], "--temperature must be in [0, 100], got -1.0"),
    (["--new-tokens", "1"], "--new-tokens must be an integer"),
    (["--seed", "-1"], "--seed must be an integer"),
    (["--threads", "0"], "--threads must be an integer"),
    (["--device", "tpu"], "--device must be cpu, cuda or cuda:N"),
    (["--dtype", "int4"], "--dtype must be one of"),
    (["--resume"], "holds no training to resume: leave --resume out"),
    (["--out", "/"], "--out: / is not empty, and holds no training: give a new folder"),
    (["--out", "/no/such/head"], "there is no folder /no/such"),
    (["--out", __file__], "is a file: give a new folder"),
    (["--target", "no/such/target/here"], "no model at 'no/such/target/here'"),
]
_TRAIN = ["train", "--target", "specpool/tiny", "--data", __file__, "--out", "/tmp/no-such-head"]
REFUSED = [
    *((["generate", *args], text) for args, text in [*ENGINE, *GENERATE]),
    *((["chat", *args], text) for args, text in ENGINE[::4]),  # the same options
    *(
        (["chat", *args], text)
        for args, text in [(["--max-sessions", "-1"], "--max-sessions must")]
    ),
    *((["tune", *args], text) for args, text in TUNE),
    *(([*_TRAIN, *args], text) for args, text in TRAIN),
    *((["bench", "generate", *args], text) for args, text in BENCH_GENERATE),
    *((["benches", name, *args], text) for name, cases in BENCHES.items() for args, text in cases),
    *OTHERS,
]


def test_a_refusal_is_one_line_before_any_heavy_import():
    """Torch is not even imported: it may not be installed."""
    for (args, text), (code, out, err, heavy) in zip(
        REFUSED, run_all([args for args, _ in REFUSED], blocked=[]), strict=True
    ):
        assert (code, out) == (2, ""), (args, err)
        assert err.startswith("error: ") and err.count("\n") == 1, (args, err)
        assert text in err, (args, err)
        assert heavy == [], args


@pytest.fixture(scope="module")
def log(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("log") / "short.log"
    ledger = specpool.Ledger(
        [specpool.Group("kv", page_size=4, num_pages=9)],
        [],
        num_rows=1,
        max_context_len=16,
        record=path,
    )
    for _ in range(5):
        ledger.finish(ledger.admit("a tag"))
    ledger.close()
    return path


def test_commands_that_need_no_model_need_no_torch(log, tmp_path):
    plan = ["plan", "--memory", "1GiB", "--json"]
    commands = [
        [*plan, *NUMBERS],
        [*plan, "--target", "specpool/tiny"],
        [*plan, "--target", resolve("specpool/tiny"), "--draft", "specpool/tiny-eagle3"],
        ["replay", str(log)],
        ["inspect", str(log)],
        ["inspect", str(log), "--html", str(tmp_path / "page.html")],
        ["lab", "sim", "--rounds", "50"],
        ["info"],
        ["benches", "reserve", "--json"],
        ["--help"],
        ["generate", "--help"],
    ]
    for args, (code, out, err, heavy) in zip(commands, run_all(commands, HEAVY), strict=True):
        assert (code, heavy) == (0, []), (args, err)
        assert out, args


def test_what_a_plan_lacks_without_transformers_is_said(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    plan = ["plan", "--memory", "1GiB", "--target"]
    by_folder, by_name = run_all([[*plan, str(tmp_path)], [*plan, "owner/model"]], HEAVY)
    assert (
        by_folder[0] == 2
        and "takes transformers to read: pip install 'specpool[hf]', or give" in (by_folder[2])
    )
    assert by_name[0] == 2 and "a hub name needs huggingface_hub: pip install" in by_name[2]


def test_the_engines_import_leaves_transformers_alone():
    code = (
        "import sys\nfrom specpool import ConfigError, Engine\n"
        "from specpool.engine.models import TargetModel\n"
        "for wrong in (None, 5):\n"
        "    try:\n"
        "        Engine.from_pretrained(wrong)\n"
        "    except ConfigError as error:\n"
        "        assert 'the target is a folder' in str(error)\n"
        "print([name for name in ('transformers', 'tokenizers') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def commands_of(group, name: str):
    """Every command below the group, with its name."""
    yield name, group
    for each, command in getattr(group, "commands", {}).items():
        yield from commands_of(command, f"{name} {each}")


def test_a_terminal_tells_of_the_seconds_that_imports_take(monkeypatch):
    """Nothing else tells of them: so no line where errors go to a file."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for errors, says in ((Terminal(), "importing torch and transformers\n"), (io.StringIO(), "")):
        monkeypatch.setattr(sys, "stderr", errors)
        start_torch(torch.get_num_threads())
        assert errors.getvalue() == says


def test_every_option_has_help(capsys):
    """No word of the help is cut, however narrow the terminal."""
    import typer

    ours, benches, lab = map(typer.main.get_command, (app, benches_app, lab_app))
    groups = [(ours, ""), (benches, "benches"), (lab, "lab")]
    num_options = 0
    for name, command in (pair for group in groups for pair in commands_of(*group)):
        _, out, _ = call(capsys, *name.split(), "--help")
        for param in command.params:
            if param.name == "help":
                continue
            text = getattr(param, "help", None)
            assert text, f"{name} {param.name}"
            # What stands in brackets may be put together with a range or a default.
            words = "".join(text.split("[default")[0].split())
            assert words in "".join(out.split()), f"{name} {param.name}"
            num_options += 1
    assert num_options > 150


def test_the_help_of_generate_begins_with_what_a_newcomer_needs(capsys):
    _, out, _ = call(capsys, "generate", "--help")
    sections = dict(re.findall(r"^(\w[\w ]+):\n((?:  .*\n?)+)", out, re.MULTILINE))
    assert [*sections] == [
        *("Options", "Prompts", "Sampling", "Form of the text", "Model", "Drafts", "Memory"),
        *("Scheduling", "Advanced"),
    ]
    named = {
        title: re.findall(r"^  (?:-\w, )?--([\w-]+)", text, re.M)
        for title, text in sections.items()
    }
    assert named["Options"] == [
        *("target", "draft", "prompt", "prompt-file", "device", "temperature", "max-new-tokens"),
        *("out", "force", "compare", "json", "help"),
    ]
    assert named["Advanced"][:3] == ["placement", "policy", "layout"]


def test_the_list_of_commands_is_not_cut(capsys, monkeypatch):
    """Each command's first sentence is complete, also on a narrow terminal."""
    import typer

    for name, command in commands_of(typer.main.get_command(app), ""):
        if not getattr(command, "commands", {}):
            continue
        for width in ("60", "80"):
            monkeypatch.setenv("COLUMNS", width)
            code, out, _ = call(capsys, *name.split(), "--help")
            assert code == 0
            words = "".join(out.split())
            for each, listed in command.commands.items():
                first = listed.help.split("\n")[0].split(". ")[0].rstrip(".")
                assert "".join(first.split()) in words, f"{name} {each} at {width}: {first}"


def test_a_group_of_options_stands_where_its_parameter_is():
    seen = []

    def command(*, first: int = 1, place: PlaceOptions, last: str = "x") -> None:
        seen.append((first, place, last))

    names = ["first", "dtype", "device", "threads", "trust_remote_code", "last"]
    assert [*inspect.signature(grouped(command)).parameters] == names
    grouped(command)(first=2, dtype=None, device="cuda", threads=3, trust_remote_code=True, last="")
    place = PlaceOptions(device="cuda", threads=3, trust_remote_code=True)
    assert seen == [(2, place, "")]


def test_no_command_prints_the_help():
    for code, out, err, _ in run_all([[], ["bench"], ["benches"], ["lab"]], []):
        assert (code, out) == (2, "") and err.startswith("Usage: ")


def test_messages_name_options():
    options = {"page_size": "--page-size", "shape": "--shape", "max_batch": "--batch"}
    for text, named in {
        "page_size must be 3": "--page-size must be 3",
        "x: page_size 3, max_batch 4": "x: --page-size 3, --batch 4",
        "shape must be a shape": "--shape must be a shape",
        "shape of a batch": "shape of a batch",
        "/tmp/page_size/x 'max_batch'": "/tmp/page_size/x 'max_batch'",
        "prompt 0 is empty": "prompt 1 is empty",
        "message 0 of prompt 9 must be": "message 0 of prompt 10 must be",
        "the chat template refuses prompt 0: x": "the chat template refuses prompt 1: x",
        "x: prompt 0 is": "x: prompt 0 is",
    }.items():
        assert with_option_names(text, options) == named


def test_prompts_that_a_folder_says_nothing_against_are_left_to_the_engine(tmp_path):
    """A config of parts, a template in a file of its own, and a model that is on the hub."""
    chat = [{"role": "user", "content": "a"}]
    config, texts = tmp_path / "config.json", tmp_path / "tokenizer_config.json"
    for held in ('{"text_config": {"vocab_size": 5}}', '{"vocab_size": 5}'):
        config.write_text(held)
        check_prompts(str(tmp_path), ["a", [0, 4]])
        with pytest.raises(ConfigError, match=r"prompt 1 has token id 5 at .* is \[0, 5\)"):
            check_prompts(str(tmp_path), ["a", [0, 5]])
    for held in ("{}", '{"vocab_size": "5"}', '{"text_config": 5}'):
        config.write_text(held)
        check_prompts(str(tmp_path), [[0, 5]])
    check_prompts(str(tmp_path), [chat])  # no tokenizer_config.json: its class may have one
    texts.write_text('{"chat_template": "{{ messages }}"}')
    check_prompts(str(tmp_path), [chat])
    texts.write_text("{}")
    with pytest.raises(ConfigError, match="prompt 0 is a chat, but the tokenizer has no chat tem"):
        check_prompts(str(tmp_path), [chat])
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    check_prompts(str(tmp_path), [chat])
    check_prompts("owner/name", [[1 << 40], chat])


@pytest.mark.parametrize(
    ("args", "warning"),
    [
        (["--seed", "3"], "--seed changes nothing at --temperature 0"),
        (["--samples", "2"], "--samples 2 are all the same at --temperature 0"),
        (["--layout", "holey"], "--layout holey changes nothing without a tree"),
        (
            ["--draft", "none", "--placement", "shared"],
            "--placement shared changes nothing without",
        ),
        (
            ["--draft", "ngram", "--placement", "shared"],
            "--placement shared changes nothing without",
        ),
    ],
)
def test_what_changes_nothing_is_said(capsys, args, warning):
    code, out, err = call(capsys, "generate", "--json", "-n", "4", "-p", "a", *args)
    assert code == 0, err
    assert json.loads(out)["outputs"]
    assert f"warning: {warning}" in err


def test_memory_is_given_in_bytes(capsys):
    how = ("generate", "--json", "-n", "4", "-p", "a", "--kv-bytes", "1MiB", "--batch", "2")
    code, out, err = call(capsys, *how, "--host-bytes", "1MiB", "--max-context-len", "256")
    assert code == 0, err
    pages = {pool["group"]: pool["pages"] for pool in json.loads(out)["pools"]}
    assert pages["target"] == (1 << 20) // (2 * (16384 + 4096)) - 1  # page 0 is beside them


def test_prompts_of_every_form(capsys, tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [
        "two\nlines",
        [97, 98],
        {"prompt": "c\u2028d"},
        {"prompt": [99]},
        {"id": 3, "prompt": "e"},
    ]
    path.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    how = ("generate", "--json", "-n", "3", "--prompt-file", str(path), "--prompt-format", "jsonl")
    code, out, err = call(capsys, *how, "-p", "x", "--prompt-ids", "104, 105")
    assert code == 0, err
    prompts = [bytes(o["prompt_ids"]).decode() for o in json.loads(out)["outputs"]]
    assert prompts == ["x", "hi", "two\nlines", "ab", "c\u2028d", "c", "e"]
    code, out, err = call(capsys, *how[:-1], "whole")
    assert bytes(json.loads(out)["outputs"][0]["prompt_ids"]).decode() == path.read_text()
    code, out, err = call(capsys, "generate", "-n", "3", "--prompt-ids", "104,105")
    assert code == 0 and "[104, 105]" in out


def test_messages_of_a_file_are_a_chat():
    chat = [{"role": "user", "content": "hi"}]
    path = Path("chat.jsonl")
    given = Given([], [], str(path), "jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "read_text", lambda *args, **options: json.dumps({"messages": chat}))
        assert read_prompts(given, "specpool/tiny", 1) == [chat]


def test_standard_input_that_is_empty_or_closed_is_refused(monkeypatch):
    given = Given([], [], "-", None)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    with pytest.raises(ConfigError, match="standard input holds no prompt"):
        read_prompts(given, "specpool/tiny", 1)
    monkeypatch.setattr("sys.stdin", None)  # what Python gives a process without descriptor 0
    with pytest.raises(ConfigError, match="standard input is closed"):
        read_prompts(given, "specpool/tiny", 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"prompt": "a"', "line 1 is no JSON"),
        ('"a"\n3', "line 2 must be a text, a list of token ids, or an object with 'prompt'"),
        ("[]", "line 1 must be a text"),
        ("[1, true]", "line 1 must be a text"),
        ('{"prompt": "a", "messages": []}', "line 1 must be a text"),
        ("[" * 100_000, "line 1 is no JSON"),
        (" \n", "holds no prompt"),
    ],
)
def test_a_line_that_is_no_prompt_is_refused_with_its_number(tmp_path, text, says):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_prompts(Given([], [], str(path), "jsonl"), "specpool/tiny", 1)
