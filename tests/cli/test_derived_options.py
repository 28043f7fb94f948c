"""Laws of options that are derived from the fields of configurations: each is declared once."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields
from inspect import signature
from typing import Annotated

import pytest
import typer

from specpool import ConfigError, EngineConfig, SamplingParams, Shape
from specpool.cli.commands import app
from specpool.cli.options.derived import OptionsOf, Values, docs_of, grouped, options_of
from specpool.fields import declared
from specpool.serve.config import ServeConfig
from specpool.train.config import TrainConfig

CONFIGS = [EngineConfig, SamplingParams, ServeConfig, TrainConfig]
#: Fields that no command has an option for, each with the reason.
WITHOUT_OPTION = {
    EngineConfig: {
        "shapes": "a request of the command line names no shape of its own",
        "forced_steps": "a command's forms draft the steps of its shape",
        "prefix_cache": "it changes no text, and gives its pages back to running requests",
    },
    SamplingParams: {
        "structured": "--json-schema, --json-object, --regex, --choice and --grammar make it",
        **dict.fromkeys(
            (
                *("ignore_eos", "stop_token_ids", "skip_special_tokens", "min_new_tokens"),
                *("no_repeat_ngram_size", "bad_words_ids", "suppress_tokens"),
                "begin_suppress_tokens",
            ),
            "it needs token ids, or is read from the target's generation_config.json",
        ),
        **dict.fromkeys(
            ("max_draft_steps", "tpot_ms", "priority", "cache_salt"),
            "it sets requests apart, and those of a command are all alike",
        ),
    },
    ServeConfig: {
        "api_keys": "--api-key-file and SPECPOOL_API_KEY have them: a secret is no argument",
        "max_header": "a guard, for programs that embed the server",
        "max_choices": "likewise",
    },
    TrainConfig: dict.fromkeys(
        ("target", "dtype", "device", "trust_remote_code"),
        "the option that all commands with a model share",
    ),
}
COMMANDS = {
    EngineConfig: ["generate", "chat", "serve"],
    SamplingParams: ["generate", "chat"],
    ServeConfig: ["serve"],
    TrainConfig: ["train"],
}


@pytest.mark.parametrize("config", CONFIGS)
def test_each_field_has_exactly_one_option_or_a_reason_to_have_none(config):
    commands = typer.main.get_command(app).commands
    params = [param for name in COMMANDS[config] for param in commands[name].params]
    options = defaultdict(set)
    for param in params:  # a command may have a default of its own
        text = (param.help or "").partition(" [default: ")[0]
        options[param.name].add((*param.opts, *param.secondary_opts, text))
    for field in fields(config):
        if field.name in WITHOUT_OPTION[config]:
            assert field.name not in options_of(config), field.name
        else:
            assert len(options[field.name]) == 1, field.name


@pytest.mark.parametrize("config", CONFIGS)
def test_the_help_of_an_option_is_the_first_sentence_of_its_fields_doc(config):
    commands = typer.main.get_command(app).commands
    docs = docs_of(config)
    assert [*docs] == [field.name for field in fields(config)]
    for name in COMMANDS[config]:
        helps = {param.name: param.help for param in commands[name].params}
        for field in options_of(config).keys() & helps.keys():
            sentence = docs[field].partition(". ")[0].removesuffix(".")
            for other, option in options_of(config).items():  # a help names options, not fields
                sentence = sentence.replace(f"`{other}`", option.names[0])
            assert helps[field].lower().startswith(sentence.lower()), field


@pytest.mark.parametrize("config", CONFIGS)
def test_a_value_beyond_a_fields_limits_is_refused(config):
    required = {"target": "t", "data": ("d",), "out": "o"} if config is TrainConfig else {}
    limited = [field for field in declared(config) if field.within is not None]
    assert limited
    for field in limited:
        for value in (field.within.minimum - 1, field.within.maximum + 1, "1", True):
            with pytest.raises(ConfigError, match=rf"^{field.name} must be an? (int|num)\w+ in \["):
                config(**required, **{field.name: value})


NAMES = ("max_batch", "kv_bytes", "graph_sizes", "mixed_chunks", "shape")


def test_a_command_has_its_own_defaults_and_gets_the_fields_values():
    """None is what was not typed: the configuration's own default stays."""
    seen = []

    def command(*, engine: Annotated[Values, OptionsOf(EngineConfig, only=NAMES, max_batch=5)]):
        seen.append(engine)

    run = grouped(command)
    defaults = {name: param.default for name, param in signature(run).parameters.items()}
    untyped = {"kv_bytes": None, "graph_sizes": None, "shape": None}
    assert defaults == {"max_batch": 5, "mixed_chunks": False, **untyped}
    run(**defaults)
    run(**{**defaults, "kv_bytes": "1KiB", "graph_sizes": "none", "shape": "2"})
    others = {"kv_bytes": 1024, "graph_sizes": (), "shape": Shape.eagle(2, 1, 3)}
    assert seen == [{"max_batch": 5, "mixed_chunks": False, **given} for given in ({}, others)]


def test_a_name_that_is_no_option_is_a_fault_of_the_command():
    for wrong in ({"without": ["prefix_cache"]}, {"only": ["max_bach"]}, {"headrom": 3}):
        with pytest.raises(AssertionError, match="EngineConfig has no options"):
            OptionsOf(EngineConfig, **wrong)
