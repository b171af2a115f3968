"""How long the requests of an LLM may be."""

from jaxspec.config.checks import check_count
from jaxspec.config.engine import EngineConfig
from jaxspec.config.model import ModelConfig
from jaxspec.decoding.functional import EngineParams
from jaxspec.engine.memory import most_tokens
from jaxspec.llm.options import LLMOptions

DEFAULT_MAX_LENGTH = 2048


def allowed_length(wanted: int | None, config: ModelConfig) -> int:
    """Most tokens of a request: ``wanted``, by default what the model allows, at most 2048.

    Raises ValueError for a length that the model does not allow.
    """
    if wanted is None:
        return min(config.max_position, DEFAULT_MAX_LENGTH)
    check_count("max_length", wanted)
    config.check_length(wanted)
    return wanted


def request_length(options: LLMOptions, params: EngineParams) -> int:
    """Most tokens of a request of an LLM with these options, see LLMOptions.max_length.

    Raises ValueError as allowed_length does.
    """
    config = params.target.config
    if options.max_length != "model":
        return allowed_length(options.max_length, config)
    if next(iter(params.target.embed.devices())).platform == "cpu":
        return allowed_length(None, config)
    engine = options.engine or EngineConfig()
    fitting = most_tokens(params, options.page_size, engine.max_rows, options.kv_memory)
    if options.num_pages is not None:
        fitting = options.num_pages * options.page_size - params.speculation.scratch_slots
    # At least 2: where not even that fits, the engine says what does.
    return config.max_position if fitting is None else min(config.max_position, max(2, fitting))


def length_text(wanted: int | None, length: int, config: ModelConfig) -> str:
    """Why requests have at most ``length`` tokens, for people; ``wanted``: by --max-length."""
    text, most = f"requests of up to {length} tokens", config.max_position
    if length == most:
        return f"{text}, the most that the model allows"
    if wanted is not None:
        return f"{text}, as --max-length says; the model allows {most}"
    if length == DEFAULT_MAX_LENGTH:
        return f"{text}: longer ones are slow on a CPU; --max-length {most} allows all of the model"
    return f"{text}, as fit the memory; the model allows {most}"
