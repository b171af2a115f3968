"""Text in, text out."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import transformers
from jax.sharding import Mesh

from jaxspec.batch_run import Run, Timings
from jaxspec.config import CacheConfig, SpeculationConfig
from jaxspec.engine import Engine
from jaxspec.functional import EngineParams
from jaxspec.loading import BUILT_IN_MODEL, load
from jaxspec.models.decoder import Decoder
from jaxspec.models.hf_config import read_json
from jaxspec.scheduling.requests import SamplingParams
from jaxspec.speculation.drafters import Drafter
from jaxspec.state import Ending
from jaxspec.weights.hub import resolve_directory

Prompt = str | Sequence[int]
DEFAULT_MAX_LENGTH = 2048


@dataclasses.dataclass(frozen=True)
class TextChunk:
    """Newly generated text of request ``index``; ``done`` after the last one."""

    index: int
    text: str
    token_ids: list[int]
    done: bool


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished request.

    Attributes:
      finish_reason: ``stop`` for a stop token (not part of the text), ``length``, or ``error``.
      error: what went wrong; the text before it stands.
      acceptance_length: mean tokens committed a round, bonus included.
      acceptance_by_depth: share of rounds that accepted at least 1, 2, ... drafted tokens.
      timings: of the batch that the request ran in.
    """

    text: str
    token_ids: list[int]
    prompt_token_ids: list[int]
    finish_reason: str
    error: str | None
    seed: int
    num_rounds: int
    num_drafted: int
    acceptance_length: float
    acceptance_by_depth: list[float]
    timings: Timings


class LLM:
    """A model that generates speculatively.

    >>> llm = LLM()
    >>> [completion] = llm.generate(["def read_config(path):"], SamplingParams(max_tokens=64))
    >>> print(completion.text)

    Args:
      model, drafter, speculation, dtype, mesh, shard_drafter, kernels: see loading.load.
      page_size, num_pages: see config.CacheConfig.
      max_length: most tokens of a request, prompt included; by default what the model allows, at
        most 2048.
      max_batch: most requests that run together; more are served in turns.
      rounds_per_call: rounds between two looks at the results.

    Raises ValueError for anything that cannot be loaded or combined.
    """

    def __init__(
        self,
        model: str | Path = BUILT_IN_MODEL,
        drafter: str | Path | Drafter = "auto",
        *,
        speculation: SpeculationConfig | None = None,
        dtype: str | None = None,
        mesh: Mesh | None = None,
        shard_drafter: bool = False,
        kernels: str = "auto",
        page_size: int = 16,
        max_length: int | None = None,
        num_pages: int | None = None,
        max_batch: int = 16,
        rounds_per_call: int = 32,
    ):
        if max_batch < 1 or rounds_per_call < 1:
            raise ValueError("max_batch and rounds_per_call must be at least 1")
        params = load(
            model,
            drafter,
            speculation=speculation,
            dtype=dtype,
            mesh=mesh,
            shard_drafter=shard_drafter,
            kernels=kernels,
        )
        self.tokenizer = load_tokenizer(model)
        length = _max_length(max_length, params.target.config.max_position)
        cache = CacheConfig(page_size, length, num_pages)
        self.engine = Engine(params, cache, max_rows=max_batch, rounds_per_call=rounds_per_call)
        self.max_batch = max_batch

    @property
    def params(self) -> EngineParams:
        """The weights, and every static choice."""
        return self.engine.params

    def use_drafter(self, drafter: Drafter) -> None:
        """From the next request on, draft with other weights of the same shapes.

        Nothing is compiled again. Raises ValueError for a drafter of other shapes or choices.
        """
        self.engine.use_drafter(drafter)

    def use_target(self, target: Decoder) -> None:
        """As use_drafter, for the target."""
        self.engine.use_target(target)

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> list[Completion]:
        """Complete every prompt (text, or token ids), in order.

        Raises ValueError for a bad prompt or sampling value.
        """
        completions = []
        for batch, params in self._batches(prompts, sampling):
            run, token_ids = Run(self.engine, batch, params), [[] for _ in batch]
            try:
                for progress in run:
                    for ids, new in zip(token_ids, progress.new_tokens, strict=True):
                        ids.extend(new)
            finally:
                run.abort()
            completions += self._complete(run, token_ids)
        return completions

    def stream(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams],
        rounds_per_call: int = 4,
    ) -> Iterator[TextChunk | Completion]:
        """As generate, giving text as it comes: TextChunks, then each batch's Completions.

        A stream that is closed before its end frees the engine at once.
        """
        for batch, params in self._batches(prompts, sampling):
            run = Run(self.engine, batch, params, rounds_per_call)
            try:
                yield from self._stream_batch(run)
            finally:
                run.abort()

    def _stream_batch(self, run: Run) -> Iterator[TextChunk | Completion]:
        params = run.plan.sampling
        token_ids: list[list[int]] = [[] for _ in params]
        shown, ended = ["" for _ in params], [False for _ in params]
        for progress in run:
            for index, new in enumerate(progress.new_tokens):
                if ended[index]:
                    continue
                token_ids[index].extend(new)
                done = ended[index] = progress.done[index]
                text = self._text(token_ids[index], params[index])
                # A character cut in half decodes to U+FFFD: wait for the rest of it.
                stable = text if done else text.rstrip("\ufffd")
                piece, shown[index] = stable[len(shown[index]) :], stable
                yield TextChunk(index, piece, new, done)
        yield from self._complete(run, token_ids)

    def _batches(
        self, prompts: Sequence[Prompt], sampling: SamplingParams | Sequence[SamplingParams]
    ) -> Iterator[tuple[list[list[int]], list[SamplingParams]]]:
        """Token prompts and their sampling, ``max_batch`` at a time."""
        if isinstance(prompts, str):
            raise ValueError("prompts must be a list of prompts, not one string")
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        tokens = [self._tokenize(index, prompt) for index, prompt in enumerate(prompts)]
        self.engine.check(tokens, params)
        for start in range(0, len(tokens), self.max_batch):
            batch = tokens[start : start + self.max_batch]
            yield batch, list(params[start : start + self.max_batch])

    def _tokenize(self, index: int, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if not prompt:
            raise ValueError(f"prompt {index} is empty")
        return list(self.tokenizer(prompt)["input_ids"])

    def _text(self, token_ids: list[int], params: SamplingParams) -> str:
        stops = self.engine.stop_ids(params)
        visible = token_ids[:-1] if token_ids and token_ids[-1] in stops else token_ids
        return str(self.tokenizer.decode(visible))

    def _complete(self, run: Run, outputs: list[list[int]]) -> Iterator[Completion]:
        plan = run.plan
        rows = zip(plan.prompts, plan.sampling, outputs, run.statistics, run.endings, strict=True)
        for prompt, params, token_ids, stats, ending in rows:
            rounds = max(stats.rounds, 1)
            assert params.seed is not None, "a plan gives every request a seed"
            yield Completion(
                text=self._text(token_ids, params),
                token_ids=token_ids,
                prompt_token_ids=list(prompt),
                finish_reason=_FINISH_REASONS.get(ending, "error"),
                error=_ERRORS.get(ending),
                seed=params.seed,
                num_rounds=stats.rounds,
                num_drafted=stats.drafted,
                acceptance_length=max(len(token_ids) - 1, 0) / rounds,
                acceptance_by_depth=[count / rounds for count in stats.accepted[1:]],
                timings=run.timings,
            )


_FINISH_REASONS = MappingProxyType({Ending.STOP: "stop", Ending.LENGTH: "length"})
_ERRORS = MappingProxyType(
    {
        Ending.NOT_FINITE: "the model's logits were not finite numbers: its weights are broken, or "
        "its dtype is too narrow for them",
        Ending.TOO_LONG: "the prompt and its limit do not fit the cache",
        Ending.NOT_GREEDY: "a sampled request ran in a program for greedy ones",
    }
)


def load_tokenizer(model: str | Path) -> transformers.PreTrainedTokenizerBase:
    """The model's own tokenizer. Raises ValueError if it has none."""
    directory = resolve_directory(model)
    try:
        return _tokenizer_class(directory).from_pretrained(directory)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{directory} holds no tokenizer that loads: {reason}") from error


def _tokenizer_class(directory: Path) -> Any:
    """The class that AutoTokenizer would take, which imports torch where it is installed: a Llama's
    generic tokenizer is found without it."""
    path = directory / "tokenizer_config.json"
    name = read_json(path).get("tokenizer_class") if path.is_file() else None
    if (
        name in ("PreTrainedTokenizerFast", "TokenizersBackend")
        and read_json(directory / "config.json").get("model_type") == "llama"
    ):
        return transformers.PreTrainedTokenizerFast
    return transformers.AutoTokenizer


def _max_length(wanted: int | None, limit: int) -> int:
    if wanted is not None and wanted > limit:
        raise ValueError(f"max_length {wanted} exceeds the model's {limit} positions")
    return min(limit, DEFAULT_MAX_LENGTH) if wanted is None else wanted
