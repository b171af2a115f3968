"""Names of drafters that look up: ``ngram``, ``suffix``, ``suffix:65536``; ``ngram+`` another."""

import difflib
import re
from pathlib import Path

from jaxspec.decoding.drafters.base import StatelessDrafter
from jaxspec.decoding.drafters.mixed import MixedDrafter
from jaxspec.decoding.drafters.ngram import NGramDrafter
from jaxspec.decoding.drafters.suffix import SuffixDrafter

MIXED_MATCH = 3  # tokens of the shortest match that is preferred to a head or a model
NAMES = ("auto", "none", "ngram", "suffix", "mtp", "text")  # of all drafters that are no directory
_MIXED = re.compile(r"((?:ngram|suffix(?::[^+/]*)?)\+)(.*)")


def split_mixed(drafter: str | Path) -> tuple[str, str]:
    """``ngram+`` or the like and the drafter after it; "" and the drafter if it is not mixed."""
    found = _MIXED.fullmatch(drafter) if isinstance(drafter, str) else None
    return ("", str(drafter)) if found is None else (found[1], found[2])


def check_name(drafter: str | Path) -> None:
    """Raise ValueError for what is nearly a drafter's name, or no hub id, before a hub is asked."""
    if not isinstance(drafter, str) or (drafter and Path(drafter).expanduser().exists()):
        return
    mixture, last = split_mixed(drafter)
    if last.startswith("text:") and not mixture:
        return
    if mixture and not last:
        return  # load_drafter says what is missing
    first, plus, _ = last.partition("+")  # hub ids have no +
    kind = first.partition(":")[0]
    if kind in NAMES or (not plus and "/" in last):
        return
    near = difflib.get_close_matches(kind.lower(), NAMES, 1)
    if not near and not plus and last and ":" not in last:  # a hub id without an owner
        return
    rest = drafter[len(mixture) + len(kind) :]
    hint = f" Do you mean {mixture}{near[0]}{rest}?" if near else ""
    raise ValueError(
        f"there is no drafter {drafter!r}.{hint} Names are {', '.join(NAMES)}, and ngram+ or "
        "suffix+ before the directory or the hub id, owner/name, of a head or a draft model"
    )


def lookup_drafter(name: str | Path) -> StatelessDrafter | None:
    """The drafter of a lookup's name; None for other names.

    Raises ValueError for a bad number of tokens."""
    if name == "ngram":
        return NGramDrafter()
    kind, colon, past = str(name).partition(":")
    if not isinstance(name, str) or kind != "suffix":
        return None
    if colon and not (past.isascii() and past.isdecimal()):
        raise ValueError(
            f"drafter {name!r}: after suffix: give how many tokens of past outputs it looks up, as "
            "in suffix:65536"
        )
    return SuffixDrafter(past=int(past or 0))


def mixed_lookup(name: str) -> StatelessDrafter:
    """The lookup of ``ngram+`` or the like. Raises ValueError as lookup_drafter does."""
    found = lookup_drafter(name.removesuffix("+"))
    if isinstance(found, SuffixDrafter):
        return found.replace(min_match=MIXED_MATCH)
    return MixedDrafter.lookup
