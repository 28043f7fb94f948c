"""Hooks of mkdocs: pages that lie outside docs/, links that leave it, and a recorded run.

README, CHANGELOG and CONTRIBUTING stay at the root, where people look for them; the site shows them
as pages. A link to any other file of the repository leads to the file on the web if `repo_url` is
set, else only its text stays. The page of the recorded run is made with the commands that a user
would type.
"""

from __future__ import annotations

import os
import posixpath
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
#: Files of the root, and the pages that show them.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
RUN = "recorded_run.html"
#: The mark in a page where the recorded run goes; it is invisible outside the site.
MARK = "<!-- the recorded run -->"
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s#]+)(#[^()\s]*)?\)")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of the root, and the recorded run."""
    for source, page in PAGES.items():
        content = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=content))
    files.append(File.generated(config, RUN, content=record()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to where their files are on the site, or to the repository."""
    source = page.file.src_uri
    root = {shown: name for name, shown in PAGES.items()}.get(source, f"docs/{source}")
    parts = FENCE.split(markdown)
    parts[::2] = [
        LINK.sub(lambda link: link_of(*link.groups(""), root, source, config), text)
        for text in parts[::2]
    ]
    frame = (
        f'<iframe src="{RUN}" title="A recorded run" loading="lazy" '
        'style="width: 100%; height: 44rem; border: 1px solid #8884"></iframe>\n\n'
        f"[The same on a page of its own]({RUN})."
    )
    return "".join(parts).replace(MARK, frame)


def link_of(text: str, link: str, anchor: str, root: str, page: str, config: Any) -> str:
    """Return a link of a file as it stands on the site; only its text if it would lead nowhere.

    Args:
        text: what is shown.
        link: as it stands in the file, without its anchor.
        anchor: with its number sign; empty = none.
        root: the file, from the root of the repository.
        page: the page that shows it, from docs/.
        config: of mkdocs.
    """
    path = posixpath.normpath(posixpath.join(posixpath.dirname(root), link))
    page_of_path = PAGES.get(path) or (
        path.removeprefix("docs/") if path.startswith("docs/") else None
    )
    if ":" in link or not (ROOT / path).exists():
        target = link  # strict mode reports one that leads nowhere
    elif page_of_path is not None:
        target = posixpath.relpath(page_of_path, posixpath.dirname(page) or ".")
    elif config["repo_url"]:
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        target = f"{config['repo_url'].rstrip('/')}/{kind}/main/{path}"
    else:
        return text
    return f"[{text}]({target}{anchor})"


def record() -> str:
    """Record the scheduler of the examples, and draw its first events; its seed is fixed."""
    with tempfile.TemporaryDirectory() as folder:
        log, page = Path(folder) / "scheduler.log", Path(folder) / RUN
        example = [sys.executable, str(ROOT / "examples" / "scheduler.py")]
        environment = {**os.environ, "SPECPOOL_RECORD": str(log)}
        subprocess.run(example, env=environment, stdout=subprocess.DEVNULL, check=True)
        inspect = [sys.executable, "-m", "specpool", "inspect", str(log), "--html", str(page)]
        subprocess.run(inspect, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        return page.read_text(encoding="utf-8")
