"""Old texts as drafts: which requests take them."""

from collections.abc import Sequence

from jaxspec.config.sampling_params import SamplingParams
from jaxspec.decoding.functional import EngineParams
from jaxspec.engine.programs.sizes import Kind


def why_not_verified(params: EngineParams, sampling: SamplingParams) -> str | None:
    """Why an old text cannot be the draft of such a request; None: it can."""
    if sampling.structured is not None:
        return "the host restricts each token of a structured output"
    if params.stages:
        return "a pipeline reads no drafts"
    if params.speculation.acceptance != "match":
        return 'an old text of a seed is an independent draft for acceptance="match" only'
    if params.speculation.verify_width is not None:
        return "in deterministic mode, and with a verify_width, a text is not read but decoded"
    return None


def verified_kinds(params: EngineParams, sampling: Sequence[SamplingParams]) -> list[Kind]:
    """The kinds of programs that verify old texts of such requests.

    Raises ValueError if there is a request of which none is verified.
    """
    for each in sampling:
        if (reason := why_not_verified(params, each)) is not None:
            raise ValueError(f"old_texts cannot be warmed up: {reason}")
    return sorted({Kind.of(each) for each in sampling})


def check_drafts(
    params: EngineParams, drafts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]
) -> None:
    """Raise ValueError for drafts of requests that cannot have them, and for unknown tokens.

    There is a draft for each sample of each request in turn; an empty one is none.
    """
    samples = [params for params in sampling for _ in range(params.num_samples)]
    if len(drafts) != len(samples):
        raise ValueError(f"there are {len(drafts)} drafts for {len(samples)} texts: give each one")
    vocab = params.target.config.vocab_size
    for index, (draft, request) in enumerate(zip(drafts, samples, strict=True)):
        reason = why_not_verified(params, request) if len(draft) else None
        if reason is not None:
            raise ValueError(f"draft {index} cannot be used: {reason}")
        unknown = [token for token in draft if not 0 <= token < vocab]
        if unknown:
            raise ValueError(f"draft {index} has token {unknown[0]}: ids are 0 to {vocab - 1}")
