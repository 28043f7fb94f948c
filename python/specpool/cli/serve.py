"""`specpool serve`: checks the options, then runs the server."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpool.cli.options import checks
from specpool.cli.options.groups import ModelOptions, PlaceOptions, loading_of, text_of
from specpool.engine.config import SERVED_BATCH
from specpool.engine.models.files.names import find_model
from specpool.engine.ranks.environment import world_of_environment
from specpool.engine.shapes.config import POLICIES
from specpool.errors import ConfigError

if TYPE_CHECKING:
    from specpool.serve.config import Launch

#: The environment's variable with an API key.
KEY_VARIABLE = "SPECPOOL_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeJob:
    """The arguments of the command line."""

    models: ModelOptions
    place: PlaceOptions
    chat_template: Path | None
    api_key_file: Path | None
    options: dict[str, Any]  # of the engine
    serve: dict[str, Any]  # of the server


def run(job: ServeJob) -> None:
    """Serve until a signal.

    Raises:
        ConfigError: an option cannot work.
    """
    launch = prepare(job)
    # Lines of libraries too, on standard error.
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    for name in ("httpx", "httpx2"):  # of the hub's client
        logging.getLogger(name).setLevel(logging.WARNING)
    if world_of_environment()[0]:
        checks.follow(launch.loading, launch.threads)
        return
    from specpool.serve.server import serve

    serve(
        launch.config,
        launch.loading,
        threads=launch.threads,
        chat_template=launch.chat_template,
        tell=_tell,
    )


def prepare(job: ServeJob, *, has_files: bool = True) -> Launch:
    """Check the options, and return what the server is started with.

    Args:
        job: the arguments of the command line.
        has_files: the checkpoints and the files of options are here; without, they are not read.

    Raises:
        ConfigError: an option cannot work, or a package is missing.
    """
    missing = [name for name in ("fastapi", "uvicorn", "httptools") if not _is_installed(name)]
    if missing and has_files:
        raise ConfigError(f"serve needs {', '.join(missing)}: pip install 'specpool[serve]'")
    checks.check_place(
        device=job.place.device,
        threads=job.place.threads,
        dtype=job.place.dtype,
        graph_sizes=job.options.get("graph_sizes"),
    )
    target, drafts = job.models.target, job.models.drafts()
    if has_files:
        checks.check_models(target, drafts)
    from specpool.serve.config import Launch, ServeConfig

    config = ServeConfig(
        api_keys=_keys(job.api_key_file) if has_files else (),
        **{"names": (name_of(target) if has_files else target,)} | job.serve,
    )
    options = dict(job.options)
    if not has_files and options.get("adaptive") not in (None, *POLICIES):
        del options["adaptive"]  # a file
    checks.check_engine_config(drafts, options)
    batch = {"max_batch": SERVED_BATCH} if job.place.device == "cpu" else {}
    template = None
    if job.chat_template is not None and has_files:
        template = text_of(job.chat_template, "chat_template")
    return Launch(
        config=config,
        loading=loading_of(job.models, job.place, batch | job.options),
        threads=job.place.threads,
        chat_template=template,
    )


def name_of(target: str) -> str:
    """Return the model's name for clients: a folder's own name, without its path."""
    if target.startswith("specpool/"):
        return target
    folder = find_model(target)
    return target if folder is None else folder.resolve().name


def _keys(path: Path | None) -> tuple[str, ...]:
    """Return the API keys of the file, a line each, and that of the environment."""
    lines = [] if path is None else text_of(path, "api_key_file").splitlines()
    keys = [line.strip() for line in lines if line.strip()]
    if path is not None and not keys:
        raise ConfigError(f"api_key_file {path} has no key")
    keys += [key] if (key := os.environ.get(KEY_VARIABLE, "")) else []
    return tuple(keys)


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _tell(line: str) -> None:
    print(line, flush=True)
