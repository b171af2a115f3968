// The server's page: streams answers, colours their tokens, and shows each round's tree (tree.js).
"use strict";

const EXAMPLE = `def read_config(path):
    """Read a JSON file and return its content as a dictionary."""
`;

const at = (id) => document.getElementById(id);
const chosen = (name) => document.querySelector(`input[name=${name}]:checked`).value;

// ---- The server.

function headers() {
  const key = at("key").value;
  const own = { "Content-Type": "application/json" };
  return key ? { ...own, Authorization: `Bearer ${key}` } : own;
}

/** What is wrong, of an answer that is not OK, in one line. */
async function problem(response) {
  let message = "";
  try {
    message = (await response.json()).error?.message ?? "";
  } catch {
    // not JSON: the status must do
  }
  if (response.status === 401) message = "the server needs an API key, or another one";
  return `${response.status}: ${message || response.statusText}`;
}

/** The objects of a stream of server-sent events. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

async function findModel() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) throw new Error(await problem(response));
    state.model = (await response.json()).data[0].id;
    at("model").textContent = state.model;
    document.title = `${state.model} · jaxspec`;
  } catch (error) {
    at("model").textContent = error.message;
  }
}

// ---- Answers.

/** One text as it comes, and what is measured of it. */
class Answer {
  constructor(label) {
    this.text = "";
    this.rounds = [];
    this.ending = null; // its finish_reason
    this.started = null; // when the first chunk came, and the tokens that came with it
    this.before = 0;
    this.ended = null;
    const who = document.createElement("p");
    who.className = "who";
    who.textContent = label;
    const text = document.createElement("div");
    text.className = "text";
    this.element = document.createElement("div");
    this.element.className = "message";
    this.element.append(who, text);
    this.tokens = new TokenText(text, (round) => {
      show(this);
      panel.select(round);
    });
  }

  /** A chunk of a stream, which came just now. */
  add(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    const choice = chunk.choices?.[0];
    this.ending = choice?.finish_reason ?? this.ending;
    this.text += choice?.delta?.content ?? choice?.text ?? "";
    const speculation = choice?.speculation ?? chunk.speculation;
    this.rounds.push(...(speculation?.trees ?? []));
    if (choice || speculation) {
      const now = performance.now();
      this.started ??= now;
      if (this.started === now) this.before = this.count ?? 1;
      this.ended = now;
    }
    show(this);
  }

  /** Tokens so far; the first comes from reading the prompt. Null if the server sends no rounds. */
  get count() {
    if (!this.rounds.length) return null;
    return this.rounds.reduce((sum, round) => sum + round.committed, 1);
  }

  /** Tokens a second after the first chunk; null while there is only one. */
  get rate() {
    const seconds = (this.ended - this.started) / 1000;
    return seconds > 0 && this.rounds.length ? (this.count - this.before) / seconds : null;
  }

  draw(selected) {
    this.tokens.show(this.text, this.rounds, selected);
  }
}

const state = {
  model: null,
  messages: [], // of the chat
  shown: null, // the answer whose rounds are in the panel
  stop: null, // of the request under way
  results: new Map(), // by request: its answer, speculative and plain
  drawing: false,
};

const panel = new RoundPanel(at("rounds"), (round) => state.shown?.draw(round));

/** Show an answer's text and rounds, at most once a frame. */
function show(answer) {
  if (state.shown !== answer) {
    state.shown?.draw(null);
    state.shown = answer;
    panel.show(answer.rounds, answer.ending);
  }
  if (state.drawing) return;
  state.drawing = true;
  requestAnimationFrame(() => {
    state.drawing = false;
    panel.show(state.shown.rounds, state.shown.ending);
    state.shown.draw(panel.selected);
    drawFigures(state.shown);
  });
}

function drawFigures(answer) {
  const { speculative, plain } = state.results.get(answer?.request) ?? {};
  const faster = speculative?.rate && plain?.rate ? speculative.rate / plain.rate : null;
  const own = [
    ["tokens/s", answer?.rate?.toFixed(1)],
    ["speed-up over plain", faster && `${faster.toFixed(2)}×`],
    ["tokens", answer?.count],
  ];
  at("figures").replaceChildren(...figures([...own, ...totalFigures(answer?.rounds ?? [])]));
}

// ---- Requests.

function requestOf(kind, input) {
  const own =
    kind === "chat"
      ? { messages: [...state.messages, { role: "user", content: input }] }
      : { prompt: input };
  return {
    model: state.model,
    ...own,
    max_tokens: at("max-tokens").valueAsNumber,
    temperature: at("temperature").valueAsNumber,
    seed: at("seed").valueAsNumber,
  };
}

/** Stream one answer. Raises what went wrong. */
async function ask(kind, request, mode) {
  const answer = new Answer(`${kind === "chat" ? "assistant" : "continued"}, ${mode}`);
  answer.request = JSON.stringify(request);
  at("answers").append(answer.element);
  const further = { stream: true, return_speculation: true };
  if (mode === "plain") further.plain = true;
  const response = await fetch(kind === "chat" ? "v1/chat/completions" : "v1/completions", {
    method: "POST",
    headers: headers(),
    body: JSON.stringify({ ...request, ...further }),
    signal: state.stop.signal,
  });
  if (!response.ok) {
    answer.element.remove();
    throw new Error(await problem(response));
  }
  for await (const chunk of events(response.body)) answer.add(chunk);
  state.results.set(answer.request, { ...state.results.get(answer.request), [mode]: answer });
  return answer;
}

/** Say whether the speculative and the plain text of a request are the same, if both are there. */
function judge(request) {
  const { speculative, plain } = state.results.get(request) ?? {};
  const verdict = at("verdict");
  verdict.hidden = !(speculative && plain);
  if (verdict.hidden) return;
  const same = speculative.text === plain.text;
  verdict.className = `verdict ${same ? "same" : "different"}`;
  const place = [...speculative.text].findIndex((letter, i) => letter !== [...plain.text][i]);
  const text = same
    ? `Plain decoding gives the same text: all ${speculative.text.length} characters, ` +
      `${speculative.count} tokens in ${speculative.rounds.length} rounds instead of ` +
      `${plain.rounds.length}.`
    : `Plain decoding gives another text, from character ${place < 0 ? "its end" : place + 1} on.`;
  const drafted = plain.rounds.filter((round) => round.nodes.length > 1).length;
  const beside = drafted
    ? ` It ran beside other requests, and ${drafted} of its rounds were drafted for: its speed is ` +
      "not that of plain decoding."
    : "";
  verdict.textContent = text + beside;
}

async function send() {
  const [kind, mode] = [chosen("kind"), chosen("mode")];
  const input = at("input").value;
  if (!state.model) await findModel();
  const request = requestOf(kind, input);
  if (kind === "completion") at("answers").replaceChildren();
  if (kind === "chat") {
    say("user", input);
    at("input").value = "";
  }
  const answer = await ask(kind, request, mode === "plain" ? "plain" : "speculative");
  if (kind === "chat") keep(input, answer);
  if (mode === "both") await ask(kind, request, "plain");
  judge(answer.request);
  show(answer);
}

function say(role, text) {
  const [entry, who, words] = ["div", "p", "div"].map((tag) => document.createElement(tag));
  [entry.className, who.className, words.className] = ["message", "who", "text"];
  who.textContent = role;
  words.textContent = text;
  entry.append(who, words);
  at("answers").append(entry);
}

function keep(input, answer) {
  state.messages.push({ role: "user", content: input });
  state.messages.push({ role: "assistant", content: answer.text });
}

// ---- The form.

function setBusy(busy) {
  at("send").disabled = busy;
  at("clear").disabled = busy;
  at("stop").disabled = !busy;
}

at("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (at("send").disabled) return;
  state.stop = new AbortController();
  at("error").hidden = at("verdict").hidden = true;
  setBusy(true);
  try {
    await send();
  } catch (error) {
    if (error.name !== "AbortError") {
      at("error").textContent = error.message;
      at("error").hidden = false;
    }
  } finally {
    setBusy(false);
  }
});

at("stop").addEventListener("click", () => state.stop?.abort());

function clear() {
  state.messages = [];
  state.shown = null;
  at("answers").replaceChildren();
  at("verdict").hidden = at("error").hidden = true;
  panel.show([]);
  drawFigures(null);
}

at("clear").addEventListener("click", clear);
at("key").addEventListener("change", findModel);

at("input").addEventListener("keydown", (event) => {
  const sends = chosen("kind") === "chat" ? !event.shiftKey : event.ctrlKey || event.metaKey;
  if (event.key === "Enter" && sends && !event.isComposing) {
    event.preventDefault();
    at("form").requestSubmit();
  }
});

for (const choice of document.querySelectorAll("input[name=kind]")) {
  choice.addEventListener("change", () => {
    const chat = chosen("kind") === "chat";
    at("input-label").textContent = chat ? "Message" : "Text to continue";
    at("send").textContent = chat ? "Send" : "Generate";
    at("input").rows = chat ? 3 : 6;
    at("input").value = chat ? "" : EXAMPLE;
    clear();
  });
}

at("input").value = EXAMPLE;
at("legend").replaceChildren(...legend());
drawFigures(null);
findModel();
