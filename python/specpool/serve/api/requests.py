"""The bodies of requests, as OpenAI has them, and the fields that vLLM and SGLang add."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
)
from pydantic_core import PydanticCustomError

from specpool.engine.sampling_params import MAX_BIASES, SamplingParams
from specpool.fields import declared
from specpool.serve.api.reading import MOST_NODES, num_nodes

_INT64 = 1 << 63
#: The most tools of a chat.
MAX_TOOLS = 1024
#: The most tokens that may end a text, beside the model's own: each text of a call looks at them.
MAX_STOP_IDS = 1024

_ENGINE_FIELDS = {field.name: field for field in declared(SamplingParams)}


def _limits(name: str) -> Any:
    """Return the limits of a number as `SamplingParams` has them for its field `name`."""
    field = _ENGINE_FIELDS[name]
    assert field.within is not None
    return Field(
        ge=field.within.minimum,
        le=field.within.maximum,
        allow_inf_nan=False if field.kind is float else None,  # pydantic refuses it for integers
    )


Count = Annotated[int, _limits("max_new_tokens")]
Token = Annotated[int, Field(ge=0, le=(1 << 31) - 1)]
# A list ends at its first mistake: a body may have millions of them.
Tokens = Annotated[list[Token], Field(fail_fast=True, max_length=1 << 20)]
StopIds = Annotated[list[Token], Field(fail_fast=True, max_length=MAX_STOP_IDS)]
Strings = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def _kind_of_prompt(value: Any) -> str | None:
    """Return which kind of prompt it is by its first item; trying all of them would take long."""
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else 0
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Strings, Tag("texts")]
    | Annotated[Tokens, Tag("ids")]
    | Annotated[list[Tokens], Field(fail_fast=True), Tag("lists")],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt_type",
        custom_error_message="Input should be a text, token ids, or a list of such",
    ),
]


def _few(value: Any) -> Any:
    """Refuse more biases than the engine takes, before each is looked at."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        message = f"At most {MAX_BIASES} tokens can have a bias, got {len(value)}"
        raise PydanticCustomError("too_many", message)
    return value


class Body(BaseModel):
    """A body. Wrong types are refused; unknown fields are kept, to be named in the answer."""

    model_config = ConfigDict(strict=True, extra="allow", protected_namespaces=())


class StreamOptions(Body):
    """What a stream tells beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """The fields that chats and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, _limits("n")] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=2 * _INT64)] | None = None
    stop: str | Strings | None = None
    max_tokens: Count | None = None
    # OpenAI's limit; the engine takes more.
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, _limits("top_p")] | None = None
    presence_penalty: Annotated[float, _limits("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, _limits("frequency_penalty")] | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_few)] = None
    # vLLM's and SGLang's
    top_k: Annotated[int, Field(ge=-1, le=(1 << 31) - 1)] | None = None  # -1 = all, as 0
    min_p: Annotated[float, _limits("min_p")] | None = None
    repetition_penalty: Annotated[float, _limits("repetition_penalty")] | None = None
    stop_token_ids: StopIds | None = None
    min_tokens: Annotated[int, _limits("min_new_tokens")] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, _limits("priority")] | None = None
    cache_salt: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    ebnf: str | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    # our own
    max_draft_steps: Annotated[int, _limits("max_draft_steps")] | None = None
    tpot_ms: Annotated[float, _limits("tpot_ms")] | None = None
    drafter: Annotated[str, Field(max_length=1024)] | None = None
    include_drafts: bool | None = None
    session_id: str | None = None
    session_offset: Annotated[int, Field(ge=0, le=1 << 40)] | None = None


class CompletionRequest(GenerationBody):
    """The body of `POST /v1/completions`."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None


class Message(Body):
    """A message of a chat; a template may read further fields."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Objects | None = None
    tool_calls: Objects | None = None
    tool_call_id: str | None = None
    name: str | None = None


def _small_arguments(messages: list[Message]) -> list[Message]:
    """Refuse arguments of calls with too many parts: their texts are parsed for the template.

    Within a string of the body they did not count as parts of the body itself.
    """
    functions = [call.get("function") for message in messages for call in message.tool_calls or ()]
    arguments = [function.get("arguments") for function in functions if isinstance(function, dict)]
    texts = [text for text in arguments if isinstance(text, str)]
    if sum(map(len, texts)) > MOST_NODES:
        num = sum(num_nodes(text.encode(errors="surrogatepass")) for text in texts)
        if num > MOST_NODES:
            raise PydanticCustomError(
                "too_many",
                f"The arguments of calls have {num} objects, lists and members; at most "
                f"{MOST_NODES} are read",
            )
    return messages


Messages = Annotated[
    list[Message],
    Field(fail_fast=True, min_length=1, max_length=4096),
    AfterValidator(_small_arguments),
]


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """A tool; functions alone are known."""

    type: Literal["function"]
    function: Function


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)]


class ChatRequest(GenerationBody):
    """The body of `POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Tools | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    # vLLM's and SGLang's
    documents: Annotated[Objects, Field(max_length=1024)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeRequest(Body):
    """The body of `POST /tokenize`: a text, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(Body):
    """The body of `POST /detokenize`."""

    model: str | None = None
    tokens: Tokens


class SessionRequest(Body):
    """The body of `POST /v1/sessions`."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=2, le=1 << 30)] | None = None


class RewindRequest(Body):
    """The body of `POST /v1/sessions/{id}/rewind`."""

    offset: Annotated[int, Field(ge=0, le=1 << 40)]
