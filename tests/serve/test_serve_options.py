"""The options of `specpool serve`: checked at once; a wrong one starts nothing."""

from __future__ import annotations

import socket

import pytest

from cli_kit import call
from serve_kit import Server
from specpool import ConfigError
from specpool.cli.serve import _keys, name_of
from specpool.serve.config import ServeConfig
from specpool.serve.guard.access import ApiError, _check_host


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--port", "70000"], "--port must be an integer in [0, 65535], got 70000"),
        (["--host", "no such host"], "--host: 'no such host' is no address"),
        (["--max-queue", "-1"], "--max-queue must be an integer in [0, "),
        (["--max-body", "lots"], "--max-body must be bytes"),
        (["--request-timeout", "-1"], "--request-timeout must be seconds above 0"),
        (["--read-timeout", "nan"], "--read-timeout must be seconds above 0"),
        (["--drain-timeout", "inf"], "--drain-timeout must be seconds above 0"),
        (["--allow-origin", "site.example"], "an origin is * or what browsers send, such as http"),
        (
            ["--trust-proxy", "nginx"],
            "--trust-proxy must be addresses or networks such as 10.0.0.0",
        ),
        (["--trust-proxy", "*"], "--trust-proxy must be addresses or networks such as 10.0.0.0/8"),
        (["--api-key-file", "/no/such"], "--api-key-file /no/such cannot be read"),
        (["--chat-template", "/no/such"], "--chat-template /no/such cannot be read"),
        (["--name", ""], "--name must be one name or several"),
        (["--target", "/no/such"], "--target: no model at '/no/such'"),
        (["--batch", "0"], "--batch must be an integer in [1, "),
        (["--shape", "3x1x9"], "cannot be built"),
    ],
)
def test_wrong_options_are_refused(capsys, options, message):
    code, out, err = call(capsys, "serve", *options)
    assert code == 2 and out == "" and message in err, err
    assert len(err.splitlines()) == 1


def test_an_empty_file_of_keys_opens_nothing(capsys, tmp_path):
    (tmp_path / "keys").write_text("\n \n")
    code, _, err = call(capsys, "serve", "--api-key-file", str(tmp_path / "keys"))
    assert code == 2 and "has no key" in err
    with pytest.raises(ConfigError, match="an API key must be visible ASCII"):
        ServeConfig(api_keys=("a\u00e9",))


@pytest.mark.parametrize("line", ["key # alice", "# keys of the team", "key-1 key-2", "key\tkey-2"])
def test_no_word_beside_a_key_is_a_key(capsys, tmp_path, monkeypatch, line):
    """Law: a line is a key. A comment must not open the server to those who guess its words."""
    monkeypatch.setattr("specpool.serve.server.serve", lambda *_, **__: None)
    (tmp_path / "keys").write_text(f"key-of-a\n{line}\n")
    code, _, err = call(capsys, "serve", "--api-key-file", str(tmp_path / "keys"))
    assert code == 2 and "an API key must be visible ASCII characters without spaces" in err


@pytest.mark.parametrize("end", ["\n", "\r\n", " \n\n"])
def test_a_line_is_a_key_however_it_ends(tmp_path, end):
    (tmp_path / "keys").write_bytes(f"key-of-a{end}key-of-b{end}".encode())
    assert _keys(tmp_path / "keys") == ("key-of-a", "key-of-b")


@pytest.mark.parametrize(
    ("keys", "options", "is_refused"),
    [
        ("a b", ["--draft", "suffix:shared"], True),
        ("a b", ["--draft", "specpool/tiny-eagle", "--draft", "suffix:shared"], True),
        ("a b", ["--draft", "suffix"], False),
        ("a b", ["--draft", "suffix:shared", "--share-prefixes"], False),
        ("a a", ["--draft", "suffix:shared"], False),
        ("", ["--draft", "suffix:shared"], False),
    ],
)
def test_drafts_from_texts_of_all_are_refused_between_keys(
    capsys, tmp_path, monkeypatch, keys, options, is_refused
):
    """Law: accepted drafts tell no key what another one has sent, unless that is asked for."""
    started = []
    monkeypatch.setattr("specpool.serve.server.serve", lambda *given, **more: started.append(given))
    (tmp_path / "keys").write_text(keys.replace(" ", "\n"))
    file = ["--api-key-file", str(tmp_path / "keys")] if keys else []
    code, _, err = call(capsys, "serve", *file, *options)
    assert (code, len(started)) == ((2, 0) if is_refused else (0, 1)), err
    if is_refused:
        assert "--draft: 'suffix:shared' drafts from the texts of all clients" in err
        assert "the 2 API keys" in err and "--share-prefixes" in err


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        *(("hosts", (name,), "hosts must be names of this machine as in a URL") for name in
          ("", " ", "a b", "http://a", "a:80", "::1", "a/b", 5, None)),
        *(("hosts", value, "hosts must be a tuple of names") for value in ("abc", 5, None)),
        *(("origins", (origin,), "an origin is . or what browsers send") for origin in
          ("", 5, "null", "https://", "https://a/", "https://a/b", "https://A.example", "HTTPS://a",
           "https://a:443", "http://a:80", "https://a:", "https://a b", "https://u@a",
           "https://*.example.com", "https://münchen.de", "http://127.1", "http://1.2.3.256",
           "https://a.b?x", "https://a.b#", "https://a.b:99999", "https://a:65536", "https://a:080",
           "https://a\\b", "https://a%41.b", "https://a<b", "https://[::1", "https://[::g]",
           "https://[1.2.3.4]", "https://[0::1]", "https://a;b", "app://ü", "https://a..b",
           "https://a\n")),
        ("origins", "*", "origins must be a tuple of names"),
        ("proxies", "10.0.0.1", "proxies must be a tuple of names"),
        *(("proxies", (proxy,), "proxies must be addresses or networks") for proxy in
          ("", "*", "box", "10.0.0.1/8", "1.2.3.4:80", None)),
        *(("names", value, "names must be one name or several") for value in ((), ("",), (5,))),
        ("names", "abc", "names must be a tuple of names"),
        ("names", ("a", "b", "a"), "names: 'a' is given twice"),
        *(("host", host, "host must be an address, got ") for host in ("", 5, None)),
    ],
)  # fmt: skip
def test_an_empty_or_strange_name_is_refused_in_python_too(field, value, message):
    with pytest.raises(ConfigError, match=message):
        ServeConfig(**{field: value})


def test_origins_are_as_browsers_send_them():
    """Law: an origin that no browser sends is refused; pages of programs have schemes of theirs."""
    ServeConfig(
        origins=("https://a.example", "http://a:8080", "http://a:443", "http://[::1]:3000",
                 "https://xn--bcher-kva.example", "https://a_b.example", "https://a.example.",
                 "https://a.b:65535", "http://a:0", "http://127.0.0.1:1", "https://1.a",
                 "http://[::ffff:7f00:1]", "vscode-webview://12", "app://obsidian.md", "tauri://localhost",
                 "chrome-extension://abc", "vscode-webview://0a1b", "*")
    )  # fmt: skip


def test_a_name_of_a_loopback_server_has_no_case():
    _check_host("Box.Example:8000", ServeConfig(hosts=("boX.example",)))
    with pytest.raises(ApiError, match="called 'other'"):
        _check_host("other", ServeConfig(hosts=("boX.example",)))


@pytest.mark.parametrize(
    "host",
    [
        "127.0.1.1:8000",
        "[::1]:8000",
        "::1",
        "[::ffff:127.0.0.1]",
        "box:80",
        "localhost.",
        "Box.:80",
    ],
)
def test_a_loopback_server_answers_to_each_loopback_address(host):
    _check_host(host, ServeConfig(host="box"))
    for strange in (
        "box.evil.example",
        "127.0.0.1.evil.example",
        "localhost..",
        "::2",
        "10.0.0.1",
        "0.0.0.0",
        "[::]",
    ):
        with pytest.raises(ApiError, match="listens on loopback and is called"):
            _check_host(strange, ServeConfig(host="box"))


def test_names_protect_a_loopback_server_alone():
    ServeConfig(hosts=("a.example", "b-2", "[fe80::1]", "*.c"))
    with pytest.raises(ConfigError, match="hosts: names protect a server that only this machine"):
        ServeConfig(host="0.0.0.0", hosts=("a.example",))


def test_a_taken_port_is_told_before_anything_is_loaded(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = call(capsys, "serve", "--port", str(port))
    assert code == 2 and f"--port: {port} of 127.0.0.1 cannot be taken" in err


def test_a_models_name_has_no_path(tmp_path):
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").write_text("{}")
    assert name_of(str(tmp_path / "my-model")) == "my-model"
    assert name_of("specpool/tiny") == "specpool/tiny"
    assert name_of("org/name") == "org/name"


def test_what_is_loopback(monkeypatch):
    """Law: the address decides. Debian's /etc/hosts gives a machine's own name a loopback one."""
    look_up, names = socket.getaddrinfo, {"box": "127.0.1.1", "box.example": "10.0.0.1"}

    def known(host, *given, **more):
        if host == "no.example":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return look_up(names.get(host, host), *given, **more)

    monkeypatch.setattr(socket, "getaddrinfo", known)
    for host, is_loopback in (
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("LocalHost", True),
        ("127.1", True),
        ("2130706433", True),
        ("::ffff:127.0.0.1", True),
        ("0:0:0:0:0:0:0:1", True),
        ("0", False),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("box", True),
        ("box.example", False),
        ("no.example", False),
    ):
        assert ServeConfig(host=host).is_loopback is is_loopback, host


def test_an_engine_that_cannot_be_loaded_ends_the_server():
    with pytest.raises(AssertionError, match=r"error: .* of KV, 1 KiB are to be had") as error:
        Server("--kv-bytes", "1KiB")
    assert "http://" not in str(error.value)


def test_a_server_for_others_warns_without_a_key():
    with Server("--host", "0.0.0.0", "--max-context-len", "64") as server:
        assert "warning: whoever reaches this address can use it" in "".join(server.out)
        status, _, _ = server.ask("GET", "/v1/models", headers={"host": "any.example"})
        assert status == 200
