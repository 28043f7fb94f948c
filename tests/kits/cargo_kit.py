"""What cargo builds of the tree, for tests in Python."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from paths import ROOT

#: The packages of `make test-rust`: another selection has other features, and is built anew.
PACKAGES = ("-p", "specpool-core", "-p", "specpool-capi")


def build(*targets: str) -> Path:
    """Build these targets as `make test-rust` does; returns the folder of what is built."""
    command = ["cargo", "build", "--quiet", "--locked", *PACKAGES, *targets]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "debug"
