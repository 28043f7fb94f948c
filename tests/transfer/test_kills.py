"""A law of processes that are killed in the middle of a row: nothing of it is left anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("run_kills.py")


@pytest.mark.timeout(1200)
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memfd is Linux's")
@pytest.mark.parametrize("kills", [16, pytest.param(1000, marks=pytest.mark.full)])
def test_a_killed_process_leaves_no_row_no_page_and_no_memory(kills):
    ran = subprocess.run(
        [sys.executable, SCRIPT, "--kills", str(kills)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "nothing is left" in ran.stdout
    ends = [line for line in ran.stdout.splitlines() if "killed" in line and "left" not in line]
    assert sum(int(line.split()[0]) for line in ends) == kills
