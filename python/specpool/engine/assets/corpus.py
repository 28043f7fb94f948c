"""A seeded synthetic corpus: the training text of the embedded models, and built-in prompts.

It has JSON records, sums, tiny functions, prose, sequences and ini sections, all ASCII, and nothing
from third parties. The same seed gives the same bytes everywhere. A longer corpus begins with the
shorter one.
"""

from __future__ import annotations

import json
import random

from specpool.errors import ConfigError

NAMES = (
    "alice bob carol dave erin frank grace heidi ivan judy "
    "mallory niaj olivia peggy rupert sybil trent victor wendy"
).split()
CITIES = (
    "amsterdam berlin cairo dakar edinburgh florence geneva havana istanbul jakarta "
    "kyoto lima madrid nairobi oslo paris quito rome seoul tokyo"
).split()
FIELDS = (
    "count total index width height price score level depth offset length size limit speed weight"
).split()

HELD_OUT_SEED = 7  # never trained on; seeds 0 and 1 are the training and validation text
PROMPT_STRIDE = 2000  # bytes from one prompt's start to the next one's


def corpus(seed: int, num_bytes: int) -> bytes:
    """Return the first `num_bytes` bytes of the corpus of `seed`."""
    rng = random.Random(seed)
    records: list[str] = []
    length = 0
    while length < num_bytes:
        records.append(_record(rng))
        length += len(records[-1])
    return "".join(records).encode("ascii")[:num_bytes]


def prompts(n: int, length: int = 128) -> list[list[int]]:
    """Return `n` held-out prompts of `length` token ids each (a token is a byte).

    Raises:
        ConfigError: `n` is below 0, or `length` is outside `[1, PROMPT_STRIDE]`.
    """
    if n < 0 or not 1 <= length <= PROMPT_STRIDE:
        raise ConfigError(
            f"need n >= 0 prompts of a length in [1, {PROMPT_STRIDE}], got n={n}, length={length}"
        )
    text = corpus(HELD_OUT_SEED, n * PROMPT_STRIDE)
    return [list(text[i * PROMPT_STRIDE :][:length]) for i in range(n)]


def _record(rng: random.Random) -> str:
    # NOTE: do not reorder the random calls: this would change all bytes that follow.
    kind = rng.randrange(6)
    if kind == 0:
        record = {
            "id": rng.randrange(1000),
            "name": rng.choice(NAMES),
            "city": rng.choice(CITIES),
            "active": rng.random() < 0.5,
            "tags": rng.sample(FIELDS, 2),
        }
        return json.dumps(record) + "\n"
    if kind == 1:
        a, b = rng.randrange(100), rng.randrange(100)
        return f"{a} + {b} = {a + b}; {a} - {b} = {a - b}\n"
    if kind == 2:
        field, other_field = rng.choice(FIELDS), rng.choice(FIELDS)
        return (
            f"def get_{field}(item):\n"
            f'    {field} = item["{field}"]\n'
            f'    return {field} + item["{other_field}"]\n'
        )
    if kind == 3:
        name, city = rng.choice(NAMES).capitalize(), rng.choice(CITIES).capitalize()
        keeps = f"{name} keeps the {rng.choice(FIELDS)} of the {rng.choice(FIELDS)}"
        return f"{name} lives in {city}. In {city}, {keeps}.\n"
    if kind == 4:
        step, first = rng.randrange(1, 9), rng.randrange(1, 20)
        return "seq: " + ", ".join(str(first + step * i) for i in range(8)) + "\n"
    field = rng.choice(FIELDS)
    minimum, maximum = rng.randrange(10), rng.randrange(10, 99)
    owner, home = rng.choice(NAMES), rng.choice(CITIES)
    return f"[{field}]\nmin = {minimum}\nmax = {maximum}\nowner = {owner}\nplace = {home}\n\n"
