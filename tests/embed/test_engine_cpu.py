"""vLLM's whole engine on a CPU, with the plug-in by its entry point: `make engine-cpu` installs it.

Laws: at each level the texts are those of this project's engine, cold, on hits, beside aborted
requests and with too few blocks; no block is held at the end; a planted double free is reported.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from benches.peers import model_folder, model_sizes
from benches.vllm_engine import (
    LEVELS,
    MODES,
    faults_of,
    job_of,
    own_texts,
    prompts_of,
    python_of_engine,
    run_engine,
    toy_head,
)
from specpool.cli.doctor import doctor
from specpool.errors import ConfigError
from specpool.record import blocks as block_log

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def tiny():
    """The target's folder, its head's, and the texts that are to come."""
    try:
        python_of_engine()
    except ConfigError as error:
        pytest.skip(str(error))
    with ExitStack() as stack:
        model = model_folder("tiny", stack)
        head = stack.enter_context(toy_head())
        yield model, head, own_texts(model, prompts_of(model_sizes(model)[0]))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_vllms_engine_keeps_the_laws(
    mode: str,
    level: str,
    tiny: tuple[Path, Path, list[list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, head, expected = tiny
    answer = run_engine(job_of(model, mode, head, level), level, tmp_path)
    assert faults_of(answer, expected, level) == []
    if level == "off":
        assert list(tmp_path.iterdir()) == []
        return
    # An operator reads it.
    monkeypatch.setenv("SPECPOOL_STATUS", str(tmp_path))
    assert not doctor("vllm", level=None, json=True)
    processes = json.loads(capsys.readouterr().out)["processes"]
    (line,) = [line for process in processes for line in process["latest"]]
    assert line["owner"] == line["request"] != ""
    assert line["caller"].startswith("vllm/v1/core/"), line
    block_log.show(Path(line["report"]), at=None)
    shown = capsys.readouterr().out
    assert f"owned by request {line['owner']}" in shown
    assert line["caller"] in shown
