// The page talks to its own server alone: sessions, chats as streams, and the pages that are held.
// Conversations are kept by the browser, a key of its store each. The server's session of one is looked for before its next
// turn; if it is gone, a new one gets the whole text.
const $ = (id) => document.getElementById(id);
const STORE = "specpool.conversation.";
// Sent under the same name, if filled in.
const NUMBERS = ["top_p", "top_k", "min_p", "repetition_penalty", "seed"];
const FIELDS = ["max", "temperature", ...NUMBERS, "system", "drafter"]; // saved with the options
const CHECKS = ["as-markdown", "mark-drafts"];
const talks = []; // {key, title, system, session, offset, isHere, turns: [{begin, text, thoughts, pieces, note, failed, runs}]}
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

function button(label, act, options = {}) {
  const node = element("button", "", label);
  return Object.assign(node, { type: "button", onclick: act, ...options });
}

function guarded(act) {
  return async (...args) => {
    try { tell(""); await act(...args); } catch (error) { tell(error.message); }
  };
}

// --- what the browser keeps

function save(talk) {
  if (!talks.includes(talk)) return; // another tab has deleted it
  const { key, title, system, session, offset } = talk;
  const turns = talk.turns.map(({ begin, text, thoughts, pieces, note, failed }) => ({ begin, text, thoughts, pieces, note, failed }));
  try {
    localStorage.setItem(STORE + key, JSON.stringify({ key, title, system, session, offset, turns }));
  } catch (error) {
    tell(`the browser keeps no more conversations (${error.name}): delete some`);
  }
}

function loadAll() {
  for (let at = 0; at < localStorage.length; at++) take(localStorage.key(at));
  current = talks.find((talk) => talk.key === sessionStorage.getItem("specpool.current")) || talks[talks.length - 1] || null;
}

// Takes what the store has under this name into `talks`.
function take(item) {
  if (!item.startsWith(STORE)) return;
  const old = talks.find((talk) => STORE + talk.key === item);
  const isRunning = old && old.turns.some((turn) => turn.runs);
  const text = localStorage.getItem(item);
  if (text === null && old) {
    if (isRunning) running.abort();
    talks.splice(talks.indexOf(old), 1);
    if (current === old) current = null;
  }
  if (text === null || isRunning) return; // an answer that runs is saved at its end
  try {
    const talk = { ...JSON.parse(text), isHere: false };
    for (const turn of talk.turns) turn.runs = false;
    if (old) Object.assign(old, talk);
    else talks.push(talk);
  } catch { /* not ours */ }
  talks.sort((one, other) => (one.key < other.key ? -1 : 1));
}

// Another tab has saved or deleted a conversation: the next turn here goes on from it.
window.onstorage = ({ key }) => {
  if (key === null || !key.startsWith(STORE)) return;
  take(key);
  draw();
};

function saveOptions() {
  const values = Object.fromEntries([
    ...FIELDS.map((id) => [id, $(id).value]), ...CHECKS.map((id) => [id, $(id).checked])]);
  localStorage.setItem("specpool.options", JSON.stringify(values));
  sessionStorage.setItem("specpool.key", $("key").value); // for this tab alone
}

function loadOptions() {
  let values = {};
  try { values = JSON.parse(localStorage.getItem("specpool.options")) || {}; } catch { /* none */ }
  for (const id of FIELDS) if (id in values) $(id).value = values[id];
  for (const id of CHECKS) if (id in values) $(id).checked = values[id];
  $("key").value = sessionStorage.getItem("specpool.key") || "";
}

// --- conversations

function add(talk) {
  talk.key = `${Date.now().toString(36)}.${Math.random().toString(36).slice(2)}`;
  talks.push(talk);
  choose(talk);
  return talk;
}

function begin() {
  return add({ title: "", system: $("system").value.trim(), session: null, offset: 0, isHere: false, turns: [] });
}

function choose(talk) {
  current = talk;
  sessionStorage.setItem("specpool.current", talk ? talk.key : "");
  draw();
}

// The server's session has what `offset` says, or there is none.
async function reach(talk) {
  if (talk.session && !talk.isHere) {
    try {
      const info = await ask("GET", `/v1/sessions/${talk.session}`);
      talk.isHere = info.offset === talk.offset;
    } catch (error) {
      if (!isGone(error)) throw error;
    }
    if (!talk.isHere) leave(talk);
  }
}

function isGone(error) { return error.code === "session_not_found" || error.code === "session_lost"; }

// Without a session, the next turn sends the whole text to a new one.
function leave(talk) {
  Object.assign(talk, { session: null, offset: 0, isHere: false });
  for (const turn of talk.turns) turn.begin = null;
}

async function fork() {
  const talk = current;
  await reach(talk);
  const turns = talk.turns.map((turn) => ({ ...turn }));
  let info = { id: null, offset: 0 };
  if (talk.session) info = await ask("POST", `/v1/sessions/${talk.session}/fork`);
  const copy = { title: `${talk.title} (fork)`, system: talk.system, session: info.id, offset: info.offset, isHere: !!info.id, turns };
  save(add(copy));
}

async function rewind(turn) {
  const talk = current;
  await reach(talk);
  if (talk.session && turn.begin !== null) {
    talk.offset = (await ask("POST", `/v1/sessions/${talk.session}/rewind`, { offset: turn.begin })).offset;
  } else if (talk.session) {
    await close(talk);
    leave(talk);
  }
  talk.turns.length = talk.turns.indexOf(turn);
  save(talk);
  draw();
}

async function close(talk) {
  try { await ask("DELETE", `/v1/sessions/${talk.session}`); } catch (error) { if (!isGone(error)) throw error; }
}

async function remove() {
  const talk = current;
  if (!confirm(`Delete "${talk.title || "this conversation"}" from this browser?`)) return;
  localStorage.removeItem(STORE + talk.key);
  talks.splice(talks.indexOf(talk), 1);
  choose(talks[talks.length - 1] || null);
  if (talk.session) await close(talk);
}

function said(turn) { return turn.pieces.map(([text]) => text).join(""); }

function messagesOf(talk) {
  const messages = talk.system ? [{ role: "system", content: talk.system }] : [];
  for (const turn of talk.turns) {
    if (turn.failed || turn.runs) continue; // the session does not have it
    messages.push({ role: "user", content: turn.text }, { role: "assistant", content: said(turn) });
  }
  return messages;
}

function download(extension, text) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text]));
  link.download = `${(current.title || "conversation").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60)}.${extension}`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function asMarkdown(talk) {
  const heads = { system: "System", user: "You", assistant: "Model" };
  const parts = messagesOf(talk).map(({ role, content }) => `## ${heads[role]}\n\n${content.trimEnd()}\n`);
  return [`# ${talk.title}\n`, ...parts].join("\n");
}

function asJson(talk) {
  return JSON.stringify({ title: talk.title, model: name, messages: messagesOf(talk) }, null, 1);
}

// --- drawing the conversation

function draw() {
  $("talks").replaceChildren(...talks.map((talk) => {
    const node = button(talk.title || "new conversation", () => choose(talk));
    node.setAttribute("aria-current", talk === current);
    return node;
  }));
  const off = !current || !!running;
  $("title").value = current ? current.title : "";
  $("title").disabled = !current;
  $("acts").replaceChildren(
    button("new", guarded(begin), { id: "do-new", disabled: !!running }),
    button("fork", guarded(fork), { id: "do-fork", disabled: off }),
    button("save .md", () => download("md", asMarkdown(current)), { id: "do-markdown", disabled: off }),
    button("save .json", () => download("json", asJson(current)), { id: "do-json", disabled: off }),
    button("delete", guarded(remove), { id: "do-delete", disabled: off }),
  );
  const nodes = current ? current.turns.map(drawn) : [];
  if (current && current.system) nodes.unshift(element("div", "said system", current.system));
  $("log").replaceChildren(...nodes);
  $("log").scrollTop = $("log").scrollHeight;
  $("send").hidden = !!running;
  $("stop").hidden = !running;
}

function drawn(turn) {
  const node = element("div", "turn");
  const thoughts = element("details", "thoughts");
  thoughts.append(element("summary", "", "thoughts"), element("div"));
  const answer = element("div", turn.runs ? "answer runs" : "answer");
  const note = element("div", turn.failed ? "note bad" : "note");
  turn.node = { thoughts, answer, note };
  node.append(element("div", "said", turn.text), thoughts, answer, note);
  paint(turn);
  if (!turn.runs) {
    const isLast = turn === current.turns[current.turns.length - 1];
    const again = async () => { await rewind(turn); await say(turn.text); };
    const back = async () => { await rewind(turn); $("text").value = turn.text; $("text").focus(); };
    if (isLast) note.append(button(turn.failed ? "try again" : "regenerate", guarded(again), { className: "again", disabled: !!running }));
    note.append(button("rewind to before this", guarded(back), { className: "rewind", disabled: !!running }));
  }
  return node;
}

function paint(turn) {
  const text = said(turn);
  const marked = new Uint8Array(text.length);
  let at = 0;
  for (const [part, drafted] of turn.pieces) {
    if (drafted && $("mark-drafts").checked) marked.fill(1, at, at + part.length);
    at += part.length;
  }
  const { thoughts, answer, note } = turn.node;
  thoughts.hidden = !turn.thoughts;
  thoughts.lastChild.textContent = turn.thoughts || "";
  const isMarkdown = $("as-markdown").checked;
  answer.classList.toggle("plain", !isMarkdown);
  if (isMarkdown) answer.replaceChildren(markdown(text, marked));
  else answer.replaceChildren(...turn.pieces.map(([part, drafted]) =>
    element("span", drafted && $("mark-drafts").checked ? "draft" : "", part)));
  if (note.firstChild && note.firstChild.nodeType === Node.TEXT_NODE) note.firstChild.data = turn.note;
  else note.prepend(turn.note);
}

let painting = false;
function grow(turn, pieces) {
  for (const [text, drafted] of pieces) {
    const last = turn.pieces[turn.pieces.length - 1];
    if (last && last[1] === drafted) last[0] += text;
    else turn.pieces.push([text, drafted]);
  }
  if (painting) return; // once a frame is enough
  painting = true;
  requestAnimationFrame(() => {
    painting = false;
    const log = $("log");
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    if (turn.node.answer.isConnected) paint(turn);
    if (atEnd) log.scrollTop = log.scrollHeight;
  });
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

function ended(reason, usage) {
  if (reason === "stop") return "ended by itself";
  if (reason === "length") return `cut at ${usage.completion_tokens} tokens: raise Most tokens under Options, if the context has room`;
  return `ended: ${reason}`;
}

function fields() {
  const number = (id) => ($(id).value === "" ? {} : { [id]: Number($(id).value) });
  const drafter = $("drafter").value;
  return {
    temperature: Number($("temperature").value),
    ...Object.assign({}, ...NUMBERS.map(number)),
    ...($("max").value === "" ? {} : { max_tokens: Number($("max").value) }),
    ...(drafter === "none" ? { max_draft_steps: 0 } : drafter ? { drafter } : {}),
  };
}

async function say(text) {
  running = new AbortController();
  const talk = current || begin();
  const turn = { begin: null, text, thoughts: "", pieces: [], note: "…", runs: true, failed: false };
  talk.turns.push(turn);
  if (!talk.title) talk.title = text.trim().split("\n")[0].slice(0, 60);
  draw();
  try {
    await reach(talk);
    try {
      await answered(talk, turn);
    } catch (error) {
      if (!isGone(error)) throw error;
      leave(talk); // it was closed meanwhile: once more, with the whole text
      await answered(talk, turn);
    }
  } catch (error) {
    const note = error.name === "AbortError" ? "stopped: the conversation is as before" : error.message;
    Object.assign(turn, { note, failed: true });
    if (error.code === "session_offset_mismatch") leave(talk);
  }
  turn.runs = false;
  running = null;
  save(talk);
  draw();
}

async function answered(talk, turn) {
  if (!talk.session) {
    const info = await ask("POST", "/v1/sessions", {}, { signal: running.signal });
    Object.assign(talk, { session: info.id, offset: info.offset, isHere: true });
  }
  turn.begin = talk.offset;
  const before = talk.offset ? [] : messagesOf(talk);
  if (before.length > (talk.system ? 1 : 0)) turn.begin = null; // earlier turns stand in this one
  const body = {
    model: name, messages: [...before, { role: "user", content: turn.text }], stream: true, include_drafts: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    session_offset: talk.offset, ...fields(),
  };
  const start = performance.now();
  const answer = await ask("POST", "/v1/chat/completions", body,
    { headers: { "x-session-id": talk.session }, stream: true, signal: running.signal });
  let drafted = 0;
  let reason = null;
  for await (const event of events(answer)) {
    const pieces = event.drafts || [];
    for (const [piece, isDraft] of pieces) drafted += isDraft ? [...piece].length : 0;
    if (event.choices.length && event.choices[0].finish_reason) reason = event.choices[0].finish_reason;
    if (event.usage) turn.note = live(start, event.usage);
    for (const { delta } of event.choices) turn.thoughts += delta.reasoning_content || "";
    grow(turn, pieces);
    const all = turn.pieces.reduce((sum, [piece]) => sum + [...piece].length, 0);
    $("accepted").textContent = `${percent(drafted, all)} of the text`;
    if (event.session) {
      talk.offset = event.session.offset;
      const figures = event.metrics.speculative_decoding;
      const used = event.usage.prompt_tokens_details.cached_tokens;
      const part = percent(figures.num_accepted_draft_tokens, figures.num_draft_tokens);
      $("accepted").textContent = part;
      turn.note = `${ended(reason, event.usage)}; ${turn.note}, ${part} of drafts accepted, `
        + `${used} of ${event.usage.prompt_tokens} tokens reused`;
    }
  }
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
$("title").onchange = () => {
  current.title = $("title").value.trim();
  save(current);
  draw();
};
$("options").onchange = () => {
  saveOptions();
  if (!running) draw();
};

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
        const model = (await ask("GET", "/v1/models")).data[0];
        if ($("max").value === "") $("max").value = model.max_model_len < 4096 ? 128 : 1024;
        for (const drafter of (await ask("GET", "/server_info")).drafters) {
          $("drafter").append(Object.assign(element("option", "", drafter), { value: drafter }));
        }
        loadOptions(); // the drafters can be chosen now
        $("model").textContent = model.id;
        name = model.id;
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

loadOptions();
loadAll();
draw();
look();
