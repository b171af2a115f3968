"""The tokenizer of a GGUF file, as the files that Hugging Face's libraries read.

Two kinds are read: ``gpt2`` is byte-level BPE, whose words are split by the expression that
``tokenizer.ggml.pre`` names; ``llama`` is BPE of SentencePiece, whose merges are not in the file
and follow from the scores of its pieces.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from jaxspec.checkpoints.gguf.metadata import Metadata

CONTROL, USER_DEFINED = 3, 4  # kinds of tokens
SPACE = "\u2581"
NO_TOKENIZER = "none"  # as llama.cpp's converter calls it

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Each splits what the one before has left whole.
SPLITS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gpt-2": (_GPT2,),
        "smollm": (r"\p{N}", _GPT2),
        "llama-bpe": (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",),
        "qwen2": (rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",),
        "gpt-4o": (_CASED % ((f"{_CONTRACTIONS}?",) * 2) + rf"|\p{{N}}{{1,3}}|{_CASED_REST}",),
        "tekken": (_CASED % ("", "") + rf"|\p{{N}}|{_CASED_REST}",),
    }
)
_SAME = MappingProxyType(
    {
        "llama3": "llama-bpe",
        "llama-v3": "llama-bpe",
        "dbrx": "llama-bpe",  # Phi-4
        "smaug-bpe": "llama-bpe",
        "deepseek-r1-qwen": "qwen2",
        "phi-2": "gpt-2",
    }
)
# A word that is a token is not merged, and without a flag in the file texts begin with a token.
_WHOLE_WORDS_FIRST = frozenset({"llama-bpe", "llama3", "llama-v3", "tekken"})
_NFC = frozenset({"qwen2"})  # text is normalized first
# Spaces after other special tokens of Phi-3 are dropped: its name says so, no field does.
_PHI3_NAMES = ("phi-3", "phi3")
_PHI3_KEEP_SPACES = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def tokenizer_files(metadata: Metadata) -> dict[str, Any]:
    """The contents of tokenizer.json and tokenizer_config.json; none for a file without a
    tokenizer.

    Raises ValueError for a kind of tokenizer that is not supported, and for missing fields.
    """
    kind = metadata.token_field("model", NO_TOKENIZER)
    if kind == NO_TOKENIZER:
        return {}
    if kind not in ("gpt2", "llama"):
        raise ValueError(
            f"tokenizer.ggml.model {kind!r} is not supported; supported are gpt2 and llama: take "
            "the checkpoint in safetensors"
        )
    needed = ("tokens", "merges" if kind == "gpt2" else "scores")
    if missing := [name for name in needed if metadata.token_field(name) is None]:
        raise ValueError(f"fields are missing: tokenizer.ggml.{', tokenizer.ggml.'.join(missing)}")
    tokens = metadata.token_field("tokens")
    pre = metadata.token_field("pre")
    if kind == "gpt2":
        made = _byte_level(metadata)
    else:
        tokens = _pieces(metadata)
        made = _sentencepiece(metadata, tokens)
    _add_whole_tokens(made, metadata, tokens)
    _add_ends(made, metadata, before=kind == "llama" or pre in _WHOLE_WORDS_FIRST)
    return {"tokenizer.json": made.to_str(), "tokenizer_config.json": _config(metadata)}


def _add_whole_tokens(made: Tokenizer, metadata: Metadata, tokens: Sequence[str]) -> None:
    """Tokens that are found in a text before it is split. Runs of spaces are pieces as others are:
    in a text they are not spelled as in the vocabulary."""
    kinds = metadata.token_field("token_type") or [1] * len(tokens)
    name = str(metadata.fields.get("general.name", "")).lower()
    drops = any(part in name for part in _PHI3_NAMES)
    added = [
        AddedToken(
            text,
            normalized=False,
            special=kind == CONTROL,
            rstrip=drops and kind == CONTROL and text not in _PHI3_KEEP_SPACES,
        )
        for text, kind in zip(tokens, kinds, strict=True)
        if kind in (CONTROL, USER_DEFINED) and text.strip(SPACE)
    ]
    made.add_tokens(added)  # one by one it takes seconds


def _config(metadata: Metadata) -> dict[str, Any]:
    tokens = metadata.token_field("tokens")
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: metadata.token_field(f"{key}_token_id") for name, key in names.items()}
    config = {f"{name}_token": tokens[id_] for name, id_ in ids.items() if id_ is not None}
    template = metadata.fields.get("tokenizer.chat_template")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **config,
        **({} if template is None else {"chat_template": template}),
    }


def _byte_level(metadata: Metadata) -> Tokenizer:
    pre = metadata.token_field("pre", "default")
    name = _SAME.get(pre, pre)
    if name not in SPLITS:
        supported = ", ".join([*SPLITS, *_SAME])
        raise ValueError(
            f"tokenizer.ggml.pre {pre!r} is not supported; supported are {supported}: take the "
            "checkpoint in safetensors"
        )
    vocab = {token: id_ for id_, token in enumerate(metadata.token_field("tokens"))}
    merges = [tuple(pair.split(" ")) for pair in metadata.token_field("merges")]
    made = Tokenizer(BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS_FIRST))
    if pre in _NFC:
        made.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in SPLITS[name]]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*splits, level])
    made.decoder = decoders.ByteLevel()
    return made


def _pieces(metadata: Metadata) -> list[str]:
    """The tokens; runs of spaces, which Gemma's files spell as such, as SentencePiece does."""
    tokens = metadata.token_field("tokens")
    return [SPACE * len(text) if text and not text.strip(" ") else text for text in tokens]


def _sentencepiece(metadata: Metadata, tokens: Sequence[str]) -> Tokenizer:
    """Gemma's pieces are merged in the order of their ids, others by their scores."""
    of_gemma = metadata.architecture.startswith("gemma")
    scores = metadata.token_field("scores")
    if of_gemma:
        scores = [-float(id_) for id_ in range(len(tokens))]
    unknown = metadata.token_field("unknown_token_id")
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    made = Tokenizer(
        BPE(
            vocab,
            merges_of(vocab, scores),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = normalizers.Replace(" ", SPACE)
    ends = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.token_field("add_space_prefix", not of_gemma):
        made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        made.decoder = decoders.Sequence([*ends, decoders.Strip(" ", 1, 0)])
    else:
        made.normalizer = spaces
        made.decoder = decoders.Sequence(ends)
    return made


def merges_of(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Pairs of pieces that give a piece, those of the highest scores first."""
    found = []
    for token, id_ in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                found.append((-scores[id_], vocab[left], vocab[right], left, right))
    found.sort(key=lambda pair: pair[:3])
    return [(left, right) for *_, left, right in found]


def _add_ends(made: Tokenizer, metadata: Metadata, *, before: bool) -> None:
    """Put the tokens around every text that the file says. ``before``: what an absent flag of the
    first token means."""
    tokens = metadata.token_field("tokens")
    wanted = {
        "bos": metadata.token_field("add_bos_token", before),
        "eos": metadata.token_field("add_eos_token", False),
    }
    ids = {name: metadata.token_field(f"{name}_token_id") for name in wanted}
    ends = {name: tokens[ids[name]] for name in wanted if wanted[name] and ids[name] is not None}
    if ends:
        parts = [ends.get("bos"), "$A", ends.get("eos")]
        single = " ".join(part for part in parts if part is not None)
        pairs = [(tokens[ids[name]], ids[name]) for name in ends]
        made.post_processor = TemplateProcessing(single=single, special_tokens=pairs)
