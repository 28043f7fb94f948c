"""Who reads the server's first lines may call at once."""

from __future__ import annotations

import sys
from pathlib import Path

import warm_kit

SCRIPT = """
import os, re, signal, socket

from specpool.serve.config import ServeConfig
from specpool.serve.server import serve


def tell(line):
    if found := re.search(r"http://([^:]+):(\\d+)/v1", line):
        socket.create_connection((found[1], int(found[2])), 120).close()
        print("it listens")
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    loading = {"target": "specpool/tiny", "max_context_len": 64, "trust_remote_code": False}
    serve(ServeConfig(port=0, names=("tiny",)), loading, tell=tell)
"""


def test_the_server_listens_before_it_says_where(tmp_path: Path) -> None:
    script = tmp_path / "served.py"
    script.write_text(SCRIPT)
    done = warm_kit.run([sys.executable, str(script)], capture_output=True)
    assert "it listens" in done.stdout, done.stderr[-2000:]
    assert done.returncode == 0, done.stderr[-2000:]
