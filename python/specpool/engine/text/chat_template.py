"""`render`: renders a checkpoint's chat template in a second process, within limits.

A template is a Jinja program. transformers' sandbox keeps it from files and from Python, but lets
it loop and allocate without end. So a second process renders with transformers' own function. It
may take at most `MOST_BYTES` more than it began with (on Linux), and is killed after
`MOST_SECONDS`. It starts with the first chat, serves all engines of this process, and ends with it.

`serve` is what the second process runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from specpool.engine.text.second_process import ProcessError, SecondProcess, limit_memory

#: The most seconds of a template, which normally takes milliseconds; a longer one is stopped.
MOST_SECONDS = 20.0
#: The most seconds for the start of the process, which imports transformers.
START_SECONDS = 120.0
#: The most memory of a template, in bytes.
MOST_BYTES = 1 << 29
#: The most characters of a rendered chat.
MOST_CHARACTERS = 1 << 25
#: Names that `variables` cannot have, because `render`, transformers and Jinja use them.
RESERVED = frozenset(
    "add_generation_prompt chat_template continue_final_message conversation conversations "
    "max_length messages padding return_assistant_tokens_mask return_dict return_tensors "
    "sanitize_control_tokens self tokenize tokenizer_kwargs tools truncation".split()
)


class TemplateError(Exception):
    """A template refused its messages, or passed a limit."""


class TemplateLimitError(TemplateError):
    """A template's process has ended, for example because it took too long."""


_process = SecondProcess(__name__, START_SECONDS)


def render(
    template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str:
    """Render a chat up to where the answer begins, unless `variables` say otherwise.

    Args:
        template: Jinja, as transformers takes it.
        messages: plain data, as in JSON.
        variables: further variables of the template, such as the special tokens; also
            `add_generation_prompt` and `continue_final_message`, as in transformers.

    Returns:
        The text.

    Raises:
        TemplateError: the template refuses or passes a limit, or the messages are not plain data.
        TemplateLimitError: its process has ended.
    """
    request = {
        "template": template,
        "messages": [dict(message) for message in messages],
        "variables": dict(variables),
        "most": [MOST_BYTES, MOST_CHARACTERS],
    }
    try:
        answer: dict[str, str] = _process.ask(request, MOST_SECONDS)
    except ProcessError as error:
        raise TemplateLimitError(str(error)) from error
    except (TypeError, RecursionError) as error:
        raise TemplateError(f"messages must be of plain data: {error}") from error
    if "error" in answer:
        raise TemplateError(answer["error"])
    return answer["text"]


def serve() -> None:
    """Answer requests until standard input ends: a JSON line for each."""
    from transformers.utils.chat_template_utils import render_jinja_template

    print("true", flush=True)
    is_limited = False
    for line in sys.stdin:
        request = json.loads(line)
        num_bytes, num_characters = request["most"]
        try:
            if not is_limited:
                limit_memory(num_bytes)
                is_limited = True
            rendered: Any = render_jinja_template(
                conversations=[request["messages"]],
                chat_template=request["template"],
                **{"add_generation_prompt": True} | request["variables"],
            )
            text = rendered[0][0]
            if len(text) > num_characters:
                raise ValueError(f"{len(text)} characters, at most {num_characters} are allowed")
            answer = json.dumps({"text": text})
        except BaseException as error:
            answer = json.dumps({"error": f"{type(error).__name__}: {error}"[:1000]})
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()
