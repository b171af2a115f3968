"""Training data of draft heads: text files and JSONL of texts or chats -> rows of tokens.

Each row has a mask of the tokens that the head is trained to predict ("learned" tokens). A file is
held out by the hash of its name, a JSONL line by the hash of its content. Training a language model
uses the same rule for files, so a head is evaluated on the files that its target has not seen.
"""

import bisect
import collections
import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import jinja2
import numpy as np
import transformers

from jaxspec.training import data

Tokenizer = transformers.PreTrainedTokenizerBase
type Answer = tuple[int, list[int]]  # the length of a prompt, the tokens of it and its answer
TEXTS_A_CALL = 256  # the tokenizer encodes the texts of one call in parallel


@dataclasses.dataclass(frozen=True)
class Examples:
    """Rows of tokens for training a head.

    Attributes:
      tokens: int32 [N, L].
      learned: bool [N, L], the tokens that a head is trained to predict.
      prompt_lens: [N], tokens of each row before the answer; regenerate() continues from there.
      kinds: N names, what sort of text each row is; empty where nobody said. See read_examples.
    """

    tokens: np.ndarray
    learned: np.ndarray
    prompt_lens: np.ndarray
    kinds: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def prompt(self, row: int) -> list[int]:
        """The prompt of a row: at least one token, and short enough for another to follow."""
        count = min(max(1, int(self.prompt_lens[row])), self.tokens.shape[1] - 1)
        return self.tokens[row, :count].tolist()

    def prompts(self) -> list[list[int]]:
        return [self.prompt(row) for row in range(len(self))]

    def take(self, rows: np.ndarray) -> "Examples":
        """The given rows, in the given order."""
        kinds = tuple(self.kinds[row] for row in rows) if self.kinds else ()
        return Examples(self.tokens[rows], self.learned[rows], self.prompt_lens[rows], kinds)

    def spread(self, count: int | None) -> "Examples":
        """At most ``count`` evenly spaced rows; None: all rows."""
        return self if count is None else self.take(spread_rows(len(self), count))

    def shuffled(self) -> "Examples":
        """All rows in a fixed random order, so that the first rows are a random sample."""
        return self.take(np.random.default_rng(0).permutation(len(self)))


def answers_as_rows(answers: Sequence[Answer], length: int) -> Examples:
    """Rows of which the tokens of the answers are learned."""
    marked = ((prompt, ids, np.arange(len(ids)) >= prompt) for prompt, ids in answers)
    return _padded(list(marked), length)


def _padded(rows: Sequence[tuple[int, list[int], np.ndarray]], length: int) -> Examples:
    """Rows of so many tokens, each given as the length of its prompt, its tokens, and which of them
    are learned."""
    tokens = np.zeros((len(rows), length), np.int32)
    learned = np.zeros((len(rows), length), bool)
    for row, (_, ids, marks) in enumerate(rows):
        tokens[row, : len(ids)], learned[row, : len(ids)] = ids, marks
    return Examples(tokens, learned, np.array([prompt for prompt, *_ in rows], int))


def spread_rows(rows: int, count: int) -> np.ndarray:
    """Indices int [min(count, rows)], evenly spaced over ``rows`` and ascending.

    Raises ValueError for a count below 1.
    """
    if count < 1:
        raise ValueError(f"at least 1 row must be taken, got {count}")
    return np.linspace(0, rows - 1, min(count, rows)).astype(int)


@dataclasses.dataclass(frozen=True)
class ExampleReport:
    """Documents (files, or lines of JSONL) read and skipped, and the rows made from them.

    ``skipped`` maps each reason to a number of documents.
    """

    documents: int
    skipped: dict[str, int]
    train_rows: int
    held_out_rows: int
    learned_tokens: int

    def __str__(self) -> str:
        skipped = ", ".join(f"{n} {reason}" for reason, n in sorted(self.skipped.items()))
        return (
            f"{self.documents} documents ({skipped or 'none'} skipped): {self.train_rows} training "
            f"and {self.held_out_rows} held-out rows, {self.learned_tokens:,} tokens to learn"
        )


@dataclasses.dataclass(frozen=True)
class _Document:
    """Tokens of one text or chat, and spans [first, last) of them that are learned."""

    held_out_by: str
    token_ids: list[int]
    learned: list[tuple[int, int]]
    is_chat: bool
    kind: str = ""


def read_examples(
    paths: Iterable[Path],
    tokenizer: Tokenizer,
    length: int,
    *,
    prompt_tokens: int = 64,
    suffixes: tuple[str, ...] = data.DEFAULT_SUFFIXES,
    held_out_fraction: float = data.HELD_OUT_FRACTION,
) -> tuple[Examples, Examples, ExampleReport]:
    """(training, held out, report) of some files and folders.

    A ``.jsonl`` file has one object per line, with ``text`` or ``messages``. Messages are formatted
    by the tokenizer's chat template; each chat is one row, and only the assistant's messages are
    learned. All other text is concatenated and cut into rows of ``length``, and all of it is
    learned. Every row begins with the tokens that the tokenizer puts before a text (``<bos>``).

    The kind of a row is the ``kind`` of its JSONL line; without one, the name of the file or folder
    among ``paths``. A row that holds several texts has that of the text in which its prompt ends.

    Raises ValueError if a path is missing, nothing usable is left for either part, or rows are too
    short for any text.
    """
    documents, skipped = _read_documents(paths, tokenizer, length, suffixes)
    if len(documents) < 2:
        raise ValueError(f"fewer than two usable documents to train on ({_reasons(skipped)})")
    names = [document.held_out_by for document in documents]
    parts = data.split(documents, names, held_out_fraction)
    train, held_out = (_rows(part, length, prompt_tokens, tokenizer) for part in parts)
    if not train.learned.any() or not held_out.learned.any():
        raise ValueError("no token is left to learn from in the training or the held-out part")
    return train, held_out, _report(documents, skipped, held_out, train)


def _report(
    documents: list[_Document],
    skipped: Mapping[str, int],
    held_out: Examples,
    train: Examples | None = None,
) -> ExampleReport:
    return ExampleReport(
        documents=len(documents) + sum(skipped.values()),
        skipped=dict(skipped),
        train_rows=0 if train is None else len(train),
        held_out_rows=len(held_out),
        learned_tokens=0 if train is None else int(train.learned.sum()),
    )


def _reasons(skipped: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in skipped.items()) or "nothing there"


def _read_documents(
    paths: Iterable[Path], tokenizer: Tokenizer, length: int, suffixes: tuple[str, ...]
) -> tuple[list[_Document], Mapping[str, int]]:
    """What can be used, and how much of the rest there is by reason."""
    skipped: collections.Counter[str] = collections.Counter()
    documents: list[_Document] = []
    paths = list(paths)
    lines = [path for path in paths if path.suffix == ".jsonl"]
    folders = [path for path in paths if path.suffix != ".jsonl"]
    if folders:
        texts, _, reasons = data.gather(folders, suffixes)
        skipped.update(reasons)
        for batch in itertools.batched(texts, TEXTS_A_CALL):
            ids = _encode(tokenizer, [text.text for text in batch])
            documents += map(_text_document, (text.name for text in batch), ids)
    for path in lines:
        documents += _read_lines(path, tokenizer, length, skipped)
    return documents, skipped


def held_out_prompts(
    paths: Iterable[Path],
    tokenizer: Tokenizer,
    count: int,
    *,
    prompt_tokens: int,
    max_tokens: int,
    suffixes: tuple[str, ...] = data.DEFAULT_SUFFIXES,
    all_rows: bool = False,
) -> tuple[list[list[int]], list[str], ExampleReport]:
    """(prompts, the kind of each, report). At most ``count`` prompts: the first tokens of evenly
    spaced held-out rows; of a chat, those before its first answer. Chats whose prompts are longer
    than ``prompt_tokens`` are left out, and reported. Kinds: see read_examples.

    The rows have ``prompt_tokens + max_tokens`` tokens. With ``all_rows`` none is left to a
    training: all of them count as held out.

    Raises ValueError as read_examples does, for sizes below 1, and if all prompts are too long.
    """
    if min(count, prompt_tokens, max_tokens) < 1:
        raise ValueError("numbers of prompts and tokens must be at least 1")
    length = prompt_tokens + max_tokens
    if all_rows:
        documents, skipped = _read_documents(paths, tokenizer, length, suffixes)
        if not documents:
            raise ValueError(f"no usable document ({_reasons(skipped)})")
        held_out = _rows(documents, length, prompt_tokens, tokenizer)
        report = _report(documents, skipped, held_out)
    else:
        _, held_out, report = read_examples(
            paths, tokenizer, length, prompt_tokens=prompt_tokens, suffixes=suffixes
        )
    prompts = held_out.prompts()
    pairs = zip(prompts, held_out.kinds, strict=True)
    short = [(prompt, kind) for prompt, kind in pairs if len(prompt) <= prompt_tokens]
    if not short:
        lengths = list(map(len, prompts))
        raise ValueError(
            f"no held-out prompt has at most {prompt_tokens} tokens (--prompt-tokens): those of "
            f"chats end before the first answer, and have {min(lengths)} to {max(lengths)}"
        )
    if len(short) < len(prompts):
        dropped = {"held-out prompts longer than the limit": len(prompts) - len(short)}
        report = dataclasses.replace(report, skipped=report.skipped | dropped)
    chosen = [short[row] for row in spread_rows(len(short), count)]
    return [prompt for prompt, _ in chosen], [kind for _, kind in chosen], report


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    # A special token's name inside a text is encoded as ordinary text.
    encoded = tokenizer(texts, add_special_tokens=False, split_special_tokens=True, verbose=False)
    return encoded["input_ids"]  # pyright: ignore[reportReturnType]


def _text_document(name: str, ids: list[int]) -> _Document:
    kind = name.split("/")[0]  # a file's name begins with that of its folder among the paths
    return _Document(name, ids, [(0, len(ids))], is_chat=False, kind=kind)


def _read_lines(
    path: Path, tokenizer: Tokenizer, length: int, skipped: collections.Counter[str]
) -> Iterator[_Document]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # strings may hold other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not any(line.strip() for line in lines):
        raise ValueError(f"{path} is empty")
    for line in filter(str.strip, lines):
        try:
            content = json.loads(line)
        except json.JSONDecodeError:
            skipped["broken JSON"] += 1
            continue
        document = _line_document(line, content, tokenizer, length)
        if isinstance(document, str):
            skipped[document] += 1
            continue
        kind = content.get("kind")
        named = kind if isinstance(kind, str) and kind else path.stem
        yield dataclasses.replace(document, kind=named)


def _line_document(
    line: str, content: object, tokenizer: Tokenizer, length: int
) -> _Document | str:
    """A document, or the reason to skip the line."""
    if not isinstance(content, dict) or not ({"text", "messages"} & content.keys()):
        return "without text or messages"
    if "messages" not in content:
        text = content["text"]
        if not isinstance(text, str) or not text.strip():
            return "without text or messages"
        return _text_document(line, _encode(tokenizer, [text])[0])
    messages = content["messages"]
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        return "messages that are no list of objects"
    spans = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not spans:
        return "without an assistant turn"
    if tokenizer.chat_template is None:
        raise ValueError("the model's tokenizer has no chat template for messages")
    try:
        return _chat_document(line, messages, spans, tokenizer, length)
    except (jinja2.TemplateError, TypeError):
        return "refused by the chat template"


def _chat_document(
    line: str,
    messages: list[dict[str, str]],
    turns: list[int],
    tokenizer: Tokenizer,
    length: int,
) -> _Document | str:
    """The tokens of a formatted chat, with the assistant's messages as learned spans.

    A message's span is the text that it adds to the formatted messages before it. Messages that the
    template rewrites later (to drop their reasoning, say) are not learned.
    """
    whole = _render(tokenizer, messages, False)
    spans = []
    for turn in turns:
        before = _render(tokenizer, messages[:turn], True)
        after = _render(tokenizer, messages[: turn + 1], False)
        if after.startswith(before) and whole.startswith(after):
            spans.append((len(before), len(after)))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = np.array([start for start, _ in encoded["offset_mapping"]])  # pyright: ignore[reportGeneralTypeIssues]
    learned = [
        (int(np.searchsorted(starts, first)), int(np.searchsorted(starts, last)))
        for first, last in spans
    ]
    learned = [(first, last) for first, last in learned if first < last]
    if not learned:
        return "rewritten by the chat template"
    if learned[0][0] >= length:
        return "a prompt longer than the limit"
    return _Document(line, list(encoded["input_ids"]), learned, is_chat=True)


def _render(tokenizer: Tokenizer, messages: list[dict[str, str]], prompt: bool) -> str:
    if not messages:
        return ""
    return str(
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    )


def _rows(
    documents: list[_Document], length: int, prompt_tokens: int, tokenizer: Tokenizer
) -> Examples:
    end, beginning = tokenizer.eos_token_id, list(tokenizer("")["input_ids"])
    rows: list[tuple[int, list[int], np.ndarray]] = []
    kinds: list[str] = []
    stream: list[int] = []
    begins: list[tuple[int, str]] = []  # of each text in the stream, and its kind
    for document in documents:
        if not document.is_chat:
            begins.append((len(stream), document.kind))
            stream += document.token_ids if end is None else [*document.token_ids, end]
            continue
        kinds.append(document.kind)
        ids = document.token_ids[:length]
        marks = np.zeros(len(ids), bool)
        for first, last in document.learned:
            marks[first:last] = True
        rows.append((min(document.learned[0][0], len(ids)), ids, marks))
    text_tokens = length - len(beginning)
    if text_tokens < 1:
        raise ValueError(
            f"rows of {length} tokens hold no text: their beginning takes {len(beginning)}"
        )
    for start in range(0, len(stream) - 1, text_tokens):
        ids = beginning + stream[start : start + text_tokens]
        marks = np.arange(len(ids)) >= len(beginning)
        prompt = min(prompt_tokens, len(ids))
        rows.append((prompt, ids, marks))
        end_of_prompt = start + max(0, prompt - len(beginning) - 1)
        kinds.append(begins[bisect.bisect(begins, end_of_prompt, key=lambda b: b[0]) - 1][1])
    return dataclasses.replace(_padded(rows, length), kinds=tuple(kinds))


def draft_vocabulary(examples: Examples, vocab_size: int, size: int) -> np.ndarray | None:
    """Ids [size], ascending, of the most frequent learned tokens; None if ``size`` is all.

    Raises ValueError for a size that the vocabulary does not have.
    """
    if not 0 < size <= vocab_size:
        raise ValueError(f"the draft vocabulary must have 1 to {vocab_size} tokens, got {size}")
    if size == vocab_size:
        return None
    counts = np.bincount(examples.tokens[examples.learned], minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def coverage(examples: Examples, token_ids: np.ndarray | None) -> float:
    """Share of the learned tokens that the draft vocabulary has."""
    if token_ids is None:
        return 1.0
    return float(np.isin(examples.tokens[examples.learned], token_ids).mean())
