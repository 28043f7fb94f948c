"""`python -m lab ancestry`: exact ancestry beside SGLang's reading of a draft tree, on one target.

A draft token attends to its true ancestors, or to whatever lies in its branch's slots. The text is
the same; the accept length is not.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from specpool.checks import check_int
from specpool.cli.options import checks
from specpool.cli.options.prompts import Given, read_prompts
from specpool.engine.models.files.names import MTP
from specpool.engine.shape_names import parse_shape
from specpool.errors import ConfigError

#: The ancestries and their names in the table.
NAMES = {"exact": "their true ancestors", "branch": "their branch's slots (SGLang)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AncestryJob:
    """The arguments of the command line."""

    target: str
    draft: str
    shape: str
    prompts: Given
    num_prompts: int
    num_tokens: int
    threads: int
    json: bool


def compare(job: AncestryJob) -> None:
    """Generate with both ancestries, and print their accept lengths and rounds.

    Raises:
        ConfigError: an option cannot work.
    """
    shape = parse_shape("--shape", job.shape)
    if shape.topk == 1:
        raise ConfigError(
            f"shape must be a tree, topk above 1, got {job.shape}: in a chain both ancestries are "
            "the same"
        )
    check_int("num_prompts", job.num_prompts, 1, 1 << 16)
    check_int("num_tokens", job.num_tokens, 1, 1 << 20)
    checks.check_place(device="cpu", threads=job.threads)
    checks.check_models(job.target, [job.draft])
    prompts = read_prompts(job.prompts, job.target, job.num_prompts)
    checks.start_torch(job.threads)
    from specpool import Engine, EngineConfig, SamplingParams
    from specpool.cli.generate.report import mean_accept_len
    from specpool.engine.assets import resolve
    from specpool.engine.draft import EagleDrafter, MTPDrafter
    from specpool.engine.models import TargetModel
    from specpool.engine.text.tokenizer import load_tokenizer

    folder = resolve(job.target)
    kind = MTPDrafter if job.draft == MTP else EagleDrafter
    source = folder if job.draft == MTP else resolve(job.draft)
    results: dict[str, dict[str, Any]] = {}
    for ancestry in NAMES:
        target = TargetModel.from_pretrained(folder, dtype="float32")
        drafter = kind.from_pretrained(source, target, ancestry=ancestry)
        with Engine(
            target, drafter, config=EngineConfig(shape=shape), tokenizer=load_tokenizer(folder)
        ) as engine:
            outputs = engine.generate(prompts, SamplingParams(max_new_tokens=job.num_tokens))
        results[ancestry] = {
            "accept_len": mean_accept_len(outputs),
            "rounds": sum(output.verify_ct for output in outputs),
        }
    if job.json:
        print(json.dumps(results))
        return
    table = Table("", "accept length", "rounds", title="draft tokens attend to")
    for ancestry, result in results.items():
        table.add_row(NAMES[ancestry], f"{result['accept_len']:.3f}", str(result["rounds"]))
    Console().print(table)
