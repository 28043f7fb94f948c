"""`ServeConfig`: the options of the server, apart from those of its engine."""

import contextlib
import ipaddress
import math
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from specpool.checks import shown
from specpool.engine.models.files.names import suffix_of
from specpool.errors import ConfigError
from specpool.fields import Option, Within, check_values
from specpool.num_bytes import parse_bytes

#: The default address to listen on: this machine alone.
LOOPBACK = "127.0.0.1"
# A name or an address as it stands in a Host header, without the port.
_HOST = re.compile(r"[^\s/:\[\]]+|\[[0-9A-Fa-f:.]+\]")
# A site as it stands in an Origin header: without a path, capital letters or the scheme's own port.
# Names are in ASCII, with other characters in Punycode.
_ORIGIN = re.compile(
    r"(?!http://.*:80$|https://.*:443$)"
    r"[a-z][a-z0-9+.-]*://(?:(?P<name>[a-z0-9_-]+(?:\.[a-z0-9_-]+)*)\.?|\[(?P<address>[0-9a-f:]+)\])"
    r"(?::(?P<port>0|[1-9][0-9]{0,4}))?"
)


def is_loopback_address(text: str) -> bool:
    """Return whether a text is an address of this machine alone; a name is none."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _is_origin(text: str) -> bool:
    """Return whether a browser sends a text as the site of a page."""
    match = _ORIGIN.fullmatch(text)
    if match is None or int(match["port"] or 0) > 65535:
        return False
    name, address = match["name"], match["address"]
    with contextlib.suppress(ValueError):
        if address is None:
            # An address has one form, to which browsers turn others, such as 127.1.
            is_name = not text.startswith("http") or not name.rpartition(".")[2].isdecimal()
            return is_name or str(ipaddress.IPv4Address(name)) == name
        six = ipaddress.IPv6Address(address)
        return six.ipv4_mapped is not None or str(six) == address
    return False


def _read_timeout(_name: str, seconds: float) -> float | None:
    return seconds or None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """The options of the server.

    The first sentence of a field's description is also the help of its option.

    Attributes:
        host: address to listen on; 0.0.0.0 = all of this machine.
        port: port to listen on; 0 = any free one.
        names: what clients call the model. The first is the one that answers carry.
        api_keys: clients must send one of them; () = no key is asked for.
        open_metrics: give /metrics without a key too. Other paths still need one.
        share_prefixes: all API keys share cached KV, so each can find out what others have sent.
            Else each key has that of its own texts alone.
        origins: sites whose pages may call the server (CORS); * = all.
        hosts: names by which a loopback server may be called too. The loopback ones need not be
            named.
        proxies: addresses or networks of proxies whose X-Forwarded-For is believed.
        max_queue: most texts that wait beside those that run; further ones get 429.
        max_body: most bytes of a request's body; beyond it 413.
        max_header: most bytes of a request's line and headers.
        max_connections: most connections that are open at once. Further ones are closed.
        max_choices: most texts of one call (`n` times the prompts).
        request_timeout: seconds until a request is aborted; 0 = never. In Python None = never.
        read_timeout: seconds in which a request must have come. Headers and body count.
        write_timeout: seconds that a part of a stream may wait for its reader.
        drain_timeout: seconds that running texts get when the server is told to stop.
        max_open_sessions: most sessions that are open at once. One of several keys may have as many
            as are left.
        session_timeout: seconds after which a session without a turn is closed.
        access_log: write a line for each request.
    """

    host: Annotated[str, Option()] = LOOPBACK
    port: Annotated[int, Within(0, 65535), Option()] = 8000
    names: Annotated[
        tuple[str, ...],
        Option("Model", names=["--name"], default="--target, without a path"),
    ] = ("specpool/tiny",)
    api_keys: tuple[str, ...] = ()
    open_metrics: Annotated[bool, Option("Server")] = False
    share_prefixes: Annotated[bool, Option("Server")] = False
    origins: Annotated[tuple[str, ...], Option("Server", names=["--allow-origin"])] = ()
    hosts: Annotated[tuple[str, ...], Option("Server", names=["--allow-host"])] = ()
    proxies: Annotated[tuple[str, ...], Option("Server", names=["--trust-proxy"])] = ()
    max_queue: Annotated[int, Within(0, 1 << 20), Option("Server")] = 1024
    max_body: Annotated[
        int,
        Within(1 << 10, 1 << 32),
        Option("Server", kind=str, read=parse_bytes, default="8MiB"),
    ] = 8 << 20
    max_header: Annotated[int, Within(1 << 10, 1 << 24)] = 32 << 10
    max_connections: Annotated[int, Within(1, 1 << 20), Option("Server")] = 4096
    max_choices: Annotated[int, Within(1, 1 << 16)] = 128
    request_timeout: Annotated[float | None, Option("Server", read=_read_timeout)] = 600.0
    read_timeout: Annotated[float, Option("Server")] = 30.0
    write_timeout: Annotated[float, Option("Server")] = 30.0
    drain_timeout: Annotated[float, Option("Server")] = 30.0
    max_open_sessions: Annotated[int, Within(0, 1 << 20), Option("Server")] = 256
    session_timeout: Annotated[float, Option("Server")] = 3600.0
    access_log: Annotated[bool, Option("Server")] = True

    def __post_init__(self) -> None:
        check_values(self)
        for name in ("request", "read", "write", "drain", "session"):
            value = getattr(self, f"{name}_timeout")
            if name == "request" and value is None:
                continue
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"{name}_timeout must be seconds above 0, got {value!r}")
        self._check_names()
        for key in self.api_keys:
            if not key.isascii() or not key.isprintable() or not key.strip() or " " in key:
                raise ConfigError(
                    "an API key must be visible ASCII characters without spaces, as it is sent in "
                    "a header"
                )

    def _check_names(self) -> None:
        """Raise `ConfigError` for a strange name of a model, a host, a site or a proxy."""
        for field in ("names", "hosts", "origins", "proxies"):
            value = getattr(self, field)
            if not isinstance(value, tuple | list):
                raise ConfigError(f"{field} must be a tuple of names, got {shown(value)}")
        if not self.names or not all(isinstance(name, str) and name for name in self.names):
            raise ConfigError("names must be one name or several, none of them empty")
        for name in self.names:
            if self.names.count(name) > 1:
                raise ConfigError(f"names: {shown(name)} is given twice")
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError(f"host must be an address, got {shown(self.host)}")
        for host in self.hosts:
            if not isinstance(host, str) or not _HOST.fullmatch(host):
                raise ConfigError(
                    "hosts must be names of this machine as in a URL, without a port, got "
                    f"{shown(host)}"
                )
        if self.hosts and not self.is_loopback:
            raise ConfigError(
                "hosts: names protect a server that only this machine reaches; one that listens "
                f"on {self.host} answers to every name: leave them out"
            )
        for origin in self.origins:
            if origin != "*" and not _is_origin(str(origin)):
                raise ConfigError(
                    "an origin is * or what browsers send, such as https://app.example or "
                    "http://localhost:3000: in small letters, without a path, a slash at its end "
                    f"or the scheme's own port, got {shown(origin)}"
                )
        for proxy in self.proxies:
            try:
                ipaddress.ip_network(str(proxy))
            except ValueError as error:
                raise ConfigError(
                    f"proxies must be addresses or networks such as 10.0.0.0/8: {error!s:.200}"
                ) from None

    @property
    def has_several_keys(self) -> bool:
        """Whether clients may have different keys."""
        return len(set(self.api_keys)) > 1

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the server, however `host` spells the address."""
        try:
            address = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)[0][4][0]
        except (OSError, UnicodeError):
            return False
        return is_loopback_address(str(address))


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a server is started with.

    Attributes:
        config: the server's options.
        loading: the arguments of `Engine.from_pretrained`.
        threads: CPU threads of torch.
        chat_template: replaces the tokenizer's own (Jinja).
        stuck_timeout: seconds after which a replica's engine that does not answer is killed.
        ranks: the processes of a replica that share the target.

    Raises:
        ConfigError: a draft would show clients something of the texts of others.
    """

    config: ServeConfig
    loading: Mapping[str, Any]
    threads: int = 1
    chat_template: str | None = None
    stuck_timeout: float = 60.0
    ranks: int = 1

    def __post_init__(self) -> None:
        shares = any(map(suffix_of, self.loading.get("draft") or ()))
        if shares and self.config.has_several_keys and not self.config.share_prefixes:
            raise ConfigError(
                "draft: 'suffix:shared' drafts from the texts of all clients, so accepted drafts "
                f"would tell each of the {len(set(self.config.api_keys))} API keys something of "
                "the others' texts: give 'suffix', or share_prefixes to share on purpose"
            )
