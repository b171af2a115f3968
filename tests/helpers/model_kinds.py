"""Small models that use each kernel also where four devices share them, as checkpoints on disk."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxspec.checkpoints.load import load
from jaxspec.checkpoints.safetensors_io import save_tree
from jaxspec.config.recurrent import GatedDeltaConfig
from jaxspec.config.speculation import SpeculationConfig
from jaxspec.functional import EngineParams
from jaxspec.models.decoder import Decoder
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.tensors import splitting
from jaxspec.parallel import make_mesh
from tests.helpers import four_bit_checkpoints as four_bits
from tests.helpers.quantized_checkpoints import FORMATS, quantize_checkpoint
from tests.helpers.random_experts import random_expert_target

# A quarter of each width is what the kernels take: heads of 128, rows of a multiple of 256.
SIZES: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": None,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
LATENT = {  # eight heads on each of four devices
    "model_type": "deepseek_v3",
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 4,
    "topk_group": 2,
}
RECURRENT = {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}


FORMS = MappingProxyType({**FORMATS, "nvfp4": four_bits.nvfp4()})


@dataclasses.dataclass(frozen=True)
class ModelKind:
    """A random model of one or two layers, and how it is stored and loaded.

    Attributes:
      config: changes of SIZES, as in config.json.
      form: the name of a file format of quantized weights (see FORMS).
      kv_dtype: of the caches, see ``load``.
      kernels: the names of kernels, as programs call them, that only such a model uses.
      close: bound of the differences of log-probabilities between one device and several, which
        round other partial sums. Inputs of 8 bits are rounded by the largest of each device's part;
        a router may choose another expert in a near tie.
      close_on_average: bound of their mean.
    """

    kernels: frozenset[str]
    config: Mapping[str, Any] = MappingProxyType({})
    form: str | None = None
    kv_dtype: str | None = None
    close: float = 0.1
    close_on_average: float = 0.03

    def save(self, folder: Path) -> Path:
        """Writes the checkpoint; returns its directory."""
        raw = {**SIZES, **self.config}
        model = _forgetting_slowly(random_expert_target(parse_model_config(raw)))
        save_tree(folder / "float32", model, model.mapped(splitting()), raw)
        if self.form is None:
            return folder / "float32"
        return quantize_checkpoint(folder / "float32", folder, FORMS[self.form])[0]

    def load(self, directory: Path, devices: int, kernels: str) -> EngineParams:
        """The saved model over so many devices (--tp), in bfloat16, with n-gram lookup."""
        return load(
            directory,
            "ngram",
            speculation=SpeculationConfig.chain(3),
            dtype="bfloat16",
            mesh=None if devices == 1 else make_mesh(devices),
            kv_dtype=self.kv_dtype,
            kernels=kernels,
        )


def _forgetting_slowly(target: Decoder) -> Decoder:
    """Random recurrences would forget each token at once."""

    def changed(layer: Any) -> Any:
        mixer = layer.mixer
        if not isinstance(mixer.config, GatedDeltaConfig):
            return layer
        return layer.replace(mixer=mixer.replace(a_log=mixer.a_log - 2))

    return target.replace(layers=tuple(map(changed, target.layers)))


KINDS: Mapping[str, ModelKind] = MappingProxyType(
    {
        "w4a16": ModelKind(frozenset({"packed_product"}), form="compressed"),
        "nvfp4": ModelKind(frozenset({"packed_expert_product"}), form="nvfp4"),
        "fp8": ModelKind(
            frozenset({"packed_product", "round_tokens"}),
            form="float8",
            close=0.4,
            close_on_average=0.1,
        ),
        "fp8 pages": ModelKind(frozenset({"paged_attention"}), kv_dtype="fp8"),
        "latent": ModelKind(frozenset({"latent_attention"}), LATENT),
        "experts": ModelKind(frozenset({"expert_product"}), EXPERTS, close=0.5),
        "recurrent": ModelKind(frozenset({"delta_read", "delta_commit", "delta_run"}), RECURRENT),
    }
)
