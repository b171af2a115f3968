"""Names of the tensors of checkpoints, as the layers that a config describes have them.

Files differ in prefixes, in what they hold beside the text model, and by family in words inside of
the names.
"""

import re
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxspec.models.families.family import Family
from jaxspec.models.from_config.model import text_family
from jaxspec.models.json.values import naming, shown_name
from jaxspec.models.tensors import CheckpointTensor

# Models of text and images: prefixes of the text model's tensors, and what it has alone in their
# place. The second and third are those of Gemma 3's published files.
TEXT_MODEL = MappingProxyType(
    {
        "model.language_model.": "model.",
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
    }
)
# Prefixes of tensors that read images and sounds, with and without the whole model's prefix.
OF_IMAGES = (
    *("visual.", "vision_tower.", "vision_model.", "vision_encoder."),
    *("multi_modal_projector.", "mm_projector.", "patch_merger.", "vit_large_projector."),
    *("patch_merge_mlp.", "vit.", "perceive."),
    *("embed_vision.", "audio_tower.", "embed_audio.", "vision_embedder."),
)

# Prefixes of the tensors of a model without its LM head, as LlamaModel.save_pretrained names them.
# Some checkpoints have the LM head beside them.
OF_BARE_MODEL = ("embed_tokens.", "layers.", "norm.")
LM_HEAD = "lm_head."
# Every EAGLE head has this projection, no language model does.
OF_PREFIXED_HEAD = "model.fc."


def named(
    stored: Mapping[str, CheckpointTensor], config: Mapping[str, Any], directory: str | Path
) -> dict[str, CheckpointTensor]:
    """The tensors of a model by the names that its layers have for them.

    Of a model of text and images those of the text model, named as if it were alone. Names without
    the prefix ``model.``, as of a model without its LM head, have it; those of a draft head lack
    it. Names of a family's own are replaced. Warns of tensors that are not read, as they are of
    images or of what its family leaves out.

    Raises ValueError for two tensors that are meant to be the same.
    """
    if any(name.startswith(OF_PREFIXED_HEAD) for name in stored):
        return {name.removeprefix("model."): tensor for name, tensor in stored.items()}
    if _is_bare(stored):
        prefixed = {name: name if name.startswith(LM_HEAD) else f"model.{name}" for name in stored}
    else:
        has_images = "vision_config" in config or any(map(_is_of_text_model, stored))
        read = (name for name in stored if not (has_images and _is_of_images(name)))
        prefixed = {name: alone(name) for name in read}
    with naming(str(directory)):
        family = text_family(config)
    if family is not None:
        prefixed = _in_words_of_layers(prefixed, family, config.get("num_hidden_layers"))
    _warn_of_others(stored, prefixed, directory)
    tensors: dict[str, CheckpointTensor] = {}
    for name, new in prefixed.items():
        if new in tensors:
            raise ValueError(
                f"{directory} has {shown_name(name)} and {shown_name(tensors[new].name)}, which "
                "are names of one tensor: remove the one that is not meant"
            )
        tensors[new] = stored[name]
    return tensors


def _is_bare(names: Collection[str]) -> bool:
    """Whether a model's tensors lack the prefix ``model.``. Draft heads have others beside them."""
    whole = "embed_tokens.weight" in names and "norm.weight" in names
    return whole and all(name.startswith((*OF_BARE_MODEL, LM_HEAD)) for name in names)


def _is_of_text_model(name: str) -> bool:
    return name.startswith(tuple(TEXT_MODEL))


def _is_of_images(name: str) -> bool:
    return name.removeprefix("model.").startswith(OF_IMAGES)


def alone(name: str) -> str:
    """The name of a text model's tensor, as if it were alone."""
    for prefix, alone in TEXT_MODEL.items():
        if name.startswith(prefix):
            return alone + name.removeprefix(prefix)
    return name


def _in_words_of_layers(
    names: Mapping[str, str], family: Family, num_layers: Any
) -> dict[str, str]:
    """The same names without those that the family leaves out, with what it renames."""
    patterns = (pattern.replace("{layers}", str(num_layers)) for pattern in family.left_out)
    left_out = [re.compile(pattern) for pattern in patterns]
    return {
        name: renamed(prefixed, family)
        for name, prefixed in names.items()
        if not any(pattern.search(prefixed) for pattern in left_out)
    }


def renamed(name: str, family: Family) -> str:
    """The name of a text model's tensor, in the words of the layers."""
    for pattern, new in family.renames:
        name = re.sub(pattern, new, name)
    return name


def _warn_of_others(
    stored: Mapping[str, CheckpointTensor], read: Collection[str], directory: str | Path
) -> None:
    """One warning of all tensors that are not read, by what their names begin with."""
    others = [name for name in stored if name not in read]
    if others:
        groups = ", ".join(sorted({_group(name) for name in others}))
        warnings.warn(
            f"{directory}: {len(others)} tensors are left out, as texts are written without them: "
            f"{groups}",
            stacklevel=1,  # so that Python shows it once
        )


def _group(name: str) -> str:
    """Its first words, without numbers of layers."""
    words = [word for word in name.split(".") if not word.isdecimal()]
    count = 1 if words[0] != "model" else 4 if words[1:2] == ["layers"] else 2
    return shown_name(".".join(words[:count]) + ".*")
