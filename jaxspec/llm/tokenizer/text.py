"""Text to token ids, and back."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from jaxspec._lazy import LazyModule
from jaxspec.checkpoints.hub import resolve_directory
from jaxspec.config.checks import check_unicode
from jaxspec.llm.tokenizer.prompts import Prompt
from jaxspec.llm.tokenizer.token_bytes import TokenBytes
from jaxspec.models.json.values import read_json

if TYPE_CHECKING:
    from jaxspec.llm.tokenizer.hugging_face import Tokenizer

hugging_face = LazyModule("jaxspec.llm.tokenizer.hugging_face")  # it loads transformers

# Keys of tokenizer_config.json that change no token, as long as the tokens they name are there.
_NAMES = {"bos_token", "eos_token", "pad_token", "unk_token"}
_HARMLESS = _NAMES | {"tokenizer_class", "model_max_length", "clean_up_tokenization_spaces"}
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
_MORE_FILES = ("added_tokens.json", "special_tokens_map.json")


class TextTokenizer:
    """The model's own tokenizer, for text. Raises ValueError if it has none that loads.

    Where tokenizer.json is all there is to it, as in models that ``jaxspec train-lm`` makes, the
    tokenizers library reads it alone. Else transformers does.
    """

    def __init__(self, model: str | Path):
        self.directory = resolve_directory(model)
        plain = plain_tokenizer(self.directory)
        if plain is None:
            full = self.full
            backend = getattr(full, "backend_tokenizer", None)
            self._encode = lambda text, special: full(
                text, add_special_tokens=special, verbose=False
            )["input_ids"]
            # Only BERT's tokenizers mean their spaces to be cleaned up; it would change text that
            # has been streamed already.
            self._decode: Callable[..., Any] = functools.partial(
                full.decode, clean_up_tokenization_spaces=False
            )
        else:
            backend = plain
            self._encode = lambda text, special: plain.encode(text, add_special_tokens=special).ids
            self._decode = plain.decode
        self._bytes = None if backend is None else TokenBytes(backend)
        # A server asks for every chat.
        self._turn_end = functools.lru_cache(maxsize=64)(
            lambda chat_template: hugging_face.turn_end(self.full, chat_template)
        )

    @functools.cached_property
    def full(self) -> "Tokenizer":
        """The tokenizer of transformers, with the chat template; loaded when first asked for."""
        return hugging_face.load_tokenizer(self.directory)

    def turn_end(self, chat_template: str | None) -> tuple[int, ...]:
        """The token that ends the assistant's turns, see hugging_face.turn_end."""
        return self._turn_end(chat_template)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids, with those that the tokenizer puts around every text if ``special``."""
        return list(self._encode(text, special))

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        """Text, special tokens included unless ``skip_special``."""
        return str(self._decode(list(token_ids), skip_special_tokens=skip_special))

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes of a token that may be a part of a character; None: they are not known, or
        those of its text."""
        return None if self._bytes is None else self._bytes.of(token_id)

    def check_stops(self, wanted: bool) -> None:
        """Raise ValueError if stop strings are wanted and there is no text to find them in."""


class NoTokenizer(TextTokenizer):
    """Stands for the tokenizer of a model without tokenizer files: prompts are token ids, and all
    text that is generated is empty. What needs a tokenizer raises ValueError."""

    def __init__(self, directory: Path):
        self.directory = directory

    def _missing(self, needs: str) -> ValueError:
        return ValueError(
            f"{needs} a tokenizer, and {self.directory} has no {', '.join(_FILES[:-1])} or "
            f"{_FILES[-1]}: add the model's, or give prompts of token ids"
        )

    @functools.cached_property
    def full(self) -> "Tokenizer":
        raise self._missing("chats and structured outputs need")

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        raise self._missing("text needs")

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = False) -> str:
        return ""

    def turn_end(self, chat_template: str | None) -> tuple[int, ...]:
        return ()

    def token_bytes(self, token_id: int) -> bytes | None:
        return None

    def check_stops(self, wanted: bool) -> None:
        if wanted:
            raise self._missing("stop strings need")


def open_tokenizer(model: str | Path) -> TextTokenizer:
    """The model's own tokenizer, or a NoTokenizer if it has no files of one.

    Raises ValueError for one that does not load.
    """
    directory = resolve_directory(model)
    found = any((directory / name).exists() for name in _FILES) or any(directory.glob("*.tiktoken"))
    return TextTokenizer(directory) if found else NoTokenizer(directory)


def plain_tokenizer(directory: Path) -> tokenizers.Tokenizer | None:
    """The tokenizer of tokenizer.json, if transformers would make the same of it, else None."""
    try:
        model, config = (
            read_json(directory / name) for name in ("tokenizer.json", "tokenizer_config.json")
        )
        if not _is_plain(model, config) or any((directory / name).exists() for name in _MORE_FILES):
            return None
        return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception:  # of any kind, from the tokenizers library too: transformers will say why
        return None


def _is_plain(model: dict[str, Any], config: dict[str, Any]) -> bool:
    added = {token["content"] for token in model["added_tokens"] if token["special"]}
    return (
        config.keys() <= _HARMLESS
        and config.get("tokenizer_class") == "PreTrainedTokenizerFast"
        and config.get("clean_up_tokenization_spaces", False) is False
        and all(config[name] in added for name in _NAMES & config.keys())
        and model["model"]["type"] == "BPE"
        and len(model["model"]["vocab"]) < 100_000  # beyond, transformers may mend the splitting
        and all(model[part] is None for part in ("truncation", "padding", "post_processor"))
    )


def tokenize(
    tokenizer: TextTokenizer, prompts: Sequence[Prompt], *, special: bool = True
) -> list[list[int]]:
    """Token ids of every prompt; those that are token ids already are copied. ``special``: texts
    get the tokens that the tokenizer puts around every text.

    Raises ValueError for anything else, and for empty text.
    """
    if isinstance(prompts, (str, bytes, Mapping)) or not hasattr(prompts, "__len__"):
        raise ValueError(f"prompts must be a list of prompts, not one {type(prompts).__name__}")
    return [_tokenize(tokenizer, index, prompt, special) for index, prompt in enumerate(prompts)]


def _tokenize(tokenizer: TextTokenizer, index: int, prompt: Prompt, special: bool) -> list[int]:
    if isinstance(prompt, str):
        if not prompt:
            raise ValueError(f"prompt {index} is empty: give it at least one character")
        check_unicode(f"prompt {index}", prompt)
        return tokenizer.encode(prompt, special=special)
    is_one_value = getattr(prompt, "ndim", 1) == 0  # an array of no dimension, of a row of ids
    is_list = hasattr(prompt, "__len__") and not is_one_value
    if isinstance(prompt, (bytes, bytearray, Mapping)) or not is_list:
        raise ValueError(
            f"prompt {index} must be text or a list of token ids, not {type(prompt).__name__}"
        )
    tolist = getattr(prompt, "tolist", None)  # of arrays: jax's give arrays one by one, not numbers
    return list(prompt) if tolist is None else tolist()
