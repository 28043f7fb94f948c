"""Checks of options that several commands share.

Every command calls them before it imports torch, so that a typo is refused within a second.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpool._core import Shape
from specpool.checks import check_choice, check_int, shown
from specpool.cli.options.drafts import keep_kv
from specpool.engine.config import EngineConfig
from specpool.engine.models.files.checkpoint import read_config, read_json
from specpool.engine.models.files.names import MTP, fetch_config, find_model, is_lookup
from specpool.engine.ranks.environment import world_of_environment
from specpool.engine.sampling_params import SamplingParams
from specpool.engine.text.structured.compiler import check_grammar
from specpool.errors import ConfigError

if TYPE_CHECKING:
    from specpool.engine.ranks.group import Ranks
    from specpool.engine.texts import Prompt

DTYPES = ("float32", "bfloat16", "float16", "auto")
ATTENTION = ("auto", "torch", "flashinfer")


def warn(text: str) -> None:
    """Print a warning on standard error."""
    print(f"warning: {text}", file=sys.stderr)


def check_place(
    *, device: str, threads: int, dtype: str | None = None, graph_sizes: Sequence[int] | None = None
) -> None:
    """Raise `ConfigError` for a wrong device, number of threads, dtype or use of graph sizes."""
    if dtype is not None:
        check_choice("dtype", dtype, DTYPES)
    if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", device, re.ASCII):
        raise ConfigError(f"device must be cpu, cuda or cuda:N, got {shown(device)}")
    check_int("threads", threads, 1, 1 << 10)
    if graph_sizes and device == "cpu":
        raise ConfigError(f"graph_sizes {[*graph_sizes]} need CUDA graphs: give --device cuda")


def check_models(target: str, drafts: Sequence[str]) -> None:
    """Check that the checkpoints exist, without reading their weights.

    Raises:
        ConfigError: there is no checkpoint of a name, or the number of `ngram:N` is out of range.
    """
    for option, name in (("target", target), *(("draft", name) for name in drafts)):
        if option == "draft" and (name == MTP or is_lookup(name)):
            continue
        try:
            if find_model(name) is None:
                fetch_config(name)
        except ConfigError as error:
            raise ConfigError(f"{option}: {error}") from None


def check_prompts(target: str, prompts: Sequence[Prompt]) -> None:
    """Refuse prompts that cannot work, as far as the files in the target's folder show.

    The engine checks everything else, and all prompts of a target on the hub.

    Raises:
        ConfigError: a token id is beyond the vocabulary, or a chat has no chat template.
    """
    folder = find_model(target)
    if folder is None:
        return
    config = read_config(folder)
    parts = config.get("text_config")
    sizes = config if not isinstance(parts, dict) or "vocab_size" in config else parts
    vocab_size = sizes.get("vocab_size")
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            continue
        if any(isinstance(entry, Mapping) for entry in prompt):
            if not _may_have_template(folder):
                raise ConfigError(
                    f"prompt {index} is a chat, but the tokenizer has no chat template: leave "
                    "--chat out, or give a target with one"
                )
        elif isinstance(vocab_size, int):
            for position, token in enumerate(prompt):
                if isinstance(token, int) and token >= vocab_size:
                    raise ConfigError(
                        f"prompt {index} has token id {token} at position {position}; the "
                        f"vocabulary is [0, {vocab_size})"
                    )


def _may_have_template(folder: Path) -> bool:
    """Return whether a tokenizer's files hold a chat template, or leave it open."""
    config = folder / "tokenizer_config.json"
    if not config.is_file() or any(folder.glob("*chat_template*")):
        return True
    held = read_json(config)
    return bool(held.get("chat_template")) or "auto_map" in held


def check_engine_config(drafts: Sequence[str], options: Mapping[str, Any]) -> None:
    """Build the configuration as an engine will, and check which options go together.

    Args:
        drafts: the drafts; empty = there is none.
        options: fields of `EngineConfig`.

    Raises:
        ConfigError: a value is out of its range, or another option makes it meaningless.
    """
    config = EngineConfig(**options)
    shape = config.shape
    check_choice("attention", config.attention, ATTENTION)
    if config.attention == "flashinfer" and importlib.util.find_spec("flashinfer") is None:
        raise ConfigError(
            "attention 'flashinfer' cannot be used: the package is not installed: "
            "pip install 'specpool[flashinfer]'; 'torch' works"
        )
    if config.adaptive is not None and shape is not None:
        raise ConfigError(
            "--adaptive chooses the shape of each round, --shape fixes it: leave one of them out"
        )
    if not drafts:
        if shape is not None and shape.num_draft_tokens > 1:
            raise ConfigError("--shape drafts, but there is no draft model: give --draft")
        if config.adaptive is not None:
            raise ConfigError("--adaptive chooses what to draft: give --draft")
        if config.draft_window is not None:
            raise ConfigError("--draft-window is of draft KV, and there is no draft: give --draft")
    elif config.draft_window is not None and not keep_kv(drafts):
        raise ConfigError(
            f"--draft-window is of draft KV, and {', '.join(drafts):.200} keeps none: leave it out"
        )
    if config.num_pages is not None and config.kv_bytes is not None:
        raise ConfigError("num_pages and kv_bytes both say how large the pools are: give one")
    if options.get("offload", "cost") != "cost" and not config.host_bytes:
        raise ConfigError("--offload says what goes to host memory: give --host-bytes too")
    if options.get("on_finding", "raise") != "raise" and not config.busy_check:
        raise ConfigError("on_finding says what a busy check does: give --busy-check 1 or 2 too")
    _warn_of_layout(config, drafts)


def _warn_of_layout(config: EngineConfig, drafts: Sequence[str]) -> None:
    """Warn of options on the place of drafts that change nothing here."""
    shapes = [config.shape or Shape.eagle(3, 1, 4)]
    if config.adaptive is not None:
        shapes = list(config.adaptive.candidates)  # type: ignore[union-attr]
    has_trees = any(shape.topk > 1 for shape in shapes)
    if not keep_kv(drafts) and config.placement == "shared":
        warn("--placement shared changes nothing without a draft model")
    if config.layout == "holey" and not (drafts and has_trees and config.page_size > 1):
        warn("--layout holey changes nothing without a tree (topk above 1) on pages of 2 or more")


def sampling_params(options: Mapping[str, Any]) -> SamplingParams:
    """Build the sampling parameters, and warn of options that change nothing.

    Raises:
        ConfigError: a value is out of its range, or does nothing in greedy decoding.
    """
    params = SamplingParams(**options)
    if params.structured is not None:
        check_grammar(params.structured)
    if params.temperature == 0:
        if params.seed:
            warn("--seed changes nothing at --temperature 0, which is greedy")
        if params.n > 1:
            warn(f"--samples {params.n} are all the same at --temperature 0, which is greedy")
    return params


def start_torch(threads: int) -> None:
    """Import torch and transformers and set them up for a command; this takes seconds of CPU.

    Whoever watches a terminal sees a line meanwhile.
    """
    if sys.stderr is not None and sys.stderr.isatty():
        print("importing torch and transformers", file=sys.stderr)
    if world_of_environment()[1] > 1:  # else torch prints C++ frames when a rank goes
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import torch
    from transformers.utils import logging

    torch.set_num_threads(threads)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def start_ranks(device: str) -> Ranks | None:
    """Join the ranks that share the target, after `start_torch`; None = this process is alone.

    Gloo prints to the standard output from C++. From here on that goes to standard error, and only
    what Python prints stays.

    Raises:
        ConfigError: the environment names ranks that cannot be.
        RankError: not all of them came.
    """
    _, world = world_of_environment()
    if world == 1:
        return None
    from specpool.engine.ranks.group import Ranks

    sys.stdout.flush()
    python_output = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors="replace")
    os.dup2(2, 1)
    sys.stdout = python_output
    return Ranks(device)


def follow(loading: Mapping[str, Any], threads: int) -> None:
    """Follow rank 0 until it ends, with an engine of the same arguments as its.

    Ctrl-C and a launcher's signal reach all processes: rank 0 decides.

    Raises:
        ConfigError: the ranks differ, or the engine cannot be loaded.
        CorruptState: this rank has parted from rank 0.
        RankError: another rank has gone.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    start_torch(threads)
    from specpool.engine.engine import Engine

    ranks = start_ranks(loading["device"])
    with ranks or contextlib.nullcontext():
        with Engine.from_pretrained(**loading, ranks=ranks) as engine:
            engine.follow()
