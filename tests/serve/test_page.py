"""The page at `/`, in a headless Chromium: one file, and it does what its buttons say."""

from __future__ import annotations

import json
import os
import random
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
    chromium.look(1200)
    chromium.go(f"{server.url}/")
    chromium.until("name")
    chromium.run("localStorage.clear(); sessionStorage.clear()")
    chromium.go("about:blank?")
    chromium.errors.clear()
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
    ended(browser)


def ended(browser):
    browser.until("!running && current && !current.turns.some((turn) => turn.runs)")


def regenerate(browser):
    browser.run("window.old = current.turns.at(-1); document.querySelector('.again').click()")
    browser.until("current.turns.at(-1) !== old")
    ended(browser)


def texts(browser):
    return browser.run("current.turns.map((turn) => [turn.text, said(turn)])")


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
    ((_, text),) = texts(browser)
    assert len(text) == 128 and drafted and len("".join(drafted)) < len(text)
    (session,) = server.ask("GET", "/v1/sessions")[1]["data"]
    assert session["offset"] == len("seq: 2, 4, 6, \n") + 128
    note = browser.run("document.querySelector('.note').textContent")
    assert re.match(
        r"cut at 128 tokens: raise Most tokens under Options, if the context has room; 128 tokens, "
        r"\d+ tokens/s, \d+ % of drafts accepted, \d+ of 15 tokens",
        note,
    )
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
    assert "stopped: the conversation is as before" in browser.run("document.body.innerText")
    assert server.ask("GET", "/v1/sessions")[1]["data"][0]["offset"] == 0


@needs_browser
def test_rewind_and_fork(browser, server):
    say(browser, "seq: 2, 4, ")
    browser.run("$('max').value = 16")
    say(browser, "seq: 3, 6, ")
    browser.run("$('do-fork').click()")
    browser.until("talks.length === 2 && current === talks[1] && current.turns.length === 2")
    browser.run("document.querySelectorAll('.rewind')[1].click()")
    browser.until("current.turns.length === 1")
    assert browser.run("$('text').value") == "seq: 3, 6, "
    offsets = [session["offset"] for session in server.ask("GET", "/v1/sessions")[1]["data"]]
    assert sorted(offsets) == sorted(browser.run("talks.map((talk) => talk.offset)"))
    browser.run("$('text').value = ''")
    say(browser, "seq: 7, 14, ")
    assert [text for text, _ in texts(browser)] == ["seq: 2, 4, ", "seq: 7, 14, "]
    browser.run("document.querySelector('#talks button').click()")
    assert browser.run("current.turns.map((turn) => turn.text)")[1] == "seq: 3, 6, "
    browser.run("window.confirm = () => true; $('do-delete').click()")
    browser.until("talks.length === 1")
    browser.until("ask('GET', '/v1/sessions').then(({ data }) => data.length === 1)")


@needs_browser
def test_conversations_survive_a_reload(browser, server):
    """The page comes back to its session; if that is gone, a new one gets the whole text."""
    browser.run("$('max').value = 16")
    say(browser, "seq: 2, 4, ")
    say(browser, "seq: 3, 6, ")
    before, session = texts(browser), browser.run("current.session")
    for is_gone in (False, True):
        if is_gone:
            server.ask("DELETE", f"/v1/sessions/{browser.run('current.session')}")
        browser.go(f"{server.url}/")
        browser.until("name")
        assert texts(browser) == before
        say(browser, "seq: 5, 10, ")
        assert [text for text, _ in texts(browser)][-1] == "seq: 5, 10, "
        assert not browser.run("current.turns.some((turn) => turn.failed)")
        assert (browser.run("current.session") == session) is not is_gone
        (held,) = server.ask("GET", "/v1/sessions")[1]["data"]
        assert held["offset"] == browser.run("current.offset")
        said = "\n".join(part for turn in texts(browser) for part in turn)
        assert held["offset"] == len(said)  # a line each: the toy has no template
        before = texts(browser)
    regenerate(browser)  # also a turn whose begin in the session is not known
    assert texts(browser) == before
    browser.errors.clear()  # the browser notes the 404 itself


@needs_browser
def test_a_session_that_goes_in_between_is_opened_anew(browser, server):
    browser.run("$('max').value = 16")
    say(browser, "seq: 2, 4, ")
    server.ask("DELETE", f"/v1/sessions/{browser.run('current.session')}")
    say(browser, "seq: 3, 6, ")
    assert not browser.run("current.turns.some((turn) => turn.failed)")
    assert len(texts(browser)[1][1]) == 16
    browser.errors.clear()


@needs_browser
def test_a_conversation_is_renamed_and_saved_as_files(browser, server):
    browser.run("$('max').value = 16; $('system').value = 'Count.'")
    say(browser, "seq: 2, 4, ")
    browser.run("$('title').value = 'Even numbers'; $('title').onchange()")
    assert browser.run("document.querySelector('#talks button').textContent") == "Even numbers"
    browser.run(
        "window.files = {}; download = (extension, text) => { files[extension] = text; };"
        "$('do-markdown').click(); $('do-json').click()"
    )
    ((asked, answer),) = texts(browser)
    saved = json.loads(browser.run("files.json"))
    assert saved["title"] == "Even numbers" and saved["model"] == "specpool/tiny"
    assert saved["messages"] == [
        {"role": "system", "content": "Count."},
        {"role": "user", "content": asked},
        {"role": "assistant", "content": answer},
    ]
    wanted = ["# Even numbers", "## System", "Count.", "## You", "seq: 2, 4,", "## Model"]
    assert browser.run("files.md") == "\n\n".join([*wanted, f"{answer.rstrip()}\n"])
    browser.go(f"{server.url}/")
    browser.until("name")
    assert browser.run("$('title').value") == "Even numbers"
    assert browser.run("$('system').value") == ""  # not changed by hand: it was not kept
    assert browser.run("current.system") == "Count."


@needs_browser
def test_options_reach_the_server_and_are_kept(browser, server):
    browser.run(
        "const set = (id, value) => { $(id).value = value;"
        " $(id).dispatchEvent(new Event('change', { bubbles: true })); };"
        "set('max', 7); set('temperature', 1); set('top_k', 5); set('seed', 3);"
        "set('drafter', 'specpool/tiny-eagle')"
    )
    wanted = {
        "temperature": 1, "seed": 3, "top_k": 5, "max_tokens": 7, "drafter": "specpool/tiny-eagle",
    }  # fmt: skip
    assert browser.run("fields()") == wanted
    browser.go(f"{server.url}/")
    browser.until("name")
    assert browser.run("fields()") == wanted
    say(browser, "seq: 2, 4, ")
    first = texts(browser)
    assert len(first[0][1]) == 7
    browser.run("$('drafter').value = 'none'")
    assert browser.run("fields()")["max_draft_steps"] == 0
    regenerate(browser)
    assert texts(browser) == first  # the seed is the same, so the text is
    assert browser.run("document.querySelectorAll('.answer .draft').length") == 0


MARKDOWN = {
    "a **b *c* d** `x*y*`": "<p>a <strong>b <em>c</em> d</strong> <code>x*y*</code></p>",
    "# T\ntext\n\nmore": "<h3>T</h3><p>text</p><p>more</p>",
    "- a\n- b\n  - c\n- d": "<ul><li>a</li><li>b<ul><li>c</li></ul></li><li>d</li></ul>",
    "2. a\n3. b": '<ol start="2"><li>a</li><li>b</li></ol>',
    "```py\n<b>\n\nx\n```\nend": '<pre data-language="py">&lt;b&gt;\n\nx</pre><p>end</p>',
    "```\nno end": '<pre data-language="">no end</pre>',
    "> a\n> b\nc": "<blockquote>a\nb</blockquote><p>c</p>",
    "| a | b |\n|---|---|\n| 1 | **2** |": '<div class="table"><table><tr><th>a</th><th>b</th></tr>'
    "<tr><td>1</td><td><strong>2</strong></td></tr></table></div>",
    "---": "<hr>",
    "snake_case_name 2*3*4": "<p>snake_case_name 2<em>3</em>4</p>",
    "[x](javascript:alert(1))": "<p>[x](javascript:alert(1))</p>",
    "<b onclick=x>": "<p>&lt;b onclick=x&gt;</p>",
}


@needs_browser
def test_markdown_is_drawn_without_a_network(browser):
    drawn = """((text) => { const box = element("div");
      box.append(markdown(text, new Uint8Array(text.length))); return box.innerHTML; })"""
    for text, html in MARKDOWN.items():
        assert browser.run(f"{drawn}({json.dumps(text)})") == html
    link = browser.run(f"{drawn}('see https://a.example/b. and [c](http://d.example)')")
    assert re.findall('href="(.*?)" target="_blank" rel="noopener noreferrer"', link) == [
        "https://a.example/b",
        "http://d.example",
    ]


MARKS = [
    "a",
    "b",
    " ",
    "**",
    "*",
    "_",
    "`",
    "~~b",
    "\n",
    "\n\n",
    "\n```\n",
    "# ",
    "- ",
    "1. ",
    "> ",
]
MARKS += ["|", "a|b\n|--|--|\n", "[", "](http://x.y)", "<", "&"]


@needs_browser
def test_no_text_is_lost_in_markdown_and_drafts_stay_marked(browser):
    """Random texts: what is drawn has each letter once, and marks just those that were drafted."""
    rng, cases = random.Random(0), []
    for _ in range(300):
        text = "".join(rng.choices(MARKS, k=rng.randint(1, 40)))
        cases.append([text, [rng.randint(0, 1) for _ in text]])
    drawn = browser.run(
        f"""{json.dumps(cases)}.map(([text, marks]) => {{
        const box = element("div");
        box.append(markdown(text, Uint8Array.from(marks)));
        return [box, ...box.querySelectorAll(".draft")].map((node) => node.textContent); }})"""
    )

    def letters(text):
        return re.sub("[^ab]", "", text)

    for (text, marks), (whole, *marked) in zip(cases, drawn, strict=True):
        assert letters(whole) == letters(text), text
        drafted = "".join(letter for letter, mark in zip(text, marks, strict=True) if mark)
        assert letters("".join(marked)) == letters(drafted), text


@needs_browser
@pytest.mark.parametrize(("width", "dark"), [(390, False), (390, True), (1200, True)])
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
      return ['.answer .draft', '.answer', '.said', '.note', 'dt', '#send', '.legend', '#title',
        '#talks button'].map((s) => {
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
def test_thoughts_stand_before_the_answer_and_survive_a_reload(browser, server):
    say(browser, "hello")
    assert browser.run("document.querySelector('.thoughts').hidden")
    event = {"choices": [{"delta": {"content": "", "reasoning_content": "<b>Hm"}}], "drafts": []}
    browser.run(f"window.first = {json.dumps(json.dumps(event))}")
    browser.run("""window.fetch_ = fetch; window.fetch = async (url, options) => {
      const answer = await fetch_(url, options);
      if (!url.endsWith("/v1/chat/completions")) return answer;
      const body = "data: " + first + "\\n\\n" + await answer.text();
      return new Response(body, { headers: answer.headers });
    }""")
    say(browser, "again")
    nodes = "[...document.querySelectorAll('.thoughts')]"
    shown = f"{nodes}.map((node) => [node.hidden, node.lastChild.textContent])"
    assert browser.run(shown) == [[True, ""], [False, "<b>Hm"]]
    assert "Hm" not in browser.run("JSON.stringify(messagesOf(current))")
    keep(browser, "thoughts")
    browser.go(f"{server.url}/")
    browser.until("name")
    assert browser.run(shown) == [[True, ""], [False, "<b>Hm"]]


@needs_browser
def test_text_is_text(browser):
    """What a model or a user says is never HTML."""
    say(browser, "<img src=x onerror=window.hit=1><b>bold</b>")
    assert browser.run(
        "window.hit === undefined && document.querySelectorAll('#log b').length === 0"
    )


@needs_browser
def test_no_text_keeps_the_page_from_its_next_frame(browser):
    """Law: long runs of one character, as some models pad, cost little more than they are long."""
    for mark in (" ", "|", "*", "`", "- ", "~~a", "["):
        for text in (f"|a|{mark}b|\n|--|--|\n|a|{mark}b|c", f"{mark}a", f"**{mark}a"):
            long = json.dumps(text.replace(mark, mark * (12_000 // len(mark))))
            assert browser.run(f"markdown({long}, new Uint8Array(30000)).childNodes.length > 0")


@needs_browser
def test_a_conversation_is_deleted_here_whatever_the_server_says(browser, server):
    browser.run("$('max').value = 16")
    say(browser, "seq: 2, 4, ")
    browser.run("window.confirm = () => true; fetch = async () => { throw Error('no server'); }")
    browser.run("$('do-delete').click()")
    browser.until("$('state').textContent === 'no server'")
    assert browser.run("talks.length") == 0
    assert not browser.run("Object.keys(localStorage).filter((key) => key.startsWith(STORE))")
    (session,) = server.ask("GET", "/v1/sessions")[1]["data"]
    server.ask("DELETE", f"/v1/sessions/{session['id']}")


@needs_browser
def test_two_tabs_keep_the_turns_of_each_other(browser, server):
    """Law: what one tab says, renames or deletes, the other has at once, and never undoes."""
    browser.run("$('max').value = 16; $('options').onchange()")
    say(browser, "seq: 2, 4, ")
    browser.run("window.other = open(location.href, 'other'); undefined")
    shown = "[...other.document.querySelectorAll('#log .said')].map((node) => node.textContent)"
    browser.until("other.document.getElementById('model')?.textContent === 'specpool/tiny'")
    say(browser, "seq: 3, 6, ")
    browser.until(f"{shown}.length === 2")
    browser.run(
        "other.document.getElementById('text').value = 'seq: 5, 10, ';"
        "other.document.getElementById('form').requestSubmit()"
    )
    browser.until("current.turns.length === 3 && !current.turns.some((turn) => turn.failed)")
    assert [text for text, _ in texts(browser)] == ["seq: 2, 4, ", "seq: 3, 6, ", "seq: 5, 10, "]
    (session,) = server.ask("GET", "/v1/sessions")[1]["data"]
    assert session["offset"] == browser.run("current.offset")
    say(browser, "seq: 7, 14, ")  # the same session goes on
    assert server.ask("GET", "/v1/sessions")[1]["data"][0]["id"] == session["id"]
    browser.run("window.confirm = () => true; $('do-delete').click()")
    browser.until(f"{shown}.length === 0")
    browser.run(
        "other.document.getElementById('text').value = 'seq: 8, ';"
        "other.document.getElementById('form').requestSubmit()"
    )
    browser.until("talks.length === 1 && current === null")  # a new one
    browser.run("other.location = 'about:blank'")
    browser.until("other.location.href === 'about:blank'")
    browser.run("other.close()")
