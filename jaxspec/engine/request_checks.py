"""The checks of requests before they are queued."""

from collections.abc import Sequence

from jaxspec.config.model import ModelConfig
from jaxspec.config.requests import check_requests
from jaxspec.config.sampling_params import SamplingParams
from jaxspec.engine.limits import MOST_STOPS
from jaxspec.scheduling.plan import Limits


def check_for_engine(
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[SamplingParams],
    model: ModelConfig,
    limits: Limits,
    *,
    trees: bool,
) -> None:
    """Raise ValueError for requests that could not run in an engine of these limits.

    ``trees``: its programs emit the draft trees of rounds.
    """
    check_requests(prompts, sampling, model.vocab_size, limits.max_length, model.max_position)
    if not trees and any(params.trees for params in sampling):
        raise ValueError("trees needs an engine that emits them: make it with trees=True")
    for index, (prompt, params) in enumerate(zip(prompts, sampling, strict=True)):
        stops = params.stops(model.stop_token_ids)
        if len(stops) > MOST_STOPS:
            most = f"at most {MOST_STOPS} may: name fewer in stop_token_ids"
            raise ValueError(f"{len(stops)} tokens would end the text, and {most}")
        limits.check(str(index), len(prompt), int(params.max_tokens))
