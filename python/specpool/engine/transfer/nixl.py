"""Rows by NIXL, which reads memory of another process: `NixlAgent`, `send` and `NixlReceiver`.

Both sides prove a shared key over TCP, as `tcp.py` does. Then the sender offers its image, and the
receiver reads it from the sender's memory:

```text
  sender    head of the image | address u64 | bytes of the metadata u32 | metadata of its agent
            | HMAC(session key, "offer", all of this)
  receiver  reads the image by NIXL, then answers as over TCP
```

The receiver computes the image's length from its head, so no count of a sender is trusted. The
offer is signed; the image itself has its checksums alone.
"""

from __future__ import annotations

import asyncio
import hmac
import importlib
import os
import secrets
import struct
import threading
import time
from typing import Any

import numpy as np

from specpool.engine.transfer import tcp
from specpool.engine.transfer.image import FIXED_BYTES, Bytes, header_bytes
from specpool.engine.transfer.layout import Layout
from specpool.engine.transfer.parcel import Parcel, TakeIn
from specpool.errors import ConfigError, TransferError, one_line

_OFFER = struct.Struct("<QI")
#: Bytes of the metadata of an agent.
MAX_METADATA = 64 << 10
# The package of each release of CUDA has a name of its own.
_MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
_POLL_SECONDS = 0.0005


class NixlAgent:
    """This process's agent of NIXL, with UCX, for host memory. It takes a second to make.

    Use it by a sender, a receiver, or several of them.
    """

    def __init__(self, *, devices: str = "lo") -> None:
        """Make the agent.

        Args:
            devices: the network interfaces on which UCX may listen, such as "lo" or "mlx5_0:1".
                The environment's `UCX_NET_DEVICES` comes first.

        Raises:
            ConfigError: NIXL is not installed, or does not start.
        """
        api = _api()
        os.environ.setdefault("UCX_NET_DEVICES", devices)
        self._lock = threading.Lock()  # an agent serves one thread at a time
        try:
            config = api.nixl_agent_config(backends=["UCX"])
            self._agent = api.nixl_agent(f"specpool-{secrets.token_hex(12)}", config)
        except Exception as error:
            raise ConfigError(f"NIXL does not start with UCX: {one_line(error)}") from error

    def offer(self, image: Bytes) -> Any:
        """Let other agents read the image; return what `withdraw` takes."""
        with self._lock:
            return self._agent.register_memory([_descriptor(image, "")], "DRAM")

    def withdraw(self, offered: Any) -> None:
        """Stop offering the image."""
        with self._lock:
            self._agent.deregister_memory(offered)

    def metadata(self) -> bytes:
        """Return what another agent needs to read what this one offers."""
        with self._lock:
            return bytes(self._agent.get_agent_metadata())

    def read(self, image: Bytes, metadata: bytes, address: int, timeout: float) -> None:
        """Fill the image from the memory of another agent.

        Raises:
            TransferError: there is no such memory, the agent is gone, or `timeout` seconds passed.
        """
        with self._lock:
            agent, end = self._agent, time.monotonic() + timeout
            try:
                name = agent.add_remote_agent(metadata)
            except Exception as error:
                raise TransferError(f"NIXL does not know the sender: {one_line(error)}") from error
            registration = handle = None
            try:
                registration = agent.register_memory([_descriptor(image, "")], "DRAM")
                target = agent.get_xfer_descs([_descriptor(image, 0)[:3]], "DRAM")
                source = agent.get_xfer_descs([(address, len(image), 0)], "DRAM")
                handle = agent.initialize_xfer("READ", target, source, name)
                state = agent.transfer(handle)
                while state == "PROC" and time.monotonic() < end:
                    time.sleep(_POLL_SECONDS)
                    state = agent.check_xfer_state(handle)
                if state != "DONE":
                    why = "it failed" if state == "ERR" else f"it took more than {timeout:g} s"
                    raise TransferError(f"NIXL has not read {len(image)} bytes: {why}")
            except TransferError:
                raise
            except Exception as error:
                raise TransferError(f"NIXL cannot read the row: {one_line(error)}") from error
            finally:
                if handle is not None:
                    handle.release()
                if registration is not None:
                    agent.deregister_memory(registration)
                agent.remove_remote_agent(name)


class NixlReceiver(tcp.TcpReceiver):
    """Listens for offers, and reads the rows, one after the other."""

    def __init__(
        self, take_in: TakeIn, layout: Layout, *, agent: NixlAgent, key: bytes, **options: Any
    ) -> None:
        """Prepare; `start` listens.

        Args:
            take_in: called in a thread with each whole image.
            layout: the engine's; it bounds what a peer can make the receiver hold.
            agent: reads the rows.
            key: the secret that both sides share.
            options: `host`, `port`, `timeout` and `max_peers`; see `TcpReceiver`.

        Raises:
            ConfigError: the key is too short, or the port is invalid.
        """
        super().__init__(take_in, layout, key=key, **options)
        self._agent = agent

    async def _image(self, reader: asyncio.StreamReader, session: bytes) -> Bytes:
        head, total = await self._head(reader)
        fixed = await self._read(reader, _OFFER.size)
        address, size = _OFFER.unpack(fixed)
        if not 0 < size <= MAX_METADATA:
            raise TransferError(f"metadata must have 1 to {MAX_METADATA} bytes, it claims {size}")
        metadata = await self._read(reader, size)
        signed = tcp.mac(session, b"offer", head, fixed, metadata)
        if not hmac.compare_digest(await self._read(reader, tcp.MAC_BYTES), signed):
            raise TransferError("the offer is not what the sender has signed")
        image = np.empty(total, np.uint8)
        await asyncio.to_thread(self._agent.read, image, metadata, address, self._timeout)
        if image[: len(head)].tobytes() != head:
            raise TransferError("the image that was read is not the one that was offered")
        return image


async def send(
    parcel: Parcel,
    host: str,
    port: int,
    *,
    agent: NixlAgent,
    key: bytes,
    timeout: float = tcp.TIMEOUT,
) -> None:
    """Send a row; it ends here if it arrived, and goes on here if not.

    Args:
        parcel: the row; `Engine.export` gives it.
        host: where a `NixlReceiver` listens.
        port: its port.
        agent: offers the row.
        key: the secret that both sides share.
        timeout: seconds in which the receiver must take the offer; for its answer, six times as
            many.

    Raises:
        TransferError: the row did not arrive; the message says why.
        ConfigError: the key is too short.
    """
    offered: list[tuple[Any, Bytes]] = []

    async def carry(image: Bytes, writer: asyncio.StreamWriter, session: bytes) -> None:
        offered.append((await asyncio.to_thread(agent.offer, image), image))
        size = header_bytes(image[:FIXED_BYTES].tobytes())
        head = image[: FIXED_BYTES + size].tobytes()
        metadata = await asyncio.to_thread(agent.metadata)
        fixed = _OFFER.pack(image.ctypes.data, len(metadata))
        signed = tcp.mac(session, b"offer", head, fixed, metadata)
        writer.write(head + fixed + metadata + signed)
        await asyncio.wait_for(writer.drain(), timeout)

    try:
        await tcp.exchange(parcel, host, port, key, timeout, carry)
    finally:
        for registration, _ in offered:
            await asyncio.to_thread(agent.withdraw, registration)


def _descriptor(image: Bytes, last: Any) -> tuple[Any, ...]:
    """Return where an image lies: address, bytes, device, and what NIXL wants last."""
    return image.ctypes.data, image.nbytes, 0, last


def _api() -> Any:
    """Import NIXL.

    Raises:
        ConfigError: it is not installed.
    """
    for module in _MODULES:
        try:
            return importlib.import_module(module)
        except ImportError as error:
            if error.name is None or not module.startswith(error.name):
                raise ConfigError(f"NIXL does not load: {one_line(error)}") from error
    raise ConfigError("rows by NIXL need it: pip install 'specpool[nixl]'")
