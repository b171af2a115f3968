"""Where the model and the draft head that come with the package are."""

from pathlib import Path

_ASSETS = Path(__file__).parents[1] / "assets"
BUILT_IN_MODEL = _ASSETS / "python-lm"
BUILT_IN_HEAD = _ASSETS / "python-lm-eagle3"


def is_built_in(model: str | Path, drafter: object = "auto") -> bool:
    """Whether this is the built-in model, with the drafter that it has by default."""
    return drafter == "auto" and Path(model).resolve() == BUILT_IN_MODEL.resolve()
