"""What vLLM needs to start on a CPU without the network, and its least pool. It imports no vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: The model that vLLM's own tests name; its weights are never loaded.
MODEL = "facebook/opt-125m"
_CONFIG = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "torch_dtype": "float16",
}


def write_home(folder: Path, version: str) -> None:
    """Write what vLLM needs to start on a CPU without the network; on the path before it starts."""
    built = folder / f"vllm-{version}+cpu.dist-info"
    built.mkdir(parents=True)
    (built / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    model = folder / "hub" / f"models--{MODEL.replace('/', '--')}"
    for part, name, text in (("refs", "main", "1"), ("snapshots/1", "config.json", "")):
        (model / part).mkdir(parents=True)
        (model / part / name).write_text(text or json.dumps(_CONFIG), "utf-8")


def steps_in_flight(settings: Mapping[str, Any]) -> int:
    """Return the most steps that are launched, and whose results are not known."""
    return int(max(1 + settings["asynchronous"], settings.get("stages", 1)))


def least_blocks(settings: Mapping[str, Any]) -> int:
    """Return blocks for one request of the greatest length, and block 0.

    vLLM starts with as many; old releases forget the drafts of a group with a window.
    """
    count = 1
    in_flight = settings["budget"] * steps_in_flight(settings)
    for group in settings["groups"]:
        length = settings["most_len"]
        if group["kind"] == "window":
            near = min(group["window"] - 1 + in_flight, length)
            count += -(-(near + settings["drafts"]) // group["block"]) + 1
        elif group["kind"] == "states":  # the last one, the running one, one for each draft
            count += 3 + settings["drafts"]
        else:
            count += -(-length // group["block"])
    return count
