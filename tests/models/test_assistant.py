"""Gemma 4's assistants: their steps are those of transformers, and what does not fit is named."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from jaxspec.cache import Geometry, page_slots
from jaxspec.checkpoints.assistant import ORDERING, holds_assistant, load_assistant
from jaxspec.models import decoder
from jaxspec.models.attention import PagedAttend
from jaxspec.models.decoder import Decoder
from jaxspec.models.from_config.assistant import assistant_config
from jaxspec.models.from_config.model import parse_model_config
from jaxspec.models.heads.assistant import Assistant, OrderedConfig
from tests.helpers.checkpoints import changed_copy, save_random_model
from tests.helpers.gemma4_checkpoints import ASSISTANT, DENSE, EXPERTS, SMALL
from tests.helpers.parity import load

LENGTH, PAGE = 24, 5  # of the text, which is longer than the window, and of pages
KEYS: dict[str, Any] = {
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": 64,
    "use_ordered_embeddings": True,
    "num_centroids": 20,
    "centroid_intermediate_top_k": 4,
    "text_config": ASSISTANT,
}
TARGET = parse_model_config(SMALL | {"model_type": "gemma4_text"})
TOKENS = np.random.default_rng(1).integers(3, 320, LENGTH)
STEPS = 3


def text(target: dict[str, Any]) -> dict[str, Any]:
    """The assistant's text_config for a target."""
    shared = ("attention_k_eq_v", "num_global_key_value_heads")
    return ASSISTANT | {"hidden_size": 32} | {key: target[key] for key in shared if key in target}


def theirs(target: Path, assistant: Path) -> tuple[list[np.ndarray], list[int]]:
    """Logits of each step, and its token, after all tokens but the last are read."""
    big = transformers.AutoModelForCausalLM.from_pretrained(target, attn_implementation="eager")
    small = transformers.Gemma4AssistantForCausalLM.from_pretrained(
        assistant, attn_implementation="eager"
    )
    ids = torch.from_numpy(TOKENS)[None]
    logits, tokens = [], [int(TOKENS[-1])]
    with torch.no_grad():
        read = big(ids[:, :-1], return_shared_kv_states=True, output_hidden_states=True)
        hidden = read.hidden_states[-1][:, -1:]
        for _ in range(STEPS):
            embedded = big.get_input_embeddings()(torch.tensor([[tokens[-1]]]))
            out = small(
                inputs_embeds=torch.cat([embedded, hidden], -1),
                position_ids=torch.tensor([[LENGTH - 1]]),
                shared_kv_states=read.shared_kv_states,
                use_cache=False,
            )
            hidden = out.last_hidden_state
            logits.append(out.logits[0, -1].numpy())
            tokens.append(int(logits[-1].argmax()))
    return logits, tokens


def ours(target: Decoder, assistant: Assistant, tokens: list[int]) -> list[np.ndarray]:
    """The same logits, from the target's pages."""
    pages, read = -(-LENGTH // PAGE), LENGTH - 1
    states = target.init_state(Geometry(1 + pages, PAGE, 1)).layers
    table, positions = jnp.arange(1, 1 + pages)[None], jnp.arange(read)[None]

    def attend(context: int, positions: jnp.ndarray) -> PagedAttend:
        valid = jnp.ones_like(positions, bool)
        return PagedAttend(
            rows=jnp.arange(1),
            page_table=table,
            context_lens=jnp.array([context]),
            slots=page_slots(table, positions, valid, PAGE),
            positions=positions,
            kv_lens=jnp.array([read]),
        )

    ids = jnp.asarray(TOKENS[None, :-1])
    normed, states, _ = decoder.run(target, ids, positions, states, attend(0, positions))
    mixers: list[Any] = [target.layers[index].mixer for index in assistant.config.sources]
    lent = tuple(
        mixer.lent(states[index])
        for mixer, index in zip(mixers, assistant.config.sources, strict=True)
    )
    hidden, logits, frozen = normed[:, -1:], [], jnp.array([[read]])
    for token in tokens[:STEPS]:
        hidden, out = assistant.run(
            target, jnp.array([[token]]), hidden, frozen, lent, attend(read, frozen)
        )
        logits.append(np.asarray(assistant.logits(out)[0, 0]))
    return logits


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("sizes", [DENSE, EXPERTS, SMALL], ids=["dense", "experts", "small"])
def test_steps_are_those_of_transformers(tmp_path: Path, sizes: dict[str, Any], ordered: bool):
    big = save_random_model(tmp_path / "target", transformers.Gemma4TextConfig(**sizes))
    keys = KEYS | {"use_ordered_embeddings": ordered, "text_config": text(sizes)}
    config = transformers.Gemma4AssistantConfig(**keys)
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(1)
    model = transformers.Gemma4AssistantForCausalLM(config)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if tensor.ndim == 1 and tensor.is_floating_point() and "inv_freq" not in name:
                tensor.add_(0.3 * torch.randn_like(tensor))
            elif name.endswith(ORDERING):
                tensor.copy_(torch.randperm(len(tensor)))
    small = tmp_path / "assistant"
    model.save_pretrained(small)

    assert holds_assistant(small) and not holds_assistant(big)
    logits, tokens = theirs(big, small)
    target = load(big)
    found = ours(target, load_assistant(small, target.config, jnp.dtype("float32")), tokens)
    for mine, other in zip(found, logits, strict=True):
        scored = np.isfinite(mine)
        assert scored.sum() == (4 * 320 // 20 if ordered else 320)
        np.testing.assert_allclose(mine[scored], other[scored], rtol=0, atol=1e-4)
        assert other[~scored].max(initial=-np.inf) < other[scored].min()

    if ordered:
        twice: dict[str, Any] = {ORDERING: np.zeros(320, np.int64)}
        wrong = changed_copy(small, tmp_path / "wrong", **twice)
        with pytest.raises(ValueError, match="must have each of 320 tokens once"):
            load_assistant(wrong, target.config, jnp.dtype("float32"))
        lacking = changed_copy(small, tmp_path / "lacking", **{ORDERING: None})
        with pytest.raises(ValueError, match="which use_ordered_embeddings needs"):
            load_assistant(lacking, target.config, jnp.dtype("float32"))


def test_layers_read_the_last_layers_with_keys_of_their_kind():
    config = assistant_config(KEYS, TARGET)
    assert config.sources == (2, 2, 3)
    assert [layer.source for layer in config.model.layers] == [None] * 3
    assert config.ordered is not None and config.ordered.chosen == 4


def test_a_published_config_is_read():
    """That of gemma-4-E2B-it-assistant, with the keys and values that a public log of it shows."""
    target = json.loads((Path(__file__).parent / "configs" / "gemma-4-e2b-it.json").read_text())
    ropes = target["text_config"]["rope_parameters"]
    raw = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "audio_token_id": 258881,
        "backbone_hidden_size": 1536,
        "boa_token_id": 256000,
        "boi_token_id": 255999,
        "centroid_intermediate_top_k": 32,
        "dtype": "bfloat16",
        "eoa_token_id": 258883,
        "eoi_token_id": 258882,
        "image_token_id": 258880,
        "model_type": "gemma4_assistant",
        "num_centroids": 2048,
        "text_config": {
            "attention_bias": False,
            "attention_k_eq_v": False,
            "enable_moe_block": False,
            "eos_token_id": 1,
            "final_logit_softcapping": None,
            "global_head_dim": 512,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 256,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": 2048,
            "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "max_position_embeddings": 131072,
            "model_type": "gemma4_text",
            "moe_intermediate_size": None,
            "num_attention_heads": 4,
            "num_experts": None,
            "num_global_key_value_heads": None,
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 4,
            "rms_norm_eps": 1e-06,
            "rope_parameters": ropes,
            "sliding_window": 512,
            "tie_word_embeddings": True,
            "top_k_experts": None,
            "use_bidirectional_attention": None,
            "use_double_wide_mlp": False,
            "vocab_size": 262144,
            "vocab_size_per_layer_input": 0,
        },
        "tie_word_embeddings": True,
        "transformers_version": "5.7.0.dev0",
        "use_ordered_embeddings": True,
    }
    config = assistant_config(raw, parse_model_config(target))
    assert config.sources == (13, 13, 13, 14)
    assert config.ordered == OrderedConfig(2048, 32)
    heads = [layer.mixer and layer.mixer.heads for layer in config.model.layers[2:]]
    assert heads == [f"4 query and 1 KV heads of {width} of another model" for width in (256, 512)]


def test_an_assistant_is_no_model():
    with pytest.raises(ValueError, match="'gemma4_assistant' is a drafter, and no model: give it"):
        parse_model_config(KEYS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backbone_hidden_size": 32}, "backbone_hidden_size 32 is not the target's hidden_size"),
        ({"num_centroids": 19}, "num_centroids 19 must divide vocab_size (320)"),
        ({"centroid_intermediate_top_k": 0}, "centroid_intermediate_top_k must be a positive"),
        ({"use_ordered_embeddings": 1}, "use_ordered_embeddings must be true or false"),
        ({"text_config": None}, "text_config must be an object, got None"),
        ({"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "code of a checkpoint is not run"),
        ({"text_config": ASSISTANT | {"vocab_size": 300}}, "vocab_size 300 is not that of the"),
        (
            {"text_config": ASSISTANT | {"num_kv_shared_layers": 2}},
            "num_kv_shared_layers must be that of all layers (3), got 2",
        ),
        (
            {"text_config": ASSISTANT | {"num_key_value_heads": 4}},
            "layers with a window read 4 KV heads of 16, and the target has 2 of 16",
        ),
        (
            {"text_config": ASSISTANT | {"hidden_size_per_layer_input": 8}},
            "hidden_size_per_layer_input = 8 is not supported, only 0",
        ),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str):
    with pytest.raises(ValueError) as caught:
        assistant_config(KEYS | change, TARGET)
    assert message in str(caught.value) and "\n" not in str(caught.value)
