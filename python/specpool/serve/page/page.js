"use strict";
// The page talks to its own server alone: sessions, chats as streams, and the pages that are held.
const $ = (id) => document.getElementById(id);
const sessions = []; // {id, offset, node, turns: [{begin, text, pieces, note}]}
let current = null;
let running = null; // the AbortController of the answer that runs
let name = null;

async function ask(method, path, body, options = {}) {
  const headers = { "content-type": "application/json", ...options.headers };
  const key = $("key").value.trim();
  if (key) headers.authorization = `Bearer ${key}`;
  const answer = await fetch(path, {
    method, headers, body: body && JSON.stringify(body), signal: options.signal,
  });
  if (!answer.ok) throw await failure(answer);
  return options.stream ? answer : answer.json();
}

async function failure(answer) {
  let error = { message: `${answer.status} ${answer.statusText}` };
  try { error = (await answer.json()).error; } catch { /* no JSON: the status says it */ }
  return Object.assign(new Error(error.message), error);
}

function tell(text) { $("state").textContent = text; }

function element(kind, className, text) {
  const node = document.createElement(kind);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

// --- sessions

function keep(info, turns = []) {
  const session = { id: info.id, offset: info.offset, turns, number: sessions.length + 1 };
  sessions.push(session);
  choose(session);
  return session;
}

function choose(session) {
  current = session;
  draw();
}

async function open() {
  return keep(await ask("POST", "/v1/sessions", {}));
}

async function fork() {
  if (!current) return;
  const info = await ask("POST", `/v1/sessions/${current.id}/fork`);
  keep(info, current.turns.map((turn) => ({ ...turn })));
}

async function rewind(turn) {
  const session = current;
  const info = await ask("POST", `/v1/sessions/${session.id}/rewind`, { offset: turn.begin });
  session.turns.length = session.turns.indexOf(turn);
  session.offset = info.offset;
  $("text").value = turn.text;
  draw();
}

async function close(session) {
  await ask("DELETE", `/v1/sessions/${session.id}`);
  sessions.splice(sessions.indexOf(session), 1);
  choose(sessions[sessions.length - 1] || null);
}

function guarded(act) {
  return async (...args) => {
    try { tell(""); await act(...args); } catch (error) { tell(error.message); }
  };
}

// --- drawing the conversation

function draw() {
  const nav = $("sessions");
  nav.replaceChildren();
  for (const session of sessions) {
    const button = element("button", "", `session ${session.number}`);
    button.type = "button";
    button.setAttribute("aria-current", session === current);
    button.onclick = () => choose(session);
    nav.append(button);
  }
  const extra = [["new", guarded(open), false], ["fork", guarded(fork), !current],
    ["close", guarded(() => close(current)), !current]];
  for (const [label, act, off] of extra) {
    const button = element("button", "", label);
    button.type = "button";
    button.id = `do-${label}`;
    button.disabled = off || !!running;
    button.onclick = act;
    nav.append(button);
  }
  $("log").replaceChildren(...(current ? current.turns.map(drawn) : []));
  $("log").scrollTop = $("log").scrollHeight;
  $("send").hidden = !!running;
  $("stop").hidden = !running;
}

function drawn(turn) {
  const node = element("div", "turn");
  const answer = element("div", turn.runs ? "answer runs" : "answer");
  for (const [text, drafted] of turn.pieces) answer.append(element("span", drafted ? "draft" : "", text));
  const note = element("div", turn.failed ? "note bad" : "note", turn.note);
  if (!turn.runs && !turn.failed) {
    const back = element("button", "rewind", "rewind to before this");
    back.type = "button";
    back.disabled = !!running;
    back.onclick = guarded(() => rewind(turn));
    note.append(back);
  }
  node.append(element("div", "said", turn.text), answer, note);
  turn.node = { answer, note };
  return node;
}

function grow(turn, pieces) {
  const log = $("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  for (const [text, drafted] of pieces) {
    const last = turn.pieces[turn.pieces.length - 1];
    if (last && last[1] === drafted) {
      last[0] += text;
      turn.node.answer.lastChild.textContent = last[0];
    } else {
      turn.pieces.push([text, drafted]);
      turn.node.answer.append(element("span", drafted ? "draft" : "", text));
    }
  }
  if (atEnd) log.scrollTop = log.scrollHeight;
}

// --- a turn

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection was cut");
    held += value;
    const blocks = held.split("\n\n");
    held = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw Object.assign(new Error(event.error.message), event.error);
      yield event;
    }
  }
}

function percent(part, whole) { return whole ? `${Math.round((100 * part) / whole)} %` : "–"; }

function live(start, usage) {
  const seconds = (performance.now() - start) / 1000;
  const rate = usage.completion_tokens / Math.max(seconds, 0.001);
  $("speed").textContent = `${Math.round(rate)} tokens/s`;
  return `${usage.completion_tokens} tokens, ${Math.round(rate)} tokens/s`;
}

async function say(text) {
  running = new AbortController();
  let turn = null;
  try {
    const session = current || (await open());
    turn = { begin: session.offset, text, pieces: [], note: "…", runs: true, failed: false };
    session.turns.push(turn);
    draw();
    const seed = $("seed").value;
    const body = {
      model: name, messages: [{ role: "user", content: text }], stream: true, include_drafts: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      max_tokens: Number($("max").value) || 128, temperature: Number($("temperature").value),
      session_offset: session.offset,
      ...(seed === "" ? {} : { seed: Number(seed) }),
      ...($("drafting").checked ? {} : { max_draft_steps: 0 }),
    };
    const headers = { "x-session-id": session.id };
    const start = performance.now();
    const answer = await ask("POST", "/v1/chat/completions", body,
      { headers, stream: true, signal: running.signal });
    let drafted = 0;
    for await (const event of events(answer)) {
      const pieces = event.drafts || [];
      for (const [piece, isDraft] of pieces) drafted += isDraft ? [...piece].length : 0;
      grow(turn, pieces);
      if (event.usage) turn.note = live(start, event.usage);
      const all = turn.pieces.reduce((sum, [piece]) => sum + [...piece].length, 0);
      $("accepted").textContent = `${percent(drafted, all)} of the text`;
      if (event.session) {
        session.offset = event.session.offset;
        const found = event.metrics.speculative_decoding;
        const used = event.usage.prompt_tokens_details.cached_tokens;
        const part = percent(found.num_accepted_draft_tokens, found.num_draft_tokens);
        $("accepted").textContent = part;
        turn.note += `, ${part} of drafts accepted, ${used} of ${event.usage.prompt_tokens} tokens reused`;
      }
    }
  } catch (error) {
    const note = error.name === "AbortError" ? "stopped: the session is as before" : error.message;
    if (turn) Object.assign(turn, { note, failed: true });
    else tell(note);
    if (error.code === "session_offset_mismatch") current.offset = error.session.offset;
  }
  if (turn) turn.runs = false;
  running = null;
  draw();
}

$("form").onsubmit = (event) => {
  event.preventDefault();
  const text = $("text").value;
  if (!text.trim() || running) return;
  $("text").value = "";
  tell("");
  say(text);
};
$("text").onkeydown = (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
};
$("stop").onclick = () => running && running.abort();

// --- pages

const KINDS = ["--free", "--tint", "--shared", "--fenced", "--cached"];

function drawPool(group) {
  const id = `pool-${group.name}`;
  let figure = $(id);
  if (!figure) {
    figure = element("figure");
    figure.id = id;
    figure.append(element("figcaption"), element("canvas"));
    $("pools").append(figure);
  }
  const held = group.runs.reduce((sum, [count, state]) => sum + (state ? count : 0), 0);
  const [caption, canvas] = figure.children;
  caption.textContent = `${group.name}: ${held} of ${group.num_pages} pages of ${group.page_size}`;
  const width = canvas.clientWidth || 280;
  const side = Math.max(2, Math.min(9, Math.floor(Math.sqrt((width * 130) / group.num_pages))));
  const columns = Math.max(1, Math.floor(width / side));
  const scale = window.devicePixelRatio || 1;
  const height = Math.ceil(group.num_pages / columns) * side;
  Object.assign(canvas, { width: width * scale, height: height * scale });
  canvas.style.height = `${height}px`;
  const paint = canvas.getContext("2d");
  paint.scale(scale, scale);
  const style = getComputedStyle(document.documentElement);
  const colours = KINDS.map((kind) => style.getPropertyValue(kind));
  const gap = side > 3 ? 1 : 0;
  let page = 0;
  for (const [count, state, owner] of [...group.runs, [group.num_pages, 0, 0]]) {
    // Each row's pages have a shade of green of their own, so that neighbours can be told apart.
    const [hue, light] = [155 + ((owner * 29) % 35), 30 + ((owner * 11) % 24)];
    paint.fillStyle = state === 1 ? `hsl(${hue} 60% ${light}%)` : colours[state];
    for (let i = 0; i < count && page < group.num_pages; i++, page++) {
      paint.fillRect((page % columns) * side, Math.floor(page / columns) * side, side - gap, side - gap);
    }
  }
}

let pool = { groups: [] };
matchMedia("(prefers-color-scheme: dark)").onchange = () => pool.groups.forEach(drawPool);

async function look() {
  let pause = 500;
  if (!document.hidden) {
    try {
      pool = await ask("GET", "/pool");
      pool.groups.forEach(drawPool);
      $("accept").textContent = pool.accept_len.toFixed(2);
      $("load").textContent = `${pool.running}, ${pool.waiting}`;
      if (!name) {
        name = (await ask("GET", "/v1/models")).data[0].id;
        $("model").textContent = name;
      }
      if ($("state").dataset.from === "look") { tell(""); delete $("state").dataset.from; }
    } catch (error) {
      tell(error.message);
      $("state").dataset.from = "look";
      pause = 3000;
    }
  }
  setTimeout(look, pause);
}

draw();
look();
