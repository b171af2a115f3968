"""Loading, saving and recognizing EAGLE heads in their official checkpoint layout."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.checkpoints.checkpoint_files import as_vector, canonical_tensors
from jaxspec.checkpoints.draft_ids import ID_TABLES, id_tables, ids_are_equal, load_head
from jaxspec.checkpoints.formats.widened import matrix_of
from jaxspec.checkpoints.safetensors_io import check_not_quantized, open_checkpoint, save_tree
from jaxspec.checkpoints.tied_head import EMBEDDINGS, warn_of_changed_copies
from jaxspec.config.mlps import DenseConfig
from jaxspec.config.model import LayerConfig, ModelConfig
from jaxspec.models.families.windows import FULL, SLIDING
from jaxspec.models.from_config.eagle_head import (
    eagle_head_config,
    says_head,
    says_parallel,
    with_qkv_bias,
)
from jaxspec.models.from_config.model import read_json, to_hf_config
from jaxspec.models.heads import DraftHead, Eagle3Front, EagleMethod, HeadConfig, head_shapes
from jaxspec.models.json.values import naming, shown_name
from jaxspec.models.quantized.kv_cache import without_kv_scales
from jaxspec.models.tensors import CheckpointTensor, Source, choosing, splitting
from jaxspec.parallel import Shards, mesh_layout

MASK = "mask_hidden"  # see MaskEntry: [1, 1, C] in files


def head_method(directory: str | Path) -> EagleMethod | None:
    """The kind of draft head that a directory holds; None for a language model.

    Raises ValueError for a head of an unsupported kind.
    """
    directory = Path(directory)
    return _method(directory, canonical_tensors(directory), read_json(directory / "config.json"))


def _method(
    directory: Path, stored: Mapping[str, CheckpointTensor], raw: Mapping[str, Any]
) -> EagleMethod | None:
    if _fc(stored) is None:  # every EAGLE head has it, no language model does
        with naming(f"draft head's {directory / 'config.json'}"):
            is_head = says_head(raw)
        if is_head or _looks_like_head(stored):
            names = ", ".join(map(shown_name, sorted(stored)[:3]))
            raise ValueError(
                f"{directory} is not an EAGLE head: it has no fc.weight, though its config.json or "
                f"its tensors ({names}, ...) look like a draft head's"
            )
        return None
    eagle3 = any(name.endswith(".hidden_norm.weight") for name in stored)
    return "eagle3" if eagle3 else "eagle1"


def _fc(stored: Mapping[str, CheckpointTensor]) -> CheckpointTensor | None:
    """The matrix that joins a head's inputs, quantized or not."""
    return matrix_of(stored, "fc")


def _looks_like_head(stored: Mapping[str, CheckpointTensor]) -> bool:
    """Whether these are a head's tensors: a layer without a final norm, or EAGLE-3's midlayer."""
    layer = matrix_of(stored, "layers.0.self_attn.q_proj") is not None
    layer = layer and "norm.weight" not in stored
    return layer or any(name.startswith("midlayer.") for name in stored)


def load_eagle_head(
    directory: str | Path,
    target: ModelConfig,
    dtype: jnp.dtype,
    mesh: Mesh | None = None,
    sharded: bool = False,
    kind: Callable[[Any, Source], Any] | None = None,
) -> DraftHead:
    """Read an EAGLE-3 or EAGLE-1/2 head for a target, onto ``mesh`` or the default device.

    ``sharded`` splits it over the mesh's model axis; otherwise it is replicated.
    ``kind``: see safetensors_io.load_decoder.

    Raises ValueError for a head that does not fit the target, saying what does not fit.
    """
    directory = Path(directory)
    shards = Shards.over(mesh, mesh_layout(mesh, split_model=sharded))
    stored, kind = open_checkpoint(directory, dtype, shards, kind)
    config = _head_config(directory, stored, target)
    if config.mask_token is not None:
        stored = stored | {MASK: as_vector(stored[MASK])}
    shapes = head_shapes(config, target, dtype, shards)
    first_layer = _first_layer(stored)
    shapes = shapes.mapped(first_layer, choosing(kind)).replace(token_ids=shapes.token_ids)
    splits, harmless = shapes.mapped(first_layer, splitting()), {*ID_TABLES}
    return load_head(directory, stored, shapes, splits, mesh, target.vocab_size, harmless)


def check_head_embeddings(directory: str | Path, model: str | Path) -> None:
    """Warn of a head's embeddings that are not those of the target in the directory ``model``."""
    copy = canonical_tensors(directory).get("embed_tokens.weight")
    if copy is not None:
        stored = canonical_tensors(model)
        warn_of_changed_copies({EMBEDDINGS: copy}, stored, are_read=True, stacklevel=2)


def save_eagle_head(head: DraftHead, directory: str | Path, target: ModelConfig) -> None:
    """Write a head as a directory in the official layout: config.json and safetensors. Scales of
    8-bit caches are left out.

    Raises ValueError for a quantized one.
    """
    check_not_quantized(head)
    head = without_kv_scales(head)
    eagle3 = head.method == "eagle3"
    config = _hf_head_config(head, target)
    extra: dict[str, np.ndarray] = {}
    if head.token_ids is not None:
        extra |= id_tables(np.asarray(head.token_ids), target.vocab_size)
    if head.mask is not None:
        extra[MASK] = np.asarray(head.mask.hidden)[None, None]
    head = head.replace(token_ids=None, mask=None)
    splits = head.mapped("midlayer" if eagle3 else "layers.0", splitting())
    save_tree(directory, head, splits, config, extra)


def _head_config(
    directory: Path, stored: Mapping[str, CheckpointTensor], target: ModelConfig
) -> HeadConfig:
    """What config.json and the tensors together say about a head."""
    raw = read_json(directory / "config.json")
    method = _method(directory, stored, raw)
    fc = _fc(stored)
    if method is None or fc is None:
        raise ValueError(f"{directory} is not an EAGLE head: it has no fc.weight")
    with naming(f"draft head's {directory / 'config.json'}"):
        config = eagle_head_config(raw, target, method)
    _check_norms(directory, config, stored)
    config = dataclasses.replace(
        config,
        fc_bias="fc.bias" in stored if raw.get("bias") is None else raw["bias"],
        model=_stored_layers(config.model, stored, raw.get("qkv_bias")),
        has_embeddings="embed_tokens.weight" in stored,
        has_lm_head=any(name.startswith("lm_head.") for name in stored),
        draft_vocab_size=_draft_vocab_size(config, stored, target),
        mask_token=_mask_token(directory, config, stored, says_parallel(raw)),
    )
    _check_shared(directory, config, target)
    hidden = config.model.hidden_size
    width = 2 * hidden
    if method == "eagle3":
        width = target.hidden_size * len(config.capture)
    if fc.shape != (hidden, width):
        source = f"states {config.capture} of the target"
        source = source if method == "eagle3" else "embedding and hidden"
        raise ValueError(
            f"{directory} does not fit the target: {fc.name} is {fc.shape}, "
            f"but {config.method} needs {(hidden, width)} ({source})"
        )
    return config


def _first_layer(stored: Mapping[str, CheckpointTensor]) -> str:
    """What the checkpoint calls layer 0."""
    midlayer = any(name.startswith("midlayer.") for name in stored)
    return "midlayer" if midlayer else "layers.0"


def _stored_layers(
    model: ModelConfig, stored: Mapping[str, CheckpointTensor], qkv_bias: bool | None
) -> ModelConfig:
    """The layers as their tensors are: as many, with those biases and norms. A config.json often
    has the target's. ``qkv_bias``: a key that only heads have; None: it has none."""
    first = _first_layer(stored)
    others = {name.split(".")[1] for name in stored if name.startswith("layers.")} - {"0"}

    def as_stored(layer: LayerConfig) -> LayerConfig:
        mixer = dataclasses.replace(
            layer.attention,
            qkv_bias=f"{first}.self_attn.q_proj.bias" in stored if qkv_bias is None else qkv_bias,
            o_bias=f"{first}.self_attn.o_proj.bias" in stored,
            qk_norm=layer.attention.qk_norm or f"{first}.self_attn.q_norm.weight" in stored,
        )
        assert isinstance(layer.mlp, DenseConfig)
        mlp = dataclasses.replace(layer.mlp, bias=f"{first}.mlp.gate_proj.bias" in stored)
        return dataclasses.replace(layer, mixer=mixer, mlp=mlp)

    layers, count = model.map_layers(as_stored).layers, 1 + len(others)
    if count != len(layers):
        layers = layers[:1] * count
    return dataclasses.replace(model, layers=layers)


def _check_shared(directory: Path, head: HeadConfig, target: ModelConfig) -> None:
    """Raise ValueError for a head that lacks embeddings or an LM head and cannot read the target's:
    of another width, or with a vocabulary of its own."""
    missing = [] if head.has_embeddings else [("embed_tokens.weight", "embeddings are")]
    if head.method == "eagle3" and not head.has_lm_head:
        missing.append(("lm_head.weight", "LM head is"))
        if head.draft_vocab_size is not None:
            raise ValueError(
                f"{directory} has no lm_head.weight, and needs one of its own: it drafts "
                f"{head.draft_vocab_size} of the target's {target.vocab_size} ids"
            )
    hidden = head.model.hidden_size
    for tensor, whose in missing:
        if hidden != target.hidden_size:
            raise ValueError(
                f"{directory} has no {tensor}, and the target's {whose} {target.hidden_size} wide "
                f"where the head needs {hidden}"
            )


def _check_norms(
    directory: Path, config: HeadConfig, stored: Mapping[str, CheckpointTensor]
) -> None:
    """Raise ValueError unless the norms before ``fc`` are those that config.json says."""
    checks = (
        ("fc_norm", config.fc_norm, "fc_norm.0.weight"),
        ("norm_before_fc", config.norm_before_fc, "input_norm.weight"),
    )
    for flag, wanted, tensor in checks:
        if wanted != (tensor in stored):
            raise ValueError(
                f"{directory}: config.json says that {flag} is {'on' if wanted else 'off'}, but "
                f"{'there is no' if wanted else 'there is a'} tensor {tensor}"
            )


def _mask_token(
    directory: Path, config: HeadConfig, stored: Mapping[str, CheckpointTensor], parallel: bool
) -> int | None:
    """The token of a mask, which the tensors say that there is. Raises ValueError if config.json
    does not name it, or says that there is a mask where there is none."""
    if MASK not in stored:
        if parallel:
            raise ValueError(
                f"{directory}: config.json says that the head drafts several tokens at once, but "
                "there is no tensor mask_hidden"
            )
        return None
    if config.mask_token is None:
        raise ValueError(
            f"{directory} has a tensor mask_hidden, and config.json does not say which token "
            "stands for one that is not known: write mask_token_id (SpecForge takes the "
            "tokenizer's mask token, unless its training is told another)"
        )
    return config.mask_token


def _draft_vocab_size(
    config: HeadConfig, stored: Mapping[str, CheckpointTensor], target: ModelConfig
) -> int | None:
    """Size of the draft vocabulary; None when draft ids are the target's ids."""
    size = config.draft_vocab_size or target.vocab_size
    same = ids_are_equal(stored)
    return None if size == target.vocab_size and same else size


def _hf_head_config(head: DraftHead, target: ModelConfig) -> dict[str, Any]:
    # to_hf_config writes a bias on q, k and v but not on o as model_type qwen2. Heads stay llama
    # and have a key for it.
    attention, front = head.config.layers[0].attention, head.front
    llama = head.config.map_layers(lambda layer: with_qkv_bias(layer, attention.o_bias))
    config = to_hf_config(llama) | {
        "architectures": ["LlamaForCausalLM"],
        "torch_dtype": jnp.dtype(head.dtype).name,
        "bias": front.fc.bias is not None,
    }
    if attention.qkv_bias != attention.o_bias:
        config["qkv_bias"] = attention.qkv_bias
    windows = [layer.attention.window for layer in head.config.layers]
    if any(windows):  # a head's file without layer_types has no windows: see eagle_head.py
        config["layer_types"] = [SLIDING if window else FULL for window in windows]
    if isinstance(front, Eagle3Front):
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": None if head.lm_head is None else head.lm_head.out_shape[0],
            "target_hidden_size": target.hidden_size,
            "num_aux_hidden_states": len(head.capture),
            "eagle_aux_hidden_state_layer_ids": list(head.capture),
        }
        options = {
            "fc_norm": bool(front.fc_norms),
            "norm_before_fc": front.input_norm is not None,
            "norm_output": head.recycle_normed,
            "norm_before_residual": front.norm_before_residual,
        }
        config |= {name: True for name, on in options.items() if on}
    if head.mask is not None:
        config |= {"architectures": ["PEagleDraftModel"], "mask_token_id": head.mask.token}
    return config
