"""Words that a text must not contain, as sequences of tokens."""

from collections.abc import Iterable

from jaxspec.config.checks import check_unicode
from jaxspec.config.sampling_params import LONGEST_BAD_SEQUENCE
from jaxspec.llm.tokenizer.text import TextTokenizer


def word_sequences(tokenizer: TextTokenizer, words: Iterable[str]) -> list[tuple[int, ...]]:
    """The tokens of each word, as it stands at the beginning of a text and after a space.

    A word can often be spelled in other tokens, too; models seldom do. Raises ValueError for a word
    that is empty, longer than LONGEST_BAD_SEQUENCE tokens, or no valid Unicode.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.strip()
        if not bare:
            raise ValueError("a bad word is empty")
        check_unicode("a bad word", bare)
        for text in (bare, f" {bare}"):
            sequence = tuple(tokenizer.encode(text, special=False))
            if len(sequence) > LONGEST_BAD_SEQUENCE:
                problem = f"{bare!r} has {len(sequence)} tokens, more than {LONGEST_BAD_SEQUENCE}"
                raise ValueError(problem)
            found[sequence] = None
    return list(found)
