"""Rules of a grammar in llguidance's variant of Lark."""

from jaxspec.engine.structured.added_tokens import Markers, lark_string

ANY_TEXT = r"TEXT: /(.|\n)*/"


class Rules:
    """Rules that refer to each other. Equal ones are there once.

    Attributes:
      schemas: the JSON schemas in them, as text.
    """

    def __init__(self, markers: Markers):
        self._markers = markers
        self._names: dict[str, str] = {}
        self.schemas: list[str] = []

    def new(self, body: str, options: str = "") -> str:
        """The name of a rule with this body."""
        return self._names.setdefault(f"{options}: {body}", f"r{len(self._names)}")

    def terminal(self, body: str) -> str:
        """The name of a lexeme."""
        return self._names.setdefault(f": {body}", f"T{len(self._names)}")

    def literal(self, text: str) -> str:
        """The text itself, in the tokens that the model has for its markers."""
        return self._markers.literal(text)

    def json(self, text: str) -> str:
        """JSON of a schema, which is text with llguidance's options."""
        self.schemas.append(text)
        return self.new(f"%json {text}")

    def until(self, text: str) -> str:
        """Any text up to the first place where this one stands, however its tokens spell it."""
        spelled = self.new(f"TEXT {lark_string(text)}", "[lazy]")
        special = self._markers.special_start(text)
        if not special:
            return spelled
        rest = self.literal(text.removeprefix(special))
        return self.new(f"{spelled} | TEXT {self._markers.token(special)} {rest}")

    def lark(self, start: str) -> str:
        """The grammar that begins with this rule."""
        rules = [f"{name}{body}" for body, name in self._names.items()]
        return "\n".join([f"start: {start}", *rules, ANY_TEXT])
