# Everything is Any: reading the sources of this package would take most of pyright's time.
from typing import Any

def __getattr__(name: str) -> Any: ...
