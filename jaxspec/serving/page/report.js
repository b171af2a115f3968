// The page of `jaxspec generate --show-trees`: one text, whose data stand in the page.
"use strict";

const { about, prompt, text, ending, speculation } = JSON.parse(document.getElementById("data").textContent);
const rounds = speculation.trees;
const tokens = new TokenText(document.getElementById("text"), (round) => panel.select(round));
const panel = new RoundPanel(document.getElementById("rounds"), (round) =>
  tokens.show(text, rounds, round),
);
document.getElementById("about").textContent = about;
document.getElementById("prompt").textContent = prompt;
document.getElementById("legend").replaceChildren(...legend());
document.getElementById("figures").replaceChildren(...figures(totalFigures(rounds)));
panel.show(rounds, ending);
panel.select(0);
