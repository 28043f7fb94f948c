"""`from_hub`: one short request before the hub's client begins its patient downloads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from specpool.errors import CheckpointError, SpecpoolError, one_line


@contextlib.contextmanager
def from_hub(
    name: str, revision: str | None = None, *, local_files_only: bool = False
) -> Iterator[bool]:
    """Ask the hub once for a model's config.json, then download in the block.

    Without the request a wrong name or no network would be noticed late: `hf_hub_download` asks 7
    times, 6 of them for up to 60 seconds, and `snapshot_download` waits without end. The request
    lasts at most `HF_HUB_ETAG_TIMEOUT` seconds (an environment variable of the client, 10 if it is
    not set). Downloads in the block keep the client's patience. A busy hub does too: it answers.

    Args:
        name: the hub name.
        revision: branch, tag or commit; None means main.
        local_files_only: never ask the network.

    Yields:
        Whether the block may use files of the cache only, because the hub gives nothing now.

    Raises:
        CheckpointError: the hub did not answer or has no such model, and the config is not in the
            cache; or the block raised. The message has the first cause.
    """
    refused: Exception | None = None
    try:
        if not local_files_only:
            refused = _ask(name, revision)
        if refused is not None and not _is_cached(name, revision):
            raise refused
        yield local_files_only or refused is not None
    except SpecpoolError:
        raise
    except Exception as error:  # of many types; a wrong name, no network, no room
        raise CheckpointError(
            f"no model at {name!r}: there is no such folder, and the hub could not give it: "
            f"{_reason(refused or error)}"
        ) from error


def _ask(name: str, revision: str | None) -> Exception | None:
    """Return why the hub gives no config.json of a model now; None if it does, or is only busy."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return None  # the client asks nobody, and says so
    url = hf_hub_url(name, "config.json", revision=revision)
    seconds = constants.HF_HUB_ETAG_TIMEOUT
    try:
        get_hf_file_metadata(url, timeout=seconds)
    except HfHubHTTPError as error:
        status = error.response.status_code
        return None if status in (408, 429) or status >= 500 else error
    except Exception as error:  # of httpx or requests, by the client's version
        silence = ConnectionError(
            f"{constants.ENDPOINT} did not answer one request of at most {seconds} s "
            f"(HF_HUB_ETAG_TIMEOUT): {one_line(error)}"
        )
        silence.__cause__ = error
        return silence
    return None


def _is_cached(name: str, revision: str | None) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str)


def _reason(error: BaseException) -> str:
    """Return an error's message in one line, with the message of the first error of its chain."""
    first = error
    while (below := first.__cause__ or first.__context__) is not None:
        first = below
    text, cause = one_line(error), one_line(first)
    return text if str(first) in str(error) else f"{text.rstrip('.')}: {cause}"
