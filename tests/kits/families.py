"""Tiny random models of every family that the target must run, made here: no download.

Also the plain-torch oracle that lays lanes out on shuffled pages and says who sees what.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

from specpool.engine.attention import AttentionBatch, AttentionView

VOCAB = 259
_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA = {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}
_MIXED = ["sliding_attention", "full_attention"]
_LEARNED = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# Expanded heads: keys of 16 + 8, values of 20.
_LATENT = {
    **_BASE,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
_LATENT_EXPERTS = {
    **_LATENT,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_FALCON = {**_LEARNED, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_FALCON |= {"max_position_embeddings": 512, "alibi": False}

# family -> (config class, its arguments)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _BASE),
    "qwen2": ("Qwen2Config", _BASE),
    "qwen3": ("Qwen3Config", {**_BASE, "head_dim": 32}),
    "mistral": ("MistralConfig", {**_BASE, "sliding_window": 8}),
    "gemma2": ("Gemma2Config", {**_BASE, **_GEMMA}),
    "gemma3": ("Gemma3TextConfig", {**_BASE, **_GEMMA, "layer_types": _MIXED}),
    "gpt_oss": (
        "GptOssConfig",
        {
            **_BASE,
            "head_dim": 16,
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": _MIXED,
        },
    ),
    "phi3": ("Phi3Config", {**_BASE, "sliding_window": 8}),
    "olmo2": ("Olmo2Config", _BASE),
    "cohere": ("CohereConfig", {**_BASE, "logit_scale": 0.25}),
    "granite": ("GraniteConfig", {**_BASE, "logits_scaling": 4.0, "embedding_multiplier": 2.0}),
    "gpt2": (
        "GPT2Config",
        {**_LEARNED, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    ),
    "opt": (
        "OPTConfig",
        {
            **_LEARNED,
            "hidden_size": 64,
            "word_embed_proj_dim": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 512,
        },
    ),
}
if int(transformers.__version__.split(".")[0]) >= 5:
    # It passes no keyword arguments on to attention. (In transformers 4 it bypasses ours: refused.)
    FAMILIES["nemotron"] = ("NemotronConfig", _BASE)
    # In transformers 4 their keys and values, masks and caches are made in other ways.
    FAMILIES |= {
        "deepseek_v2": ("DeepseekV2Config", _LATENT_EXPERTS),
        "deepseek_v3": ("DeepseekV3Config", _LATENT_EXPERTS),
        "minicpm3": ("MiniCPM3Config", _LATENT),
        "longcat_flash": (  # two attentions in each layer
            "LongcatFlashConfig",
            {
                **{key: value for key, value in _LATENT.items() if key != "num_hidden_layers"},
                "num_layers": 2,
                "head_dim": 8,
                "ffn_hidden_size": 96,
                "expert_ffn_hidden_size": 32,
                "n_routed_experts": 4,
                "moe_topk": 2,
                "zero_expert_num": 2,
            },
        ),
        "llama4": (  # scales the queries of its full layers by their positions
            "Llama4TextConfig",
            {
                **_BASE,
                "head_dim": 16,
                "intermediate_size_mlp": 128,
                "num_hidden_layers": 2,
                "layer_types": ["chunked_attention", "full_attention"],
                "no_rope_layers": [1, 0],
                "attention_chunk_size": 8,
                "floor_scale": 8,
                "attn_scale": 0.5,
                "num_local_experts": 4,
            },
        ),
        "falcon": (
            "FalconConfig",
            {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
        ),
        "falcon_multi_query": ("FalconConfig", {**_FALCON, "multi_query": True, "bias": True}),
        "afmoe": (  # reads its attention's output as one block
            "AfmoeConfig",
            {
                **_BASE,
                "head_dim": 16,
                "sliding_window": 8,
                "layer_types": _MIXED,
                "moe_intermediate_size": 32,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "num_dense_layers": 1,
            },
        ),
        "gpt_neox": (
            "GPTNeoXConfig",
            {**_BASE, "num_key_value_heads": 4},
        ),  # its config says is_decoder=False
        "stablelm": ("StableLmConfig", {**_BASE, "partial_rotary_factor": 0.5}),
    }


def make_config(family: str, families: Mapping[str, tuple[str, dict[str, Any]]] = FAMILIES) -> Any:
    """A fresh config, or None where this transformers has no such family."""
    name, arguments = families[family]
    config_class = getattr(transformers, name, None)
    return None if config_class is None else config_class(**copy.deepcopy(arguments))


def random_model(config: Any, seed: int = 0) -> Any:
    """A float32 causal language model with the weights that transformers draws."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.float().eval()


def make_model(config: Any, seed: int = 0) -> Any:
    """A float32 causal language model whose weights are large enough for logits to differ."""
    model = random_model(config, seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 or "sinks" in name:
            parameter.data.normal_(0, 0.08)
    return model


@dataclass
class PagedLanes:
    """Lanes on shuffled pages with one K and V buffer per layer; the oracle of who sees what."""

    layer_kv: Sequence[Any]
    page_size: int
    num_lanes: int
    max_len: int = 96
    seed: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"
    shuffle: bool = True
    buffers: list[tuple[Tensor, Tensor]] = field(init=False)
    pages: Tensor = field(init=False)  # int64 [num_lanes, pages per lane]

    def __post_init__(self) -> None:
        per_lane = -(-self.max_len // self.page_size)
        ids = list(range(1, self.num_lanes * per_lane + 1))
        if self.shuffle:
            random.Random(self.seed).shuffle(ids)
        self.pages = torch.tensor(ids, device=self.device).view(self.num_lanes, per_lane)
        num_slots = (len(ids) + 1) * self.page_size
        self.buffers = [
            tuple(
                # The contents of unused cells must not matter.
                torch.randn(
                    num_slots, layer.num_kv_heads, dim, dtype=self.dtype, device=self.device
                )
                for dim in (layer.k_head_dim, layer.v_head_dim)
            )
            for layer in self.layer_kv
        ]  # type: ignore[assignment]

    def slot(self, lane: int, position: int) -> int:
        page, offset = divmod(position, self.page_size)
        return int(self.pages[lane, page]) * self.page_size + offset

    def batch(
        self,
        starts: Sequence[int],
        q_lens: Sequence[int],
        own_masks: Sequence[Tensor] | None = None,
        own_positions: Sequence[Sequence[int]] | None = None,
        decode_len: int | None = None,
    ) -> tuple[AttentionBatch, Tensor]:
        """One forward that writes in-row positions start..start+q; and its rope positions [T].

        own_masks: bool [q, q] per lane, who sees whom among the new tokens (causal by default).
        """
        if own_positions is None:
            own_positions = [range(s, s + q) for s, q in zip(starts, q_lens, strict=True)]
        columns = -(-max(s + q for s, q in zip(starts, q_lens, strict=True)) // self.page_size)

        def mask_for(window: int | None, chunk: int | None = None) -> Tensor:
            size = (self.num_lanes, max(q_lens), columns * self.page_size)
            visible = torch.zeros(size, dtype=torch.bool)
            for b, (start, q_len) in enumerate(zip(starts, q_lens, strict=True)):
                visible[b, q_len:, 0] = True
                own_mask = (
                    torch.ones(q_len, q_len).tril().bool() if own_masks is None else own_masks[b]
                )
                positions = torch.tensor([*range(start), *own_positions[b]])
                seen = torch.cat([torch.ones(q_len, start, dtype=torch.bool), own_mask], 1)
                if window is not None:
                    seen &= positions[start:, None] - positions[None] < window
                if chunk is not None:
                    seen &= positions[start:, None] // chunk == positions[None] // chunk
                visible[b, :q_len, : start + q_len] = seen
            return visible

        slots = [
            self.slot(b, start + i)
            for b, (start, q_len) in enumerate(zip(starts, q_lens, strict=True))
            for i in range(q_len)
        ]

        def view_of(chunk: int | None) -> AttentionView:
            return AttentionView(
                page_size=self.page_size,
                write_slots=torch.tensor(slots, device=self.device),
                read_pages=self.pages[:, :columns],
                q_lens=list(q_lens),
                mask_for=functools.partial(mask_for, chunk=chunk),
                decode_len=decode_len if chunk is None else None,
            )

        chunks = [layer.window if layer.is_chunked else None for layer in self.layer_kv]
        views = {chunk: view_of(chunk) for chunk in chunks}
        kv = [(k, v, views[c]) for (k, v), c in zip(self.buffers, chunks, strict=True)]
        positions = torch.tensor(
            [p for lane_positions in own_positions for p in lane_positions], device=self.device
        )
        return AttentionBatch(views=tuple(views.values()), kv=kv), positions

    def compact(self, lane: int, start: int, path: Sequence[int]) -> None:
        """Moves accepted nodes to the first slots after the prefix: gather, then scatter."""
        source = torch.tensor([self.slot(lane, start + node) for node in path])
        target = torch.tensor([self.slot(lane, start + depth) for depth in range(len(path))])
        for pair in self.buffers:
            for buffer in pair:
                buffer[target] = buffer[source]
