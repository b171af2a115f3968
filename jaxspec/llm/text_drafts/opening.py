"""Text drafters by name: ``text:`` and a draft model, or the URL of a server."""

import dataclasses
import re
from pathlib import Path

from jaxspec.checkpoints.hub import resolve_directory
from jaxspec.checkpoints.load import load_params
from jaxspec.checkpoints.load_drafter import platform_of
from jaxspec.checkpoints.load_options import LoadOptions
from jaxspec.config.cache import CacheConfig
from jaxspec.config.engine import EngineConfig
from jaxspec.decoding.drafters import HostDrafted
from jaxspec.decoding.functional import EngineParams
from jaxspec.engine.engine import Engine
from jaxspec.llm.options import LLMOptions
from jaxspec.llm.text_drafts.drafter import TextDrafter, TextSource
from jaxspec.llm.text_drafts.model_source import ModelSource
from jaxspec.llm.text_drafts.server_source import ServerSource
from jaxspec.llm.tokenizer.text import NoTokenizer, TextTokenizer, open_tokenizer
from jaxspec.models.from_config.model import load_model_config
from jaxspec.parallel import stage_meshes

PREFIX = "text:"
MOST_TOKENS = 65_536  # of all texts together that the draft model keeps; others it reads again
PAGE_SIZE = 8  # of the draft model: what does not fill a page is read again in every round


def source_name(options: LLMOptions) -> str | None:
    """What follows ``text:`` in the drafter's name; None: it is another drafter."""
    drafter = options.drafter
    is_text = isinstance(drafter, str) and drafter.startswith(PREFIX)
    return str(drafter)[len(PREFIX) :] if is_text else None


def drafted_on_host(options: LLMOptions) -> LLMOptions:
    """The options with HostDrafted in place of a text drafter; of another drafter, as they are.

    Raises ValueError for options that do not go with text drafts.
    """
    name = source_name(options)
    if name is None:
        return options
    config, speculation = options.engine or EngineConfig(), options.speculation
    wrong = [
        problem
        for problem, found in (
            ("adaptive trees", config.adaptive),
            ("several processes", options.processes is not None),
            ("pipelines", len(stage_meshes(options.mesh, options.drafter_mesh)) > 1),
            ("drafter_bits", options.drafter_bits is not None),
            ("shard_drafter", options.shard_drafter),
            ("trees but chains", speculation is not None and not speculation.is_chain),
        )
        if found
    ]
    if wrong:
        raise ValueError(f"drafter {options.drafter!r} does not go with {', '.join(wrong)}")
    _check_source(name)  # before the target is loaded, which may take long
    engine = dataclasses.replace(config, adaptive=False)
    return dataclasses.replace(options, drafter=HostDrafted(), engine=engine)


def _check_source(name: str) -> None:
    """Raises ValueError for a name of no model, and for a server that does not answer."""
    if not name:
        raise ValueError(
            f"drafter {PREFIX!r}: after text: give the directory or hub id of a draft model, or "
            "the URL of a server on this machine"
        )
    if _is_server(name):
        ServerSource(name)
    else:
        load_model_config(resolve_directory(name), "draft model")


def _is_server(name: str) -> bool:
    """Whether a name is an address, complete or not: ServerSource says what is missing."""
    return re.fullmatch(r"\w+://.*|https?:.*|[\w.-]+:\d+", name, re.IGNORECASE) is not None


def open_text_drafter(
    options: LLMOptions, params: EngineParams, tokenizer: TextTokenizer, length: int
) -> TextDrafter | None:
    """The text drafter of these options, for a target; None: they name another drafter.

    Args:
      length: most tokens of a request.

    Raises ValueError for a model that cannot be loaded, a server that does not answer, and models
    without a tokenizer.
    """
    name = source_name(options)
    if name is None:
        return None
    if isinstance(tokenizer, NoTokenizer):
        raise ValueError(f"drafter {options.drafter!r} needs a tokenizer of the target's")
    source = ServerSource(name) if _is_server(name) else _model_source(name, options, length)
    return TextDrafter(tokenizer, source, params.target.config.vocab_size)


def _model_source(name: str, options: LLMOptions, length: int) -> TextSource:
    tokenizer = open_tokenizer(Path(name) if Path(name).is_dir() else name)
    if isinstance(tokenizer, NoTokenizer):
        raise ValueError(f"drafter {options.drafter!r} has no tokenizer: text drafts need it")
    loaded = LoadOptions(
        name, "none", dtype=options.dtype, mesh=options.mesh, kernels=options.kernels
    )
    params, config = load_params(loaded), options.engine or EngineConfig()
    length = min(length, params.target.config.max_position)
    page_size = 16 if platform_of(options.mesh) == "tpu" else PAGE_SIZE
    tokens = max(length + 1, min(config.max_rows * (length + 1), MOST_TOKENS))
    pages = config.max_rows + -(-tokens // page_size) + 1
    cache = CacheConfig(page_size, length, num_pages=pages)
    rows = EngineConfig(max_rows=config.max_rows, max_programs=config.max_programs)
    return ModelSource(Engine(params, cache, rows), tokenizer)
