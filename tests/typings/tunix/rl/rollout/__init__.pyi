# Everything is Any: the package is installed by those who use it, and by no test.
from typing import Any

def __getattr__(name: str) -> Any: ...
