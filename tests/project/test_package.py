"""What is published is whole: the sdist, a wheel where `make build` has made one, the workflows.

Needs neither torch nor an installed specpool: the release workflow runs it beside a new wheel.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from paths import ROOT

WHEELS = sorted((ROOT / "dist").glob("*.whl"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ASSETS = ROOT / "python" / "specpool" / "engine" / "assets"
#: Bytes. The toy pair's weights are 2.5 MB, the extension is 1.5 MB.
MOST_BYTES = 6_000_000


def package_files() -> set[str]:
    """What belongs to the package, as `specpool/..`."""
    folder = ROOT / "python"
    suffixes = {".py", ".pyi", ".json", ".safetensors", ".css", ".html", ".js"}
    files = {
        path for path in folder.rglob("*") if path.suffix in suffixes or path.name == "py.typed"
    }
    return {str(path.relative_to(folder)) for path in files if "__pycache__" not in path.parts}


def check_metadata(message: Message) -> None:
    assert message["Name"] == "specpool"
    assert message["License-Expression"] == "Apache-2.0" and message["License-File"] == "LICENSE"
    assert message["Author"] and "speculative decoding" in message["Keywords"]
    assert message["Requires-Python"] == ">=3.10"
    urls = dict(url.split(", ", 1) for url in message.get_all("Project-URL", []))
    assert set(urls) == {"Repository", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(urls["Repository"]) for url in urls.values())
    needs = message.get_all("Requires-Dist", [])
    assert [need for need in needs if "extra ==" not in need] == ["numpy>=1.24"]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> tarfile.TarFile:
    if shutil.which("cargo") is None or find_spec("maturin") is None:
        pytest.skip("needs cargo and maturin")
    folder = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "-m", "maturin", "sdist", "--out", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.iterdir()
    assert path.stat().st_size < MOST_BYTES
    return tarfile.open(path)


def test_the_sdist_has_all_that_a_build_needs(sdist):
    names = {name.partition("/")[2] for name in sdist.getnames()}
    kernels = {f"cuda/{path.name}" for path in (ROOT / "cuda").iterdir()}
    crates = {
        str(path.relative_to(ROOT))
        for pattern in ("rust/*/Cargo.toml", "rust/*/build.rs", "rust/*/src/**/*.rs")
        for path in ROOT.glob(pattern)
        # The proof, the C interface and the benchmark are no part of what is shipped.
        if not {"specpool-check", "specpool-capi", "specpool-bench"} & set(path.parts)
    }
    files = {"Cargo.toml", "Cargo.lock", "pyproject.toml", "README.md", "LICENSE", "PKG-INFO"}
    missing = (files | kernels | crates | {f"python/{name}" for name in package_files()}) - names
    assert not missing
    strangers = {
        name
        for name in names
        if re.search(
            r"\.so$|__pycache__|^target/|\.env|^\.|^lab/|specpool-(check|capi|bench)/", name
        )
    }
    assert not strangers


def test_the_sdists_metadata(sdist):
    (member,) = [member for member in sdist.getmembers() if member.name.endswith("PKG-INFO")]
    file = sdist.extractfile(member)
    assert file is not None
    check_metadata(Parser().parsestr(file.read().decode()))


@pytest.fixture(params=WHEELS or [None], ids=lambda path: path.name if path else "none")
def wheel(request: pytest.FixtureRequest) -> Path:
    if request.param is None:
        pytest.skip("no wheel in dist/: `make build` makes one")
    return request.param


def test_the_wheel_runs_on_old_systems_and_every_python(wheel):
    """Python 3.10 and newer by the stable ABI, glibc 2.17 and newer; maturin audits the symbols."""
    name, _, python, abi, platforms = wheel.name.removesuffix(".whl").split("-")
    assert (name, python, abi) == ("specpool", "cp310", "abi3")
    processors = {platform.removeprefix("manylinux_2_17_") for platform in platforms.split(".")}
    processors -= {
        f"manylinux2014_{processor}" for processor in processors
    }  # the same by its old name
    assert len(processors) == 1 and processors <= {"x86_64", "aarch64"}, platforms


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    assert wheel.stat().st_size < MOST_BYTES
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        extension = archive.read("specpool/_core.abi3.so")
    package = {name for name in names if not name.startswith("specpool-")}
    assert package == package_files() | {"specpool/_core.abi3.so"}
    beside = {name.partition("/")[2] for name in names - package}
    assert {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"} <= beside
    for path in (ROOT / "cuda").glob("*.cu*"):  # the kernels lie inside the extension
        assert path.read_bytes() in extension, path.name


def test_the_wheels_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        check_metadata(Parser().parsestr(archive.read(name).decode()))


# --- Workflows ---


def jobs_of(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_what_a_workflow_calls_exists(path):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    jobs = jobs_of(path)
    for job in jobs.values():
        assert job["timeout-minutes"] <= 120
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= set(jobs)
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            if "uses" in step:
                assert re.fullmatch(r"[\w-]+/[\w-]+@[\w./-]+", step["uses"]), step
                continue
            for target in re.findall(r"\bmake ([a-z-]+)", step["run"]):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
            for script in re.findall(r"(?:^|\s)(\.\w+/\w+|tests/[\w.]+)", step["run"]):
                if not script.startswith(".venv/"):  # `make install` builds that
                    assert (ROOT / script).exists(), script


def test_a_release_is_built_for_both_processors_attested_and_published_without_a_token():
    jobs = jobs_of(ROOT / ".github" / "workflows" / "release.yml")
    targets = {entry["target"] for entry in jobs["wheels"]["strategy"]["matrix"]["include"]}
    assert targets == {"x86_64", "aarch64"}
    for name in ("sdist", "wheels"):
        steps = [step.get("run", step.get("uses")) for step in jobs[name]["steps"]]
        assert steps.index(".github/name_repository") < steps.index("PyO3/maturin-action@v1")
    publish = jobs["publish"]
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert publish["permissions"] == {
        "contents": "read",
        "id-token": "write",
        "attestations": "write",
    }
    used = [step["uses"].partition("@")[0] for step in publish["steps"] if "uses" in step]
    assert used[-2:] == ["actions/attest-build-provenance", "pypa/gh-action-pypi-publish"]


def test_the_release_names_its_repository(tmp_path):
    """Law: a URL with the placeholder stands only in files of which the release fills it in."""
    texts = [
        *ROOT.glob("[a-zA-Z]*.*"),
        ROOT / "deploy",
        ROOT / "docs",
        ROOT / "python",
        ROOT / "rust",
    ]
    listed = ["grep", "-rlI", "--exclude-dir=__pycache__", "github.com/OWNER", *map(str, texts)]
    paths = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    names = [str(Path(path).relative_to(ROOT)) for path in paths.splitlines()]
    assert "pyproject.toml" in names
    for name in [".github/name_repository", *names]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    environment = {
        "GITHUB_SERVER_URL": "https://git.example",
        "GITHUB_REPOSITORY": "someone/pool",
        "PATH": "/usr/bin:/bin",
    }
    command = [str(tmp_path / ".github" / "name_repository")]
    assert subprocess.run(command, env=environment, capture_output=True).returncode == 0
    for name in names:
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert "https://git.example/someone/pool" in text and "OWNER/" not in text, name
