"""`specpool deploy`: checks the options, then prints or applies Ray Serve's config."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpool.checks import shown
from specpool.cli.options.checks import warn
from specpool.cli.options.names import with_option_names
from specpool.cli.serve import ServeJob, prepare
from specpool.engine.shapes.config import POLICIES
from specpool.errors import ConfigError

if TYPE_CHECKING:
    from specpool.serve.config import Launch


@dataclass(frozen=True, slots=True, kw_only=True)
class DeployJob:
    """The arguments of the command line."""

    replicas: str
    app: str
    gpus: float
    cpus: float
    stuck_timeout: float
    ranks: int
    apply: bool
    address: str
    wait: float
    words: list[str]  # the options of `specpool serve`


def run(job: DeployJob) -> None:
    """Print the config, or apply it and wait until the replicas run.

    Raises:
        ConfigError: an option cannot work, or there is no cluster.
    """
    from specpool.serve.replicas.cluster import Cluster
    from specpool.serve.replicas.manifest import ReplicaConfig, manifest

    min_replicas, max_replicas = _range_of(job.replicas)
    config = ReplicaConfig(
        app=job.app,
        min_replicas=min_replicas,
        max_replicas=max_replicas,
        gpus=job.gpus,
        cpus=job.cpus,
        stuck_timeout=job.stuck_timeout,
        ranks=job.ranks,
    )
    if not 0 <= job.wait < 1e9:
        raise ConfigError(f"wait must be seconds from 0 on, got {job.wait!r}")
    launch = launch_of(job.words, has_files=False)
    content = manifest(config, launch, job.words)
    if not launch.config.is_loopback and not any("--api-key-file" in word for word in job.words):
        warn(
            f"whoever reaches {launch.config.host}:{launch.config.port} can use it: give "
            "--api-key-file, or SPECPOOL_API_KEY to the replicas"
        )
    if not job.apply:
        print(_yaml(content), end="")
        return
    cluster = Cluster(job.address)
    cluster.apply(content)
    if job.wait:
        cluster.wait(job.app, job.wait, lambda line: print(line, file=sys.stderr, flush=True))


def application(args: dict[str, Any]) -> Any:
    """Return Ray Serve's application of `args` in a config; Serve calls it on the cluster.

    Raises:
        ConfigError: an option cannot work.
    """
    from specpool.serve.replicas.manifest import args_of
    from specpool.serve.replicas.replica import application as of_words

    words, seconds, ranks = args_of(args)
    launch_of(words, has_files=False)  # refuse a wrong word here, before any replica starts
    return of_words(_Preparing(seconds, ranks), words)


@dataclass(frozen=True, slots=True)
class _Preparing:
    """Prepares the launch of a replica on its node; it is pickled."""

    stuck_timeout: float
    ranks: int

    def __call__(self, words: list[str]) -> Launch:
        launch = launch_of(words, has_files=True)
        return replace(launch, stuck_timeout=self.stuck_timeout, ranks=self.ranks)


def launch_of(words: Sequence[str], *, has_files: bool) -> Launch:
    """Parse and check the options of `specpool serve`.

    Args:
        words: the options.
        has_files: this is a replica's node, with its files.

    Raises:
        ConfigError: one of them is wrong.
    """
    import typer

    from specpool.cli.engine_commands import serving

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command("serve", add_help_option=False)(serving)
    command: Any = typer.main.get_command(app)
    usage_error: type[Exception] = typer.BadParameter.__mro__[1]
    try:
        job: ServeJob = command.main(list(words), standalone_mode=False)
        if not has_files:
            _check_paths(job)
        return prepare(job, has_files=has_files)
    except usage_error as error:
        text = error.format_message()  # type: ignore[attr-defined]
        raise ConfigError(f"{' '.join(text.split())} (an option of specpool serve)") from None
    except ConfigError as error:
        options = {param.name: max(param.opts, key=len) for param in command.params}
        raise ConfigError(with_option_names(str(error), options)) from None


def _range_of(text: str) -> tuple[int, int]:
    """Parse `--replicas`: a number, or the fewest and the most."""
    match = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text, re.ASCII)
    if match is None:
        raise ConfigError(f"replicas must be a number, or two such as 2:8, got {shown(text)}")
    min_replicas, max_replicas = int(match[1]), int(match[2] or match[1])
    if not 1 <= min_replicas <= max_replicas:
        raise ConfigError(f"replicas must be from 1 on, the fewer first, got {shown(text)}")
    return min_replicas, max_replicas


def _check_paths(job: ServeJob) -> None:
    """Refuse relative paths: the replicas have another working directory."""
    adaptive = job.options.get("adaptive")
    models = [("target", job.models.target), *(("draft", name) for name in job.models.draft or ())]
    # A model that does not exist here is a name on the hub.
    paths: list[tuple[str, Any]] = [model for model in models if os.path.exists(model[1])]
    paths += [("chat_template", job.chat_template), ("api_key_file", job.api_key_file)]
    paths += [("adaptive", adaptive)] if adaptive not in POLICIES else []
    for name, path in paths:
        if path is not None and not Path(path).is_absolute():
            raise ConfigError(
                f"--{name.replace('_', '-')} must be an absolute path, the same on every node, got "
                f"{shown(str(path))}"
            )


def _yaml(config: dict[str, Any]) -> str:
    try:
        import yaml
    except ImportError:
        raise ConfigError("deploy needs PyYAML: pip install 'specpool[ray]'") from None
    text: str = yaml.safe_dump(config, sort_keys=False, width=100)
    return text
