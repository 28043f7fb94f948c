"""Rows over TCP: `send` and `TcpReceiver`, authenticated by a shared key (docs/transfer.md).

```text
  receiver  nonce 32
  sender    nonce 32 | HMAC(key, "sender", both nonces)       -> else the receiver hangs up
  receiver  HMAC(key, "receiver", both nonces)                -> else the sender hangs up
  sender    the image | HMAC(session key, image)
  receiver  1 or 0 | bytes of the message u32 | message | HMAC(session key, all of this)
  sender    gives its row up | HMAC(session key, "settled")   -> else the receiver undoes its own
```

The session key is HMAC(key, "session", both nonces), so nothing can be replayed. The content is not
encrypted: use a private network or a tunnel.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import struct
from collections.abc import Awaitable, Callable

import numpy as np

from specpool.checks import check_int
from specpool.engine.transfer.image import FIXED_BYTES, Bytes, header_bytes, parse_header
from specpool.engine.transfer.layout import Layout
from specpool.engine.transfer.parcel import Parcel, TakeIn
from specpool.errors import ConfigError, TransferError, one_line

_NONCE = MAC_BYTES = 32
_PIECE = 256 << 10
_MAX_MESSAGE = 4096
_REPLY = struct.Struct("<BI")
#: Brings an image to a receiver.
Carry = Callable[[Bytes, asyncio.StreamWriter, bytes], Awaitable[None]]
#: Bytes of the shortest key.
MIN_KEY = 16
#: Seconds in which a peer must send or take the next piece.
TIMEOUT = 10.0


def mac(key: bytes, name: bytes, *parts: bytes) -> bytes:
    """Sign these bytes, for what `name` says."""
    return hmac.digest(key, name + b"\0" + b"".join(parts), hashlib.sha256)


def _check_key(key: object) -> None:
    if not isinstance(key, bytes) or len(key) < MIN_KEY:
        size = len(key) if isinstance(key, bytes) else type(key).__name__
        raise ConfigError(f"key must have {MIN_KEY} secret bytes at least, got {size}")


class TcpReceiver:
    """Listens for rows and takes them in, one after the other."""

    def __init__(
        self,
        take_in: TakeIn,
        layout: Layout,
        *,
        key: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        timeout: float = TIMEOUT,
        max_peers: int = 4,
    ) -> None:
        """Prepare; `start` listens.

        Args:
            take_in: called in a thread with each whole image.
            layout: the engine's; it bounds what a peer can make the receiver hold.
            key: the secret that both sides share.
            host: an address of this machine. What is not loopback must be asked for.
            port: 0 = any free one.
            timeout: seconds in which a peer must send or take the next piece.
            max_peers: peers at once; others are hung up on.

        Raises:
            ConfigError: the key is too short, or the port is invalid.
        """
        _check_key(key)
        check_int("port", port, 0, 65535)
        check_int("max_peers", max_peers, 1, 1 << 10)
        self._take_in, self._layout, self._key = take_in, layout, key
        self._host, self._asked_port, self._timeout = host, port, timeout
        self._max_peers, self._peers = max_peers, set[asyncio.Task[None]]()
        self._settling = set[asyncio.Task[None]]()
        self._server: asyncio.Server | None = None
        self._turn = asyncio.Lock()
        self.failures: list[str] = []  # why rows were refused, the latest 100

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: the address is taken, or none of this machine.
        """
        try:
            self._server = await asyncio.start_server(
                self._serve, self._host, self._asked_port, limit=_PIECE
            )
        except OSError as error:
            where = f"{self._host}:{self._asked_port}"
            raise ConfigError(f"rows cannot be received at {where}: {error.strerror}") from None

    @property
    def port(self) -> int:
        """The port that it listens on."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening, and hang up on peers in mid-row; a row that is in has to be settled."""
        if self._server is not None:
            self._server.close()
        for peer in self._peers - self._settling:
            peer.cancel()
        await asyncio.gather(*self._peers, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._peers) >= self._max_peers:
            writer.transport.abort()
            return
        self._peers.add(task)
        try:
            await self._receive(reader, writer)
        except Exception as error:  # the next peer is served all the same
            self.failures.append(one_line(error))
            del self.failures[:-100]
        except asyncio.CancelledError:
            pass  # by `close`
        finally:
            self._peers.discard(task)
            self._settling.discard(task)
            writer.transport.abort()

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own_nonce = secrets.token_bytes(_NONCE)
        await self._write(writer, own_nonce)
        sender_nonce = await self._read(reader, _NONCE)
        nonces = own_nonce + sender_nonce
        sender_mac = await self._read(reader, MAC_BYTES)
        if not hmac.compare_digest(sender_mac, mac(self._key, b"sender", nonces)):
            raise TransferError("a peer has a wrong key")
        await self._write(writer, mac(self._key, b"receiver", nonces))
        session = mac(self._key, b"session", nonces)
        try:
            image = await self._image(reader, session)
            async with self._turn:
                undo = await self._taken(image)
        except Exception as error:
            await self._reply(writer, session, 0, one_line(error, _MAX_MESSAGE // 4))
            raise
        task = asyncio.current_task()
        assert task is not None
        self._settling.add(task)
        await self._settle(reader, writer, session, undo)

    async def _taken(self, image: Bytes) -> Callable[[], None]:
        """Take the image in; if the receiver is closed meanwhile, undo that."""
        job = asyncio.ensure_future(asyncio.to_thread(self._take_in, image))
        try:
            return await asyncio.shield(job)
        except asyncio.CancelledError:
            undo = await job
            await asyncio.to_thread(undo)
            raise

    async def _settle(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        session: bytes,
        undo: Callable[[], None],
    ) -> None:
        """Tell the sender, and undo what was taken in if it does not hear of it."""
        try:
            await self._reply(writer, session, 1, "")
            if await self._read(reader, MAC_BYTES) != mac(session, b"settled"):
                raise TransferError("the sender did not settle its row")
        except BaseException:
            await asyncio.to_thread(undo)
            raise

    async def _head(self, reader: asyncio.StreamReader) -> tuple[bytes, int]:
        """Read the head of an image; return it, and the bytes that the image must have."""
        head = await self._read(reader, FIXED_BYTES)
        head += await self._read(reader, header_bytes(head))
        return head, parse_header(head, self._layout)[1].total

    async def _image(self, reader: asyncio.StreamReader, session: bytes) -> Bytes:
        head, total = await self._head(reader)
        image = np.empty(total, np.uint8)
        image[: len(head)] = np.frombuffer(head, np.uint8)
        signed, at = hmac.new(session, head, hashlib.sha256), len(head)
        while at < total:
            piece = await asyncio.wait_for(reader.read(min(_PIECE, total - at)), self._timeout)
            if not piece:
                raise EOFError(f"the sender is gone after {at} of {total} bytes")
            image[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            signed.update(piece)
            at += len(piece)
        if not hmac.compare_digest(await self._read(reader, MAC_BYTES), signed.digest()):
            raise TransferError("the image is not what the sender has signed")
        return image

    async def _reply(
        self, writer: asyncio.StreamWriter, session: bytes, is_in: int, message: str
    ) -> None:
        text = message.encode()[:_MAX_MESSAGE]
        reply = _REPLY.pack(is_in, len(text)) + text
        await self._write(writer, reply + mac(session, b"reply", reply))

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(data)
        await asyncio.wait_for(writer.drain(), self._timeout)

    async def _read(self, reader: asyncio.StreamReader, size: int) -> bytes:
        return await asyncio.wait_for(reader.readexactly(size), self._timeout)


async def send(
    parcel: Parcel,
    host: str,
    port: int,
    *,
    key: bytes,
    timeout: float = TIMEOUT,
) -> None:
    """Send a row; it ends here if it arrived, and goes on here if not.

    Args:
        parcel: the row; `Engine.export` gives it.
        host: where the receiver listens.
        port: its port.
        key: the secret that both sides share.
        timeout: seconds in which the receiver must take the next piece; for its answer, six times
            as many.

    Raises:
        TransferError: the row did not arrive; the message says why.
        ConfigError: the key is too short.
    """

    async def carry(image: Bytes, writer: asyncio.StreamWriter, session: bytes) -> None:
        for at in range(0, len(image), _PIECE):
            writer.write(image[at : at + _PIECE].tobytes())
            await asyncio.wait_for(writer.drain(), timeout)
        writer.write(hmac.digest(session, image.data, hashlib.sha256))

    await exchange(parcel, host, port, key, timeout, carry)


async def exchange(
    parcel: Parcel, host: str, port: int, key: bytes, timeout: float, carry: Carry
) -> None:
    """Prove the key to a receiver, let `carry` bring it the image, and settle the row; see `send`.

    Args:
        parcel: the row. It has ended when this returns, or goes on.
        host: where the receiver listens.
        port: its port.
        key: the secret that both sides share.
        timeout: as in `send`.
        carry: called with the image, the way to the receiver, and the session's key.

    Raises:
        TransferError: the row did not arrive; the message says why.
        ConfigError: the key is too short.
    """
    try:
        _check_key(key)
        await _exchange(parcel, host, port, key, timeout, carry)
    except (OSError, EOFError, TimeoutError) as error:
        raise TransferError(f"the row did not arrive at {host}:{port}: {one_line(error)}") from None
    finally:
        parcel.give_back()


async def _exchange(
    parcel: Parcel, host: str, port: int, key: bytes, timeout: float, carry: Carry
) -> None:
    image = np.empty(parcel.num_bytes, np.uint8)
    await asyncio.to_thread(parcel.write, image)
    reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port), timeout)
    try:

        async def read(size: int, seconds: float = timeout) -> bytes:
            return await asyncio.wait_for(reader.readexactly(size), seconds)

        receiver_nonce, own_nonce = await read(_NONCE), secrets.token_bytes(_NONCE)
        nonces = receiver_nonce + own_nonce
        writer.write(own_nonce + mac(key, b"sender", nonces))
        if not hmac.compare_digest(await read(MAC_BYTES), mac(key, b"receiver", nonces)):
            raise TransferError(f"{host}:{port} has another key")
        session = mac(key, b"session", nonces)
        with contextlib.suppress(ConnectionError):  # it refuses early: its answer says why
            await carry(image, writer, session)
        reply = await read(_REPLY.size, 6 * timeout)
        is_in, size = _REPLY.unpack(reply)
        if size > _MAX_MESSAGE:
            raise TransferError(f"{host}:{port} answers with {size} bytes")
        reply += await read(size)
        if not hmac.compare_digest(await read(MAC_BYTES), mac(session, b"reply", reply)):
            raise TransferError(f"the answer of {host}:{port} is not signed with the key")
        if not is_in:
            raise TransferError(f"{host}:{port} refused the row: {reply[_REPLY.size :].decode()}")
        # Of a row whose last word is lost neither side has anything; the other order could leave it
        # on both.
        parcel.arrived()
        writer.write(mac(session, b"settled"))
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
    except BaseException:
        writer.transport.abort()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        raise
