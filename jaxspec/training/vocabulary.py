"""The tokens of a language model in training: its own, or those of another model."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxspec.checkpoints.hub import resolve_directory
from jaxspec.llm.tokenizer import Tokenizer as ModelTokenizer
from jaxspec.llm.tokenizer import load_tokenizer, tokenizer_json
from jaxspec.models.from_config.model import load_model_config

END_OF_TEXT = "<|endoftext|>"
# The pre-tokenization pattern of GPT-4, with two changes: every digit is a token of its own, and
# English contractions are not special (in code an apostrophe usually opens a string).
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ENCODE_BATCH_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class Owner:
    """The model whose tokenizer a new one takes.

    ``vocab_size``: the rows of its embeddings, which may be more than the tokenizer has tokens.
    """

    name: str
    tokenizer: ModelTokenizer
    vocab_size: int


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, and the token that ends each document. ``owner`` None: it was trained here."""

    tokenizer: Tokenizer
    end_of_text: str = END_OF_TEXT
    owner: Owner | None = None

    @property
    def size(self) -> int:
        return self.tokenizer.get_vocab_size() if self.owner is None else self.owner.vocab_size

    @property
    def end_of_text_id(self) -> int:
        token = self.tokenizer.token_to_id(self.end_of_text)
        if token is None:
            raise ValueError(f"the tokenizer has no {self.end_of_text}")
        return token

    def digest(self) -> str:
        content = json.dumps([self.tokenizer.to_str(), self.end_of_text, self.size])
        return hashlib.sha256(content.encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Tokens [N] of all texts, as uint16 or uint32. Before each stands what the tokenizer puts
        before a text (``<bos>``), after each the end of text."""
        dtype = np.uint16 if self.size <= 1 << 16 else np.uint32
        end = self.end_of_text_id
        begin = [token for token in self.tokenizer.encode("").ids if token != end]
        plain = Tokenizer.from_str(self.tokenizer.to_str())
        plain.encode_special_tokens = True  # <|endoftext|> inside a file is ordinary text
        parts = []
        for batch in _batches(texts):
            for encoding in plain.encode_batch_fast(batch, add_special_tokens=False):
                parts += [np.asarray(part, dtype) for part in (begin, encoding.ids, [end])]
        return np.concatenate(parts)

    def save(self, directory: Path, max_length: int) -> None:
        """Write a folder that transformers.AutoTokenizer opens."""
        directory.mkdir(parents=True, exist_ok=True)
        if self.owner is not None:
            self.owner.tokenizer.save_pretrained(directory)
            return
        self.tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.end_of_text,
            "pad_token": self.end_of_text,
            "model_max_length": max_length,
            "clean_up_tokenization_spaces": False,
        }
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def train_vocabulary(texts: Iterator[str], size: int) -> Vocabulary:
    """Train a byte-level BPE tokenizer, which decodes any encoded text to the same text."""
    smallest = len(pre_tokenizers.ByteLevel.alphabet()) + 1
    if size < smallest:
        raise ValueError(f"the vocabulary must have at least {smallest} tokens, got {size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[AddedToken(END_OF_TEXT, special=True, normalized=False)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Vocabulary(tokenizer)


def vocabulary_of(model: str | Path) -> Vocabulary:
    """The vocabulary of a model, for another one that shall draft for it.

    Args:
      model: its directory or hub id.

    Raises ValueError if it has no tokenizer.json, or no token that ends a text.
    """
    directory = resolve_directory(model)
    tokenizer = load_tokenizer(directory)
    end = tokenizer.eos_token
    if not isinstance(end, str):
        raise ValueError(f"the tokenizer of {model} names no eos_token to end documents with")
    owner = Owner(str(model), tokenizer, load_model_config(directory).vocab_size)
    copy = Tokenizer.from_str(tokenizer_json(tokenizer))
    copy.no_truncation()
    copy.no_padding()
    return Vocabulary(copy, end, owner)


def _batches(texts: Sequence[str]) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= ENCODE_BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
