"""Law: keys of config.json and tokenizer_config.json mean what they mean in transformers.

A key works, is refused, or is named in the log. The keys are those of transformers' own base
classes, so that a new one has to be looked at here.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from specpool import ConfigError, Engine, SamplingParams
from specpool.engine.assets import resolve
from specpool.engine.text.tokenizer import cleans_spaces, load_tokenizer

PROMPT = "seq: 1, 2, 3, "
#: A value of each key of transformers' base class that is not its default, and some of decoders.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM", "OtherForCausalLM"],
    "chunk_size_feed_forward": 4,
    "dtype": "float32",
    "id2label": {"0": "first"},
    "is_encoder_decoder": True,
    "label2id": {"first": 0},
    "output_hidden_states": True,
    "problem_type": "regression",
    "return_dict": False,
    "transformers_version": "99.0",
    "attention_dropout": 0.5,
    "is_decoder": False,
    "add_cross_attention": True,
    "output_attentions": True,
    "quantization_config": {"quant_method": "gptq", "bits": 4},
    "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    "sliding_window": 4,
    "tie_word_embeddings": True,
    "use_cache": False,
    "repetition_penalty": 1.5,
}
REFUSED = {
    "is_encoder_decoder",
    "add_cross_attention",
    "quantization_config",
    "sliding_window",
    "return_dict",
}
#: A value of each option of transformers' base class of tokenizers.
TOKENIZER: dict[str, Any] = {
    "backend": "tokenizers",
    "chat_control_tokens": ["<eos>"],
    "chat_template": "{{ messages[0].content }}",
    "clean_up_tokenization_spaces": True,
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
    "extra_special_tokens": ["<eos>"],
    "additional_special_tokens": ["<eos>"],
    "files_loaded": [],
    "max_len": 4,
    "model_input_names": ["input_ids"],
    "model_max_length": 4,
    "model_specific_special_tokens": {"image_token": "<eos>"},
    "name_or_path": "elsewhere",
    "padding_side": "left",
    "processor_class": "OtherProcessor",
    "response_schema": {"type": "object"},
    "response_template": {},
    "split_special_tokens": True,
    "truncation_side": "left",
    "verbose": True,
    "add_bos_token": True,
    "add_eos_token": True,
    "add_prefix_space": True,
    "legacy": False,
    "spaces_between_special_tokens": False,
    "use_default_system_prompt": True,
}
CLEANS = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"


def folder_with(path: Path, file: str, **values: Any) -> str:
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(resolve("specpool/tiny"), path)
    content = json.loads((path / file).read_text())
    (path / file).write_text(json.dumps({**content, **values}))
    return str(path)


def test_the_lists_have_every_key_of_transformers():
    keys = {key for key in vars(PretrainedConfig()) if not key.startswith("_")}
    assert not keys - CONFIG.keys()
    source = inspect.getsource(PreTrainedTokenizerBase.__init__)
    options = set(re.findall(r"""kwargs\.pop\(\s*"(\w+)\"""", source))
    assert len(options) > 10 and not options - TOKENIZER.keys()


def test_a_key_of_the_config_does_what_it_does_in_transformers(tmp_path: Path):
    for key, value in CONFIG.items():
        folder = folder_with(tmp_path / "target", "config.json", **{key: value})
        try:
            with Engine.from_pretrained(folder, max_context_len=64, num_pages=16) as engine:
                params = SamplingParams(max_new_tokens=8)
                (output,) = engine.generate(PROMPT, params, progress=False)
        except ConfigError:
            assert key in REFUSED, key
            continue
        assert key not in REFUSED
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids = torch.tensor([output.prompt_ids])
        text = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
        text = text if isinstance(text, torch.Tensor) else text[0]
        assert output.token_ids == text[0, ids.shape[1] :].tolist(), key


@pytest.fixture(scope="module")
def engine():
    with Engine.from_pretrained(max_context_len=128, num_pages=32) as engine:
        yield engine


def test_an_option_of_a_tokenizer_does_what_it_does_in_transformers(engine, tmp_path, caplog):
    prompt = "ab <eos> don't . say , 'ab' c"
    options = [{}, *({key: value} for key, value in TOKENIZER.items())]
    options.append({CLEANS: True, "clean_up_tokenization_spaces": True})
    for given in options:
        folder = folder_with(tmp_path / "target", "tokenizer_config.json", **given)
        theirs, ours = AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
        caplog.clear()
        other = Engine(engine.target, None, config=engine.config, tokenizer=ours)
        params = SamplingParams(max_new_tokens=6, ignore_eos=True)
        (output,) = other.generate(prompt, params, progress=False)
        assert output.prompt_ids == theirs(prompt).input_ids, given
        is_named = "clean_up_tokenization_spaces is not taken" in caplog.text
        assert is_named == cleans_spaces(theirs) == (len(given) == 2), given
        if not is_named:
            text = theirs.decode(output.token_ids, skip_special_tokens=True)
            assert output.text == text, given
