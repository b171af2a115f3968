"""The engine as pure functions, by the name under which programs import them.

``jaxspec.decoding.functional`` explains and lists them.
"""

from jaxspec.decoding import functional
from jaxspec.decoding.functional import *  # noqa: F403 - all of them, as they are listed there

__all__ = []
__all__ += functional.__all__
