"""Find out which causal language models of the installed transformers run, on small random models.

`make models` writes docs/models.md with it. It builds each type of `AutoModelForCausalLM` small,
with windows and chunks shorter than the texts, and compares its text over pages, plain and
drafted, with transformers' own `generate`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

import families
import recurrent_families
from lossless import Comparison, Reference
from specpool import Engine, SamplingParams, Shape
from specpool.engine.draft import ScriptedDrafter
from specpool.engine.models import TargetModel
from specpool.engine.models.gate import RECURRENT, text_config
from specpool.errors import ConfigError

NUM_TOKENS = 20
PROMPT_LENS = (33, 20, 5)
MOST_PARAMETERS = 35_000_000
TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

#: What makes a config small, for each key that a class knows.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("embedding_size", "embed_dim", "input_embedding_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 4),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("expert_ffn_hidden_size", "dense_intermediate_size"), 32),
    **dict.fromkeys(("prefix_dense_intermediate_size",), 96),
    **dict.fromkeys(("head_dim", "attention_head_dim", "global_head_dim", "kv_channels"), 16),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size"), 8),
    **dict.fromkeys(("local_attention", "window_size", "floor_scale"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 512),
    **dict.fromkeys(("max_sequence_length", "max_target_positions", "num_positions"), 512),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_num_experts", "num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    "moe_num_experts": 4,
    "vocab_size": families.VOCAB,
    "vocab_size_per_layer_input": families.VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 20,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "rotary_dim": 8,
    "conv_kernel": 4,
    "state_size": 8,
    "mamba_d_state": 8,
    "image_size": 28,
    "patch_size": 14,
}
MIXED = ["sliding_attention", "full_attention"]
#: What else a type needs to be small, or to show what its size would hide.
OWN: dict[str, dict[str, Any]] = {
    "longcat_flash": {"num_layers": 2, "head_dim": 8},
    "cohere_compass_text": {
        "layer_types": MIXED * 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]}
            for kind in MIXED
        },
    },
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "zaya": {"num_experts_per_tok": 1},
    "qwen4_exp_text": {
        "hc_lowrank": 8,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "no_rope_layers": [1, 0, 1, 0],
        "num_experts_per_tok": 1,
        "attn_scale": 0.5,
    },
}


@dataclass(frozen=True)
class Row:
    """The result for one type."""

    model_type: str
    class_name: str
    verdict: str  # runs, refused, not tried, differs
    note: str = ""  # the reason; of one that runs, what its layers keep

    @property
    def cell(self) -> str:
        """The note as a table of the page has it."""
        return self.note.replace("|", "\\|")

    def line(self) -> str:
        """The row for a person who asked for this type."""
        return f"{self.model_type} ({self.class_name}): {self.verdict}: {self.note}"


def small_config(model_type: str) -> Any:
    """A config of a type, small enough to build."""
    config_class = CONFIG_MAPPING[model_type]
    for kit in (families, recurrent_families):
        for name, arguments in kit.FAMILIES.values():
            if name == config_class.__name__:
                return config_class(**arguments)
    return _shrunk(config_class, OWN.get(model_type, {}))


def _shrunk(config_class: Any, own_fields: dict[str, Any]) -> Any:
    names = {f.name for f in dataclasses.fields(config_class)}
    arguments = {name: value for name, value in SMALL.items() if name in names}
    for name, part in (getattr(config_class, "sub_configs", None) or {}).items():
        if dataclasses.is_dataclass(part) and name in names:
            arguments[name] = _shrunk(part, own_fields.get(name, {})).to_dict()
        elif name in names and name in ("text_config", "decoder", "llm_config"):
            arguments[name] = own_fields.get(name, {})
    if "kv_lora_rank" in names and "num_key_value_heads" in names:
        arguments["num_key_value_heads"] = arguments["num_attention_heads"]
    arguments |= own_fields
    config = _taken(config_class, arguments)
    if "layer_types" in names and "layer_types" not in own_fields:
        kinds = set(config.layer_types or ())
        slides = {"use_sliding_window": True} if "use_sliding_window" in names else {}
        is_mixed = kinds and kinds <= set(MIXED) and getattr(config, "sliding_window", None)
        if is_mixed and config.num_hidden_layers == 4:
            return _taken(config_class, {**arguments, "layer_types": MIXED * 2, **slides})
    return config


def _taken(config_class: Any, arguments: dict[str, Any]) -> Any:
    """The config of those of the arguments that it takes."""
    while True:
        try:
            return config_class(**arguments)
        except TypeError as error:  # of a key that is written but not taken
            unknown = [name for name in arguments if f"'{name}'" in str(error)]
            if not unknown:
                raise
            arguments = {n: value for n, value in arguments.items() if n != unknown[0]}


def make_model(config: Any) -> Any:
    """A random float32 model of a config.

    Raises:
        ValueError: it is too big.
    """
    with torch.device("meta"):
        shell = transformers.AutoModelForCausalLM.from_config(config)
    size = sum(parameter.numel() for parameter in shell.parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"a small config of it has {size} parameters")
    is_recurrent = text_config(config).model_type in RECURRENT
    return (recurrent_families if is_recurrent else families).make_model(config)


def survey(model_type: str) -> Row:
    """Build, run and compare a type."""
    class_name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    try:
        config = small_config(model_type)
        class_name = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
        model = make_model(config)
        reference = Reference(model)
        prompts = _prompts(model)
        texts = [[*prompt, *reference.text(prompt, NUM_TOKENS)] for prompt in prompts]
    except Exception as error:  # transformers may raise anything for a config that we guessed
        try:
            with TargetModel.from_pretrained(model):  # type: ignore[possibly-undefined]
                pass
        except ConfigError as refusal:
            return Row(model_type, class_name, "refused", _reason(refusal))
        except Exception:  # nothing was built
            pass
        return Row(model_type, class_name, "not tried", _first_line(error))
    try:
        with TargetModel.from_pretrained(model) as target:
            kv_kinds = _kinds_of_kv(target)
        for shape in (None, Shape.eagle(4, 4, 16)):
            _compare(model, reference, prompts, texts, shape)
    except ConfigError as error:
        return Row(model_type, class_name, "refused", _reason(error))
    except Exception as error:
        return Row(model_type, class_name, "differs", _first_line(error))
    return Row(model_type, class_name, "runs", kv_kinds)


def _prompts(model: Any) -> list[list[int]]:
    rng = random.Random(0)
    vocab_size = model.get_output_embeddings().weight.shape[0]
    return [[rng.randrange(3, vocab_size) for _ in range(n)] for n in PROMPT_LENS]


def _compare(
    model: Any,
    reference: Reference,
    prompts: list[list[int]],
    texts: list[list[int]],
    shape: Shape | None,
) -> None:
    vocab_size = model.get_output_embeddings().weight.shape[0]
    drafter = None
    if shape is not None:
        drafter = ScriptedDrafter(texts, vocab_size=vocab_size, error_rate=0.3)
    with Engine.from_pretrained(
        model,
        draft=drafter,
        shape=shape,
        page_size=4,
        max_batch=2,
        prefill_tokens=16,
        max_context_len=80,
    ) as engine:
        params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
        outputs = engine.generate(prompts, params)
    comparison = Comparison()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.token_ids) == NUM_TOKENS, output.error
        comparison.add(reference, prompt, output.token_ids)


def _kinds_of_kv(target: TargetModel) -> str:
    """What the model's layers keep, in words."""
    kinds: Counter[str] = Counter()
    for layer in target.layer_kv:
        kind = "full" if layer.window is None else "chunk" if layer.is_chunked else "window"
        if layer.k_head_dim != layer.v_head_dim:
            kind += ", keys and values of different width"
        if layer.has_sinks:
            kind += ", sinks"
        kinds[kind] += 1
    names = sorted(kinds)
    return "; ".join(["state", *names] if target.keeps_state else names)


def _reason(error: Exception) -> str:
    """Why a model is refused, without the part that names what does run."""
    text = str(error).partition(" over pages: ")[2] or str(error)
    return text.partition(";")[0]


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return f"{text.splitlines()[0]:.110}"


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Silence what transformers says about configs that nobody would ship."""
    transformers.logging.set_verbosity(logging.CRITICAL)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


HEAD = """# Which models run

For anyone who wants to know before loading whether a model runs.

specpool runs most decoders that transformers' `AutoModelForCausalLM` loads, unmodified. `make
models` wrote this page with transformers {version}: it built each type small, with random weights,
and compared greedy text over pages, plain and drafted (trees of 4x4x16), with transformers' own
`generate`.

| verdict | types |
|---|---|
{counts}

| verdict | meaning |
|---|---|
| runs | The texts are equal. The note says what the layers keep: `full` (K and V of all tokens), \
`window` (of the last tokens), `chunk` (of the query's own chunk), `state` (recurrent). Multi-head \
latent attention ("keys and values of different width") is kept as transformers expands it. |
| refused | Loading ends with the reason in the note, before any memory is taken. |
| not tried | No small model of this type could be built. Loading a real one makes the same \
checks, also for a type that is not in this table. |

Of a model of text and images or sound the text part alone is read, if transformers maps its type to
`AutoModelForImageTextToText` or `AutoModelForMultimodalLM` and its decoder runs. Tests compare
`gemma3`, `glm4v`, `idefics3`, `internvl`, `kimi_k25`, `llava`, `mistral3`, `paligemma`,
`qwen2_5_vl`, `qwen2_vl`, `qwen3_vl`, `qwen3_vl_moe` and `voxtral` with the whole model's own
`generate`. A prompt with the token that stands for an image is refused.
"""


def page(rows: list[Row]) -> str:
    """docs/models.md: a table for each verdict, with a row for each note."""
    counted = Counter(row.verdict for row in rows)
    counts = "\n".join(f"| {verdict} | {n} |" for verdict, n in counted.most_common())
    text = HEAD.format(version=transformers.__version__, counts=counts)
    for verdict, _ in counted.most_common():
        types: dict[str, list[str]] = {}
        for row in rows:
            if row.verdict == verdict:
                types.setdefault(row.cell, []).append(f"`{row.model_type}`")
        text += f"\n## {verdict.capitalize()}\n\n| types | note |\n|---|---|\n"
        for note, names in sorted(types.items(), key=lambda item: -len(item[1])):
            text += f"| {', '.join(names)} | {note} |\n"
    return text


def main(types: list[str]) -> int:
    """Write the lines of these types, or the page of all; 1 = some text differs."""
    torch.set_num_threads(1)
    rows = []
    for model_type in types or TYPES:
        with silence():
            rows.append(survey(model_type))
        print(rows[-1].line(), file=sys.stdout if types else sys.stderr, flush=True)
    if not types:
        print(page(rows), end="")
    return int(any(row.verdict == "differs" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
