"""`check_growth`: loads a tokenizer in a second process first, if its settings could blow up.

A tokenizer.json of a few KB can make a billion characters of one, for example with three
normalizers that each put a thousand letters in the place of one. Its library then aborts the
process for want of memory; no exception is raised. So a tokenizer whose settings could do that is
loaded in a second process first, which may take `MOST_BYTES` more than it began with (on Linux) and
`MOST_SECONDS`. All others start no process.
"""

from __future__ import annotations

import base64
import contextlib
import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specpool.checks import shown
from specpool.engine.text.second_process import ProcessError, SecondProcess, limit_memory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: What settings may make of one character without a trial. Published tokenizers make less.
MOST_GROWTH = 4096
#: The tokens that a post-processor may add without a trial.
MOST_ADDED = 1 << 16
#: The characters that all added tokens may become without a trial: they are normalized at once.
MOST_CHARACTERS = 1 << 28
#: The most seconds of a trial, and of the start of its process, which imports transformers.
MOST_SECONDS, START_SECONDS = 60.0, 120.0
#: The most memory of a trial, in bytes.
MOST_BYTES = 1 << 30

#: The most characters that each kind of step makes of one. Any other kind could make any number.
_GROWTHS = {
    "BPEDecoder": 1, "BertNormalizer": 12, "BertPreTokenizer": 1, "ByteFallback": 3, "ByteLevel": 4,
    "CTC": 1, "CharDelimiterSplit": 1, "Digits": 1, "FixedLength": 1, "Fuse": 1, "Lowercase": 3,
    "Metaspace": 2, "NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Nmt": 1, "Punctuation": 1,
    "Split": 1, "Strip": 1, "StripAccents": 1, "UnicodeScripts": 1, "Whitespace": 1,
    "WhitespaceSplit": 1, "WordPiece": 2,
}  # fmt: skip


def check_growth(folder: Path) -> None:
    """Load the folder's tokenizer in a second process, if its settings could blow up.

    To know whether they could, its tokenizer.json is read once more.

    Raises:
        ValueError: the trial failed; the message says why it was made, and within which limits.
    """
    names = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
    num_other_bytes = sum(
        (folder / name).stat().st_size for name in names if (folder / name).is_file()
    )
    files = [file for file in folder.glob("tokenizer*.json") if file.name not in names]
    risks = (_risk(json.loads(file.read_text(encoding="utf-8")), num_other_bytes) for file in files)
    risk = next(filter(None, risks), None)
    if risk is None:
        return
    process = SecondProcess(__name__, START_SECONDS)
    try:
        failure = process.ask(os.fspath(folder), MOST_SECONDS)
    except ProcessError as error:
        failure = str(error)
    finally:
        process.close()
    if failure is not None:
        raise ValueError(
            f"{risk}, so it was tried in a second process, with at most {MOST_BYTES >> 20} MiB "
            f"and {MOST_SECONDS:g} s: {failure}"
        )


def serve() -> None:
    """Load and try the tokenizers of folders until standard input ends.

    Answer null, or what is wrong with one.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast  # noqa: F401

    with contextlib.suppress(ImportError):
        import torch  # noqa: F401 - transformers imports it at the first load, beyond the limit

    print("true", flush=True)
    for line in sys.stdin:
        failure = None
        limit_memory(MOST_BYTES)
        try:
            try_tokenizer(read_tokenizer(json.loads(line), trust_remote_code=False))
        except BaseException as error:
            failure = f"{type(error).__name__}: {error}"[:1000]
        print(json.dumps(failure), flush=True)


def read_tokenizer(folder: str, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Read a tokenizer as transformers does, with any error that it raises."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        folder, trust_remote_code=trust_remote_code, local_files_only=not trust_remote_code
    )
    return tokenizer


def try_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    """Encode and decode a little; raise any error of a tokenizer that cannot do it."""
    count = len(tokenizer)
    if not count:
        raise ValueError("it knows no tokens")
    ids = list(tokenizer.encode("a 1, b"))
    if not ids:
        raise ValueError(f"it knows {count} tokens, and encodes 'a 1, b' to none")
    if any(type(token) is not int or token < 0 for token in ids):
        raise ValueError(f"it encodes to {shown(ids)}, not to token ids")
    for token_ids in (ids, list(range(min(64, count))), list(range(max(0, count - 64), count))):
        tokenizer.convert_ids_to_tokens(token_ids)
        if not isinstance(tokenizer.decode(token_ids), str):
            raise ValueError(f"it decodes {shown(token_ids)} to no text")


def _risk(settings: Any, num_others: int) -> str | None:
    """Return why the settings of a tokenizer.json could blow up; None if they cannot.

    `num_others` are the characters of the files that may hold further added tokens.
    """
    if not isinstance(settings, dict):
        return None
    encode = _growth(settings.get("normalizer"))
    tokens = settings.get("added_tokens")
    num_characters = num_others + sum(
        len(str(token.get("content", "")))
        for token in (tokens if isinstance(tokens, list) else ())
        if isinstance(token, dict)
    )
    num_added = _num_added(settings.get("post_processor"))
    growth = max(encode * _growth(settings.get("pre_tokenizer")), _growth(settings.get("decoder")))
    if growth > MOST_GROWTH:
        number = "any number of" if math.isinf(growth) else f"{growth:.0f}"
        return f"its settings could make {number} characters of one"
    if num_added > MOST_ADDED:
        return f"its post-processor could add {num_added} tokens"
    if encode * num_characters > MOST_CHARACTERS:
        return f"its added tokens could become {encode * num_characters:.0f} characters"
    return None


def _growth(step: Any) -> float:
    """Return an upper bound of the characters that a step, or a list of steps, makes of one."""
    if step is None:
        return 1.0
    if isinstance(step, list):
        return math.prod(map(_growth, step))
    if not isinstance(step, dict):
        return math.inf
    kind = step.get("type")
    if kind == "Sequence":
        steps = [value for name, value in step.items() if name != "type"]
        return math.prod(map(_growth, steps))
    if kind == "Replace":
        content, pattern = step.get("content"), step.get("pattern")
        string = pattern.get("String") if isinstance(pattern, dict) else None
        if isinstance(content, str) and isinstance(string, str) and string:
            return max(1.0, len(content) / len(string))
        return len(content) + 1.0 if isinstance(content, str) else math.inf
    if kind == "Prepend":
        return len(str(step.get("prepend", ""))) + 1.0
    if kind == "Precompiled":
        return _longest_entry(step.get("precompiled_charsmap"))
    return _GROWTHS.get(kind, math.inf) if isinstance(kind, str) else math.inf


def _longest_entry(charsmap: Any) -> float:
    """Return the most characters that sentencepiece's table of characters puts for one."""
    if not isinstance(charsmap, str):
        return 1.0
    content = base64.b64decode(charsmap)
    size = int.from_bytes(content[:4], "little")
    return max(1.0, max(map(len, content[4 + size :].split(b"\0"))))


def _num_added(processor: Any) -> int:
    """Return an upper bound of the tokens that a post-processor adds."""
    if isinstance(processor, list):
        return sum(map(_num_added, processor))
    if not isinstance(processor, dict):
        return 0
    tokens = processor.get("special_tokens")
    ids = [
        len(token["ids"])
        for token in (tokens.values() if isinstance(tokens, dict) else ())
        if isinstance(token, dict) and isinstance(token.get("ids"), list)
    ]
    pieces = [processor.get(name) for name in ("single", "pair")]
    num_pieces = max(len(piece) if isinstance(piece, list) else 0 for piece in pieces)
    return num_pieces * max(ids, default=0) + _num_added(processor.get("processors"))
