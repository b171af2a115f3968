"""MTP layers of every layout: transformers' logits, in one pass, in drafting and in training.

transformers reads no checkpoints in the layouts of ERNIE, Hy3, MiMo and Qwen: its MTP layers are
given their tensors, and the hidden states that each family reads.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import Array

from jaxspec import SpeculationConfig, functional, load
from jaxspec.checkpoints.mtp import load_mtp_head
from jaxspec.checkpoints.safetensors_io import load_decoder
from jaxspec.config.mtp import AFTER, AFTER_BEFORE, ALL_MTP_STATES, BEFORE, BEFORE_AFTER, MtpStates
from jaxspec.decoding.sampling import make_sampling
from jaxspec.decoding.state import EngineState
from jaxspec.functional import EngineParams
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.decoder import FINAL_NORM
from jaxspec.models.from_config.model import load_model_config
from jaxspec.training.heads.loss import unroll
from tests.helpers.checkpoints import add_mtp_layer, within_images
from tests.helpers.families import VARIANTS, save_family
from tests.helpers.marks import slow
from tests.helpers.mtp_reference import draft_log_probs, target_states, torch_mtp
from tests.helpers.parity import paged_head_logits
from tests.helpers.programs import FAST_COMPILE
from tests.helpers.random_models import jit_admit, padded

FLOAT32 = jnp.dtype("float32")
COUNT, PAGE, LENGTH = 3, 5, 64
TOKENS = np.random.default_rng(0).integers(0, 320, (2, 13))
PROMPTS = [np.random.default_rng(seed).integers(0, 257, size) for seed, size in ((1, 23), (2, 4))]
# By name: the model's variant, the layout of its MTP layers, and what these read by default.
BODIES: dict[str, tuple[str, str, MtpStates]] = {
    "deepseek": ("llama-gqa", "deepseek", AFTER),
    "mimo": ("qwen2", "mimo", BEFORE_AFTER),
    "deepseek_v3": ("deepseek_v3", "deepseek", AFTER),
    "deepseek_v3-halves": ("deepseek_v3-halves", "deepseek", AFTER),
    "deepseek_v32": ("deepseek_v32", "deepseek", AFTER),
    "glm4_moe": ("glm4_moe", "deepseek", AFTER),
    "glm4_moe-qk-norm": ("glm4_moe-qk-norm", "deepseek", AFTER),
    "hy_v3": ("hy_v3", "hy3", AFTER),
    "ernie4_5": ("ernie4_5", "ernie", AFTER),
    "ernie4_5_moe": ("ernie4_5_moe", "ernie", AFTER),
    "exaone_moe": ("exaone_moe", "qwen", AFTER),
    "exaone4_5": ("exaone4", "qwen", AFTER),
    "mellum": ("mellum", "qwen", AFTER),
    "qwen3_next": ("qwen3_next", "qwen", AFTER),
    "qwen3_5_text": ("qwen3_5_text", "qwen", AFTER),
    "qwen3_5_text-tied": ("qwen3_5_text-tied", "qwen", AFTER),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """(name, number of MTP layers) -> its directory, transformers' model and MTP layers"""

    @functools.cache
    def make(name: str, count: int = 1) -> tuple[Path, Any, Any]:
        variant, layout, _ = BODIES[name]
        changes = {"first_k_dense_replace": 1} if "halves" in name else {}
        if name == "exaone_moe":  # whose MTP layer has a dense MLP
            changes |= {"mlp_layer_types": ["dense", "sparse", "dense"]}
        if name == "exaone4_5":  # whose first layer has a window, as the last of three
            changes |= {"num_hidden_layers": 3}
        changes |= {"index_topk": 5} if name == "deepseek_v32" else {}  # of up to 13 tokens
        path = save_family(tmp_path_factory.mktemp("mtp"), variant, **changes)
        # Little noise: rounding grows from layer to layer, in transformers' float32 as in ours.
        add_mtp_layer(path, layout, count=count, noise=0.05)
        made = torch_mtp(path, layout, VARIANTS[variant][0], count)
        if name == "exaone4_5":
            within_images(path, name, "Exaone4_5_ForConditionalGeneration")
        return path, *made

    return make


def name_of(case: Any) -> str:
    return case.name if isinstance(case, MtpStates) else str(case)


STATES = [(name, states) for name in ("deepseek", "mimo") for states in ALL_MTP_STATES]
OTHERS = [(name, AFTER) for name in BODIES if name not in ("deepseek", "mimo")]


def cases(*fast: str) -> pytest.MarkDecorator:
    """Of bodies and what they read: all are slow but those of these names, which read AFTER."""
    marked = [
        (name, states) if name in fast and states == AFTER else slow(name, states)
        for name, states in STATES + OTHERS
    ]
    return pytest.mark.parametrize(("name", "states"), marked, ids=name_of)


def from_transformers(model: Any, mtp: Any, states: MtpStates) -> tuple[Any, Any, np.ndarray]:
    """The target's states of TOKENS, the MTP layer's after these, and its logits."""
    ids = torch.from_numpy(TOKENS)
    hidden = target_states(model, ids, normed=states.target_normed)[:, :-1]
    with torch.no_grad():
        positions = torch.arange(ids.shape[1] - 1)[None]
        after = mtp.forward_layer(0, hidden, positions, None, input_ids=ids[:, 1:])
        return hidden, after, model.lm_head(after).numpy()


@cases("deepseek_v3", "qwen3_next")  # layers of glm4_moe, deepseek and mimo have parts of theirs
def test_logits_over_pages_are_those_of_transformers(checkpoint, name: str, states: MtpStates):
    path, model, mtp = checkpoint(name)
    hidden, _, expected = from_transformers(model, mtp, states)
    config = load_model_config(path)
    target = load_decoder(path, config, FLOAT32)
    head = load_mtp_head(path, config, FLOAT32, states=states)
    paged = paged_head_logits(head, target, TOKENS[:, 1:], hidden.numpy(), 3, 4)
    np.testing.assert_allclose(paged, expected, rtol=0, atol=2e-4)


@cases("deepseek", "mimo")
def test_logits_are_those_of_transformers(checkpoint, name: str, states: MtpStates):
    """In one pass, of the target's captured states too."""
    path, model, mtp = checkpoint(name)
    _, after, expected = from_transformers(model, mtp, states)
    config = load_model_config(path)
    target = load_decoder(path, config, FLOAT32)
    head = load_mtp_head(path, config, FLOAT32, states=states)
    assert head.config.layers == (config.layers[:1] if "ernie" in name else config.layers[-1:])
    assert head.capture == ((FINAL_NORM,) if states.target_normed else (config.num_layers,))

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def run(tokens: Array) -> Any:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        none, attend = target.no_states(), dense_causal_attend
        captured = decoder.run(target, tokens, positions, none, attend, head.capture)[2]
        assert captured is not None
        read = tokens[:, 1:], head.hidden(captured[:, :-1]), positions[:, :-1], (None,)
        out = head.run(target, *read, attend)
        return out, head.logits(target, out.normed)

    out, logits = run(jnp.asarray(TOKENS))
    print(f"{name}: {np.abs(logits - expected).max():.1e} of {np.abs(expected).max():.1f}")
    np.testing.assert_allclose(out.normed, after, rtol=0, atol=1e-4)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-4)
    is_normed = np.array_equal(out.hidden, out.normed)
    assert is_normed == states.draft_normed  # what the next draft step reads


def draft_after(
    params: EngineParams, width: int, rounds: int
) -> tuple[list[list[int]], np.ndarray]:
    """Committed tokens and drafted ones of each row, and log-probabilities [B, steps, V] of drafts,
    after so many rounds. Prompts are read in pieces of ``width``."""
    batch = len(PROMPTS)
    lens = np.array([len(prompt) for prompt in PROMPTS])
    sampling = make_sampling(batch, temperature=1.0, seeds=np.arange(batch, dtype=np.uint32))

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def read(state: EngineState) -> EngineState:
        return functional.prefill(params, state, width=width)[0]

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def propose(state: EngineState) -> Any:
        if rounds:
            state, _ = functional.decode(params, state, rounds, max_rounds=rounds)
        return state, params.drafter.propose(params.target, state, params.round_options())[0]

    state = functional.init_state(params, batch, LENGTH, page_size=PAGE)
    prompts = padded(PROMPTS, LENGTH)
    state = jit_admit(params, state, np.arange(batch), prompts, lens, sampling=sampling)
    for _ in range(0, max(lens), width):
        state = read(state)
    state, tree = propose(state)
    lengths = np.asarray(state.rows.context_lens) + 1
    rows, drafted = np.asarray(state.rows.tokens), np.asarray(tree.tokens)[:, 1:].tolist()
    texts = [row[:n].tolist() + more for row, n, more in zip(rows, lengths, drafted, strict=True)]
    return texts, np.log(np.asarray(tree.probs)[:, 1:])


@pytest.mark.parametrize(
    ("name", "states", "count", "width", "rounds"),
    [
        ("deepseek", AFTER, 2, 5, 3),  # two steps; all others have COUNT
        slow("deepseek", AFTER, COUNT, 5, 3),
        slow("deepseek", AFTER, COUNT, 32, 0),
        slow("deepseek", BEFORE, COUNT, 32, 2),
        slow("deepseek", AFTER_BEFORE, COUNT, 7, 3),
        slow("deepseek", AFTER, COUNT, 1, 7),
        slow("mimo", BEFORE_AFTER, 1, 5, 2),
        slow("mimo", BEFORE_AFTER, COUNT, 5, 2),
        slow("mimo", BEFORE_AFTER, COUNT, 32, 0),
        slow("mimo", BEFORE, COUNT, 3, 4),
        slow("mimo", BEFORE, 1, 1, 0),
        slow("mimo", AFTER, COUNT, 7, 2),
        slow("mimo", AFTER, 1, 32, 3),
        slow("mimo", AFTER_BEFORE, 1, 7, 2),
        slow("deepseek_v3", AFTER, 1, 5, 2),
        slow("deepseek_v3", AFTER, 1, 1, 0),  # the prompt read token by token
        slow("deepseek_v3", AFTER, COUNT, 5, 2),  # a layer for each step
        slow("deepseek_v3-halves", AFTER, 1, 32, 3),
        slow("glm4_moe", AFTER, 1, 1, 0),
        slow("glm4_moe", AFTER, COUNT, 5, 2),
        slow("glm4_moe-qk-norm", AFTER, 1, 32, 3),
        slow("exaone_moe", AFTER, 1, 5, 2),
        slow("exaone4_5", AFTER, 1, 5, 2),
        slow("hy_v3", AFTER, 1, 5, 2),
        slow("ernie4_5", AFTER, 1, 5, 2),
        slow("ernie4_5_moe", AFTER, 1, 5, 2),
        slow("mellum", AFTER, 1, 5, 2),
        slow("qwen3_5_text", AFTER, 1, 1, 0),
        slow("qwen3_5_text", AFTER, 1, 7, 3),
        slow("qwen3_next", AFTER, 1, 1, 0),
        slow("qwen3_next", AFTER, 1, 32, 4),
    ],
    ids=name_of,
)
def test_draft_logits_are_those_of_transformers(
    checkpoint, name: str, states: MtpStates, count: int, width: int, rounds: int
):
    """Over pages of five slots, of prompts read in pieces, and after rounds that rejected drafts;
    one layer reads what it wrote itself. Drafts over other states are far from them.

    By default of one layout. Other bodies differ in the layer, whose logits over pages
    the two tests above compare (deepseek_v3, qwen3_next, mimo), and MiMo in what it reads, of which
    test_training_unrolls_the_same_steps compares each step."""
    path, model, mtp = checkpoint(name, count)
    steps = 2 if count == 2 else COUNT
    drafter = "mtp" if states == BODIES[name][2] else f"mtp:{states.name}"
    # With this rule drafts are drawn, and their distributions kept.
    drawn = SpeculationConfig.chain(steps, acceptance="rejection")
    params = load(path, drafter, speculation=drawn, dtype="float32")
    found: Any = params.drafter
    assert len(found.heads) == count
    texts, ours = draft_after(params, width, rounds)

    def distance(of: MtpStates) -> float:
        theirs = [draft_log_probs(model, mtp, text, steps, of) for text in texts]
        return np.abs(ours - np.stack(theirs)).max()

    found_distance = distance(states)
    print(f"{name}, {states.name}, {count}: {found_distance:.1e}")
    assert found_distance < 2e-4
    assert min(distance(other) for other in ALL_MTP_STATES if other != states) > 0.01


@pytest.mark.slow  # by default: drafting, which runs the same steps, above
@pytest.mark.parametrize("states", ALL_MTP_STATES, ids=name_of)
def test_training_unrolls_the_same_steps(checkpoint, states: MtpStates):
    """Step by step, at several places of a row: a layer is trained on what it reads in drafting."""
    path, model, mtp = checkpoint("mimo")
    config = load_model_config(path)
    target = load_decoder(path, config, FLOAT32)
    head = load_mtp_head(path, config, FLOAT32, states=states)

    @functools.partial(jax.jit, compiler_options=FAST_COMPILE)
    def run(tokens: Array) -> list[Array]:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        none, attend = target.no_states(), dense_causal_attend
        captured = decoder.run(target, tokens, positions, none, attend, head.capture)[2]
        assert captured is not None
        steps = unroll(head, target, tokens, captured, COUNT)
        return [jax.nn.log_softmax(head.logits(target, normed)) for _, normed in steps]

    found = run(jnp.asarray(TOKENS))
    for row, ids in enumerate(TOKENS.tolist()):
        for root in (2, 5, len(ids) - COUNT - 1):  # the last token before the drafts
            ours = np.array([found[step][row, root + step] for step in range(COUNT)])
            theirs = draft_log_probs(model, mtp, ids[: root + COUNT + 1], COUNT, states)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
