"""What the files of a checkpoint say about the choice of experts, and config.json does not."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxspec.config.experts import ExpertsConfig
from jaxspec.config.layer import LayerConfig
from jaxspec.config.model import ModelConfig
from jaxspec.models.tensors import CheckpointTensor

CORRECTION = ".e_score_correction_bias"
TABLE = ".gate.tid2eid"  # the experts of each token id


def with_stored_routes(config: ModelConfig, stored: Mapping[str, CheckpointTensor]) -> ModelConfig:
    """The config, in which routers have a correction where the family leaves that to the files.

    Raises ValueError for a table of experts that the model does not have.
    """
    has_correction = any(name.endswith(CORRECTION) for name in stored)

    def changed(layer: LayerConfig) -> LayerConfig:
        mlp = layer.mlp
        if not isinstance(mlp, ExpertsConfig) or mlp.routing.correction is not None:
            return layer
        routing = dataclasses.replace(mlp.routing, correction=has_correction)
        return dataclasses.replace(layer, mlp=dataclasses.replace(mlp, routing=routing))

    _check_tables(config, stored)
    return config.map_layers(changed)


def _check_tables(config: ModelConfig, stored: Mapping[str, CheckpointTensor]) -> None:
    mlps = [layer.mlp for layer in config.layers]
    counts = [mlp.routing.num_experts for mlp in mlps if isinstance(mlp, ExpertsConfig)]
    for name, tensor in stored.items():
        if not counts or not name.endswith(TABLE):
            continue
        table = np.asarray(tensor.read())
        wrong = table[(table < 0) | (table >= min(counts))]
        if wrong.size:
            where, last = f"{tensor.file.name}: {tensor.name}", min(counts) - 1
            raise ValueError(f"{where} has expert {wrong[0]}, and the model's are 0 to {last}")
