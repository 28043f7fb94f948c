"""A tokenizer whose ids are bytes, with bos, eos and pad: in the form that transformers loads."""

from __future__ import annotations

from pathlib import Path

from corpus import BOS, EOS, PAD
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def byte_letters() -> dict[int, str]:
    """The printable letter that byte-level BPE uses for each byte (as GPT-2 does)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    return letters | {byte: chr(256 + i) for i, byte in enumerate(others)}


def save_tokenizer(out: Path, max_len: int) -> None:
    """Write `tokenizer.json` and its config: byte-level BPE without a single merge."""
    vocab = {letter: byte for byte, letter in sorted(byte_letters().items())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {BOS: "<bos>", EOS: "<eos>", PAD: "<pad>"}
    tokenizer.add_special_tokens([AddedToken(special[i], special=True) for i in sorted(special)])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=special[BOS],
        eos_token=special[EOS],
        pad_token=special[PAD],
        clean_up_tokenization_spaces=False,
        model_max_length=max_len,
    ).save_pretrained(out)
