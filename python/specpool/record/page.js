"use strict";
// The drawing of `specpool inspect --html`: the frames come from film_page.py, in the element #film.
const film = JSON.parse(document.getElementById("film").textContent);
const $ = id => document.getElementById(id);
const FREE = 0, OWNED = 1, SHARED = 2, FENCED = 3, CACHED = 4;
const STATES = ["free", "owned", "shared", "fenced", "cached"];
let at = 0, picked = film.picked, rootChoice = null, timer = null;
let now = null;  // the state after frame `at`

// --- the state: frames hold what changed, so going back means running again from the start
function blank() {
  return {at: -1, rows: new Map(), groups: film.groups.map(() => ({pages: new Map(), free: 0, fenced: 0, cached: 0, reclaimable: 0}))};
}
const newRow = () => ({tag: "", resolved: 0, in_flight: 0, drafted: 0, epoch: 0, idle: false, rounds: [], allocated: [], protected: [], evicted: [], pages: film.groups.map(() => [])});
function apply(state, frame) {
  frame.groups.forEach((group, g) => {
    [state.groups[g].free, state.groups[g].fenced, state.groups[g].cached, state.groups[g].reclaimable] = group.counts;
    for (const [first, count, ...record] of group.pages) {
      for (let page = first; page < first + count; page++) state.groups[g].pages.set(page, record);
    }
  });
  const {gone = [], pages = [], ...columns} = frame.rows, touched = new Set();
  for (const row of gone) state.rows.delete(row);
  for (const [key, runs] of Object.entries(columns)) {
    for (const [first, count, value] of runs) {
      for (let row = first; row < first + count; row++) {
        if (!state.rows.has(row)) state.rows.set(row, newRow());
        state.rows.get(row)[key] = value;
        touched.add(row);
      }
    }
  }
  for (const row of touched) finish(state.rows.get(row));
  pages.forEach((runs, g) => {
    for (const [row, column, count, page] of runs) {
      for (let i = 0; i < count; i++) state.rows.get(row).pages[g][column + i] = page && page + i;
    }
  });
  state.at += 1;
}
function finish(row) {  // What follows from the rest: how many columns there are, where the rounds' roots can be.
  film.groups.forEach((group, g) => {
    const pages = row.pages[g], columns = row.allocated[g] / group.page_size;
    pages.length = Math.min(pages.length, columns);
    while (pages.length < columns) pages.push(0);
  });
  let lo = row.resolved, hi = row.resolved;
  row.roots = row.rounds.map(([, shape]) => {
    const root = [lo, hi];
    lo += 1; hi += film.max_accept_lens[shape];
    return root;
  });
}
function seek(target) {
  at = Math.max(0, Math.min(film.frames.length - 1, target));
  if (now === null || now.at > at) now = blank();
  while (now.at < at) apply(now, film.frames[now.at + 1]);
  draw();
}

// --- small things
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "tip") node.dataset.tip = value;
    else if (key === "style") node.style.cssText = value;
    else if (key.startsWith("on")) node[key] = value;
    else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}
function name(row) {
  let width = 1, most = 26, text = "";
  while (film.num_rows > most) { width += 1; most *= 26; }
  for (let rest = row - 1; width > 0; width -= 1, rest = Math.floor(rest / 26)) text = String.fromCharCode(65 + rest % 26) + text;
  return text;
}
const colour = row => row === 0 ? "var(--quiet)" : `hsl(${((row - 1) * 137.5 + 150) % 360} var(--sat) var(--light))`;
const badge = row => el("span", {class: "name", style: `background:${colour(row)}`}, name(row));
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;

// --- where the drafts of a round lie (rust/specpool-core/src/layout.rs says the same)
function branches(group, [S, K], root) {
  const P = group.page_size, holey = group.layout === "holey" && P > 1 && K > 1;
  const last = holey ? root % P : 0, base = root - last;
  const stride = holey ? Math.ceil((last + S) / P) * P : S;
  return {holey, last, base, stride, end: base + K * stride};
}
function slotsOf(row, g, root) {
  const group = film.groups[g], P = group.page_size, table = row.pages[g];
  const slots = [];
  for (let position = 0; position < row.allocated[g]; position++) {
    const page = table[Math.floor(position / P)];
    let kind = "reserved";
    if (page === 0) kind = "evicted";
    else if (position < row.protected[g]) kind = "shared";
    else if (position < row.resolved) kind = "committed";
    else if (position < row.resolved + row.in_flight) kind = "claimed";
    slots.push({position, page, kind, text: kind === "committed" || kind === "shared" ? "p" + position : ""});
  }
  const round = row.rounds.at(-1);
  if (!round) return {slots, shape: null};
  const shape = film.shapes[round[1]], [S, K, N] = shape;
  if (group.hosts_drafts && S > 0) {
    const {holey, last, base, stride} = branches(group, shape, root);
    for (let b = 0; b < K; b++) {
      for (let i = 0; i < last; i++) {
        const slot = slots[base + b * stride + i];
        if (b === 0) slot.tail = holey;
        else Object.assign(slot, {kind: "hole", text: "p" + (base + i), source: base + i, branch: b});
      }
      for (let j = 0; j < S; j++) {
        Object.assign(slots[base + b * stride + last + j], {kind: "draft", text: "d" + j, branch: b, depth: j});
      }
    }
  }
  for (let n = 0; n < N && root + n < slots.length; n++) slots[root + n].verify = n;
  return {slots, shape};
}
function explain(slot, g) {
  const P = film.groups[g].page_size, lines = [];
  const says = {
    evicted: "given back: below the window", shared: "committed, on a page that is shared: never written", committed: "committed: final KV",
    claimed: "claimed by the root of a round in flight", reserved: "reserved, not written yet",
    draft: `draft ${slot.depth} of branch ${slot.branch}`,
    hole: `hole: a copy of position ${slot.source}, so that a whole-page read of branch ${slot.branch} sees the real prefix`,
  };
  lines.push(`position ${slot.position}` + (slot.page ? `, page ${slot.page}, slot ${slot.page * P + slot.position % P}` : ", no page"));
  lines.push(says[slot.kind]);
  if (slot.tail) lines.push("in the prefix's partly filled tail page: it is what the holes repeat");
  if (slot.verify !== undefined) lines.push(slot.verify === 0 ? "verify window: the root" : `verify window: node ${slot.verify}`);
  return lines.join("\n");
}

// --- drawing
function draw() {
  const frame = film.frames[at];
  $("slider").value = at;
  $("step").textContent = (frame.step ? `step ${frame.step} \u00b7 ` : "") + frame.verb;
  $("call").textContent = frame.text;
  $("where").textContent = `event ${frame.index} of ${film.num_events}` + (frame.index ? `, byte ${frame.offset} of the log, digest ${frame.digest}` : "");
  if (!now.rows.has(picked)) {
    picked = 0;
    const busy = [...now.rows].find(([, row]) => row.rounds.length) || [...now.rows][0];
    if (busy) picked = busy[0];
  }
  drawPools(); drawRows(); drawDetail();
}
function drawPools() {
  const scrolled = [...document.querySelectorAll(".grid")].map(grid => grid.scrollTop);
  $("pools").replaceChildren(...film.groups.map((group, g) => {
    const state = now.groups[g];
    const grid = el("div", {class: "grid" + (film.num_rows > 26 ? " wide" : "")});
    const counts = [0, 0, 0, 0, 0];
    for (let page = 1; page <= group.shown; page++) {
      const [kind, owner, holders] = state.pages.get(page) || [FREE, 0, 0];
      counts[kind] += 1;
      const style = kind === FREE ? "" : `background-color:${kind === SHARED ? "var(--quiet)" : colour(owner)}`;
      const who = owner ? `row ${owner} (${name(owner)})` : "nobody";
      const tip = {
        [FREE]: `page ${page}: free` + (owner ? `, last held by ${who}` : ""),
        [OWNED]: `page ${page}: owned by ${who}`,
        [SHARED]: `page ${page}: shared, read-only, ${plural(holders, "holder")}`,
        [FENCED]: `page ${page}: fenced. Freed by ${who}, but a launched step may still touch it`,
        [CACHED]: `page ${page}: cached. Computed by ${who}, held by the prefix cache alone`,
      }[kind];
      const text = kind === SHARED ? (holders > 9 ? "*" : String(holders)) : kind === FENCED ? name(owner).toLowerCase() : kind === CACHED ? "+" : kind === OWNED ? name(owner) : "";
      grid.append(el("div", {class: "page " + STATES[kind], style, tip, "data-page": page, "data-group": g}, text));
    }
    const used = counts[OWNED] + counts[SHARED];
    const rest = group.num_pages - group.shown;
    const fact = (label, number) => el("span", {}, label + " ", el("b", {}, String(number)));
    return el("section", {},
      el("h2", {}, `Pool ${group.name}`, el("small", {}, `${plural(group.num_pages, "page")} of ${plural(group.page_size, "slot")}` +
        (group.window ? `, window of ${group.window}` : "") + (group.sink ? `, sink of ${group.sink}` : "") + (group.hosts_drafts ? `, hosts drafts, ${group.layout}` : ", no drafts"))),
      el("div", {class: "counts"}, fact("in rows and prefixes", used), fact("shared", counts[SHARED]), fact("fenced", state.fenced), fact("cached", state.cached), fact("free", state.free), fact("reclaimable", state.reclaimable)),
      grid, rest > 0 ? el("p", {class: "quiet"}, `${plural(rest, "more page")}: free throughout`) : "");
  }));
  document.querySelectorAll(".grid").forEach((grid, g) => { grid.scrollTop = scrolled[g] || 0; });
}
function strip(row, id, g) {
  const group = film.groups[g], P = group.page_size;
  const box = el("div", {class: "strip"});
  const pages = row.pages[g], most = 60, skip = Math.max(0, pages.length - most);
  if (skip) box.append(el("span", {class: "quiet"}, `${skip} pages \u2026`));
  for (let column = skip; column < pages.length; column++) {
    const from = column * P, page = pages[column];
    const part = (to) => Math.max(0, Math.min(1, (to - from) / P)) * 100;
    const shared = from < row.protected[g];
    const tip = page === 0 ? `positions [${from}, ${from + P}): given back, below the window`
      : `page ${page}: positions [${from}, ${from + P}), ${Math.max(0, Math.min(P, row.resolved - from))} committed` + (shared ? ", shared" : "");
    const cell = el("i", {class: (page === 0 ? "gone" : shared ? "shared" : ""), tip, "data-page": page, "data-group": g});
    if (page) cell.append(
      el("b", {style: `width:${part(row.resolved + row.in_flight)}%;background:var(--root)`}),
      el("b", {style: `width:${part(row.resolved)}%;background:${colour(id)}`}));
    box.append(cell);
  }
  return box;
}
function drawRows() {
  const head = ["row", "request", "resolved", "in flight", "drafted", "epoch", ...film.groups.map(group => group.name)];
  $("head").replaceChildren(el("tr", {}, ...head.map(text => el("th", {}, text))));
  const lines = [...now.rows].sort((a, b) => a[0] - b[0]).map(([id, row]) => {
    const [lo, hi] = row.roots.at(-1) || [];
    const flight = row.in_flight ? `${row.in_flight}: root ${lo === hi ? "at " + lo : `in [${lo}, ${hi}]`}` : "";
    const cells = [badge(id), (row.tag || "") + (row.idle ? " (idle)" : ""), String(row.resolved), flight, String(row.drafted), String(row.epoch),
      ...film.groups.map((_, g) => strip(row, id, g))];
    return el("tr", {class: "row" + (id === picked ? " picked" : ""), onclick: () => { picked = id; rootChoice = null; draw(); }}, ...cells.map(cell => el("td", {}, cell)));
  });
  $("rows").replaceChildren(...(lines.length ? lines : [el("tr", {}, el("td", {colspan: head.length, class: "quiet"}, "no row is admitted"))]));
}
function cellsOf(slots, from, to, id, g, width) {
  const P = film.groups[g].page_size, cells = el("div", {class: "cells"});
  for (const slot of slots.slice(from, to)) {
    const edge = slot.position % P === 0;
    const owned = slot.kind === "committed" || slot.kind === "shared";
    const style = owned ? `background-color:${colour(id)}` : slot.kind === "claimed" ? "background:var(--root)" : "";
    const classes = ["cell", "k-" + slot.kind, edge ? "edge" : "", slot.tail ? "k-tail" : "", slot.verify !== undefined ? "v" : "", slot.verify === 0 ? "root" : ""];
    cells.append(el("div", {class: classes.filter(Boolean).join(" "), style: `width:${width}px`, tip: explain(slot, g), "data-kind": slot.kind, "data-position": slot.position},
      edge && slot.page ? el("em", {}, (P * width > 44 ? "page " : "") + slot.page) : "",
      el("s", {style}, width >= 20 ? slot.text || (slot.verify === 0 ? "root" : "") : ""), el("u")));
  }
  return cells;
}
function drawDetail() {
  const row = now.rows.get(picked);
  if (!row) { $("detail").replaceChildren(el("h2", {}, "Slots of a row"), el("span", {class: "quiet"}, "no row is admitted")); return; }
  const round = row.rounds.at(-1), [lo, hi] = row.roots.at(-1) || [row.resolved, row.resolved];
  const root = rootChoice === null ? lo : Math.max(lo, Math.min(hi, rootChoice));
  const parts = [el("h2", {}, badge(picked), ` row ${picked}, slot by slot`,
    el("small", {}, round ? `step ${round[0]} is ${round[2]}: shape S ${film.shapes[round[1]][0]} / K ${film.shapes[round[1]][1]} / N ${film.shapes[round[1]][2]}` : "nothing in flight"))];
  if (hi > lo) {
    const input = el("input", {type: "range", min: lo, max: hi, value: root, oninput: event => { rootChoice = +event.target.value; drawDetail(); }});
    parts.push(el("div", {class: "rootpick"}, `an older round is not resolved, so the root of this one is somewhere in [${lo}, ${hi}]: drawn at ${root}`, input));
  }
  film.groups.forEach((group, g) => parts.push(groupDetail(row, g, root, round)));
  $("detail").replaceChildren(...parts);
}
function groupDetail(row, g, root, round) {
  const group = film.groups[g], P = group.page_size, {slots, shape} = slotsOf(row, g, root);
  const box = el("div", {class: "detail"});
  const lane = (label, from, to, caption = null) => {
    if (to <= from) return;
    const cells = cellsOf(slots, from, to, picked, g, width);
    if (caption !== null) cells.classList.add("one");
    box.append(el("div", {class: "lane"}, el("label", {}, label), cells, caption && width >= 20 ? el("small", {}, caption) : ""));
  };
  const drafts = shape && group.hosts_drafts && shape[0] > 0 ? branches(group, shape, root) : null;
  const hasLanes = drafts && shape[1] > 1;  // a chain and a verify window just go on behind the prefix
  const laneLen = hasLanes ? drafts.stride : 16;
  const width = Math.max(7, Math.min(30, Math.floor(900 / Math.max(laneLen, 16)) - 1));
  const perLine = Math.max(1, Math.floor(1000 / (width + 1) / P)) * P;
  const prefixEnd = hasLanes ? drafts.base : Math.floor(root / P) * P;
  const kept = Math.max(1, hasLanes ? Math.floor(perLine / P) - 1 : 2);
  const shown = Math.max(0, Math.floor(prefixEnd / P) - kept) * P;
  const title = `${group.name}: ${plural(row.allocated[g], "slot")} on ${plural(row.pages[g].filter(Boolean).length, "page")}`;
  box.append(el("div", {class: "quiet", style: "margin-top:14px"}, title + (shown ? `; positions [0, ${shown}) are left out here` : "")));
  if (hasLanes) {
    lane("prefix", shown, drafts.base);
    for (let b = 0; b < shape[1]; b++) {
      const tail = drafts.last === 0 ? "" : b === 0 ? "the prefix's own tail, then drafts" : "a copy of the tail, then drafts";
      lane(`branch ${b}`, drafts.base + b * drafts.stride, drafts.base + (b + 1) * drafts.stride, tail);
    }
    lane(root + shape[2] > drafts.end ? "behind them" : "reserved", drafts.end, slots.length);
  } else lane("slots", shown, slots.length);
  if (shape) box.append(note(group, root, shape, drafts, slots));
  return box;
}
function note(group, root, [S, K, N], drafts, slots) {
  const P = group.page_size;
  const text = el("p", {class: "note"});
  const strong = (kind, words) => el("b", {class: kind}, words);
  text.append("The ", strong("root", `root`), ` is the target's own last token, at position ${root}. `);
  if (drafts && drafts.holey) {
    text.append("This group is holey: its reader fetches whole pages, so every branch has ", plural(drafts.stride / P, "page"), " of its own. ");
    if (drafts.last) text.append(`The prefix ends inside a page: ${root} % ${P} = ${drafts.last}. Its last ${plural(drafts.last, "token")}, positions [${drafts.base}, ${root}), are copied to the head of the other ${plural(K - 1, "branch").replace("branchs", "branches")}: the `,
      strong("hole", plural((K - 1) * drafts.last, "hole")), ". A whole-page read of any branch then sees the real prefix, followed by that branch's ", strong("draft", plural(S, "draft")), ". ");
    else text.append(`The prefix ends on a page edge, so nothing is copied: no holes this time. Each branch has `, strong("draft", plural(S, "draft")), ". ");
  } else if (drafts) {
    text.append(K > 1 ? "This group is dense: branch after branch, without gaps, for readers of single tokens. " : "The draft is a chain. ", strong("draft", plural(K * S, "draft")), ` lie at [${root}, ${drafts.end}). `);
  } else if (!group.hosts_drafts) text.append("This group hosts no drafts. ");
  text.append("The ", strong("verify", `verify window of ${plural(N, "node")}`), ` is [${root}, ${root + N}); accepted tokens move to its front.`);
  const spare = slots.filter(slot => slot.kind === "reserved" && slot.verify === undefined).length;
  if (spare) text.append(` ${plural(spare, "reserved slot")} ${spare === 1 ? "is" : "are"} touched by neither with the root here.`);
  return text;
}
function drawLegend() {
  const cell = (kind, words, extra = "", style = "") => el("span", {}, el("div", {class: `cell k-${kind} ${extra}`}, el("s", {style}), extra.includes("v") ? el("u") : ""), words);
  const page = (kind, text, words) => el("span", {}, el("div", {class: "page " + kind, style: kind === "free" ? "" : `background-color:${kind === "shared" ? "var(--quiet)" : colour(1)}`}, text), words);
  $("legend").replaceChildren(
    page("owned", "A", "page of row A"), page("fenced", "a", "fenced: freed by A, still in use on the device"), page("shared", "2", "shared by 2 holders"), page("cached", "+", "cached: held by the prefix cache alone"), page("free", "", "free"),
    cell("committed", "committed", "", `background-color:${colour(1)}`), cell("shared", "committed and shared", "", `background-color:${colour(1)}`), cell("committed", "partial tail of the prefix", "k-tail", `background-color:${colour(1)}`),
    cell("hole", "hole: copy of the tail"), cell("draft", "draft"), cell("reserved", "verify window", "v"), cell("reserved", "root", "root"), cell("reserved", "claimed by a round in flight", "", "background:var(--root)"),
    cell("reserved", "reserved"), cell("evicted", "given back, below the window"));
}

// --- moving
function step(direction) {
  let to = at + direction;
  while (to > 0 && to < film.frames.length - 1 && !film.frames[to].verb.startsWith("prepare")) to += direction;
  seek(to);
}
function play() {
  if (timer) { clearInterval(timer); timer = null; $("play").textContent = "\u25B6 play"; return; }
  if (at >= film.frames.length - 1) seek(0);
  $("play").textContent = "\u2016 pause";
  timer = setInterval(() => { if (at >= film.frames.length - 1) play(); else seek(at + 1); }, +$("speed").value);
}
function pickNeighbour(direction) {
  const rows = [...now.rows.keys()].sort((a, b) => a - b);
  if (rows.length) { picked = rows[(rows.indexOf(picked) + direction + rows.length) % rows.length]; rootChoice = null; draw(); }
}
$("first").onclick = () => seek(0);
$("back").onclick = () => seek(at - 1);
$("next").onclick = () => seek(at + 1);
$("last").onclick = () => seek(film.frames.length - 1);
$("play").onclick = play;
$("speed").onchange = () => { if (timer) { play(); play(); } };
$("slider").max = film.frames.length - 1;
$("slider").oninput = event => seek(+event.target.value);
document.onkeydown = event => {
  if (event.target.type === "range" && event.target.id !== "slider") return;
  const keys = {
    ArrowLeft: () => event.shiftKey ? step(-1) : seek(at - 1), ArrowRight: () => event.shiftKey ? step(1) : seek(at + 1),
    ArrowUp: () => pickNeighbour(-1), ArrowDown: () => pickNeighbour(1),
    Home: () => seek(0), End: () => seek(film.frames.length - 1), " ": play,
  };
  if (keys[event.key]) { event.preventDefault(); keys[event.key](); }
};
document.onmousemove = event => {
  const node = event.target.closest && event.target.closest("[data-tip]");
  document.querySelectorAll(".hit").forEach(hit => hit.classList.remove("hit"));
  if (!node) { $("tip").style.display = "none"; return; }
  if (+node.dataset.page) document.querySelectorAll(`[data-page="${node.dataset.page}"][data-group="${node.dataset.group}"]`).forEach(same => same.classList.add("hit"));
  $("tip").textContent = node.dataset.tip;
  $("tip").style.display = "block";
  const box = $("tip").getBoundingClientRect();
  $("tip").style.left = Math.min(event.clientX + 14, innerWidth - box.width - 8) + "px";
  $("tip").style.top = (event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18) + "px";
};
$("title").textContent = film.log;
document.title = `specpool inspect ${film.log}`;
$("config").textContent = `${plural(film.num_rows, "row")}, context ${film.max_context_len}, overlap depth ${film.overlap_depth}, policy ${film.policy}, shapes `
  + film.shapes.map(shape => shape.join("/")).join(", ") + ` \u00b7 written by specpool ${film.made_by}` + (film.damage ? ` \u00b7 ${film.damage}` : "");
if (film.frames.length < film.num_events + 1) {
  const last = film.frames[film.frames.length - 1].index;
  $("part").hidden = false;
  $("part").textContent = `This page holds the events ${film.frames[0].index} to ${last} of ${film.num_events}: `
    + "specpool inspect --html takes --frames for more of them, and --at N for those around a step N.";
}
drawLegend();
seek(film.start);
