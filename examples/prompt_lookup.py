"""Prompt lookup: drafts without a draft model, taken from the text itself."""

from __future__ import annotations

from specpool import Engine, SamplingParams, Shape
from specpool.engine.draft import NgramDrafter

RECORD = "[size]\nmin = 3\nmax = 7\nowner = erin\nplace = rome\n\n"


def main() -> None:
    """Continue text that repeats itself, with a tree of what followed its last tokens before."""
    drafter = NgramDrafter(max_ngram=6)  # or draft="ngram:6"
    shape = Shape.eagle(4, 4, 16)  # 4 tokens deep, 4 different continuations, 16 nodes verified
    with Engine.from_pretrained("specpool/tiny", draft=drafter, shape=shape) as engine:
        params = SamplingParams(max_new_tokens=96)
        drafted = engine.generate(RECORD * 4, params)[0]
        plain = engine.generate(RECORD * 4, params, shape=Shape.none())[0]
    assert drafted.token_ids == plain.token_ids
    print(drafted.text)
    print(
        f"{len(drafted.token_ids)} tokens in {drafted.verify_ct} rounds: "
        f"{drafted.accept_len:.2f} tokens a round"
    )


if __name__ == "__main__":
    main()
