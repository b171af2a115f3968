"""The letters that byte-level tokenizers write for bytes, as GPT-2's does."""


def _letters() -> tuple[str, ...]:
    """Printable characters of Latin-1 stand for themselves, and those from U+0100 on for the other
    bytes, in their order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return tuple(chr(byte if byte in printable else next(others)) for byte in range(256))


LETTERS = _letters()  # of each byte
