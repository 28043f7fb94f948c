"""Usage: what a call has cost, and what drafting did for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specpool.serve.api.choice import AnswerChoice
from specpool.serve.bridge.messages import Done


def usage_of(num_prompt: int, choices: Sequence[AnswerChoice]) -> dict[str, Any]:
    """Return `usage`.

    Args:
        num_prompt: tokens of all prompts; a prompt of several samples counts once.
        choices: the texts, ended or not.
    """
    ended = [choice.done for choice in choices if choice.done is not None]
    num_new = sum(choice.num_tokens for choice in choices)
    accepted = sum(done.num_accepted for done in ended)
    drafts = sum(done.num_drafts for done in ended)
    # The further samples of a prompt share what the first has computed.
    cached = sum(done.num_reused for done in ended if done.sample == 0)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": min(cached, num_prompt)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(drafts - accepted, 0),
        },
    }


def drafting_of(done: Done, num_steps: int) -> dict[str, Any]:
    """Return how the drafts of one text went, as vLLM reports it and AIPerf reads it.

    The last round counts drafts behind a stop too. `usage_of` counts those of the text alone, so
    its `accepted_prediction_tokens` may be smaller.

    Args:
        done: the text's end.
        num_steps: drafts of a round at most, as far as the engine has a fixed shape.
    """
    correct = [length - 1 for length in done.accept_lens]
    max_drafts = max([num_steps, *correct])
    accepted, rounds = sum(correct), len(correct)
    return {
        "mean_acceptance_length": 1 + accepted / rounds if rounds else 1.0,
        "draft_acceptance_rate": accepted / done.num_drafts if done.num_drafts else 0.0,
        "acceptance_histogram": [correct.count(number) for number in range(max_drafts + 1)],
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": done.num_drafts,
        "num_spec_steps": rounds,
        "num_spec_tokens": max_drafts,
    }
