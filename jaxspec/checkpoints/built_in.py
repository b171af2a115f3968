"""Where the model and the draft heads that come with the package are."""

from pathlib import Path
from types import MappingProxyType

_ASSETS = Path(__file__).parents[1] / "assets"
BUILT_IN_MODEL = _ASSETS / "python-lm"
BUILT_IN_HEAD = _ASSETS / "python-lm-eagle3"
_HEADS_BY_NAME = MappingProxyType({"smollm2": _ASSETS / "smollm2-135m-eagle3"})


def head_of(model: str | Path) -> Path | None:
    """The draft head that comes with the package for a model: the built-in one, or a name in
    packaged.PACKAGED."""
    return BUILT_IN_HEAD if is_built_in(model) else _HEADS_BY_NAME.get(str(model))


def is_built_in(model: str | Path, drafter: object = "auto") -> bool:
    """Whether this is the built-in model, with the drafter that it has by default."""
    return drafter == "auto" and Path(model).resolve() == BUILT_IN_MODEL.resolve()
