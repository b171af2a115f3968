"""Folders of source text -> one array of tokens, with a tokenizer trained on the same text."""

import collections
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
# The pre-tokenization pattern of GPT-4, with two changes: every digit is a token of its own, and
# English contractions are not special (in code an apostrophe usually opens a string).
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

DEFAULT_SUFFIXES = (".py", ".txt", ".md")
PROSE_SUFFIXES = frozenset({".txt", ".md", ".rst"})  # a paragraph may be one line
# Packages installed inside a standard library folder are not part of the standard library.
SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "node_modules", "site-packages"})
GENERATED = re.compile(r"auto(matically)?[- ]?generated|do not edit", re.IGNORECASE)
MAX_FILE_BYTES = 1 << 20
MAX_LINE = 1000  # characters
MAX_MEAN_LINE = 120
MIN_LETTERS = 0.35  # share of the non-blank bytes; tables of numbers and escapes have fewer
BLANKS = b" \t\r\n"
NO_LETTERS = bytes(byte for byte in range(128) if not chr(byte).isalpha())

HELD_OUT_FRACTION = 0.02
ENCODE_BATCH_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class Document:
    """One text file. ``name`` does not depend on where its root folder lies."""

    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class Report:
    """What a corpus was made from: counts of files, of UTF-8 bytes and of tokens.

    ``sources`` maps each root folder to the (files, bytes) kept. ``skipped`` maps each reason for
    skipping a file to the number of files.
    """

    sources: dict[str, tuple[int, int]]
    skipped: dict[str, int]
    files: int
    held_out_files: int
    train_bytes: int
    held_out_bytes: int
    train_tokens: int
    held_out_tokens: int


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Tokens [N] of the training and the held-out files; END_OF_TEXT ends each file.

    The dtype is uint16, or uint32 where the vocabulary needs it.
    """

    train: np.ndarray
    held_out: np.ndarray
    tokenizer: Tokenizer
    report: Report


def list_files(root: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Files under ``root`` with one of ``suffixes``, in a fixed order.

    A root that is a file is listed whatever its suffix. Hidden folders, caches and installed
    packages below the root are left out.
    """
    if root.is_file():
        yield root
        return
    for folder, subfolders, files in os.walk(root):
        kept = (s for s in subfolders if s not in SKIPPED_FOLDERS and not s.startswith("."))
        subfolders[:] = sorted(kept)
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(suffixes))


def reason_to_skip(content: bytes, prose: bool = False) -> str | None:
    """Why a file is not used as training text; None if it is used. Prose may have long lines."""
    if len(content) > MAX_FILE_BYTES:
        return "too large"
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return "not UTF-8"
    if not text.strip() or "\0" in text:
        return "empty or binary"
    lines = text.splitlines()
    if not prose and (max(map(len, lines)) > MAX_LINE or len(text) > MAX_MEAN_LINE * len(lines)):
        return "long lines"
    letters = len(content.translate(None, NO_LETTERS))
    if letters < MIN_LETTERS * len(content.translate(None, BLANKS)):
        return "data table"
    return "generated" if GENERATED.search(text[:1000]) else None


def gather(
    paths: Iterable[Path], suffixes: tuple[str, ...] = DEFAULT_SUFFIXES
) -> tuple[list[Document], dict[str, tuple[int, int]], dict[str, int]]:
    """Read the text files of some folders or files, each distinct content once.

    Returns (documents, {root: (files, bytes)}, {reason: files skipped}).
    Raises ValueError if a path is missing or nothing usable is found.
    """
    documents, sources, skipped, seen = [], {}, collections.Counter(), set()
    for root in paths:
        if not root.exists():
            raise ValueError(f"no such file or folder: {root}")
        files = size = 0
        for path in list_files(root, suffixes):
            try:
                content = path.read_bytes()
            except OSError:
                skipped["unreadable"] += 1
                continue
            digest = hashlib.sha256(content).digest()
            prose = path.suffix in PROSE_SUFFIXES
            reason = "duplicate" if digest in seen else reason_to_skip(content, prose)
            if reason:
                skipped[reason] += 1
                continue
            seen.add(digest)
            name = root.name if path == root else f"{root.name}/{path.relative_to(root).as_posix()}"
            documents.append(Document(name, content.decode()))
            files, size = files + 1, size + len(content)
        sources[str(root)] = (files, size)
    if not documents:
        wanted = " ".join(suffixes)
        counts = ", ".join(f"{n} {reason}" for reason, n in sorted(skipped.items()))
        raise ValueError(
            f"no usable text file ({wanted}) in {' '.join(sources) or 'no folder'}"
            + (f"; skipped: {counts}" if counts else "")
        )
    return documents, sources, dict(skipped)


def split[T](
    documents: Sequence[T], names: Sequence[str], held_out_fraction: float
) -> tuple[list[T], list[T]]:
    """(training, held-out) documents, chosen by the hash of the name; at least one is held out.

    Raises ValueError for fewer than two documents.
    """
    if len(documents) < 2:
        raise ValueError("training needs at least two documents: one of them is held out")
    digests = (hashlib.sha256(name.encode()).digest() for name in names)
    places = [int.from_bytes(digest[:8]) / 2**64 for digest in digests]
    threshold = max(held_out_fraction, min(places))
    placed = list(zip(documents, places, strict=True))
    train = [document for document, place in placed if place > threshold]
    return train, [document for document, place in placed if place <= threshold]


def train_tokenizer(documents: list[Document], vocab_size: int, sample_bytes: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer, which decodes any encoded text to the same text.

    It is trained on about ``sample_bytes`` of the files, picked by the hash of their names.
    """
    smallest = len(pre_tokenizers.ByteLevel.alphabet()) + 1
    if vocab_size < smallest:
        raise ValueError(f"the vocabulary must have at least {smallest} tokens, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # pyright: ignore[reportAttributeAccessIssue]
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(END_OF_TEXT, special=True, normalized=False)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(documents, sample_bytes), trainer)
    return tokenizer


def _sample(documents: list[Document], sample_bytes: int) -> Iterator[str]:
    size = 0
    for document in sorted(documents, key=lambda d: hashlib.sha256(d.name.encode()).digest()):
        if size >= sample_bytes:
            return
        size += len(document.text)
        yield document.text


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Write a folder that transformers.AutoTokenizer opens."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def end_of_text_id(tokenizer: Tokenizer) -> int:
    token = tokenizer.token_to_id(END_OF_TEXT)
    if token is None:
        raise ValueError(f"the tokenizer has no {END_OF_TEXT}")
    return token


def encode(tokenizer: Tokenizer, documents: list[Document]) -> np.ndarray:
    """Tokens [N] of all documents, END_OF_TEXT after each, as uint16 or uint32."""
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    end = np.array([end_of_text_id(tokenizer)], dtype)
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.encode_special_tokens = True  # <|endoftext|> inside a file is ordinary text
    parts = []
    for texts in _batches(documents):
        for encoding in plain.encode_batch_fast(texts):
            parts += [np.asarray(encoding.ids, dtype), end]
    return np.concatenate(parts)


def _batches(documents: list[Document]) -> Iterator[list[str]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document.text)
        size += len(document.text)
        if size >= ENCODE_BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _digest(documents: list[Document], options: dict[str, float]) -> str:
    hasher = hashlib.sha256(json.dumps([WORDS, options]).encode())
    for document in documents:
        for part in (document.name, document.text):
            hasher.update(hashlib.sha256(part.encode()).digest())
    return hasher.hexdigest()


def num_bytes(documents: list[Document]) -> int:
    return sum(len(document.text.encode()) for document in documents)


def build_corpus(
    paths: list[Path],
    cache: Path,
    vocab_size: int,
    *,
    suffixes: tuple[str, ...] = DEFAULT_SUFFIXES,
    held_out_fraction: float = HELD_OUT_FRACTION,
    sample_bytes: int = 32 << 20,
) -> Corpus:
    """Read and split the files, train the tokenizer and encode; or read the result from ``cache``.

    The cache holds train.npy, held_out.npy, tokenizer.json and corpus.json. It is reused while the
    files' contents and the options stay the same.
    """
    documents, sources, skipped = gather(paths, suffixes)
    options = {"vocab": vocab_size, "held_out": held_out_fraction, "sample": sample_bytes}
    digest, manifest = _digest(documents, options), cache / "corpus.json"
    if manifest.exists() and json.loads(manifest.read_text())["digest"] == digest:
        report = Report(**json.loads(manifest.read_text())["report"])
        tokenizer = Tokenizer.from_file(str(cache / "tokenizer.json"))
        return Corpus(
            np.load(cache / "train.npy"), np.load(cache / "held_out.npy"), tokenizer, report
        )
    names = [document.name for document in documents]
    train, held_out = split(documents, names, held_out_fraction)
    tokenizer = train_tokenizer(train, vocab_size, sample_bytes)
    tokens = {"train": encode(tokenizer, train), "held_out": encode(tokenizer, held_out)}
    report = Report(
        sources=sources,
        skipped=skipped,
        files=len(documents),
        held_out_files=len(held_out),
        train_bytes=num_bytes(train),
        held_out_bytes=num_bytes(held_out),
        train_tokens=len(tokens["train"]),
        held_out_tokens=len(tokens["held_out"]),
    )
    cache.mkdir(parents=True, exist_ok=True)
    manifest.unlink(missing_ok=True)  # written again once the new files are complete
    for name, array in tokens.items():
        np.save(cache / f"{name}.npy", array)
    tokenizer.save(str(cache / "tokenizer.json"))
    content = {"digest": digest, "report": dataclasses.asdict(report)}
    manifest.write_text(json.dumps(content, indent=2))
    return Corpus(tokens["train"], tokens["held_out"], tokenizer, report)
