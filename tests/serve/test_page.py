"""The page at `/`, in a headless Chromium: one file, and it does what its buttons say."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from browser_kit import CHROMIUM, NO_CHROMIUM, Browser
from specpool.serve.page import page

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)
PICTURES = os.environ.get("SPECPOOL_PICTURES")  # a folder for the pictures, to look at


LAST_PAGE = """(() => {
  const canvas = document.querySelector('#pools canvas');
  const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  let last = data.length - 4;
  while (data[last + 3] === 0) last -= 4;
  return `rgb(${data[last]}, ${data[last + 1]}, ${data[last + 2]})`;
})()"""  # the colour of the last page of the target's map


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def browser(chromium, server):
    chromium.errors.clear()
    chromium.look(1200)
    chromium.go("about:blank?")
    chromium.go(f"{server.url}/")
    chromium.until("name")
    yield chromium
    assert chromium.errors == []


def keep(browser, name):
    if PICTURES:
        Path(PICTURES, f"{name}.png").write_bytes(browser.picture())


def say(browser, text):
    browser.run("$('text').focus()")
    browser.type(text)
    browser.press_enter()
    browser.until("!running && current && !current.turns.some((turn) => turn.runs)")


def test_the_page_is_one_file():
    """Nothing is fetched from elsewhere, and no placeholder is left."""
    text = page()
    assert not re.search(r'\b(?:src|href)="(?!data:)', text) and "url(" not in text
    assert not re.search(r"\bSTYLE\b|\bSCRIPT\b", text)
    assert len(re.findall("https?://", text)) == 0


def test_the_server_allows_the_page_nothing_else(server):
    _, _, headers = server.ask("GET", "/")
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"


@needs_browser
def test_a_talk_shows_drafts_figures_and_pages(browser, server):
    say(browser, "seq: 2, 4, 6, ")
    drafted = browser.run(
        "[...document.querySelectorAll('.answer .draft')].map((e) => e.textContent)"
    )
    text = browser.run("document.querySelector('.answer').textContent")
    assert len(text) == 128 and drafted and len("".join(drafted)) < len(text)
    (session,) = server.ask("GET", "/v1/sessions")[1]["data"]
    assert session["offset"] == len("seq: 2, 4, 6, \n") + 128
    note = browser.run("document.querySelector('.note').textContent")
    assert re.search(r"128 tokens, \d+ tokens/s, \d+ % of drafts accepted, \d+ of 15 tokens", note)
    assert re.fullmatch(r"\d+ tokens/s", browser.run("$('speed').textContent"))
    assert re.fullmatch(r"\d+ %", browser.run("$('accepted').textContent"))
    browser.until("Number($('accept').textContent) > 1")
    caption = browser.until("document.querySelector('#pools figcaption')?.textContent")
    assert re.match(r"target: \d+ of 512 pages of 4", caption)
    colours = """(() => {
      const canvas = document.querySelector('#pools canvas');
      const data = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
      const found = new Set();
      for (let i = 0; i < data.length; i += 4) found.add(data.slice(i, i + 4).join());
      return found.size;
    })()"""
    browser.until(f"{colours} >= 3")  # free, owned, and the gaps between
    keep(browser, "wide")


@needs_browser
def test_the_answer_runs_and_can_be_stopped(browser, server):
    browser.run("$('max').value = 200; $('temperature').value = 1")
    browser.run("$('text').value = 'seq: 5, '; $('form').requestSubmit()")
    browser.until("current && current.turns[0].pieces.length > 2")
    assert not browser.run("$('stop').hidden") and browser.run("$('send').hidden")
    browser.run("$('stop').click()")
    browser.until("!running")
    assert "stopped: the session is as before" in browser.run("document.body.innerText")
    assert server.ask("GET", "/v1/sessions")[1]["data"][0]["offset"] == 0


@needs_browser
def test_rewind_and_fork(browser, server):
    say(browser, "seq: 2, 4, ")
    browser.run("$('max').value = 16")
    say(browser, "seq: 3, 6, ")
    browser.run("$('do-fork').click()")
    browser.until("sessions.length === 2 && current === sessions[1] && current.turns.length === 2")
    browser.run("document.querySelectorAll('.rewind')[1].click()")
    browser.until("current.turns.length === 1")
    assert browser.run("$('text').value") == "seq: 3, 6, "
    offsets = [each["offset"] for each in server.ask("GET", "/v1/sessions")[1]["data"]]
    assert sorted(offsets) == sorted(browser.run("sessions.map((each) => each.offset)"))
    browser.run("$('text').value = ''")
    say(browser, "seq: 7, 14, ")
    texts = browser.run("current.turns.map((turn) => turn.text)")
    assert texts == ["seq: 2, 4, ", "seq: 7, 14, "]
    browser.run("document.querySelector('#sessions button').click()")
    assert browser.run("current.turns.map((turn) => turn.text)")[1] == "seq: 3, 6, "
    browser.run("$('do-close').click()")
    browser.until("sessions.length === 1")
    assert len(server.ask("GET", "/v1/sessions")[1]["data"]) == 1


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(400, False), (400, True), (1200, True)])
def test_it_is_usable_when_narrow_and_in_the_dark(browser, width, dark):
    browser.look(width, dark=dark)
    say(browser, "seq: 2, 4, 6, ")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    inside = """['text', 'send', 'log'].every((id) => {
      const box = $(id).getBoundingClientRect();
      return box.width > 30 && box.left >= 0 && box.right <= innerWidth;
    })"""
    assert browser.run(inside)
    contrast = """(() => {
      const light = (colour) => {
        const part = colour.match(/[\\d.]+/g).slice(0, 3).map((v) => {
          const s = v / 255; return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4; });
        return 0.2126 * part[0] + 0.7152 * part[1] + 0.0722 * part[2];
      };
      const back = (e) => {
        const own = getComputedStyle(e).backgroundColor;
        return own === 'rgba(0, 0, 0, 0)' ? back(e.parentElement) : own;
      };
      return ['.answer .draft', '.answer', '.said', '.note', 'dt', '#send', '.legend'].map((s) => {
        const e = document.querySelector(s);
        const [a, b] = [light(getComputedStyle(e).color), light(back(e))].sort((x, y) => y - x);
        return (a + 0.05) / (b + 0.05);
      });
    })()"""
    assert min(browser.run(contrast)) >= 4.5  # WCAG AA
    assert browser.run(LAST_PAGE) in browser.run(
        "[...document.querySelectorAll('#pages i')].map((e) => getComputedStyle(e).backgroundColor)"
    )  # free or cached
    keep(browser, f"{width}-{'dark' if dark else 'light'}")


@needs_browser
def test_what_the_server_refuses_is_told(browser):
    browser.run("$('max').value = 99999")
    say(browser, "a" * 300)
    assert "leaves room for" in browser.run("document.querySelector('.note.bad').textContent")
    browser.errors.clear()  # the browser notes each 400 itself


@needs_browser
def test_text_is_text(browser):
    """What a model or a user says is never HTML."""
    say(browser, "<img src=x onerror=window.hit=1><b>bold</b>")
    assert browser.run(
        "window.hit === undefined && document.querySelectorAll('#log b').length === 0"
    )
