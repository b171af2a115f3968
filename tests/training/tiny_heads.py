"""The tiny draft heads, of every method, that the tests of training train."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config.mtp import AFTER, MtpConfig
from jaxspec.models.heads import block_layers
from jaxspec.training.heads.block_init import init_block_head, new_block_config
from jaxspec.training.heads.candidate_loss import block_loss_for
from jaxspec.training.heads.correction_sizes import CorrectionSizes
from jaxspec.training.heads.data import Examples
from jaxspec.training.heads.loss import DraftBatch, LossConfig
from jaxspec.training.heads.run import DraftData, DraftTraining
from jaxspec.training.heads.step import DraftTrainConfig, init_head, init_mtp_layer
from jaxspec.training.schedule import Schedule
from tests.helpers.random_models import random_target, tiny_config

TARGET = random_target(tiny_config(num_layers=3))
CONFIG = TARGET.config
HEAD_CONFIG = tiny_config(num_layers=1)
BLOCKS = ("dflash", "dspark", "dflash2", "lilicorr")
SIZES = {
    "dspark": CorrectionSizes(rank=8),
    "dflash2": CorrectionSizes(rank=8, candidates=6, taps=2),
    "lilicorr": CorrectionSizes(candidates=4, width=16, taps=2),
}
SCHEDULE = Schedule(
    steps=12, steps_per_call=4, seconds_per_call=math.inf, evaluate_every=6, save_every=4
)


def random_examples(rows: int, seed: int) -> Examples:
    tokens = np.random.default_rng(seed).integers(CONFIG.vocab_size, size=(rows, 16))
    learned = np.random.default_rng(seed).random((rows, 16)) < 0.7
    return Examples(tokens.astype(np.int32), learned, np.full(rows, 4))


TRAIN, HELD_OUT = random_examples(40, 1), random_examples(8, 2)
DATA = DraftData(TRAIN, HELD_OUT)


def make_head(method: Any = "eagle3") -> Any:
    if method in BLOCKS:
        layers, sizes = block_layers(CONFIG, 1, 40), SIZES.get(method, CorrectionSizes())
        config = new_block_config(CONFIG, layers, method, block_size=4, mask_token=95, sizes=sizes)
        return init_block_head(TARGET, config)
    if method == "mtp":
        return init_mtp_layer(TARGET, MtpConfig("deepseek", num_layers=1, states=AFTER))
    if method == "eagle1":
        return init_head(TARGET, HEAD_CONFIG, method)
    ids = np.arange(0, CONFIG.vocab_size, 2, dtype=np.int32)
    return init_head(TARGET, HEAD_CONFIG, method, capture=(0, 1, 2), token_ids=ids)


def config_of(method: Any = "eagle3", **changes: Any) -> DraftTrainConfig:
    block = method in BLOCKS
    config = DraftTrainConfig(
        loss=block_loss_for(method, make_head(method).max_depth, 6)
        if block
        else LossConfig.for_method(method, 2),
        batch_size=8,
        learning_rate=1e-2,
        warmup_steps=2,
        compute_dtype="float32",
    )
    return dataclasses.replace(config, **changes)


def batch_of(method: str, learned: np.ndarray = TRAIN.learned[:8]) -> DraftBatch:
    batch = DraftBatch(tokens=jnp.asarray(TRAIN.tokens[:8]), learned=jnp.asarray(learned))
    drawn = config_of(method).loss.drawn(batch, np.random.default_rng(0))
    return jax.tree.map(jnp.asarray, drawn)


def start(
    directory: Path,
    method: str = "eagle3",
    *,
    target: Any = TARGET,
    data: DraftData = DATA,
    resume: bool = False,
    data_parallel: int = 1,
    **changes: Any,
) -> DraftTraining:
    """A run in a folder; ``changes`` are of its DraftTrainConfig."""
    return DraftTraining(
        make_head(method), target, config_of(method, **changes), data, SCHEDULE, directory,
        resume=resume, data_parallel=data_parallel,
    )  # fmt: skip
