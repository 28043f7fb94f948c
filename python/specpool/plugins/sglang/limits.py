"""The settings that level `rows` cannot serve, each with its reason; checked at start."""

from __future__ import annotations

from typing import Any, NoReturn

from sglang.srt.runtime_context import get_server_args, get_spec

from specpool import Shape

#: Algorithms whose rounds write slots as SGLang's `prepare_for_draft` does, and no others.
ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN")


def check() -> None:
    """End the process if the settings need what the ledger does not do; none may be there yet.

    Raises:
        SystemExit: they do; one line has all reasons.
    """
    try:
        settings = get_server_args(), get_spec()
    except ValueError:  # SGLang's unit tests publish none
        return
    if refusals := reasons(*settings):
        leave(*refusals)


def leave(*refusals: str) -> NoReturn:
    """End the process.

    Raises:
        SystemExit: always; one line has all reasons.
    """
    raise SystemExit(
        f"specpool: SPECPOOL_SGLANG=rows leaves to SGLang: {'; '.join(refusals)}: use "
        "SPECPOOL_SGLANG=reserve or pages"
    )


def shape() -> Shape:
    """Return the shape of SGLang's rounds now."""
    spec = get_spec()
    steps = spec.speculative_num_steps or 1
    return Shape(
        steps, spec.speculative_eagle_topk or 1, spec.speculative_num_draft_tokens or steps + 1
    )


def reasons(arguments: Any, spec: Any) -> list[str]:
    """Return why these settings cannot be served, a line each."""
    algorithm = spec.speculative_algorithm

    def is_set(name: str, default: Any = False) -> bool:
        return getattr(arguments, name, default) not in (default, None, False)

    refused = {
        "decoding without drafts claims slots in another way": algorithm is None,
        f"{algorithm} places its drafts in another way than EAGLE": (
            algorithm is not None and algorithm not in ALGORITHMS
        ),
        "an adaptive shape may change between a claim and its round": spec.speculative_adaptive,
        "several EAGLE layers each write a window of their own": spec.enable_multi_layer_eagle,
        "drafts from another process claim slots there": is_set("decoupled_spec_role", "null"),
        "PD disaggregation moves rows between engines": is_set("disaggregation_mode", "null"),
        "HiCache holds pages that the ledger does not see": is_set("enable_hierarchical_cache"),
        "LMCache holds pages that the ledger does not see": is_set("enable_lmcache"),
        "FlexKV holds pages that the ledger does not see": is_set("enable_flexkv"),
        "an external linker of the tree holds pages that the ledger does not see": is_set(
            "enable_unified_cache_external_linker"
        ),
        "another radix cache takes pages in a way of its own": is_set("radix_cache_backend"),
        "HiSparse gives rows slots of its own": is_set("enable_hisparse"),
        "a dLLM writes its blocks again": is_set("dllm_algorithm"),
        "context parallel decoding widens pages": is_set("dcp_size", 1),
        "unified memory shares pages with other pools": is_set("enable_unified_memory"),
    }
    return [reason for reason, applies in refused.items() if applies]
