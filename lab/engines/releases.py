"""`python -m lab.engines.releases NAME...`: unpacks releases of engines, side by side.

A name is `vllm-0.21.0` or `sglang-0.5.23`. Each becomes `.engines/releases/NAME/` with the engine's
package in it: of vLLM's source package the Python and the tests, of SGLang's wheel all but what is
compiled. Their dependencies are those of `make engines`, the same for every release.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
RELEASES = ROOT / ".engines" / "releases"
#: What vLLM's setup.py asks of torch before it tells its version.
TORCH = """
import sys, types
version = types.SimpleNamespace(cuda=None, hip=None, xpu=None)
__version__ = "2.10.0"
"""
EXTENSION = "CUDA_HOME = ROCM_HOME = None\n"
SETUP = ("setuptools", "setuptools-scm", "setuptools-rust", "packaging", "wheel", "jinja2")


def release_path(name: str) -> Path:
    """Return the folder that goes on Python's path for a release.

    Raises:
        FileNotFoundError: it is not unpacked.
    """
    engine = name.partition("-")[0]
    folder = RELEASES / name
    if not (folder / engine).is_dir():
        raise FileNotFoundError(f"{name} is not unpacked: make lab-engines RELEASES={name}")
    return folder


def fetch(names: Iterable[str]) -> None:
    """Download and unpack the releases that are not there yet."""
    RELEASES.mkdir(parents=True, exist_ok=True)
    for name in names:
        engine, _, version = name.partition("-")
        if engine not in ("vllm", "sglang") or not version:
            raise SystemExit(f"a release is named like vllm-0.21.0 or sglang-0.5.23, got {name!r}")
        if (RELEASES / name / engine).is_dir():
            continue
        with tempfile.TemporaryDirectory(dir=RELEASES) as folder:
            (_vllm if engine == "vllm" else _sglang)(version, Path(folder))
            (Path(folder) / "kept").rename(RELEASES / name)
        print(f"{name} is in {RELEASES / name}", flush=True)


def _pip(*arguments: str, **settings: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    subprocess.run(command, env=os.environ | settings, check=True)


def _vllm(version: str, folder: Path) -> None:
    """A wheel of vLLM has some 300 MB, its source package 9 to 47: pip asks its setup.py first."""
    setup = RELEASES / ".setup"
    if not setup.is_dir():
        _pip("install", "--target", str(folder / "setup"), *SETUP)
        utils = folder / "setup" / "torch" / "utils"
        utils.mkdir(parents=True)
        (utils.parent / "__init__.py").write_text(TORCH)
        (utils / "__init__.py").touch()
        (utils / "cpp_extension.py").write_text(EXTENSION)
        (folder / "setup").rename(setup)
    _pip(
        *("download", "--no-deps", "--no-build-isolation", "--no-binary", "vllm"),
        *("--dest", str(folder), f"vllm=={version}"),
        PYTHONPATH=str(setup),
        VLLM_TARGET_DEVICE="empty",
        VLLM_VERSION_OVERRIDE=version,
        SETUPTOOLS_SCM_PRETEND_VERSION=version,
    )
    (archive,) = folder.glob("vllm-*.tar.gz")
    with tarfile.open(archive) as packed:
        top = packed.getnames()[0].partition("/")[0]
        inside = (f"{top}/vllm/", f"{top}/tests/v1/")
        kept = [part for part in packed if part.isfile() and part.name.startswith(inside)]
        packed.extractall(folder, kept, filter="data")
    (folder / "kept" / "source").mkdir(parents=True)
    (folder / top / "vllm").rename(folder / "kept" / "vllm")
    (folder / top / "tests").rename(folder / "kept" / "source" / "tests")


def _sglang(version: str, folder: Path) -> None:
    """Its wheel is small enough; some modules look for the sources of kernels when imported."""
    _pip("download", "--no-deps", "--dest", str(folder), f"sglang=={version}")
    (archive,) = folder.glob("sglang-*.whl")
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(folder / "wheel")
    (folder / "kept").mkdir()
    shutil.move(folder / "wheel" / "sglang", folder / "kept" / "sglang")
    for compiled in (folder / "kept").rglob("*.so"):
        compiled.unlink()


if __name__ == "__main__":
    fetch(sys.argv[1:])
