"""The documentation site is whole, looked at without building it (`make docs` builds it).

Every public name has its place in the reference, every page its place in the menu, and every link
within the repository leads somewhere, anchors included.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path

import pytest

from browser_kit import CHROMIUM, NO_CHROMIUM, Browser
from paths import ROOT
from specpool import BlockPool, Ledger

PACKAGE, DOCS = ROOT / "python" / "specpool", ROOT / "docs"
MENU = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
#: Pages of the site that are made of files of the root, by docs/hooks.py.
FROM_ROOT = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
MODULES = {
    "specpool": ("__init__.py", "specpool"),
    "specpool.engine.draft": ("engine/draft/__init__.py", "draft"),
    "specpool.engine.shapes": ("engine/shapes/__init__.py", "adaptive"),
    "specpool.engine.models": ("engine/models/__init__.py", "models"),
    "specpool.engine.attention": ("engine/attention/__init__.py", "attention"),
    "specpool.kernels": ("kernels/__init__.py", "kernels"),
    "specpool.testing": ("testing/__init__.py", "testing"),
    "specpool.metrics": ("metrics.py", "metrics"),
    "specpool.slot_table": ("slot_table.py", "slot_table"),
    "specpool._core": ("_core.pyi", "core"),
}
HOST = ("tier", "copies", "reload")


def tree_of(path: str) -> ast.Module:
    return ast.parse((PACKAGE / path).read_text(encoding="utf-8"))


def public_names(path: str) -> set[str]:
    """`__all__` of a file, or what it defines without an underscore."""
    body = tree_of(path).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    defined = (ast.FunctionDef, ast.ClassDef)
    return {n.name for n in body if isinstance(n, defined) and not n.name.startswith("_")}


def shown(page: str) -> set[str]:
    """The names that a page renders (`::: path`) or names in its text."""
    text = (DOCS / "reference" / f"{page}.md").read_text(encoding="utf-8")
    rendered = re.findall(r"^::: [\w.]+\.(\w+)$", text, re.MULTILINE)
    return {*rendered, *re.findall(r"`(?:specpool\.)?(\w+)`", text)}


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(module):
    path, page = MODULES[module]
    missing = public_names(path) - shown(page)
    assert not missing, f"docs/reference/{page}.md lacks {sorted(missing)} of {module}"


def test_the_host_tier_is_in_the_reference():
    names = set().union(*(public_names(f"engine/memory/host/{name}.py") for name in HOST))
    helpers = {"whole_row_pages", "group_buffers"}
    assert names - shown("host") == helpers


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("reference/")])
def test_what_the_reference_renders_exists(page):
    """A name that is gone would fail `make docs` only."""
    for path in re.findall(r"^::: ([\w.]+)$", (DOCS / page).read_text(), re.MULTILINE):
        module, _, name = path.rpartition(".")
        file = Path(*module.split(".")[1:])
        choices = [f"{file}.py", f"{file}.pyi", f"{file}/__init__.py"]
        (found,) = [choice for choice in choices if (PACKAGE / choice).is_file()]
        assert name in public_names(found), path


def test_every_page_is_in_the_menu_once():
    menu = re.findall(r"^ +- [^:]+: ([\w/]+\.md)$", MENU, re.MULTILINE)
    assert sorted(menu) == sorted([*PAGES, *FROM_ROOT])


def test_each_guide_says_first_for_whom_it_is():
    menu = MENU[MENU.index("nav:") : MENU.index("theme:")]
    parts = re.split(r"^  - (\w+):$", menu, flags=re.MULTILINE)
    assert parts[1::2] == ["Start", "Guides", "Reference", "Inside"]
    for part in (parts[2], parts[4]):
        for page in re.findall(r"([\w/]+\.md)$", part, re.MULTILINE):
            if page not in FROM_ROOT:
                _, first = (DOCS / page).read_text("utf-8").split("\n\n", 1)
                assert first.startswith("For "), page


def test_the_site_asks_nothing_of_elsewhere():
    """Its search runs from files, by a script of our own; no repository's figures are fetched."""
    assert re.search(r"^  - search\n  - offline$", MENU, re.MULTILINE)
    (script,) = re.findall(r"^    - (.*iframe-worker.*)$", MENU, re.MULTILINE)
    assert (DOCS / script).is_file()
    assert "repo_url" not in MENU and "http" not in re.sub("#.*", "", MENU)


@pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
def test_a_worker_runs_in_a_page_that_is_opened_as_a_file(tmp_path):
    """Law: of the worker that the site's search is, everything that it uses works from files."""
    (tmp_path / "page.html").write_text(
        f"<body><script>{(DOCS / 'iframe-worker.js').read_text('utf-8')}</script>"
    )
    (tmp_path / "more.js").write_text("self.louder = (text) => text.toUpperCase();")
    (tmp_path / "worker.js").write_text(
        "addEventListener('message', async (event) => {"
        " await importScripts('more.js'); postMessage(louder(event.data)); });"
    )
    with Browser(tmp_path / "chromium") as browser:
        browser.go((tmp_path / "page.html").as_uri())
        browser.run(
            "window.worker = new Worker('worker.js'); worker.postMessage('found');"
            "worker.addEventListener('message', (event) => { window.answer = event.data; })"
        )
        assert browser.until("window.answer") == "FOUND"
        assert browser.errors == []


def verbs_of(heading: str) -> set[str]:
    """The verbs in the tables of a part of the contract."""
    contract = (DOCS / "contract.md").read_text("utf-8")
    (part,) = re.findall(rf"^## {heading}$(.*?)(?=^## )", contract, re.MULTILINE | re.DOTALL)
    cells = re.findall(r"^\| (`[^|]+) \|", part, re.MULTILINE)
    return {verb for cell in cells for verb in re.findall(r"`(\w+)(?:\(|`)", cell)}


@pytest.mark.parametrize(
    "heading", ["The ledger", "Prefix cache", "A prefix cache outside", "Rows that move"]
)
def test_the_verbs_of_the_contract_are_the_ledgers(heading):
    assert verbs_of(heading) and not {v for v in verbs_of(heading) if not hasattr(Ledger, v)}


def test_the_verbs_of_blocks_are_the_block_pools():
    verbs = verbs_of("Blocks")
    assert {"take", "drop", "match", "put", "keep", "preview", "forget"} <= verbs
    assert all(hasattr(BlockPool, verb) for verb in verbs)


def test_the_tools_are_an_extra_and_the_output_is_ignored():
    assert re.search(
        r"^docs = \[.*mkdocs-material.*mkdocstrings\[python\]",
        (ROOT / "pyproject.toml").read_text(),
        re.M,
    )
    assert "/site/" in (ROOT / ".gitignore").read_text().splitlines()


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", head).strip().lower()) for head in heads}


def broken_links(file: Path) -> list[str]:
    """The links of a page that lead nowhere in the repository."""
    text = re.sub(r"^```.*?^```$", "", file.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
        if ":" in link:
            continue
        place = posixpath.normpath(posixpath.join(file.parent.as_posix(), link)) if link else file
        target = Path(place)
        if not target.exists():
            broken.append(link)
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text("utf-8")):
            broken.append(f"{link}#{anchor}")
    return broken


FILES = sorted([*(DOCS / page for page in PAGES), *(ROOT / name for name in FROM_ROOT.values())])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(file):
    assert not broken_links(file)


def test_a_broken_link_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# A head\n[a](page.md#a-head) [b](page.md#gone) [c](gone.md) [d](https://x.y)\n"
    )
    assert broken_links(page) == ["page.md#gone", "gone.md"]


def test_the_recorded_run_has_its_place():
    """docs/hooks.py puts it where the mark is."""
    (mark,) = re.findall(r'^MARK = "(.+)"$', (DOCS / "hooks.py").read_text(), re.MULTILINE)
    assert [page for page in PAGES if mark in (DOCS / page).read_text("utf-8")] == ["event_log.md"]


def glossary() -> list[str]:
    """The words that the glossary defines, one entry for each of a row's."""
    text = (DOCS / "glossary.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", text, re.MULTILINE)
    return [word.strip("` ") for row in rows for word in re.sub(r"\(.*?\)", "", row).split(",")]


def test_the_glossary_defines_each_word_once():
    words = [word for word in glossary() if word not in ("word", "---")]
    assert sorted(words) == sorted(set(words))
    wanted = (
        "lane round epoch retract extend turn bound checkpoint page slot row group shape step plan"
    )
    assert not set(wanted.split()) - set(words)


def test_the_ledgers_states_and_verbs_are_in_the_glossary():
    """Every word that docs/ledger.md draws in the life of a page or a step is defined."""
    lives = "free owned shared fenced prepare launch resolve complete cancel abandon stale evict"
    assert not set(lives.split()) - set(glossary())
