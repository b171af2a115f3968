"""Parts of answers: what chats, responses and messages are written from."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Part:
    """A piece of an answer: reasoning, text, or of the call ``call`` its name or more of its
    arguments.

    Attributes:
      call: the number of the call in the answer; None: the piece is reasoning or text.
      name: of the tool, in the first part of a call.
      id: there, what the model calls the call by; None: any name will do.
    """

    text: str = ""
    call: int | None = None
    name: str | None = None
    reasoning: bool = False
    id: str | None = None
