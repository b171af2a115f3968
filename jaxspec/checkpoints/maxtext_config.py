"""What the config of a MaxText model says of its arrays, which these do not show."""

from typing import Any

from flax import nnx

from jaxspec.checkpoints.flax_bridge import Names

PAIRS, HALVES, QWEN = "maxtext.llama3.1", "maxtext.llama", "maxtext.qwen3"


def check_maxtext(names: str | Names, model: nnx.Module) -> None:
    """Raise ValueError if a MaxText model does not compute what the layout called ``names`` says.

    A model without MaxText's config, and a table, are not checked.

    Args:
      model: MaxText's Transformer, or the TunixMaxTextAdapter around one.
    """
    config: Any = getattr(getattr(model, "base", model), "config", None)
    rope_type = getattr(config, "rope_type", None)
    if rope_type is None or not isinstance(names, str) or not names.startswith("maxtext."):
        return
    model_name = str(config.model_name)
    says = f"the actor has rope_type={rope_type.lower()!r} and model_name={model_name!r}"
    if model_name.startswith(PAIRS.removeprefix("maxtext.")) or rope_type.startswith("llama3.1"):
        if names != PAIRS:
            raise ValueError(f"{says}: it rotates pairs of neighbours, give names={PAIRS!r}")
    elif rope_type.lower() != "default":
        raise ValueError(f"{says}: there is no layout for it, only for 'default' and 'llama3.1'")
    elif names == PAIRS:
        fitting = QWEN if model_name.startswith("qwen3") else HALVES
        raise ValueError(f"{says}: it rotates halves, give names={fitting!r}")
    if config.logits_via_embedding and config.normalize_embedding_logits:
        raise ValueError(
            "the actor divides its logits by the root of its width: give MaxText "
            "normalize_embedding_logits=False, as its qwen3 models have it"
        )
