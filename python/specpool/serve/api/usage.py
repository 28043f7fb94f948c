"""Usage: what a call has cost, and what drafting did for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specpool.serve.api.choice import Choice
from specpool.serve.bridge.messages import Done


def usage_of(num_prompt: int, choices: Sequence[Choice]) -> dict[str, Any]:
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


def drafting_of(ended: Sequence[Done]) -> dict[str, Any]:
    """Return how drafting went, in the names that AIPerf reads at the root of an answer."""
    rounds, drafts = sum(d.num_rounds for d in ended), sum(d.num_drafts for d in ended)
    accepted = sum(d.num_accepted for d in ended)
    return {
        "speculative_decoding": {
            "num_drafts": rounds,
            "num_draft_tokens": drafts,
            "num_accepted_tokens": accepted,
            "acceptance_rate": accepted / drafts if drafts else 0.0,
            "mean_acceptance_length": 1 + accepted / rounds if rounds else 0.0,
        }
    }
