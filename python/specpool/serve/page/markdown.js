"use strict";
// Markdown as elements, never as HTML text. `marked` says of each UTF-16 unit whether it was drafted, so that drafts stay marked
// inside of emphasis, lists and code. What is not complete yet, such as a fence without an end, is drawn as far as it goes.

const INLINE = new RegExp([
  "(?<ticks>`+)(?<code>[^`]|[^`][^]*?[^`])\\k<ticks>(?!`)",
  "\\*\\*(?=\\S)(?<strong>[^]*?\\S)\\*\\*",
  "\\*(?=\\S)(?<em>[^*]*?\\S)\\*",
  "(?<!\\w)_(?=\\S)(?<em2>[^_]*?\\S)_(?!\\w)",
  "~~(?=\\S)(?<del>[^~]*?\\S)~~",
  "\\[(?<label>[^\\]]+)\\]\\((?<target>https?:\\/\\/[^\\s)]+)\\)",
  "(?<url>https?:\\/\\/[^\\s<>()\\]]*[^\\s<>()\\].,;:!?])",
].join("|"), "dg");
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+/;
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const RULE = /^ {0,3}([-*_])( *\1){2,}\s*$/;
const TABLE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)+\|?\s*$/;
// Beyond so many characters a block has no emphasis: looking for its ends could take long.
const LONG_BLOCK = 8000;

function markdown(text, marked) {
  const root = document.createDocumentFragment();
  const lines = [];
  for (let start = 0; start <= text.length;) {
    const end = text.indexOf("\n", start);
    const stop = end < 0 ? text.length : end;
    lines.push({ start, stop, text: text.slice(start, stop) });
    start = stop + 1;
  }

  function put(parent, start, stop) {
    for (let from = start; from < stop;) {
      let to = from + 1;
      while (to < stop && marked[to] === marked[from]) to++;
      const part = text.slice(from, to);
      parent.append(marked[from] ? element("span", "draft", part) : part);
      from = to;
    }
  }

  function inline(parent, start, stop) {
    let from = start;
    if (stop - start <= LONG_BLOCK) {
      for (const match of text.slice(start, stop).matchAll(INLINE)) {
        const groups = match.indices.groups;
        const kind = ["code", "strong", "em", "em2", "del", "label", "url"].find((name) => groups[name]);
        const [inner, innerStop] = groups[kind].map((at) => at + start);
        put(parent, from, match.index + start);
        const node = element({ em2: "em", label: "a", url: "a" }[kind] || kind);
        if (node.tagName === "A") {
          Object.assign(node, { href: match.groups.target || match.groups.url, target: "_blank", rel: "noopener noreferrer" });
        }
        if (kind === "code" || kind === "url") put(node, inner, innerStop);
        else inline(node, inner, innerStop);
        parent.append(node);
        from = match.index + match[0].length + start;
      }
    }
    put(parent, from, stop);
  }

  function inlineLines(parent, some, skip) {
    some.forEach((line, at) => {
      if (at) parent.append("\n");
      const match = line.text.match(skip);
      inline(parent, line.start + (match ? match[0].length : 0), line.stop);
    });
  }

  function list(at) {
    const stack = []; // {indent, list}
    for (; at < lines.length; at++) {
      const match = lines[at].text.match(ITEM);
      if (!match) {
        const last = stack[stack.length - 1].list.lastChild;
        if (!/^\s+\S/.test(lines[at].text)) break;
        last.append("\n");
        inline(last, lines[at].start + lines[at].text.search(/\S/), lines[at].stop);
        continue;
      }
      const indent = match[1].length;
      while (stack.length > 1 && indent < stack[stack.length - 1].indent) stack.pop();
      let top = stack[stack.length - 1];
      if (!top || indent > top.indent + 1) {
        const node = element(/\d/.test(match[2]) ? "ol" : "ul");
        if (/\d/.test(match[2])) node.start = parseInt(match[2], 10);
        (top ? top.list.lastChild : root).append(node);
        top = { indent, list: node };
        stack.push(top);
      }
      const item = element("li");
      inline(item, lines[at].start + match[0].length, lines[at].stop);
      top.list.append(item);
    }
    return at;
  }

  function row(line, kind) {
    const node = element("tr");
    const body = line.text.trimEnd().replace(/\|$/, "").trimEnd();
    let from = body.search(/[^\s|]|(?<=\|)\s*\|/);
    from = from < 0 ? 0 : from;
    for (;;) {
      const bar = body.indexOf("|", from);
      const cell = element(kind);
      const stop = bar < 0 ? body.length : bar;
      const trimmed = body.slice(from, stop);
      const lead = trimmed.length - trimmed.trimStart().length;
      inline(cell, line.start + from + lead, line.start + from + trimmed.trimEnd().length);
      node.append(cell);
      if (bar < 0) return node;
      from = bar + 1;
    }
  }

  for (let at = 0; at < lines.length;) {
    const line = lines[at];
    const fence = line.text.match(FENCE);
    const heading = line.text.match(/^(#{1,6})\s+/);
    if (!line.text.trim()) {
      at++;
    } else if (fence) {
      let end = at + 1;
      while (end < lines.length && !lines[end].text.trim().startsWith(fence[1])) end++;
      const box = element("pre");
      if (at + 1 < lines.length) put(box, lines[at + 1].start, Math.max(lines[at + 1].start, lines[end - 1].stop));
      if (end > at + 1 || end < lines.length) box.dataset.language = fence[2];
      root.append(box);
      at = end + 1;
    } else if (heading) {
      const node = element(`h${Math.min(6, heading[1].length + 2)}`);
      inline(node, line.start + heading[0].length, line.stop);
      root.append(node);
      at++;
    } else if (RULE.test(line.text)) {
      root.append(element("hr"));
      at++;
    } else if (ITEM.test(line.text)) {
      at = list(at);
    } else if (line.text.includes("|") && at + 1 < lines.length && TABLE.test(lines[at + 1].text)) {
      const table = element("table");
      table.append(row(line, "th"));
      for (at += 2; at < lines.length && lines[at].text.includes("|"); at++) table.append(row(lines[at], "td"));
      const frame = element("div", "table");
      frame.append(table);
      root.append(frame);
    } else {
      const quoted = /^ {0,3}>/.test(line.text);
      let end = at + 1;
      while (end < lines.length && lines[end].text.trim() && /^ {0,3}>/.test(lines[end].text) === quoted
        && !(FENCE.test(lines[end].text) || /^#{1,6}\s/.test(lines[end].text) || ITEM.test(lines[end].text)
          || RULE.test(lines[end].text))) end++;
      const node = element(quoted ? "blockquote" : "p");
      inlineLines(node, lines.slice(at, end), quoted ? /^ {0,3}> ?/ : /^/);
      root.append(node);
      at = end;
    }
  }
  return root;
}
