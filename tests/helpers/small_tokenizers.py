"""Tokenizers of the kinds that published models have, made offline with the tokenizers library."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

TEXTS = [
    "the quick brown fox jumps over the lazy dog and says hello to the world",
    "def read(path): return open(path).read()  # the path of the file",
    "naïve café, déjà vu: the fox says hello, hello",
] * 4


def one_token_a_byte(further: Mapping[str, int] = MappingProxyType({})) -> Tokenizer:
    """No token is longer than a byte but ``further`` ones."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**vocab, **further}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_level(size: int = 320) -> Tokenizer:
    """As GPT-2, Llama 3 and Qwen have it: tokens are bytes, and may end inside a character."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        special_tokens=["<end>", "<begin>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def sentencepiece_like(size: int = 400, byte_fallback: bool = True) -> Tokenizer:
    """As Llama 2's tokenizer.json has it: a word carries the space before it, the decoder drops the
    first one, and what no token covers is spelt in bytes if there are such tokens."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=byte_fallback, fuse_unk=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    alphabet = sorted(set("▁abcdefghijklmnopqrstuvwxyz.,:()#H"))
    spelt = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else []
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        show_progress=False,
        special_tokens=["<unk>", "<s>", "</s>", *spelt],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
    )
    # Trained on words, as SentencePiece does; the published tokenizers have no pre-tokenizer.
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.train_from_iterator(TEXTS, trainer)
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = not token["content"].startswith("<0x")
    content["added_tokens"] = [t for t in content["added_tokens"] if t["special"]]
    content["pre_tokenizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def metaspace(size: int = 400, byte_fallback: bool = True) -> Tokenizer:
    """As newer conversions of SentencePiece have it: the pre-tokenizer puts the first space."""
    tokenizer = sentencepiece_like(size, byte_fallback)
    tokenizer.normalizer = normalizers.Sequence([])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path, **config: Any) -> None:
    """Write tokenizer.json, and tokenizer_config.json with these keys."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


# As Qwen's and Gemma's files have them: true where ``special`` is.
MARKUP = {
    "<|im_start|>": True,
    "<|im_end|>": True,
    "<tool_call>": False,
    "</tool_call>": False,
    "<table>": False,
    "</b>": False,
    "<b>": False,
    "\n\n": False,
}


def with_markup(tokenizer: Tokenizer) -> Tokenizer:
    """The same with MARKUP as added tokens."""
    for text, special in MARKUP.items():
        token = AddedToken(text, normalized=False, special=special)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])
    return tokenizer
