"""`specpool serve`: checks the options, then runs the server."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpool.cli.generate.generate import draft_of
from specpool.cli.options import checks
from specpool.cli.options.shapes import shape_of
from specpool.errors import ConfigError
from specpool.models.files.names import find_model
from specpool.ranks.environment import world_of_environment

#: The environment's variable with an API key.
KEY_VARIABLE = "SPECPOOL_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The arguments of the command line."""

    target: str
    draft: str | None
    shape: str | None
    dtype: str | None
    device: str
    threads: int
    trust_remote_code: bool
    chat_template: Path | None
    api_key_file: Path | None
    names: list[str]
    options: dict[str, Any]  # of the engine
    serve: dict[str, Any]  # of the server


def run(job: Job) -> None:
    """Serve until a signal.

    Raises:
        ConfigError: an option cannot work.
    """
    missing = [name for name in ("fastapi", "uvicorn", "httptools") if not _is_installed(name)]
    if missing:
        raise ConfigError(f"serve needs {', '.join(missing)}: pip install 'specpool[serve]'")
    checks.check_place(
        device=job.device,
        threads=job.threads,
        dtype=job.dtype,
        graph_sizes=job.options.get("graph_sizes"),
    )
    shape, draft = shape_of(job.shape), draft_of(job.target, job.draft)
    checks.check_models(job.target, draft)
    from specpool.serve.config import ServeConfig

    config = ServeConfig(
        names=tuple(job.names) or (name_of(job.target),),
        api_keys=_keys(job.api_key_file),
        **job.serve,
    )
    checks.check_engine_config(shape, draft, job.options)
    template = None if job.chat_template is None else _read(job.chat_template, "chat_template")
    # Lines of libraries too, on standard error.
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for name in ("httpx", "httpx2"):  # of the hub's client
        logging.getLogger(name).setLevel(logging.WARNING)
    loading = {
        "target": job.target,
        "draft": draft,
        "dtype": job.dtype,
        "device": job.device,
        "shape": shape,
        "trust_remote_code": job.trust_remote_code,
        **job.options,
    }
    if world_of_environment()[0]:
        checks.follow(loading, job.threads)
        return
    from specpool.serve.server import serve

    serve(config, loading, threads=job.threads, chat_template=template, tell=_tell)


def name_of(target: str) -> str:
    """Return the model's name for clients: a folder's own name, without its path."""
    if target.startswith("specpool/"):
        return target
    folder = find_model(target)
    return target if folder is None else folder.resolve().name


def _keys(path: Path | None) -> tuple[str, ...]:
    """Return the API keys of the file, a line each, and that of the environment."""
    keys = [] if path is None else _read(path, "api_key_file").split()
    if path is not None and not keys:
        raise ConfigError(f"api_key_file {path} has no key")
    keys += [key] if (key := os.environ.get(KEY_VARIABLE, "")) else []
    return tuple(keys)


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"{option} {path} cannot be read: {why}") from None


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _tell(line: str) -> None:
    print(line, flush=True)
