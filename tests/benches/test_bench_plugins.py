"""The benches of the plug-ins measure what the tables of their pages show."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benches.engines import ENGINES
from figure_tables import Record

QUIET = {"OMP_NUM_THREADS": "1", "SPECPOOL_STATUS": "off"}


@pytest.mark.full
@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_calls_of_the_record_are_measured(engine: str) -> None:
    if not (ENGINES / engine / engine).is_dir():
        pytest.skip("make engines")
    command = [sys.executable, "-m", "benches", engine, "--repeats", "1", "--json"]
    out = subprocess.run(command, env=os.environ | QUIET, stdout=subprocess.PIPE, check=True).stdout
    names = [result["name"] for result in json.loads(out)["results"]]
    assert names == [result["name"] for result in Record(f"cpu-{engine}").results]
