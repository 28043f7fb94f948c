"""`serve`: starts the engine's process and the front, and stops both in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Protocol

import uvicorn

from specpool.checks import shown
from specpool.engine.models.files.names import shown_drafts
from specpool.engine.text.chat_template import render
from specpool.engine.text.tokenizer import load_tokenizer
from specpool.errors import ConfigError
from specpool.serve import garbage
from specpool.serve.api.errors import shutting_down
from specpool.serve.app import build_app
from specpool.serve.bridge.client import Carrier, EngineClient, EngineGone
from specpool.serve.bridge.process import EngineProcess
from specpool.serve.config import ServeConfig
from specpool.serve.front import Front
from specpool.serve.guard.protocol import guarded
from specpool.serve.service import PLAIN_TEMPLATE, Service

log = logging.getLogger("specpool.serve")

#: Files that the front has open beside its connections, with room for more.
_OTHER_FILES = 96


class EngineEnd(Carrier, Protocol):
    """An engine that was started, wherever it runs."""

    def close(self) -> None:
        """Stop it."""


def serve(
    config: ServeConfig,
    loading: Mapping[str, Any],
    *,
    threads: int = 1,
    chat_template: str | None = None,
    tell: Callable[[str], None] = print,
    start: Callable[[Mapping[str, Any], int], EngineEnd] = EngineProcess,
) -> None:
    """Serve an engine until a signal stops the server.

    Args:
        config: the server's options.
        loading: the arguments of `Engine.from_pretrained`.
        threads: CPU threads of torch.
        chat_template: replaces the tokenizer's own (Jinja).
        tell: prints a line for the person who starts the server.
        start: starts the engine from `loading` and `threads`; a benchmark puts it elsewhere.

    Raises:
        ConfigError: the port is taken, or the engine cannot be loaded.
        EngineGone: the engine's process has died.
    """
    # One text at a time is tokenized faster without the threads of the tokenizer.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    config = fit_connections(config)
    listener = bind(config)
    try:
        engine = start(loading, threads)
        try:
            _run(_main(config, engine, listener, loading, chat_template, tell))
        finally:
            engine.close()
    finally:
        listener.close()


def fit_connections(config: ServeConfig) -> ServeConfig:
    """Raise the limit of open files to what `max_connections` needs.

    If the system does not allow it, return the options with fewer connections. Otherwise the system
    would refuse new connections before the server closes idle ones to make room.
    """
    try:
        import resource
    except ImportError:  # not on this system
        return config
    wanted = config.max_connections + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return config
    max_files = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, hard))
        soft = max_files
    if soft == wanted:
        return config
    num = max(soft - _OTHER_FILES, 1)
    log.warning(
        "%d connections at once, not %d: a process may open %d files",
        num,
        config.max_connections,
        soft,
    )
    return replace(config, max_connections=num)


def bind(config: ServeConfig) -> socket.socket:
    """Take the address, before minutes of loading.

    Raises:
        ConfigError: it cannot be taken.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM
        )[0]
        listener = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigError(f"host: {shown(config.host)} is no address: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return listener
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"port: {config.port} of {config.host} cannot be taken: {error.strerror}; give another"
        ) from None


def _run(work: Any) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(work)
    else:
        uvloop.run(work)


async def _main(
    config: ServeConfig,
    engine: EngineEnd,
    listener: socket.socket,
    loading: Mapping[str, Any],
    chat_template: str | None,
    tell: Callable[[str], None],
) -> None:
    client = EngineClient(engine)
    with _stopping(asyncio.Event()) as stop:
        started = time.monotonic()
        # The process that renders chats starts beside the engine: not with the first chat.
        warm = asyncio.create_task(asyncio.to_thread(render, "", [], {}))
        if not await _ends_before(client.start(), stop):
            return
        tokenizer = await asyncio.to_thread(
            tokenizer_of, client.ready.tokenizer, chat_template, bool(loading["trust_remote_code"])
        )
        await warm
        service = Service(config, client, tokenizer)
        server = Front(
            uvicorn.Config(
                build_app(service),
                http=guarded(config),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="info",
                access_log=False,
                proxy_headers=False,  # `build_app` does what the options say
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=5,
            )
        )
        garbage.settle()  # before the first request
        front = asyncio.create_task(server.serve(sockets=[listener]))
        expiry = asyncio.create_task(service.sessions.expire())
        tidying = asyncio.create_task(garbage.tidy(lambda: _crowd(service, server)))
        while not (server.started or front.done()):  # a reader of the greeting may call at once
            await asyncio.sleep(0.005)
        for line in _greeting(config, listener, loading, time.monotonic() - started):
            tell(line)
        try:
            await _ends_before(client.ended.wait(), stop)
            await drain(service, stop)
        finally:
            expiry.cancel()
            tidying.cancel()
            server.should_exit = True
            await front
            service.close()
    if client.failure is not None:
        raise EngineGone(f"the engine has ended: {client.failure}")
    await client.close()


def _crowd(service: Service, server: Front) -> int:
    """Return the open requests, or the open connections if they are more."""
    return max(service.num_open, len(server.server_state.connections))


async def drain(service: Service, stop: asyncio.Event) -> None:
    """Take no new work, let the running texts end, and abort what has not ended in time.

    A second signal aborts at once.
    """
    service.is_draining = True
    stop.clear()
    end = time.monotonic() + service.config.drain_timeout
    if service.client.num_open:
        log.info("draining: %d texts run or wait", service.client.num_open)
    while service.client.num_open and time.monotonic() < end and not stop.is_set():
        await asyncio.sleep(0.05)
    if service.client.num_open:
        log.warning("aborting %d texts", service.client.num_open)
        service.client.fail_all(shutting_down())
    for _ in range(100):  # each stream still sends its last event
        if not service.client.num_open:
            break
        await asyncio.sleep(0.02)


@contextlib.contextmanager
def _stopping(stop: asyncio.Event) -> Iterator[asyncio.Event]:
    """Set the event at SIGTERM and SIGINT."""
    loop, numbers = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _ends_before(work: Any, stop: asyncio.Event) -> bool:
    """Wait for the work or for a stop; return whether the work has ended."""
    task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if task.done():
        task.result()
        return True
    task.cancel()
    return False


def tokenizer_of(folder: str | None, chat_template: str | None, trusts: bool) -> Any:
    """Return the target's tokenizer, with a chat template.

    Raises:
        ConfigError: the target has none.
    """
    tokenizer = None if folder is None else load_tokenizer(folder, trust_remote_code=trusts)
    if tokenizer is None:
        raise ConfigError("the target has no tokenizer: there is no text to serve")
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    elif not getattr(tokenizer, "chat_template", None):
        log.info("no chat template: the texts of a chat are joined as they are, a line each")
        tokenizer.chat_template = PLAIN_TEMPLATE
    return tokenizer


def _greeting(
    config: ServeConfig, listener: socket.socket, loading: Mapping[str, Any], seconds: float
) -> Iterator[str]:
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    drafts = shown_drafts(loading.get("draft") or ())
    yield f"{config.names[0]}, {drafts}: loaded in {seconds:.1f} s"
    yield f"http://{host}:{port}/v1 for clients, http://{host}:{port}/ to talk"
    if config.is_loopback:
        yield "only this machine can reach it: --host 0.0.0.0 opens it to others"
    elif not config.api_keys:
        yield "warning: whoever reaches this address can use it: give --api-key-file"
