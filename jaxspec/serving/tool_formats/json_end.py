"""Where a JSON value ends in a text that grows."""

import re

# What matters outside and inside of strings.
MARKS, IN_STRING = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')
NO_WORD = re.compile(r"[^\w.+\-]")  # what ends a number, true, false and null


class JsonEnd:
    """Finds the end of one JSON value, which comes in pieces."""

    def __init__(self):
        self._begun = False  # there was more than white space
        self._depth = 0
        self._in_string = self._escaped = False

    def find(self, piece: str) -> int | None:
        """Where the value ends in this piece, which follows those before; None: not in it."""
        place = 0 if self._begun else len(piece) - len(piece.lstrip())
        self._begun |= place < len(piece)
        if self._escaped and piece:
            place, self._escaped = 1, False
        while place < len(piece):
            if self._in_string:
                place = self._string(piece, place)
            elif not self._depth and (word := NO_WORD.search(piece, place)) is None:
                return None
            elif not self._depth and word and word[0] not in '"{[':
                return word.start()
            else:
                found = MARKS.search(piece, place)
                if found is None:
                    return None
                place = found.end()
                self._in_string = found[0] == '"'
                self._depth += (found[0] in "{[") - (found[0] in "}]")
            if not self._depth and not self._in_string:
                return place
        return None

    def _string(self, piece: str, place: int) -> int:
        """Where the string ends, or goes on after an escape."""
        found = IN_STRING.search(piece, place)
        if found is None:
            return len(piece)
        if found[0] == '"':
            self._in_string = False
        elif found.end() == len(piece):
            self._escaped = True
        else:
            return found.end() + 1
        return found.end()
