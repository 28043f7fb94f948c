"""Laws of rows that NIXL carries, on host memory. Skipped where NIXL is not installed."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Iterator

import pytest

from parcel_kit import Parcel, Side
from specpool import ConfigError, TransferError
from specpool.engine.transfer import nixl, tcp
from specpool.engine.transfer.image import FIXED_BYTES, header_bytes

KEY = b"sixteen bytes at least"
TOKENS = list(range(64))


@pytest.fixture(scope="module")
def agents() -> Iterator[tuple[nixl.NixlAgent, nixl.NixlAgent]]:
    """Two agents of this process, which know nothing of each other."""
    try:
        pair = nixl.NixlAgent(), nixl.NixlAgent()
    except ConfigError as error:
        pytest.skip(str(error))
    yield pair


def parcel_of(side: Side, length: int = 23, seed: int = 1) -> tuple[Parcel, list[bytes]]:
    row = side.fill(length, seed)
    content = side.content(row)
    return Parcel(side, row, TOKENS[: length + 1]), content


async def receiver_of(side: Side, agent: nixl.NixlAgent) -> nixl.NixlReceiver:
    receiver = nixl.NixlReceiver(side.take_in, side.layout, agent=agent, key=KEY, timeout=5.0)
    await receiver.start()
    return receiver


def test_rows_go_by_nixl(agents):
    here, there = agents

    async def main() -> None:
        one, two, contents = Side(), Side(), []
        receiver = await receiver_of(two, there)
        for seed, length in enumerate([23, 60, 3]):
            parcel, content = parcel_of(one, length, seed)
            contents.append(content)
            await nixl.send(parcel, "127.0.0.1", receiver.port, agent=here, key=KEY)
            assert parcel.outcome == "arrived"
        await receiver.close()
        assert [two.content(row) for row in two.rows] == contents
        one.check_empty()
        for row in two.rows:
            two.ledger.finish(row)
        two.check_empty()

    asyncio.run(main())


def test_a_wrong_key_gets_nothing(agents):
    here, there = agents

    async def main() -> None:
        one, two = Side(), Side()
        receiver = await receiver_of(two, there)
        parcel, _ = parcel_of(one)
        with pytest.raises(TransferError, match="did not arrive"):
            await nixl.send(parcel, "127.0.0.1", receiver.port, agent=here, key=KEY[::-1])
        assert parcel.outcome == "back"
        while receiver._peers:
            await asyncio.sleep(0)
        assert receiver.failures == ["TransferError: a peer has a wrong key"]
        await receiver.close()
        one.check_empty()
        two.check_empty()

    asyncio.run(main())


OFFERS = {
    "unsigned": "not what the sender has signed",
    "long": "metadata must have 1 to 65536 bytes, it claims 4294967295",
    "garbage": "NIXL does not know the sender",
    "elsewhere": "NIXL cannot read the row",
    "another image": "not the one that was offered",
}


@pytest.mark.parametrize("kind", OFFERS)
def test_a_false_offer_is_one_error_and_leaves_nothing(agents, kind: str):
    """Also of a peer that knows the key."""
    here, there = agents

    async def main() -> None:
        one, two = Side(), Side()
        receiver = await receiver_of(two, there)
        parcel, _ = parcel_of(one)
        kept = []

        async def carry(image, writer, session) -> None:
            lying = image.copy()
            kept.append((here.offer(lying), lying))
            metadata, address = here.metadata(), lying.ctypes.data
            head = image[: FIXED_BYTES + header_bytes(image[:FIXED_BYTES].tobytes())].tobytes()
            size = len(metadata)
            match kind:
                case "long":
                    size = (1 << 32) - 1
                case "garbage":
                    metadata = bytes(size)
                case "elsewhere":
                    address = 4096
                case "another image":
                    lying[20] ^= 1
            fixed = struct.pack("<QI", address, size)
            signed = tcp.mac(session, b"offer", head, fixed, metadata)
            if kind == "unsigned":
                signed = bytes(32)
            writer.write(head + fixed + metadata + signed)
            with contextlib.suppress(ConnectionError):
                await writer.drain()

        with pytest.raises(TransferError, match=OFFERS[kind]):
            await tcp.exchange(parcel, "127.0.0.1", receiver.port, KEY, 5.0, carry)
        assert parcel.outcome == "back"
        here.withdraw(kept[0][0])
        parcel, content = parcel_of(one, seed=2)  # the next one is served all the same
        await nixl.send(parcel, "127.0.0.1", receiver.port, agent=here, key=KEY)
        await receiver.close()
        assert [two.content(row) for row in two.rows] == [content]
        one.check_empty()
        for row in two.rows:
            two.ledger.finish(row)
        two.check_empty()

    asyncio.run(main())


def test_without_nixl_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(nixl, "_MODULES", ("specpool_has_no_such_module",))
    with pytest.raises(ConfigError, match=r"pip install 'specpool\[nixl\]'"):
        nixl.NixlAgent()
