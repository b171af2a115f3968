"""Rollouts for Tunix, against a stub of its interface: what its trainer reads, and when."""

import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec import EngineConfig, Lora, SamplingParams, SpeculationConfig, from_nnx
from jaxspec.integrations.rollout_options import RolloutOptions
from jaxspec.integrations.seeds import seeds_of_call
from jaxspec.models.decoder import Decoder
from tests.helpers.compilations import Compilations
from tests.helpers.engines import seal
from tests.helpers.nnx_llama import (
    HEADS,
    HIDDEN,
    THETA,
    VOCAB,
    NnxLlama,
    ScannedLlama,
    write_config,
)
from tests.helpers.nnx_llama import WIDTH as HEAD
from tests.helpers.tunix_stub import (
    BOS,
    EOS,
    PAD,
    LetterTokenizer,
    RolloutConfig,
    compute_per_token_logps,
    stub_modules,
)

MODULE = "jaxspec.integrations.tunix"
WIDTH, NEW, G = 12, 16, 2
CONFIG = RolloutConfig(NEW, temperature=0.7, max_prompt_length=WIDTH, return_logprobs=True)
PROMPTS = [text for text in ("jaxspec", "a") for _ in range(G)]
MESH = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
logps = jax.jit(compute_per_token_logps, static_argnums=0, static_argnames="temperature")


@pytest.fixture(scope="module")
def tunix() -> Iterator[Any]:
    """The module under test, with the stub instead of Tunix."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.split(".")[0] == "tunix"]:
            patch.delitem(sys.modules, name)
        for name, module in stub_modules().items():
            patch.setitem(sys.modules, name, module)
        patch.delitem(sys.modules, MODULE, raising=False)
        yield importlib.import_module(MODULE)
        del sys.modules[MODULE]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its config.json has another theta than the actor, as with Tunix's llama3 and qwen3, and fewer
    tokens, as with its gemma."""
    return write_config(tmp_path_factory.mktemp("actor"), theta=5e5, vocab_size=VOCAB - 3)


def options(folder: Path, **changes: Any) -> RolloutOptions:
    engine = EngineConfig(max_rows=len(PROMPTS))
    shared: dict[str, Any] = {
        "names": "tunix.llama3",
        "engine": engine,
        "warm_up": False,
        "page_size": 4,
    }
    shared |= {"drafter": "ngram", "speculation": SpeculationConfig.chain(2)}
    shared |= {"rope_theta": THETA, "vocab_size": VOCAB} | changes
    return RolloutOptions(folder, **shared)


def make(tunix: Any, actor: nnx.Module, options: RolloutOptions) -> Any:
    """As Tunix's RLCluster does, with arguments by name."""
    given = {"tokenizer": LetterTokenizer(), "mesh": MESH, "rollout_config": CONFIG}
    return tunix.JaxspecRollout(rollout_actor=actor, **given, options=options)


def make_ready(tunix: Any, folder: Path, **changes: Any) -> Any:
    """One with few programs."""
    made = make(tunix, NnxLlama(), options(folder, **changes))
    seal(made.engine, SamplingParams(temperature=1.0, max_tokens=8, logprobs=0), WIDTH)
    return made


@pytest.fixture(scope="module")
def first_calls(tunix: Any, folder: Path) -> Any:
    """A rollout, and its first two calls."""
    made = make_ready(tunix, folder)
    return made, [made.generate(PROMPTS, CONFIG) for _ in range(2)]


@pytest.fixture
def rollout(first_calls: Any) -> Any:
    return first_calls[0]


def completions(output: Any) -> np.ndarray:
    """As GRPOLearner pads them."""
    return np.stack(
        [np.pad(ids, (0, NEW - len(ids)), constant_values=PAD) for ids in output.tokens]
    )


def trainers_logps(actor: NnxLlama, output: Any, temperature: float) -> np.ndarray:
    prompts = output.left_padded_prompt_tokens
    state = nnx.split(actor)
    found = logps(*state, prompts, completions(output), PAD, EOS, temperature=temperature)
    return np.asarray(found)


def check_logps(actor: NnxLlama, output: Any, temperature: float) -> None:
    expected = trainers_logps(actor, output, temperature)
    for row, (ids, found) in enumerate(zip(output.tokens, output.logprobs, strict=True)):
        assert found.shape == ids.shape and found.dtype == np.float32
        np.testing.assert_allclose(found, expected[row, : len(ids)], atol=2e-5)


def test_a_call_gives_what_the_trainer_reads(rollout: Any):
    stops = [EOS, 10, 20, 30, 40, 50]
    output = rollout.generate(PROMPTS, dataclasses.replace(CONFIG, eos_tokens=stops))
    assert output.logits == [] and len(output.text) == len(output.tokens) == len(PROMPTS)
    ids = np.concatenate(output.tokens)
    assert ids.dtype == np.int32 and not np.isin(ids, [PAD, *stops]).any()
    ended = [each for each in rollout.last if each.token_ids[-1] in stops]
    assert ended, "no text has ended: this run tested little"
    assert output.text == [LetterTokenizer().decode(each.tolist()) for each in output.tokens]
    padded = output.left_padded_prompt_tokens
    assert padded.shape == (len(PROMPTS), WIDTH) and padded.dtype == np.int32
    assert padded[G].tolist() == [PAD] * (WIDTH - 2) + [BOS, *LetterTokenizer().encode("a")]


@pytest.mark.parametrize("changes", [{}, {"temperature": 1.0}, {"top_p": 0.8, "top_k": 20}])
def test_log_probabilities_are_those_of_the_trainer(rollout: Any, changes: dict[str, Any]):
    """With the temperature, without what top-k and top-p leave out."""
    config = dataclasses.replace(CONFIG, **changes)
    output = rollout.generate(PROMPTS, config)
    check_logps(NnxLlama(), output, config.temperature)
    again = rollout.get_per_token_logps(
        jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(completions(output))
    )
    expected = trainers_logps(NnxLlama(), output, CONFIG.temperature)
    is_text = completions(output) != PAD
    np.testing.assert_allclose(again, np.where(is_text, expected, 0), atol=2e-5)


def test_pads_inside_of_a_prompt_are_not_seen(rollout: Any):
    """The trainer masks them, wherever they are, as Llama's chats with pad = end of turn have."""
    output = rollout.generate(["jax_spec", "roll__outs"] * G, CONFIG)
    assert (output.left_padded_prompt_tokens[:, -5:] == PAD).any()
    check_logps(NnxLlama(), output, CONFIG.temperature)


def test_samples_of_a_prompt_differ_and_share_its_pages(rollout: Any):
    rollout.engine.forget_texts()
    output = rollout.generate(["rollout_engine"[:11]] * G, CONFIG)
    assert len({ids.tobytes() for ids in output.tokens}) == G
    cached = [each.cached_tokens for each in rollout.last]
    assert cached == [0] + [11] * (G - 1), "all but the last of 12 tokens"


def test_greedy_is_without_top_p_or_at_temperature_0(rollout: Any):
    config = dataclasses.replace(CONFIG, top_p=None)
    output = rollout.generate(PROMPTS, config)
    assert len({ids.tobytes() for ids in output.tokens}) == len(PROMPTS) // G
    check_logps(NnxLlama(), output, CONFIG.temperature)
    cold = rollout.generate(PROMPTS, dataclasses.replace(CONFIG, temperature=0.0))
    assert [ids.tolist() for ids in cold.tokens] == [ids.tolist() for ids in output.tokens]
    check_logps(NnxLlama(), cold, 1.0)


def test_weights_follow_the_actor(rollout: Any, compilations: Compilations):
    """Under the guards of Tunix's sync_weights; nothing is compiled; the arrays may be donated."""
    before = rollout.generate(PROMPTS, CONFIG)
    actor = NnxLlama(seed=1)
    state = nnx.state(actor, (nnx.Param,))
    graph, kept = nnx.split(NnxLlama(seed=1))
    compilations.clear()
    with (
        jax.transfer_guard_device_to_host("disallow_explicit"),
        jax.transfer_guard_host_to_device("disallow_explicit"),
    ):
        rollout.update_params(state, (nnx.Param,))
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    after = rollout.generate(PROMPTS, CONFIG)
    assert not compilations
    assert [each.tolist() for each in after.tokens] != [each.tolist() for each in before.tokens]
    check_logps(nnx.merge(graph, kept), after, CONFIG.temperature)
    assert {each.version for each in rollout.last} == {rollout.engine.version} == {1}
    rollout.update_params(nnx.state(NnxLlama(), nnx.Param))


def test_each_call_has_seeds_of_its_own(first_calls: Any):
    rollout, [first, second] = first_calls
    assert first.text != second.text, "the same noise in each step"
    config = dataclasses.replace(CONFIG, seed=jax.random.key(7))
    seeds = []
    for _ in range(2):
        rollout.generate(PROMPTS, config)
        seeds += [each.sampling.seed for each in rollout.last]
    assert len(set(seeds)) == 2 * len(PROMPTS)


@pytest.mark.slow
def test_texts_depend_on_seed_and_call_and_not_on_the_drafter(
    tunix: Any, folder: Path, first_calls: Any
):
    plain = make_ready(tunix, folder, drafter="none", speculation=None, start_check=False)
    texts = [output.text for output in first_calls[1]]
    assert [plain.generate(PROMPTS, CONFIG).text for _ in range(2)] == texts


def test_an_actor_of_maxtext_is_followed(tunix: Any, rollout: Any, folder: Path):
    """By its paths and layouts, which the start check compares."""
    made = make(tunix, ScannedLlama(), options(folder, names="maxtext.llama3.1"))
    check_same(made.engine.params.target, rollout.engine.params.target)
    made.update_params(nnx.state(ScannedLlama(seed=1), nnx.Param), (nnx.Param,))
    expected = from_nnx(NnxLlama(seed=1), names="tunix.llama3", like=made.engine.params.target)
    check_same(made.engine.params.target, expected)


def check_same(found: Decoder, expected: Decoder) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_lora_weights_come_alone(tunix: Any, folder: Path):
    """As Tunix gives them; the actor's others stay. At the start b is 0."""
    actor: Any = NnxLlama()
    random = np.random.default_rng(3)
    projection = actor.layers[1].attn.q_proj
    for name, shape in (("w_lora_a", (HIDDEN, 4)), ("w_lora_b", (4, HEADS, HEAD))):
        array = random.normal(size=shape) if name == "w_lora_a" else np.zeros(shape)
        setattr(projection, name, nnx.LoRAParam(jnp.asarray(array, jnp.float32)))
    made = make(tunix, actor, options(folder, lora=Lora(alpha=8, rank=4)))
    projection.w_lora_b[...] = jnp.asarray(random.normal(size=(4, HEADS, HEAD)), jnp.float32)
    made.update_params(nnx.state(actor, nnx.LoRAParam), (nnx.LoRAParam,))
    merged = NnxLlama()
    weight = merged.layers[1].attn.q_proj.w  # pyright: ignore
    a, b = projection.w_lora_a[...], projection.w_lora_b[...]
    weight[...] = weight[...] + 8 / 4 * jnp.einsum("dr,rnh->dnh", a, b)
    expected = from_nnx(merged, names="tunix.llama3", like=made.engine.params.target)
    check_same(made.engine.params.target, expected)


@pytest.mark.slow
def test_rollouts_on_the_devices_of_a_trainers_mesh(tunix: Any, folder: Path):
    """The actor is divided as trainers do, the engine by tensor parallelism over its devices."""
    mesh = Mesh(np.array(jax.devices()[2:4]).reshape(2, 1), ("fsdp", "tp"))
    first = NamedSharding(mesh, PartitionSpec("fsdp"))

    def actor(seed: int) -> NnxLlama:
        made = NnxLlama(seed)
        nnx.update(made, jax.device_put(nnx.state(made), first))
        return made

    given = {"tokenizer": LetterTokenizer(), "mesh": mesh, "rollout_config": CONFIG}
    made = tunix.JaxspecRollout(rollout_actor=actor(0), **given, options=options(folder))
    assert made.engine.params.mesh.shape == {"data": 1, "model": 2}
    check_logps(NnxLlama(), made.generate(PROMPTS, CONFIG), CONFIG.temperature)
    state = nnx.state(actor(1), nnx.Param)
    made.update_params(state, (nnx.Param,))
    with (
        jax.transfer_guard_device_to_host("disallow_explicit"),
        jax.transfer_guard_host_to_device("disallow_explicit"),
    ):
        made.update_params(state, (nnx.Param,))
    check_logps(NnxLlama(seed=1), made.generate(PROMPTS, CONFIG), CONFIG.temperature)


def test_seeds():
    rows = seeds_of_call(0, 0, 64)
    assert len(set(rows)) == 64 and rows == seeds_of_call(0, 0, 64)
    key = jax.random.key(7)
    starts = [seeds_of_call(seed, call, 1)[0] for seed in (0, 1, key, 2**31) for call in range(100)]
    assert len(set(starts)) == len(starts)
    legacy = np.asarray(jax.random.key_data(key))
    assert seeds_of_call(key, 3, 2) == seeds_of_call(jnp.asarray(legacy), 3, 2)


def test_what_cannot_be_is_said(tunix: Any, rollout: Any, folder: Path):
    def refuses(message: str, prompts: list[str], config: RolloutConfig, **more: Any) -> None:
        with pytest.raises(ValueError, match=message):
            rollout.generate(prompts, config, **more)

    refuses("prompt 1 has 14 tokens, more than max_prompt_length 12", ["a", "b" * 13], CONFIG)
    refuses(r"prompt 0 ends with the pad token \(0\)", ["jax_"], CONFIG)
    refuses("generate has no option images", ["a"], CONFIG, images=[])
    parallel = dataclasses.replace(CONFIG, tensor_parallel_size=2)
    refuses("tensor_parallel_size: leave it, and give RolloutOptions.mesh", ["a"], parallel)
    longer = dataclasses.replace(CONFIG, max_prompt_length=WIDTH + 1)
    refuses("want 29 tokens, the engine holds 28: give max_length", ["a"], longer)
    with pytest.raises(ValueError, match="tokenizer comes from the trainer"):
        make(tunix, NnxLlama(), options(folder, tokenizer=object()))
    with pytest.raises(ValueError, match="the flax tree does not fit: "):
        make(tunix, NnxLlama(), options(folder, names="tunix.gemma"))


def test_an_actor_that_rotates_otherwise_is_noticed(tunix: Any, folder: Path):
    with pytest.raises(ValueError, match=r"look at the rotary.*RolloutOptions\.rope_theta"):
        make(tunix, NnxLlama(), options(folder, rope_theta=None))


def test_the_model_is_shown_only_where_it_is_asked_for(tunix: Any, rollout: Any, folder: Path):
    """Tunix gives no weights to an engine whose model() has the actor's arrays."""
    assert rollout.model() is None
    actor = NnxLlama()
    assert (
        make(tunix, actor, options(folder, shares_model=True, start_check=False)).model() is actor
    )
    assert (rollout.pad_id(), rollout.eos_id()) == (PAD, EOS)


def test_without_tunix_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "tunix"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setitem(sys.modules, "tunix", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jaxspec-decoding\[tunix\]'"):
        importlib.import_module(MODULE)
