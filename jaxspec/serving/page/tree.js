// What speculative decoding did: a text whose tokens are coloured by how they came, and a picture
// of each round's draft tree. Used by the server's page and by `jaxspec generate --show-trees`.
//
// A round is {nodes: [{token, text, parent, probability}], path, bonus: {token, text}, committed};
// node 0 is the token before the round, `path` the accepted nodes from there.
"use strict";

const KINDS = {
  prompt: "sampled while the prompt was read",
  accepted: "drafted and accepted",
  bonus: "bonus: the model's own token",
  rejected: "drafted and rejected",
  cut: "cut by the token limit or the text's end",
};

/** What has cut the last round of a text, by its finish_reason. */
function cutBy(ending) {
  return ending === "stop" ? "the text's end" : "the token limit";
}

// ---- Text: which characters came from which token.

/** The tokens that a round added to the text: [{text, kind, token}]. */
function committedTokens(round) {
  const accepted = round.path.slice(1).map((node) => ({ ...round.nodes[node], kind: "accepted" }));
  return [...accepted, { ...round.bonus, kind: "bonus" }].slice(0, round.committed);
}

/** All tokens of the rounds, in order, each with the number of its round. */
function tokensOf(rounds) {
  const tokens = [];
  rounds.forEach((round, number) => {
    const last = tokens.at(-1);
    // The first token, and one after a preemption, is sampled while the prompt is read.
    if (!last || last.token !== round.nodes[0].token) {
      tokens.push({ ...round.nodes[0], kind: "prompt", round: null });
    }
    for (const token of committedTokens(round)) tokens.push({ ...token, round: number });
  });
  return tokens;
}

/**
 * Cut a text into the pieces that its tokens made: [{text, kind, round}].
 *
 * A token may show no text (a stop token), or only the bytes of half a character: what its
 * neighbours do not explain is theirs. Text after the last token has kind null.
 */
function piecesOf(text, rounds) {
  const REACH = 8; // characters that tokens without a text of their own may have made
  const pieces = [];
  let place = 0;
  for (const { text: own, kind, round } of tokensOf(rounds)) {
    if (!own) continue;
    const found = text.slice(place, place + REACH + own.length).indexOf(own);
    if (found < 0) continue;
    if (found > 0) pieces.push({ text: text.slice(place, place + found), kind, round });
    pieces.push({ text: own, kind, round });
    place += found + own.length;
  }
  if (place < text.length) pieces.push({ text: text.slice(place), kind: null, round: null });
  return pieces;
}

/** A text as coloured tokens. A click on a token tells `onSelect` its round. */
class TokenText {
  constructor(element, onSelect) {
    this.element = element;
    element.addEventListener("click", (event) => {
      const round = event.target.dataset?.round;
      if (round !== undefined) onSelect(Number(round));
    });
  }

  show(text, rounds, selected) {
    const spans = piecesOf(text, rounds).map((piece) => {
      const span = document.createElement("span");
      span.textContent = piece.text;
      if (piece.kind) {
        span.className = `token ${piece.kind}`;
        span.title = KINDS[piece.kind];
      }
      if (piece.round !== null) {
        span.dataset.round = piece.round;
        span.classList.toggle("selected", piece.round === selected);
      }
      return span;
    });
    this.element.replaceChildren(...spans);
  }
}

// ---- Picture: one round's tree.

const BOX = { width: 76, height: 38, across: 14, down: 8, indent: 18, margin: 4 };
const LONGEST_LABEL = 9;

/** A token's text in one line, with its white space visible. */
function visible(text) {
  return text === "" ? "∅" : text.replace(/ /g, "␣").replace(/\n/g, "⏎").replace(/\t/g, "⇥");
}

function shortened(text) {
  const characters = Array.from(visible(text));
  if (characters.length <= LONGEST_LABEL) return characters.join("");
  return characters.slice(0, LONGEST_LABEL - 1).join("") + "…";
}

function percent(probability) {
  if (probability === null || probability === undefined) return "";
  const value = 100 * probability;
  if (value < 0.1) return "<0.1%";
  if (value > 99.9) return ">99.9%";
  return `${value < 1 || value > 99 ? value.toFixed(1) : Math.round(value)}%`;
}

/** The nodes to draw, the bonus last: [{text, parent, chance, kind}]. */
function drawnNodes(round) {
  const onPath = new Map(round.path.map((node, depth) => [node, depth]));
  const nodes = round.nodes.map(({ text, parent, probability }, node) => {
    const depth = onPath.get(node);
    let kind = depth === undefined ? "rejected" : depth > round.committed ? "cut" : "accepted";
    if (node === 0) kind = "root";
    return { text, parent, chance: node === 0 ? "before" : percent(probability), kind };
  });
  const kind = round.committed === round.path.length ? "bonus" : "cut";
  nodes.push({ text: round.bonus.text, parent: round.path.at(-1), chance: "bonus", kind });
  return nodes;
}

function childrenOf(nodes) {
  const children = nodes.map(() => []);
  nodes.forEach(({ parent }, node) => parent >= 0 && children[parent].push(node));
  return children;
}

/** Left to right: a column for each depth, a row for each leaf. */
function columns(nodes) {
  const children = childrenOf(nodes);
  const places = [];
  let leaves = 0;
  let deepest = 0;
  function place(node, depth) {
    deepest = Math.max(deepest, depth);
    for (const child of children[node]) place(child, depth + 1);
    const rows = children[node].map((child) => places[child].row);
    const row = rows.length ? (rows[0] + rows.at(-1)) / 2 : leaves++;
    places[node] = { row, x: depth * (BOX.width + BOX.across), y: row * (BOX.height + BOX.down) };
  }
  place(0, 0);
  return {
    places,
    width: (deepest + 1) * (BOX.width + BOX.across) - BOX.across,
    height: leaves * (BOX.height + BOX.down) - BOX.down,
    link: ({ x, y }, to) => {
      const [left, right] = [x + BOX.width, to.x];
      const [top, bottom] = [y + BOX.height / 2, to.y + BOX.height / 2];
      const middle = (left + right) / 2;
      return `M${left},${top}C${middle},${top} ${middle},${bottom} ${right},${bottom}`;
    },
  };
}

/** For narrow screens: a row for each node, indented by its depth. */
function outline(nodes) {
  const children = childrenOf(nodes);
  const places = [];
  let rows = 0;
  let deepest = 0;
  function place(node, depth) {
    deepest = Math.max(deepest, depth);
    places[node] = { x: depth * BOX.indent, y: rows++ * (BOX.height + BOX.down) };
    for (const child of children[node]) place(child, depth + 1);
  }
  place(0, 0);
  return {
    places,
    width: deepest * BOX.indent + BOX.width,
    height: rows * (BOX.height + BOX.down) - BOX.down,
    link: ({ x, y }, to) => {
      const left = x + BOX.indent / 2;
      return `M${left},${y + BOX.height}V${to.y + BOX.height / 2}H${to.x}`;
    },
  };
}

function svg(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** The picture of a round, at most `room` pixels wide where that is possible. */
function treePicture(round, room, ending) {
  const nodes = drawnNodes(round);
  const wide = columns(nodes);
  const plan = wide.width + 2 * BOX.margin <= room ? wide : outline(nodes);
  const { places, width, height, link } = plan;
  const links = nodes.flatMap(({ parent, kind }, node) =>
    parent < 0 ? [] : [svg("path", { class: `link ${kind}`, d: link(places[parent], places[node]) })],
  );
  const order = { rejected: 0, cut: 1 }; // what is lit lies above what is not
  links.sort((a, b) => rank(a, order) - rank(b, order));
  const boxes = nodes.map((node, index) => box(node, places[index]));
  const size = [width + 2 * BOX.margin, height + 2 * BOX.margin];
  return svg(
    "svg",
    {
      class: "tree",
      role: "img",
      "aria-label": describe(round, ending),
      width: size[0],
      height: size[1],
      viewBox: `${-BOX.margin} ${-BOX.margin} ${size[0]} ${size[1]}`,
    },
    ...links,
    ...boxes,
  );
}

function rank(element, order) {
  return order[element.getAttribute("class").split(" ")[1]] ?? 2;
}

function box({ text, chance, kind }, { x, y }) {
  const middle = BOX.width / 2;
  return svg(
    "g",
    { class: `node ${kind}`, transform: `translate(${x} ${y})` },
    svg("title", {}, `${JSON.stringify(text)}, ${chance}`),
    svg("rect", { width: BOX.width, height: BOX.height, rx: 7 }),
    svg("text", { class: "label", x: middle, y: 16 }, shortened(text)),
    svg("text", { class: "chance", x: middle, y: 31 }, chance),
  );
}

/** A round in words; `ending`: the finish_reason of its text, if that is known. */
function describe(round, ending) {
  const drafted = round.nodes.length - 1;
  const accepted = round.path.length - 1;
  const quoted = committedTokens(round).map(({ text }) => JSON.stringify(text));
  const text = quoted.length ? `: ${quoted.join(" ")}` : "";
  const what = drafted ? `${drafted} drafted, ${accepted} accepted` : "nothing drafted";
  const cut = round.path.length - round.committed; // accepted ones, and the bonus
  const left = cut > 0 ? `, ${cut} cut by ${cutBy(ending)}` : "";
  return `${what}, ${round.committed} committed${text}${left}`;
}

// ---- The panel beside a text: stepping through its rounds.

/**
 * Shows one round at a time, of a text whose rounds may still be coming. Follows the newest round
 * until the reader steps back.
 */
class RoundPanel {
  /** `onSelect` is told the number of the round that is shown. */
  constructor(element, onSelect) {
    this.rounds = [];
    this.ending = null;
    this.selected = null;
    this.following = true;
    this.onSelect = onSelect;
    this.buttons = [
      ["first", "|◀", "First round (Home)", () => this.select(0)],
      ["previous", "◀", "Previous round (left arrow)", () => this.step(-1)],
      ["next", "▶", "Next round (right arrow)", () => this.step(1)],
      ["last", "▶|", "Last round (End)", () => this.select(this.rounds.length - 1)],
    ].map(([name, sign, label, act]) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = name;
      button.textContent = sign;
      button.title = label;
      button.setAttribute("aria-label", label);
      button.addEventListener("click", act);
      return button;
    });
    this.count = document.createElement("output");
    this.count.className = "count";
    const bar = document.createElement("div");
    bar.className = "stepper";
    bar.append(...this.buttons.slice(0, 2), this.count, ...this.buttons.slice(2));
    this.picture = document.createElement("div");
    this.picture.className = "picture";
    this.picture.tabIndex = 0; // so that a wide tree can be scrolled with the keyboard
    this.picture.setAttribute("role", "group");
    this.picture.setAttribute("aria-label", "Draft tree of the round");
    this.words = document.createElement("p");
    this.words.className = "words";
    element.replaceChildren(bar, this.picture, this.words);
    document.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.draw()).observe(this.picture);
    this.draw();
  }

  onKey(event) {
    const { target, key } = event;
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    if (target.closest?.("input, textarea, select, [contenteditable]")) return;
    const act = {
      ArrowLeft: () => this.step(-1),
      ArrowRight: () => this.step(1),
      Home: () => this.select(0),
      End: () => this.select(this.rounds.length - 1),
    }[key];
    if (act && this.rounds.length) {
      event.preventDefault();
      act();
    }
  }

  /** The rounds of a text so far, and its finish_reason; another list is another text. */
  show(rounds, ending = null) {
    this.ending = ending;
    if (rounds !== this.rounds) {
      this.rounds = rounds;
      this.selected = null;
      this.following = true;
    }
    if (this.following && rounds.length) this.selected = rounds.length - 1;
    this.draw();
  }

  step(by) {
    this.select((this.selected ?? 0) + by);
  }

  select(number) {
    if (!this.rounds.length) return;
    this.selected = Math.min(Math.max(number, 0), this.rounds.length - 1);
    this.following = this.selected === this.rounds.length - 1;
    this.draw();
    this.onSelect(this.selected);
  }

  draw() {
    const { rounds, selected, buttons } = this;
    const last = rounds.length - 1;
    const [first, previous, next, final] = buttons;
    for (const button of [first, previous]) button.disabled = selected === null || selected === 0;
    for (const button of [next, final]) button.disabled = selected === null || selected === last;
    this.count.textContent = selected === null ? "no round yet" : `${selected + 1} / ${last + 1}`;
    if (selected === null) {
      this.picture.replaceChildren();
      this.words.textContent = "";
      return;
    }
    const [round, width] = [rounds[selected], this.picture.clientWidth];
    this.picture.replaceChildren(treePicture(round, width, this.ending));
    this.words.textContent = describe(round, this.ending);
  }
}

/** What the rounds of a text amount to; null values where there is nothing to divide by. */
function totals(rounds) {
  const deepest = Math.max(0, ...rounds.map((round) => round.path.length - 1));
  const shares = [];
  for (let depth = 1; depth <= deepest; depth++) {
    shares.push(rounds.filter((round) => round.path.length > depth).length / rounds.length);
  }
  const committed = rounds.reduce((sum, round) => sum + round.committed, 0);
  return {
    rounds: rounds.length,
    drafted: rounds.reduce((sum, round) => sum + round.nodes.length - 1, 0),
    committed,
    length: rounds.length ? committed / rounds.length : null,
    shares,
  };
}

// ---- What both pages show around it.

/** Entries of a list that explains the colours. */
function legend() {
  return Object.entries(KINDS).map(([kind, words]) => {
    const entry = document.createElement("li");
    const sample = document.createElement("span");
    sample.className = `token ${kind}`;
    sample.textContent = words;
    entry.append(sample);
    return entry;
  });
}

/** A bar for each depth: the share of rounds that accepted so many drafted tokens or more. */
function depthPicture(shares) {
  const [width, gap, most, line] = [34, 6, 48, 16];
  const bars = shares.flatMap((share, index) => {
    const [x, height] = [index * (width + gap), Math.max(1, most * share)];
    const [top, middle] = [line + most - height, x + width / 2];
    return [
      svg("rect", { x, y: top, width, height, rx: 3 }),
      svg("text", { x: middle, y: top - 4 }, `${Math.round(100 * share)}%`),
      svg("text", { class: "depth", x: middle, y: line + most + line - 3 }, `${index + 1}`),
    ];
  });
  const size = [shares.length * (width + gap) - gap, line + most + line];
  const words = shares.map((share, index) => `${index + 1}: ${Math.round(100 * share)}%`);
  const label = `accepted by depth: ${words.join(", ")}`;
  const [box, role] = [`0 0 ${size[0]} ${size[1]}`, "img"];
  return svg("svg", { class: "depths", role, "aria-label": label, width: size[0], viewBox: box }, ...bars);
}

/**
 * Entries of a <dl>: a pair of nodes for each [name, value], which may be a picture; null is shown
 * as a dash.
 */
function figures(entries) {
  return entries.map(([name, value]) => {
    const [pair, term, description] = ["div", "dt", "dd"].map((tag) => document.createElement(tag));
    term.textContent = name;
    description.replaceChildren(value ?? "–");
    pair.append(term, description);
    return pair;
  });
}

function totalFigures(rounds) {
  const { rounds: count, drafted, length, shares } = totals(rounds);
  return [
    ["rounds", count],
    ["tokens a round", length?.toFixed(2)],
    ["drafted", drafted],
    ["accepted by depth", shares.length ? depthPicture(shares) : null],
  ];
}
