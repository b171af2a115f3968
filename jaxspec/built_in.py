"""Where the model and the draft head that come with the package are."""

from pathlib import Path

_ASSETS = Path(__file__).parent / "assets"
BUILT_IN_MODEL = _ASSETS / "python-lm"
BUILT_IN_HEAD = _ASSETS / "python-lm-eagle3"
