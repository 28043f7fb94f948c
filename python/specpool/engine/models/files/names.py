"""The names of models: an embedded one, a folder, a name on the hub, `mtp`, or prompt lookup.

This file does not import torch or transformers, so that a wrong name is refused at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from specpool.checks import check_int, did_you_mean, shown
from specpool.engine.assets import EMBEDDED, resolve
from specpool.engine.models.files.hub import from_hub
from specpool.errors import ConfigError

#: The name of the draft that ships inside the target's checkpoint.
MTP = "mtp"
#: The longest n-gram of prompt lookup that may be asked for, and the default.
MAX_NGRAM, DEFAULT_NGRAM = 32, 4

#: The names of drafts that are neither a folder's nor a hub's.
_DRAFT_WORDS = ("ngram", "suffix", MTP, "none")

_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?", re.ASCII)


def ngram_of(name: str) -> int | None:
    """Return the longest n-gram that `ngram` or `ngram:6` names; None for another kind of name.

    Raises:
        ConfigError: `ngram:` is followed by anything else than a number in `[1, MAX_NGRAM]`.
    """
    kind, colon, number = name.partition(":")
    if kind != "ngram":
        return None
    if not colon:
        return DEFAULT_NGRAM
    if not (number.isascii() and number.isdigit() and len(number) < 10):
        raise ConfigError(f"ngram:n needs a number n in [1, {MAX_NGRAM}], got {shown(name)}")
    check_int("the n of ngram:n", int(number), 1, MAX_NGRAM)
    return int(number)


def suffix_of(name: str) -> bool | None:
    """Return whether `suffix:shared` or `suffix` shares texts; None for another kind of name.

    Raises:
        ConfigError: `suffix:` is followed by anything else than `shared`.
    """
    kind, colon, mode = name.partition(":")
    if kind != "suffix":
        return None
    if colon and mode != "shared":
        raise ConfigError(f"it is 'suffix' or 'suffix:shared', got {shown(name)}")
    return bool(colon)


def is_lookup(name: str) -> bool:
    """Return whether a name stands for a drafter that searches texts and has no model.

    Raises:
        ConfigError: the name is nearly that of such a drafter, or has a wrong ending.
    """
    check_draft_name(name)
    return ngram_of(name) is not None or suffix_of(name) is not None


def check_draft_name(name: str) -> None:
    """Raise `ConfigError` for a word that is nearly `ngram`, `suffix`, `mtp` or `none`.

    The hub would be asked for it otherwise. A folder may have such a name.
    """
    word = name.partition(":")[0]
    if word in _DRAFT_WORDS or "/" in name or os.path.exists(name):
        return
    if suggestion := did_you_mean(word, _DRAFT_WORDS, cutoff=0.65):
        raise ConfigError(f"draft: there is none named {shown(name)}{suggestion}")


def shown_drafts(names: Sequence[str]) -> str:
    """Return a description of an engine's drafts: `no draft`, `draft a` or `drafts a, b`."""
    if not names:
        return "no draft"
    return f"draft{'s' if len(names) > 1 else ''} {', '.join(names)}"


def find_model(name: str) -> Path | None:
    """Return the folder that `name` means; None if it has the form of a hub name.

    Raises:
        ConfigError: it is neither a folder with a config.json nor a possible hub name.
    """
    if not name:
        raise ConfigError("the name of a model is empty: give a folder or a hub name")
    path = Path(os.path.expanduser(resolve(name)))  # path.expanduser() raises for an unknown user
    if os.path.isdir(path):  # unlike path.is_dir(), no error for a name that is too long
        if not os.path.isfile(path / "config.json"):
            raise ConfigError(f"no model at {name!r}: the folder has no config.json")
        return path
    if os.path.exists(path):
        raise ConfigError(f"no model at {name!r}: it is a file; give the folder that holds it")
    if name.startswith("specpool/"):
        raise ConfigError(
            f"no model at {name!r}: there is no such folder{did_you_mean(name, EMBEDDED) or ';'} "
            f"embedded are {', '.join(EMBEDDED)}"
        )
    if not _HUB_NAME.fullmatch(name):
        raise ConfigError(f"no model at {name!r:.200}: there is no such folder")
    return None


def fetch_config(name: str) -> Path:
    """Return `config.json` of a model on the hub, from the hub's cache if it is there.

    Raises:
        ConfigError: huggingface_hub is not installed, or the hub does not give it (`from_hub`).
    """
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import logging
    except ImportError:
        raise ConfigError(
            f"no model at {name!r}: there is no such folder, and a hub name needs huggingface_hub: "
            "pip install 'specpool[hf]'"
        ) from None
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # Its retries are no news; what comes of them is said below.
    try:
        with from_hub(name) as only_cached:
            return Path(hf_hub_download(name, "config.json", local_files_only=only_cached))
    finally:
        logging.set_verbosity(level)
