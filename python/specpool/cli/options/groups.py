"""Groups of options that several commands share; a command takes a group as one parameter."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from specpool.checks import shown
from specpool.cli.options import types as o
from specpool.cli.options.prompts import Given
from specpool.engine.config import HEADROOM
from specpool.engine.text.structured.grammar import Grammar
from specpool.errors import ConfigError
from specpool.num_bytes import parse_bytes

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """The checkpoints."""

    target: o.Target = "specpool/tiny"
    draft: o.Drafts = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """The prompts."""

    prompt: o.PromptText = None
    prompt_ids: o.PromptIds = None
    prompt_file: o.PromptFile = None
    prompt_format: o.PromptFormat = None

    def given(self) -> Given:
        """Return the options as an argument of `read_prompts`."""
        return Given(self.prompt or [], self.prompt_ids or [], self.prompt_file, self.prompt_format)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOptions:
    """The layout of drafts in pages, and how much a round reserves."""

    page_size: o.PageSize = 16
    placement: o.Placement = "split"
    policy: o.Policy = "exact"
    layout: o.Layout = "auto"
    draft_window: o.DraftWindow = None
    draft_sink: o.DraftSink = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceOptions:
    """The device, the dtype and the threads of a model."""

    dtype: o.DtypeName = None
    device: o.DeviceName = "cpu"
    threads: o.Threads = 1
    trust_remote_code: o.TrustRemoteCode = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """The attention back end and its CUDA graphs."""

    attention: o.Attention = "auto"
    graph_sizes: o.GraphSizes = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """The sampling of tokens."""

    temperature: o.Temperature = 0.0
    top_k: o.TopK = None
    top_p: o.TopP = None
    min_p: o.MinP = None
    repetition_penalty: o.RepetitionPenalty = None
    presence_penalty: o.PresencePenalty = 0.0
    frequency_penalty: o.FrequencyPenalty = 0.0
    logit_bias: o.LogitBias = None
    seed: o.Seed = 0

    def fields(self) -> dict[str, Any]:
        """Return fields of `SamplingParams`.

        Raises:
            ConfigError: `logit_bias` is no pair of a token and a number, or names a token twice.
        """
        biases: dict[int, float] = {}
        for token, value in map(_bias, self.logit_bias or ()):
            if token in biases:
                raise ConfigError(
                    f"logit_bias of token {token} is given twice: {biases[token]:g} and {value:g}"
                )
            biases[token] = value
        return asdict(self) | {"logit_bias": biases}


@dataclass(frozen=True, slots=True, kw_only=True)
class FormOptions:
    """The form that the text must have."""

    json_schema: o.JsonSchemaFile = None
    json_object: o.JsonObject = False
    regex: o.Regex = None
    choice: o.ChoiceText = None
    grammar: o.GrammarFile = None

    def fields(self) -> dict[str, Any]:
        """Return fields of `SamplingParams`.

        Raises:
            ConfigError: several forms are given, a file cannot be read, or a form is wrong.
        """
        given = {name: value for name, value in asdict(self).items() if value not in (None, False)}
        if len(given) > 1:
            names = " and ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ConfigError(f"{names} both say what the text must be: give one")
        for name, value in given.items():
            make: Callable[..., Grammar] = getattr(Grammar, {"grammar": "ebnf"}.get(name, name))
            arguments = [text_of(value, name)] if isinstance(value, Path) else [value]
            return {"structured": make(*([] if value is True else arguments))}
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """The memory, and the lengths that it is for."""

    prefill_tokens: o.PrefillTokens = 1024
    headroom: o.Headroom = HEADROOM
    max_context_len: o.MaxContextLen = None
    num_pages: o.NumPages = None
    kv_bytes: o.KvBytes = None
    host_bytes: o.HostBytes = None
    offload: o.Offload = "cost"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions:
    """The order of steps, and the worker that runs them."""

    overlap_depth: o.OverlapDepth = 0
    worker: o.Worker = "auto"
    mixed_chunks: o.MixedChunks = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Where a server listens, for whom, and its limits."""

    host: o.Host = "127.0.0.1"
    port: o.Port = 8000
    api_key_file: o.ApiKeyFile = None
    open_metrics: o.OpenMetrics = False
    share_prefixes: o.SharePrefixes = False
    allow_origin: o.AllowOrigin = None
    allow_host: o.AllowHost = None
    trust_proxy: o.TrustProxy = None
    max_queue: o.MaxQueue = 1024
    max_body: o.MaxBody = "8MiB"
    max_connections: o.MaxConnections = 4096
    request_timeout: o.RequestTimeout = 600.0
    read_timeout: o.ReadTimeout = 30.0
    write_timeout: o.WriteTimeout = 30.0
    drain_timeout: o.DrainTimeout = 30.0
    max_open_sessions: o.MaxOpenSessions = 256
    session_timeout: o.SessionTimeout = 3600.0
    access_log: o.AccessLog = True

    def fields(self) -> dict[str, Any]:
        """Return fields of `ServeConfig`.

        Raises:
            ConfigError: `max_body` is no number of bytes.
        """
        given = asdict(self)
        del given["api_key_file"]
        given["origins"] = tuple(given.pop("allow_origin") or ())
        given["hosts"] = tuple(given.pop("allow_host") or ())
        given["proxies"] = tuple(given.pop("trust_proxy") or ())
        given["max_body"] = parse_bytes("max_body", given["max_body"])
        given["max_sessions"] = given.pop("max_open_sessions")
        given["request_timeout"] = given["request_timeout"] or None
        return given


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The checks while requests run."""

    busy_check: o.BusyCheck = None
    on_finding: o.OnFinding = "raise"


def grouped(command: Callable[..., T]) -> Callable[..., T]:
    """Replace a command's group parameters by the options of the groups."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {}
    params: list[inspect.Parameter] = []
    for param in signature.parameters.values():
        if is_dataclass(param.annotation):
            groups[param.name] = param.annotation
            params += inspect.signature(groups[param.name]).parameters.values()
        else:
            params.append(param)
    types = {
        name: kind
        for group in groups.values()
        for name, kind in get_type_hints(group, include_extras=True).items()
    }
    params = [param.replace(annotation=types.get(param.name, param.annotation)) for param in params]

    @functools.wraps(command)
    def run(**given: Any) -> T:
        for name, group in groups.items():
            given[name] = group(**{option.name: given.pop(option.name) for option in fields(group)})
        return command(**given)

    run.__signature__ = signature.replace(parameters=params)  # type: ignore[attr-defined]
    run.__annotations__ = {param.name: param.annotation for param in params}
    return run


def engine_options(*groups: Any, **options: Any) -> dict[str, Any]:
    """Return fields of `EngineConfig` from groups and single options, with texts parsed.

    Raises:
        ConfigError: a text cannot be parsed.
    """
    for group in groups:
        options |= asdict(group)
    for name in ("kv_bytes", "host_bytes"):
        text = options.pop(name)
        if text is not None:
            options[name] = parse_bytes(name, text)
    graph_sizes = options.pop("graph_sizes")
    if graph_sizes is not None:
        options["graph_sizes"] = () if graph_sizes == "none" else _sizes(graph_sizes)
    if options["busy_check"] is None:
        del options["busy_check"]
    return options


def text_of(path: Path, option: str) -> str:
    """Return the text of an option's file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"{option} {path} cannot be read: {why}") from None


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition(":")
    try:
        return int(token), float(value)
    except ValueError:
        raise ConfigError(
            f"logit_bias must be TOKEN:VALUE, such as 257:-5, got {shown(text)}"
        ) from None


def _sizes(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() for part in parts):
        raise ConfigError(
            f"graph_sizes must be batch sizes with commas between, or none, got {shown(text)}"
        )
    return tuple(int(part) for part in parts)
