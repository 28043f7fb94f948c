"""`specpool chat`: a conversation in the terminal; each turn computes its new tokens only."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from specpool.capacity.group_sizes import DEFAULT_BATCH
from specpool.checks import shown
from specpool.cli.generate.interrupt import Interrupt
from specpool.cli.options import checks
from specpool.cli.options.drafts import check_drafter
from specpool.cli.options.groups import ModelOptions, PlaceOptions, loading_of
from specpool.cli.options.prompts import check_stdin
from specpool.engine.models.files.names import shown_drafts
from specpool.engine.output import RequestOutput
from specpool.engine.sampling_params import SamplingParams
from specpool.errors import ConfigError, SpecpoolError

if TYPE_CHECKING:
    from specpool.engine.engine import Engine
    from specpool.engine.texts import Prompt

HELP = """\
/rewind [n]  go n turns back (1)
/fork        begin a further session here
/switch N    go on in session N
/stats       what each session has, and has computed
/help        this
/quit        leave; so do Ctrl-D, and Ctrl-C where no answer runs"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatJob:
    """The arguments of the command line."""

    models: ModelOptions
    system: str | None
    place: PlaceOptions
    sampling: dict[str, Any]  # of the requests
    options: dict[str, Any]  # of the engine


def run(job: ChatJob) -> None:
    """Run the conversation until the user leaves.

    Raises:
        ConfigError: an option cannot work.
    """
    checks.check_place(
        device=job.place.device,
        threads=job.place.threads,
        dtype=job.place.dtype,
        graph_sizes=job.options.get("graph_sizes"),
    )
    check_stdin("chat reads its lines from there")
    params = checks.sampling_params(job.sampling)
    target, drafts = job.models.target, job.models.drafts()
    check_drafter(drafts, params.drafter)
    checks.check_engine_config(drafts, job.options)
    checks.check_models(target, drafts)
    checks.start_torch(job.place.threads)
    from specpool.engine.engine import Engine

    console = Console(highlight=False, force_terminal=None if sys.stdin.isatty() else False)
    with console.status(f"loading {target}, {shown_drafts(drafts)}"):
        options = {"max_batch": DEFAULT_BATCH, **job.options}  # more would only take more graphs
        engine = Engine.from_pretrained(**loading_of(job.models, job.place, options))
    with engine:
        talk = Talk(engine, params, console, job.system)
        talk.tell(f"{target}, {shown_drafts(drafts)}: /help lists the commands")
        if not talk.has_template:
            talk.tell(
                "the tokenizer has no chat template: what you type is put behind the text as it "
                "is, and the model goes on with it"
            )
        try:
            for line in talk.lines():
                if not talk.hear(line):
                    break
        except (KeyboardInterrupt, EOFError):
            console.print()


class Talk:
    """A conversation in the terminal: its sessions, one of which is current."""

    def __init__(
        self, engine: Engine, params: SamplingParams, console: Console, system: str | None
    ) -> None:
        """Open a first, empty session.

        Raises:
            ConfigError: the target has no tokenizer.
        """
        if engine.tokenizer is None:
            raise ConfigError("the target has no tokenizer: there is no text to talk in")
        self.has_template = bool(getattr(engine.tokenizer, "chat_template", None))
        self._engine, self._params, self._console = engine, params, console
        self._system = system
        self._session = engine.open_session()
        self._sessions = {self._session.number: self._session}

    def lines(self) -> Iterator[str]:
        """Yield the lines that the user types or pipes in; print piped lines."""
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # line editing for `input`
            while True:
                yield input(self._prompt())
        try:
            for line in sys.stdin:
                self._print(f"{self._prompt()}{line.rstrip()}\n")
                yield line.rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ConfigError(f"standard input is no text: {error}") from None

    def hear(self, line: str) -> bool:
        """Run a command, or a turn with the line as its text; return False to leave."""
        if not line.strip():
            return True
        if not line.startswith("/"):
            self._say(line)
            return True
        name, *args = line[1:].split() or [""]
        commands = {
            "rewind": self._rewind,
            "fork": self._fork,
            "switch": self._switch,
            "stats": self._stats,
            "help": self._help,
        }
        try:
            if name not in (*commands, "quit"):
                raise ConfigError(f"there is no command /{name}: /help lists them")
            numbers = _numbers(name, args)
            if name == "quit":
                return False
            commands[name](*numbers)
        except SpecpoolError as error:
            self.tell(f"error: {error}")
        return True

    def _say(self, text: str) -> None:
        """Run one turn: print the answer as it comes, then a line of figures."""
        session, interrupt, start = self._session, Interrupt(), time.perf_counter()
        first_seconds, output = 0.0, None
        try:
            with interrupt.handled(), session.append(self._turn(text), self._params) as turn:
                for item in turn:
                    if isinstance(item, RequestOutput):
                        output = item
                        break
                    first_seconds = first_seconds or time.perf_counter() - start
                    self._print(item.text)
                    # Leaving between two rounds aborts the turn; the session keeps its KV.
                    if interrupt.is_requested and session.is_busy:
                        break
        except KeyboardInterrupt:
            session.abort()
        except SpecpoolError as error:
            self.tell(f"error: {error}; the session is as before, /rewind goes back")
            return
        seconds = time.perf_counter() - start
        self._console.print()
        if output is None:
            self.tell("aborted: the session is as before")
        elif output.error is not None:
            self.tell(f"error: {output.error}; the session is as before")
        else:
            self.tell(_figures(output, first_seconds, seconds))
            if session.num_tokens >= session.max_tokens - 1:
                self.tell(f"the session is full at {session.num_tokens} tokens: /rewind goes back")

    def _turn(self, text: str) -> Prompt:
        """Return the prompt for a user's text, with the system text in the first turn."""
        system = self._system if self._session.num_tokens == 0 else None
        if not self.has_template:
            return text if system is None else f"{system}\n{text}"
        messages = [] if system is None else [{"role": "system", "content": system}]
        return [*messages, {"role": "user", "content": text}]

    def _rewind(self, num_turns: int = 1) -> None:
        ends = self._session.turn_ends
        if not 1 <= num_turns <= len(ends):
            raise ConfigError(f"cannot go {num_turns} turns back: there are {len(ends)}")
        num_tokens = [0, *ends][-num_turns - 1]
        kept_len = self._session.rewind(num_tokens)
        turns_left = len(self._session.turn_ends)
        self.tell(f"turns left: {turns_left}; {num_tokens} tokens, {kept_len} of them with KV")

    def _fork(self) -> None:
        session = self._session.fork()
        self._sessions[session.number] = session
        self.tell(f"session {session.number} begins here: /switch {session.number} goes on in it")

    def _switch(self, number: int = 0) -> None:
        if number not in self._sessions:
            raise ConfigError(f"there is no session {number}, but {[*self._sessions]}")
        self._session = self._sessions[number]
        self.tell(f"session {number} goes on at {self._session.num_tokens} tokens")

    def _stats(self) -> None:
        table = Table(title="sessions")
        names = ("number", "state", "tokens", "with KV", "turns")
        for name in (*names, "computed", "not computed again", "retractions", "drops"):
            table.add_column(name, justify="left" if name == "state" else "right")
        for session in self._engine.stats().sessions:
            counts = (
                session.num_tokens,
                session.kept_tokens,
                session.turn_ct,
                session.computed_token_ct,
            )
            event_counts = (session.reused_token_ct, session.retraction_ct, session.drop_ct)
            table.add_row(str(session.number), session.state, *map(str, (*counts, *event_counts)))
        # Wide enough for all columns, also if the output is not a terminal.
        Console(width=max(self._console.width, 112), force_terminal=False).print(table)

    def _help(self) -> None:
        self.tell(HELP)

    def _prompt(self) -> str:
        return "> " if len(self._sessions) == 1 else f"{self._session.number}> "

    def _print(self, text: str, style: str = "") -> None:
        """Print a text literally, without rich's markup and emoji names."""
        self._console.print(Text(text, style=style), end="", soft_wrap=True)

    def tell(self, text: str) -> None:
        """Print a line that is not part of the conversation, dimmed."""
        self._print(f"{text}\n", "dim")


def _numbers(name: str, args: list[str]) -> list[int]:
    """Parse the arguments of a command; raise `ConfigError` for a wrong number or form."""
    max_args = 1 if name in ("rewind", "switch") else 0
    if len(args) > max_args or not all(re.fullmatch("[0-9]{1,9}", arg) for arg in args):
        takes = "one number" if max_args else "nothing"
        raise ConfigError(f"/{name} takes {takes}, got {shown(' '.join(args))}")
    return [int(arg) for arg in args]


def _figures(output: RequestOutput, first_seconds: float, seconds: float) -> str:
    """Return the line of figures of a turn."""
    prompt_len, num_new = len(output.prompt_ids), len(output.token_ids)
    accept = f", accept length {output.accept_len:.2f}" if output.verify_ct else ""
    return (
        f"[{prompt_len} tokens, {output.num_reused} not computed again; first token after "
        f"{1e3 * first_seconds:.1f} ms; {num_new} new tokens, {num_new / seconds:.0f} tokens/s"
        f"{accept}]"
    )
