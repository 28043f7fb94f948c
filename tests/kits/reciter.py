"""A model that says a given answer behind any prompt of a given length, and its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerBase

from specpool.engine.assets import resolve

CHATML = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(
    specials: Sequence[str] = ("<|im_start|>", "<|im_end|>"), chat_template: str | None = CHATML
) -> PreTrainedTokenizerBase:
    """The embedded tokenizer, a token for each byte, with further special tokens from 259 on."""
    tokenizer = AutoTokenizer.from_pretrained(resolve("specpool/tiny"))
    tokenizer.add_special_tokens({"additional_special_tokens": list(specials)})
    tokenizer.chat_template = chat_template
    return tokenizer


def reciter(
    answers: Mapping[int, Sequence[int]],
    vocab_size: int,
    *,
    length: int = 256,
    eos: int | list[int] | None = 257,
    filler: int = ord("."),
) -> GPT2LMHeadModel:
    """A GPT-2 whose next token depends on the position alone.

    Args:
        answers: the prompt's length -> the tokens behind it.
        vocab_size: tokens of the vocabulary.
        length: positions.
        eos: tokens that end a text, for the configs.
        filler: the token everywhere else.
    """
    config = GPT2Config(
        vocab_size=vocab_size,
        n_embd=length,
        n_layer=1,
        n_head=2,
        n_positions=length,
        n_inner=8,
        bos_token_id=256,
        eos_token_id=eos,
        tie_word_embeddings=False,
    )
    model = GPT2LMHeadModel(config).eval().float()
    script = [filler] * (length + 1)
    for start, answer in answers.items():
        script[start : start + len(answer)] = answer
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(length) * 10)
        for position in range(length):
            model.lm_head.weight[script[position + 1], position] = 1.0
    return model
