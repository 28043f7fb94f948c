"""`specpool deploy`: its config, its errors, and what it says to a cluster. No Ray is needed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from cli_kit import call
from paths import ROOT
from specpool import ConfigError
from specpool.cli.deploy import launch_of
from specpool.serve.replicas.figures import samples_of
from specpool.serve.replicas.manifest import args_of


def printed(capsys, *words: str):
    code, out, err = call(capsys, "deploy", *words)
    assert code == 0, err
    return yaml.safe_load(out)


def test_the_config_that_is_printed(capsys):
    """Law: the replica gets the very words, and room for all that the server takes by itself."""
    words = ["--draft", "specpool/tiny-eagle", "--batch", "16", "--max-queue", "100", "--port", "0"]
    config = printed(capsys, "--replicas", "3", "--gpus", "0.5", *words)
    assert config["http_options"] == {"host": "127.0.0.1", "port": 0}
    (app,) = config["applications"]
    assert app["args"] == {"serve": words, "stuck_timeout": 60.0, "ranks": 1}
    (deployment,) = app["deployments"]
    assert deployment["num_replicas"] == 3 and "autoscaling_config" not in deployment
    assert deployment["max_ongoing_requests"] > 16 + 100
    # A request may take 600 s, and the sessions 60 s.
    assert deployment["graceful_shutdown_timeout_s"] > 660
    assert deployment["ray_actor_options"] == {"num_cpus": 1.0, "num_gpus": 0.5}
    module, name = deployment["request_router_config"]["request_router_class"].split(":")
    text = (ROOT / "python" / Path(*module.split("."))).with_suffix(".py").read_text()
    assert f"class {name}(" in text
    scaled = printed(capsys, "--replicas", "2:8")["applications"][0]["deployments"][0]
    assert scaled["autoscaling_config"]["min_replicas"] == 2 and "num_replicas" not in scaled
    assert scaled["autoscaling_config"]["max_replicas"] == 8


def test_the_ranks_of_a_replica_are_on_one_node(capsys):
    """Law: one actor has all GPUs of its ranks, so Ray finds them on one node."""
    words = ["--device", "cuda", "--target", "/models/target"]
    config = printed(capsys, "--ranks", "4", "--gpus", "4", "--cpus", "8", *words)
    (app,) = config["applications"]
    assert app["args"] == {"serve": words, "stuck_timeout": 60.0, "ranks": 4}
    assert app["deployments"][0]["ray_actor_options"] == {"num_cpus": 8.0, "num_gpus": 4.0}


def test_what_a_replica_starts_with_is_what_serve_starts_with():
    launch = launch_of(["--batch", "5", "--page-size", "4", "--name", "a"], has_files=True)
    assert launch.loading["max_batch"] == 5 and launch.loading["page_size"] == 4
    assert launch.config.names == ("a",) and launch.loading["target"] == "specpool/tiny"


def test_no_secret_is_printed(monkeypatch, capsys, tmp_path):
    """Law: keys are read on the replica's node, never here."""
    monkeypatch.setenv("SPECPOOL_API_KEY", "top-secret-1")
    file = tmp_path / "keys"
    file.write_text("top-secret-2")
    code, out, _ = call(capsys, "deploy", "--api-key-file", str(file))
    assert code == 0 and "top-secret" not in out and str(file) in out
    assert set(launch_of(["--api-key-file", str(file)], has_files=True).config.api_keys) == {
        "top-secret-1",
        "top-secret-2",
    }


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--replicas", "0"], "--replicas must be from 1 on, the fewer first, got '0'"),
        (["--replicas", "8:2"], "--replicas must be from 1 on, the fewer first, got '8:2'"),
        (["--replicas", "two"], "--replicas must be a number, or two such as 2:8, got 'two'"),
        (["--gpus", "-1"], "--gpus must be 0 or more and at most 64, got -1.0"),
        (["--cpus", "nan"], "--cpus must be 0 or more and at most 1024, got nan"),
        (["--stuck-timeout", "0"], "--stuck-timeout must be above 0 and at most 86400, got 0.0"),
        (["--app", "a/b"], "--app must be letters, digits, - and _, got 'a/b'"),
        (["--wait", "-1"], "--wait must be seconds from 0 on, got -1.0"),
        (["--device", "cuda"], "--gpus must be above 0 for --device cuda, got 0: Ray hides them"),
        (
            ["--device", "cuda", "--ranks", "4", "--gpus", "1"],
            "--gpus must be 4 for 4 ranks, a GPU each, got 1",
        ),
        (["--ranks", "0"], "--ranks must be an integer in [1, 64], got 0"),
        (["--max-queue", "-1"], "--max-queue must be an integer in [0, 1048576], got -1"),
        (["--batch", "0"], "--batch must be an integer in [1, "),
        (["--bach", "3"], "No such option: --bach"),
        (["--target", "python"], "--target must be an absolute path, the same on every node"),
        (["--api-key-file", "k"], "--api-key-file must be an absolute path"),
        (["--", "--help"], "No such option: --help"),
        (["--apply", "--address", "x"], "--address must be a dashboard's, such as http://127"),
        (["--apply", "--address", "http://a:99999"], "--address: 'http://a:99999' is no address"),
        (["--apply", "--address", "http://127.0.0.1:9"], "there is no Ray cluster at http://127."),
    ],
)
def test_bad_input_is_one_line(monkeypatch, capsys, words, says):
    monkeypatch.chdir(ROOT)
    code, out, err = call(capsys, "deploy", *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {says}") and err.count("\n") == 1, err


def test_errors_come_before_heavy_imports():
    code = (
        "import sys; sys.argv = ['specpool', 'deploy', '--batch', '0']\n"
        "from specpool.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n"
        "    heavy = [m for m in ('torch', 'transformers', 'ray', 'fastapi') if m in sys.modules]\n"
        "    sys.exit(f'{end.code} {heavy}')"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stderr.splitlines()[-1] == "2 []"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({"serve": "--batch 3"}, "args.serve must be a list of texts"),
        ({"serve": [3]}, "args.serve must be a list of texts"),
        ({"words": []}, "args has no field 'words'"),
        ({"stuck_timeout": 0}, "args.stuck_timeout must be seconds above 0, got 0"),
        ({"ranks": 65}, "args.ranks must be an integer in [1, 64], got 65"),
    ],
)
def test_a_config_that_was_written_by_hand(args, says):
    with pytest.raises(ConfigError) as error:
        args_of(args)
    assert str(error.value).startswith(says)
    assert args_of({}) == ([], 60.0, 1)


class Dashboard:
    """A dashboard that remembers what it was told, and serves the answers that it is given."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        requests, left = [], list(answers)

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                size = int(self.headers.get("content-length") or 0)
                body, token = self.rfile.read(size), self.headers.get("authorization")
                requests.append((self.command, self.path, body, token))
                status, text = left.pop(0) if len(left) > 1 else left[0]
                self.send_response(status)
                self.send_header("content-length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())

            do_GET = do_PUT = _answer  # noqa: N815

            def log_message(self, *args: object) -> None:
                pass

        self.told = requests
        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Dashboard:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def status(name: str, state: str, message: str = "") -> tuple[int, str]:
    return 200, json.dumps({"applications": {name: {"status": state, "message": message}}})


def test_apply_gives_the_printed_config_and_waits(monkeypatch, capsys):
    monkeypatch.setenv("RAY_AUTH_TOKEN", "t0ken")
    expected = printed(capsys, "--replicas", "2")
    answers = [
        (200, "{}"),
        (200, ""),
        status("specpool", "DEPLOYING"),
        status("specpool", "RUNNING"),
    ]
    with Dashboard(*answers) as dashboard:
        words = ["--apply", "--address", dashboard.address, "--replicas", "2"]
        code, out, err = call(capsys, "deploy", *words)
    assert (code, out) == (0, "") and err == "specpool: DEPLOYING\nspecpool: RUNNING\n"
    assert [method for method, *_ in dashboard.told] == ["GET", "PUT", "GET", "GET"]
    assert {path for _, path, *_ in dashboard.told} == {"/api/serve/applications/"}
    assert {token for *_, token in dashboard.told} == {"Bearer t0ken"}
    assert json.loads(dashboard.told[1][2]) == expected


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ([status("other", "RUNNING")], "the cluster serves other too, which this config would end"),
        (
            [(401, "no")],
            "the cluster at {} answers 401: its token is missing or wrong: set RAY_AUTH",
        ),
        (
            [(200, "{}"), (400, "a\nValueError: why\n")],
            "the cluster at {} answers 400: ValueError: why",
        ),
        ([(200, "<html>")], "{} is no Ray dashboard: its answer is no JSON object"),
        (
            [(200, "{}"), (200, "{}"), status("specpool", "DEPLOY_FAILED", "x\nConfigError: y")],
            "specpool is DEPLOY_FAILED: ConfigError: y",
        ),
        (
            [(200, "{}"), (200, "{}"), (200, "{}")],
            "specpool is NOT_STARTED after 0.1 s: it does not",
        ),
    ],
)
def test_a_cluster_that_refuses(monkeypatch, capsys, answers, says):
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere")
    with Dashboard(*answers) as dashboard:
        words = ["--apply", "--address", dashboard.address, "--wait", "0.1"]
        code, _, err = call(capsys, "deploy", *words)
    assert code == 2 and f"error: {says.format(dashboard.address)}" in err, err
    puts = [method for method, *_ in dashboard.told if method == "PUT"]
    # By what it says without the address, whose port may have any digits.
    assert len(puts) == ("other" not in says and "401" not in says and "html" not in answers[0][1])


def test_the_manifest_for_kubernetes_is_what_deploy_prints(capsys):
    """Law: the config in deploy/kuberay.yaml is that of the command which its first lines name."""
    text = (ROOT / "deploy" / "kuberay.yaml").read_text()
    command = next(line for line in text.splitlines() if "specpool deploy" in line)
    words = command.partition("specpool deploy ")[2].split()
    manifest, policy = yaml.safe_load_all(text)
    assert (manifest["kind"], policy["kind"]) == ("RayService", "NetworkPolicy")
    config = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    assert config == printed(capsys, *words)


def test_samples_of_a_page_of_metrics():
    page = """\
# HELP vllm:a x
# TYPE vllm:a counter
vllm:a_total{b="c"} 3.0
vllm:a_created 1.0
# TYPE h histogram
h_bucket{le="1"} 2.0
h_bucket{le="+Inf"} 2.0
h_sum 1.5
h_count 2.0
"""
    assert samples_of(page) == [
        ("vllm_a_total", {"b": "c"}, 3.0),
        ("h_bucket", {"le": "1"}, 2.0),
        ("h_bucket", {"le": "+Inf"}, 2.0),
        ("h_sum", {}, 1.5),
        ("h_count", {}, 2.0),
    ]


def test_an_open_address_without_a_key_is_warned_of(capsys, tmp_path):
    file = tmp_path / "keys"
    file.write_text("key")
    for words, warns in (
        ([], False),
        (["--host", "0.0.0.0"], True),
        (["--host", "0.0.0.0", "--api-key-file", str(file)], False),
    ):
        assert ("can use it" in call(capsys, "deploy", *words)[2]) == warns
