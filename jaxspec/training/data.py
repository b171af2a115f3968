"""Folders of source text -> one array of tokens."""

import collections
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from jaxspec.training.vocabulary import WORDS, Vocabulary, train_vocabulary

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
    """Tokens [N] of the training and the held-out files; the vocabulary's end of text ends each.

    The dtype is uint16, or uint32 where the vocabulary needs it.
    """

    train: np.ndarray
    held_out: np.ndarray
    vocabulary: Vocabulary
    report: Report

    @property
    def tokenizer(self) -> Tokenizer:
        return self.vocabulary.tokenizer


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


def _sample(documents: list[Document], sample_bytes: int) -> Iterator[str]:
    """Texts of about ``sample_bytes`` in all, picked by the hash of their names."""
    size = 0
    for document in sorted(documents, key=lambda d: hashlib.sha256(d.name.encode()).digest()):
        if size >= sample_bytes:
            return
        size += len(document.text)
        yield document.text


def _digest(documents: list[Document], options: dict[str, float | str]) -> str:
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
    vocabulary: int | Vocabulary,
    *,
    suffixes: tuple[str, ...] = DEFAULT_SUFFIXES,
    held_out_fraction: float = HELD_OUT_FRACTION,
    sample_bytes: int = 32 << 20,
) -> Corpus:
    """Read, split and encode the files; or read the result from ``cache``.

    The cache holds train.npy, held_out.npy, tokenizer.json and corpus.json. It is reused while the
    files' contents and the options stay the same.

    Args:
      vocabulary: a vocabulary, or the size of one that is trained on the files.
    """
    documents, sources, skipped = gather(paths, suffixes)
    size = vocabulary if isinstance(vocabulary, int) else vocabulary.digest()
    options = {"vocab": size, "held_out": held_out_fraction, "sample": sample_bytes}
    digest, manifest = _digest(documents, options), cache / "corpus.json"
    if manifest.exists() and json.loads(manifest.read_text())["digest"] == digest:
        report = Report(**json.loads(manifest.read_text())["report"])
        if isinstance(vocabulary, int):
            vocabulary = Vocabulary(Tokenizer.from_file(str(cache / "tokenizer.json")))
        train, held_out = (np.load(cache / f"{name}.npy") for name in ("train", "held_out"))
        return Corpus(train, held_out, vocabulary, report)
    names = [document.name for document in documents]
    train, held_out = split(documents, names, held_out_fraction)
    if isinstance(vocabulary, int):
        vocabulary = train_vocabulary(_sample(train, sample_bytes), vocabulary)
    tokens = {
        name: vocabulary.encode([document.text for document in part])
        for name, part in (("train", train), ("held_out", held_out))
    }
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
    vocabulary.tokenizer.save(str(cache / "tokenizer.json"))
    content = {"digest": digest, "report": dataclasses.asdict(report)}
    manifest.write_text(json.dumps(content, indent=2))
    return Corpus(tokens["train"], tokens["held_out"], vocabulary, report)
