"""The checkpoint that is quantized: what it holds, and one layer of it at a time."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxspec.checkpoints.checkpoint_files import (
    canonical_tensors,
    quantization_of,
    scan,
)
from jaxspec.checkpoints.eagle import head_method
from jaxspec.checkpoints.formats.to_linear import as_stored
from jaxspec.checkpoints.fused_experts import unfused
from jaxspec.checkpoints.safetensors_io import check_tensors, load_tree, placements
from jaxspec.checkpoints.tied_head import HEAD, with_stored_head
from jaxspec.config.mixers import AttentionConfig
from jaxspec.config.mlps import experts_of
from jaxspec.config.model import ModelConfig
from jaxspec.models.decoder import Decoder, decoder_shapes
from jaxspec.models.from_config.block_layouts import says_block
from jaxspec.models.from_config.model import load_model_config, text_family
from jaxspec.models.json.mtp_names import mtp_tensors
from jaxspec.models.json.values import read_json
from jaxspec.models.layer import Layer
from jaxspec.models.tensors import CheckpointTensor, choosing, splitting, tensor_shapes
from jaxspec.parallel import ONE_SHARD
from jaxspec.quantize.layers import FLOAT32, LayerKind

LAYERS = "model.layers."
PROJECTIONS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc"),
)


@dataclasses.dataclass(frozen=True)
class Unit:
    """Projections that are quantized together and saved together.

    ``prefix``: of the names of its tensors in the checkpoint; ``projections`` come after it.
    """

    prefix: str
    projections: tuple[str, ...]


class Checkpoint:
    """A language model's directory, or a draft head's. It must not be quantized.

    Attributes:
      raw: the contents of config.json, which say that an LM head of other values is not tied.
      config: of a language model; None for a draft head.

    Raises ValueError for anything else.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.raw = read_json(directory / "config.json")
        if says_block(self.raw):
            raise ValueError(f"{directory} is a block drafter, which is not quantized")
        if "vision_config" in self.raw:
            raise ValueError(f"{directory} is a model of text and images, which is not quantized")
        family = text_family(self.raw)
        if family is not None and family.renames:
            raise ValueError(
                f"{directory} has tensors of other names than Llama's: its family is not quantized"
            )
        self.stored = scan(directory)
        if any(tensor.file.suffix == ".gguf" for tensor in self.stored.values()):
            raise ValueError(
                f"{directory} leads to a GGUF file: take the checkpoint in safetensors"
            )
        if quantization_of(directory, self.stored) is not None:
            raise ValueError(f"{directory} is quantized already: take the original checkpoint")
        self.config = None
        if head_method(directory) is None:
            config = load_model_config(directory)
            self.config = with_stored_head(config, self.stored, directory)
            if self.config != config:  # readers of what is written need not compare
                self.raw["tie_word_embeddings"] = False
        layers = () if self.config is None else self.config.layers
        if any(experts_of(layer.mlp) for layer in layers):
            raise ValueError(f"{directory} has experts, which are not quantized")
        mixers = [layer.mixer for layer in layers]
        if any(not isinstance(mixer, AttentionConfig) or mixer.gate for mixer in mixers):
            raise ValueError(
                f"{directory} has recurrent layers, or attention that is gated or over latents, "
                "which are not quantized"
            )

    def units(self, *, lm_head: bool) -> list[Unit]:
        """What is quantized, in the order of the forward pass: layers, then the LM head; or all of
        a draft head.

        Raises ValueError for an LM head that the checkpoint does not have.
        """
        tied = self.config is not None and self.config.tie_word_embeddings
        if lm_head and (tied or HEAD not in self.stored):
            raise ValueError(f"{self.directory} has no lm_head.weight of its own: no --lm-head")
        head = [Unit("", ("lm_head",))] if lm_head else []
        if self.config is None:
            names = (name.removesuffix(".weight") for name in sorted(self.stored))
            projections = tuple(name for name in names if name.split(".")[-1] in PROJECTIONS)
            return [Unit("", projections), *head]
        layers = enumerate(layer_kinds(self.config))
        return [Unit(f"{LAYERS}{i}.", tuple(kind.names())) for i, kind in layers] + head

    def tensors(self, unit: Unit) -> dict[str, Array]:
        """A unit's tensors as they are stored, by their names after its prefix.

        Of a layer these are all that it has. Raises ValueError for tensors that do not fit.
        """
        if not unit.prefix:
            return {
                f"{name}.weight": jnp.asarray(self.stored[f"{name}.weight"].read())
                for name in unit.projections
            }
        assert self.config is not None
        kind = layer_kinds(self.config)[int(unit.prefix.split(".")[-2])]
        stored = {name: x for name, x in self.stored.items() if name.startswith(unit.prefix)}
        shape = kind.shape()
        splits = shape.mapped(unit.prefix, splitting().with_norms(kind.norm_offset))
        pairs = zip(jax.tree.leaves(shape), jax.tree.leaves(splits), strict=True)
        expected = tensor_shapes(pairs)
        check_tensors(stored, expected)
        return {
            name.removeprefix(unit.prefix): jnp.asarray(stored[name].read()) for name in expected
        }

    def embedding(self) -> np.ndarray:
        """The table of embeddings [V, H], as layers read it."""
        table = self.stored["model.embed_tokens.weight"].read()
        scale = 1.0 if self.config is None else self.config.embed_scale
        return table if scale == 1 else table.astype(np.float32) * np.float32(scale)

    def shapes(self, units: list[Unit]) -> dict[str, tuple[int, ...]]:
        """[out, in] of all projections of some units, by their whole names."""
        names = [f"{unit.prefix}{name}" for unit in units for name in unit.projections]
        return {name: self.stored[f"{name}.weight"].shape for name in names}

    def fingerprint(self) -> str:
        """Changes with the config and the sizes of files; contents are not read."""
        parts = [json.dumps(self.raw, sort_keys=True)]
        parts += [f"{tensor}" for tensor in sorted(map(_described, self.stored.values()))]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _described(tensor: CheckpointTensor) -> tuple[Any, ...]:
    status = tensor.file.stat()
    return tensor.name, tensor.shape, tensor.dtype, status.st_size, status.st_mtime_ns


def layer_kinds(config: ModelConfig) -> list[LayerKind]:
    """What the layers of a model are; those that are alike are equal, and share programs."""
    shared = config.hidden_size, config.rms_norm_eps, config.norm_offset
    return [LayerKind(layer, *shared) for layer in config.layers]


class Streamed:
    """A language model's weights in float32, quantized or not, of one layer at a time."""

    def __init__(self, directory: Path):
        stored = canonical_tensors(directory)
        self.config = with_stored_head(load_model_config(directory), stored, directory)
        stored = unfused(stored, self.config)
        others = mtp_tensors(self.config, stored)
        self._stored = {name: tensor for name, tensor in stored.items() if name not in others}
        self._kind = as_stored(self._stored, ONE_SHARD)

    def layer(self, index: int) -> Layer:
        """A layer on the default device, in the format that the checkpoint has."""
        prefix = f"{LAYERS}{index}."
        stored = {name: x for name, x in self._stored.items() if name.startswith(prefix)}
        shapes = layer_kinds(self.config)[index].shape().mapped(prefix, choosing(self._kind))
        splits = splitting().with_norms(self.config.norm_offset)
        return self._load(stored, shapes, shapes.mapped(prefix, splits))

    def ends(self) -> Decoder:
        """The embeddings, the last norm and the LM head: a decoder without layers."""
        rest = {n: tensor for n, tensor in self._stored.items() if not n.startswith(LAYERS)}
        if self.config.tie_word_embeddings:
            rest.pop(HEAD, None)  # a copy of the embeddings
        shapes = decoder_shapes(self.config, FLOAT32).replace(layers=())
        shapes = shapes.mapped(choosing(self._kind))
        return self._load(rest, shapes, shapes.mapped(splitting(self.config.vocab_size)))

    def _load(self, stored: dict[str, CheckpointTensor], shapes: Any, splits: Any) -> Any:
        return load_tree(stored, shapes, splits, placements(shapes, None))
