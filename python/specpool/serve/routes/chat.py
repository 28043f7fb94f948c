"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from specpool.engine.sampling_params import SamplingParams
from specpool.engine.text.chat_messages import THOUGHTS
from specpool.engine.text.chat_template import RESERVED
from specpool.serve.api.channels import Channels, has_channels
from specpool.serve.api.choice import AnswerChoice, Delta
from specpool.serve.api.errors import bad
from specpool.serve.api.requests import ChatRequest, Message, TokenizeRequest, Tool
from specpool.serve.api.sampling import check_supported, params_of
from specpool.serve.api.structured import form_field, tools_of
from specpool.serve.api.thoughts import Thoughts, begins_thoughts
from specpool.serve.api.tool_calls import ToolCalls
from specpool.serve.api.tool_formats import THOUGHTS_BEGIN, formats_of
from specpool.serve.generation import tokens_of
from specpool.serve.routes.calls import ANSWERS, Call
from specpool.serve.routes.reading import reading
from specpool.serve.service import Service

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Tokens at a prompt's end in which thoughts may begin.
_TAIL = 32


class ChatForm:
    """The form of a chat's answer."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        body: ChatRequest,
        num: int,
        prompt: Sequence[int] = (),
    ) -> None:
        """Write `num` choices for this request, behind this prompt."""
        self._most_calls = 1 if body.parallel_tool_calls is False else None
        self._num_top = (body.top_logprobs or 0) if body.logprobs else None
        template = getattr(tokenizer, "chat_template", None)
        formats = formats_of(template)
        # A text in a form, and one that shows its special tokens, have no mark behind thoughts.
        is_marked = form_field(body) is None and body.skip_special_tokens is not False
        ids = list(prompt[-_TAIL:])
        plain, tail = (
            str(tokenizer.decode(ids, skip_special_tokens=skips)).rstrip()
            for skips in (True, False)
        )
        is_read = is_marked and begins_thoughts(tail) and not begins_thoughts(plain)
        thinks = any(match.end() == len(tail) for match in THOUGHTS_BEGIN.finditer(tail))
        self._tools = [ToolCalls(body, formats, thinks=thinks and not is_read) for _ in range(num)]
        self._has_channels = has_channels(template)
        self._readers: list[Channels | Thoughts] = [
            Channels() if self._has_channels else Thoughts(thinks=is_read) for _ in range(num)
        ]
        self._contents: list[list[str]] = [[] for _ in range(num)]
        self._thoughts: list[list[str]] = [[] for _ in range(num)]
        self._pieces: list[list[tuple[str, bool]]] = [[] for _ in range(num)]  # of no part so far

    def first(self, choice: AnswerChoice) -> dict[str, Any] | None:
        """Return the part that names the role."""
        return _part(choice, {"role": "assistant", "content": ""}, None, None)

    def part(self, choice: AnswerChoice, delta: Delta) -> dict[str, Any] | None:
        """Return the part of a stream with a delta's text and calls."""
        tools, is_last = self._tools[choice.index], delta.finish_reason is not None
        thoughts, content, calls = self._push(choice, delta)
        if self._most_calls is not None:
            calls = [call for call in calls if call["index"] < self._most_calls]
        new: dict[str, Any] = {"reasoning_content": thoughts} if thoughts else {}
        if content:
            new["content"] = content
        if calls:
            new["tool_calls"] = calls
        pieces = self._pieces[choice.index]
        pieces += delta.pieces
        if not new and not is_last and not (self._num_top is not None and delta.entries):
            return None
        delta.pieces, self._pieces[choice.index] = pieces, []
        return _part(choice, new, self._logprobs(choice, delta), self._reason(tools, delta))

    def whole(self, choice: AnswerChoice, deltas: list[Delta]) -> dict[str, Any]:
        """Return a choice in one piece."""
        tools = self._tools[choice.index]
        for delta in deltas:
            self._push(choice, delta)
        content, thoughts = (
            "".join(texts[choice.index]) for texts in (self._contents, self._thoughts)
        )
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if thoughts:
            message["reasoning_content"] = thoughts
        if calls := tools.calls[: self._most_calls]:
            message |= {"content": content or None, "tool_calls": calls}
        assert choice.done is not None
        whole = Delta(entries=[entry for delta in deltas for entry in delta.entries])
        del whole.entries[len(choice.done.token_ids) :]  # tokens behind a stop string
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice, whole),
            "finish_reason": self._reason(tools, deltas[-1]),
        }

    def _push(self, choice: AnswerChoice, delta: Delta) -> tuple[str, str, list[dict[str, Any]]]:
        """Read a delta; return its thoughts, content and calls.

        The last one gives the choice its message, if this is not the text itself.
        """
        tools, contents = self._tools[choice.index], self._contents[choice.index]
        is_last = delta.finish_reason is not None
        thoughts, text, specials = _parted(self._readers[choice.index], delta)
        self._thoughts[choice.index].append(thoughts)
        content, calls = tools.push(text, is_last, specials)
        contents.append(content)
        all_thoughts = "".join(self._thoughts[choice.index]) if is_last else ""
        if is_last and (tools.calls or all_thoughts or self._has_channels):
            message: dict[str, Any] = {"role": "assistant", "content": "".join(contents)}
            if tools.calls:
                message["tool_calls"] = tools.calls[: self._most_calls]
            if all_thoughts:
                message["reasoning_content"] = all_thoughts
            choice.message = message
        return thoughts, content, calls

    def _logprobs(self, choice: AnswerChoice, delta: Delta) -> dict[str, Any] | None:
        if self._num_top is None:
            return None
        return choice.log.chat(delta.entries, self._num_top)

    def _reason(self, tools: ToolCalls, delta: Delta) -> str | None:
        if delta.finish_reason != "stop":
            return delta.finish_reason
        # If only the first of several calls is answered, a later one may be cut off.
        limit = self._most_calls
        is_whole = limit is not None and len(tools.calls) > limit and tools.num_whole >= limit
        return "tool_calls" if is_whole else tools.finish_reason


def _parted(reader: Channels | Thoughts, delta: Delta) -> tuple[str, str, list[tuple[int, str]]]:
    """Return a delta's thoughts, its other text, and the special tokens in the latter.

    The delta's pieces, which show what was drafted, become those of the other text.
    """
    thoughts, text = "", ""
    specials: list[tuple[int, str]] = []
    pieces: list[tuple[str, bool]] = []
    start, left = 0, list(delta.specials)
    # Special tokens that the text does not go beyond yet stand behind the pieces.
    for piece, is_drafted in [*delta.pieces, ("", False)]:
        end = start + len(piece)
        num = sum(offset < end or not piece for offset, _ in left)
        piece_specials = [(offset - start, special) for offset, special in left[:num]]
        is_last = not piece and delta.finish_reason is not None
        new = reader.push(piece, is_last, piece_specials)
        thoughts += new.thoughts
        specials += [(len(text) + offset, special) for offset, special in new.specials]
        text += new.text
        if new.text:
            pieces.append((new.text, is_drafted))
        start, left = end, left[num:]
    delta.pieces = pieces
    return thoughts, text, specials


def _part(
    choice: AnswerChoice, delta: dict[str, Any], logprobs: dict[str, Any] | None, reason: str | None
) -> dict[str, Any]:
    return {
        "index": choice.index,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": reason,
    }


def messages_of(messages: list[Message]) -> list[dict[str, Any]]:
    """Return messages as plain data: fields that are not given are left out."""
    plain_messages = []
    for message in messages:
        plain = message.model_dump(exclude_none=True)
        plain.setdefault("content", "")  # an answer that was calls alone
        plain_messages.append(plain)
    return plain_messages


def template_variables(
    body: ChatRequest | TokenizeRequest, tools: list[Tool] | None
) -> dict[str, Any]:
    """Return the tools and the variables that a body names for the chat template.

    Raises:
        ApiError: one of them is what the server itself gives the template.
    """
    variables = body.chat_template_kwargs or {}
    if names := sorted(variables.keys() & RESERVED):
        raise bad(
            f"chat_template_kwargs has {', '.join(map(repr, names))}, which the server gives the "
            "template itself: leave it out",
            "chat_template_kwargs",
        )
    tool_variables = (
        {"tools": [tool.model_dump(exclude_none=True) for tool in tools]} if tools else {}
    )
    return {**variables, **tool_variables}


#: The variables of a chat template that `reasoning_effort` sets: gpt-oss', and Qwen3's and others'.
_EFFORT = ("reasoning_effort", "enable_thinking")


def _variables(body: ChatRequest) -> dict[str, Any]:
    """Return the further variables of the chat template.

    Raises:
        ApiError: see `template_variables`, or two fields contradict.
    """
    variables: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        variables |= zip(
            _EFFORT, (body.reasoning_effort, body.reasoning_effort != "none"), strict=True
        )
    if body.documents is not None:
        variables["documents"] = body.documents
    variables |= template_variables(body, tools_of(body))
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise bad(
                "add_generation_prompt begins a new answer, continue_final_message goes on with "
                "the last message: give one",
                "continue_final_message",
            )
        variables |= {"add_generation_prompt": False, "continue_final_message": True}
    elif body.add_generation_prompt is False:
        variables["add_generation_prompt"] = False
    return variables


def _unread(body: ChatRequest, template: str) -> list[str]:
    """Return the fields that are for the chat template, which does not read them."""
    names = []
    if body.reasoning_effort is not None and not any(name in template for name in _EFFORT):
        names.append("reasoning_effort")
    if body.documents is not None and "documents" not in template:
        names.append("documents")
    if body.parallel_tool_calls is not None and not body.tools:
        names.append("parallel_tool_calls")
    return names


def unread_thoughts(
    service: Service, messages: list[dict[str, Any]], variables: Mapping[str, Any]
) -> list[str]:
    """Return the fields with thoughts of a rendered chat, if the template does not read them."""
    answers = [message for message in messages if message["role"] == "assistant"]
    names = {f"messages.{name}" for name in THOUGHTS for answer in answers if answer.get(name)}
    contents = [answer["content"] for answer in answers if isinstance(answer["content"], list)]
    if any(part.get("type") == "thinking" for content in contents for part in content):
        names.add("messages.content.thinking")
    return sorted(names) if names and not service.texts.reads_thoughts(variables) else []


def routes(service: Service) -> APIRouter:
    """Return the route of chats."""
    router = reading(service.read_aside)

    @router.post("/v1/chat/completions", summary="Answer a chat", responses=ANSWERS)
    async def chat(body: ChatRequest, request: Request) -> Response:
        model = service.check_model(body.model)
        template = str(getattr(service.tokenizer, "chat_template", ""))
        ignored = sorted(check_supported(body) + _unread(body, template))
        call = Call(service, request, body, model, ignored)
        if body.top_logprobs is not None and not body.logprobs:
            raise bad("top_logprobs needs logprobs: true", "top_logprobs")
        variables = _variables(body)
        num_top = (body.top_logprobs or 0) if body.logprobs else None

        def params(room: int) -> SamplingParams:
            wanted = body.max_completion_tokens or body.max_tokens
            temperature = service.client.ready.temperature
            return params_of(body, min(wanted or room, room), num_top, temperature)

        messages = messages_of(body.messages)
        generation = await call.generation([messages], params, variables, notes_special=True)
        call.ignored = sorted({*ignored, *unread_thoughts(service, messages, variables)})
        (prompt,) = generation.order.prompts

        def form() -> ChatForm:
            return ChatForm(service.tokenizer, body, len(generation.choices), tokens_of(prompt))

        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        return await call.answer(generation, form, kind, "chatcmpl")

    return router
