"""Models of text and images, of which the text model is read."""

import dataclasses
from collections.abc import Mapping

from jaxspec.config.model import ModelConfig
from jaxspec.models.families.family import Family, Keys, check_agrees, check_code, check_config_keys
from jaxspec.models.json import keys as hf_keys
from jaxspec.models.json.values import shown

TEXT = "text_config"
# Keys of the whole model that hold for its text model.
SHARED = ("tie_word_embeddings", "eos_token_id")


@dataclasses.dataclass(frozen=True)
class WithImages:
    """A ``model_type`` whose config has that of a text model in ``text_config``.

    Attributes:
      architecture: its class name in transformers.
      texts: by model_type, the families of which the text model may be. The first is meant where
        ``text_config`` does not say.
      published_as: the name of the class in published files, where it is another.
      flat: in old files the text model's keys stand beside the others, without a ``text_config``.
      defaults: what the config has where it does not say otherwise.
      shared: keys beside ``text_config`` that hold for the text model, too.
      agreeing: keys of both that must say the same, as the text model itself computes with its own.
    """

    architecture: str
    texts: Mapping[str, Family]
    published_as: str | None = None
    flat: bool = False
    defaults: Keys = dataclasses.field(default_factory=dict)
    shared: tuple[str, ...] = SHARED
    agreeing: tuple[str, ...] = ()

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names of the classes whose files are read."""
        return self.architecture, *filter(None, [self.published_as])

    def inside(self, raw: Keys) -> str | None:
        """The key of the object that has the text model's config. None: it is the whole file."""
        return None if self.flat and TEXT not in raw else TEXT

    def text_family(self, raw: Keys) -> Family:
        """The family of the text model. Raises ValueError for one that is not supported."""
        given = raw.get(TEXT, {})
        if not isinstance(given, dict):
            raise ValueError(f"{TEXT} must be an object, got {shown(given)}")
        kind = given.get("model_type", next(iter(self.texts)))
        if not isinstance(kind, str) or kind not in self.texts:
            known = " or ".join(repr(name) for name in self.texts)
            raise ValueError(f"{TEXT}: model_type {shown(kind)} is not supported, only {known}")
        return self.texts[kind]

    def model(self, raw: Keys) -> ModelConfig:
        """The ModelConfig of the text model.

        Raises ValueError for one that the decoder would not compute exactly, and for keys beside it
        that matter.
        """
        family, raw = self.text_family(raw), {**self.defaults, **raw}
        check_code(raw.get("auto_map"), self.architectures)
        beside, inside = raw, raw.get(TEXT, {})
        if self.inside(raw) is None:
            beside = {key: value for key, value in raw.items() if key in hf_keys.AROUND_KEYS}
            inside = {key: value for key, value in raw.items() if key not in beside}
        known = hf_keys.AROUND_KEYS | {TEXT, *self.shared}
        check_config_keys(beside, known, hf_keys.FIXED_VALUES, raw["model_type"])
        shared = {key: raw[key] for key in self.shared if raw.get(key) is not None}
        for key in shared.keys() & {*self.agreeing}:
            check_agrees({key: None, **inside}, key, shared[key], f"that beside {TEXT}")
        return family.model({"model_type": next(iter(self.texts)), **inside, **shared})
