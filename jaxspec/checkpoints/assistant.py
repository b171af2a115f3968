"""Loading and recognizing Gemma 4's assistants."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.checkpoints.checkpoint_files import quantization_of, scan
from jaxspec.checkpoints.safetensors_io import load_tree, placements
from jaxspec.config.model import ModelConfig
from jaxspec.models.from_config.assistant import assistant_config, says_assistant
from jaxspec.models.heads.assistant import Assistant, OrderedHead, assistant_shapes
from jaxspec.models.json.values import naming, read_json
from jaxspec.models.tensors import CheckpointTensor, splitting
from jaxspec.parallel import Shards, mesh_layout
from jaxspec.parallel.memory_format import put_weight

ORDERING = "masked_embedding.token_ordering"
_COPY = "lm_head.weight"  # tied to the embeddings


def holds_assistant(directory: str | Path) -> bool:
    """Whether a directory's config.json is an assistant's, supported or not."""
    return says_assistant(read_json(Path(directory) / "config.json"))


def load_assistant(
    directory: str | Path, target: ModelConfig, dtype: jnp.dtype, mesh: Mesh | None = None
) -> Assistant:
    """Read an assistant for a target, cast to ``dtype``, onto ``mesh`` or the default device. On a
    mesh it is split as the target is, whose keys and values it reads.

    Raises ValueError for one that does not fit the target, and for one that is quantized.
    """
    directory = Path(directory)
    stored = scan(directory)
    if quantization_of(directory, stored) is not None:
        raise ValueError(f"{directory} is a quantized assistant, which is not supported")
    with naming(f"assistant's {directory / 'config.json'}"):
        config = assistant_config(read_json(directory / "config.json"), target)
    shapes = assistant_shapes(config, dtype, Shards.over(mesh, mesh_layout(mesh)))
    places, without = placements(shapes, mesh), shapes
    if isinstance(shapes.lm_head, OrderedHead):
        without, places_without = (
            tree.replace(lm_head=tree.lm_head.replace(tokens=None)) for tree in (shapes, places)
        )
    else:
        places_without = places
    splits = shapes.mapped(splitting())
    made = load_tree(stored, without, splits, places_without, {ORDERING, _COPY})
    if config.ordered is None:
        return made
    groups = _groups(directory, stored, config.ordered.num_centroids, config.model.vocab_size)
    tokens = put_weight(groups, places.lm_head.tokens)
    return made.replace(lm_head=made.lm_head.replace(tokens=tokens))


def _groups(
    directory: Path, stored: dict[str, CheckpointTensor], count: int, vocab_size: int
) -> np.ndarray:
    """The tokens of each group: int32 [C, V / C]. Raises ValueError unless each token is in one."""
    tensor = stored.get(ORDERING)
    if tensor is None:
        raise ValueError(f"{directory} lacks {ORDERING}, which use_ordered_embeddings needs")
    order = tensor.read()
    if order.shape != (vocab_size,) or not np.array_equal(np.sort(order), np.arange(vocab_size)):
        raise ValueError(f"{directory}: {ORDERING} must have each of {vocab_size} tokens once")
    return order.astype(np.int32).reshape(count, -1)
