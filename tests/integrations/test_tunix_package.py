"""The same rollouts in google-tunix itself, where it is installed: GRPO, and its own sampler."""

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

from jaxspec import EngineConfig, SpeculationConfig
from jaxspec.integrations.rollout_options import RolloutOptions
from tests.helpers import nnx_llama, tunix_stub
from tests.helpers.compilations import compilations_meanwhile
from tests.helpers.nnx_llama import THETA, NnxLlama, write_config
from tests.helpers.tunix_stub import EOS, PAD, LetterTokenizer

pytestmark = [
    pytest.mark.slow,
    # Tunix and the libraries that it imports warn of what they will change.
    pytest.mark.filterwarnings("ignore"),
]

PAGE = Path(__file__).parents[2] / "docs/integrations.md"
WIDTH, NEW, G, STEPS = 12, 16, 4, 5
MESH = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
MODULES = {
    "base": "rl.rollout.base_rollout",
    "cluster": "rl.rl_cluster",
    "common": "rl.common",
    "grpo": "rl.grpo.grpo_learner",
    "sampler": "generate.sampler",
    "llama": "models.llama3.model",
    "adapter": "generate.tokenizer_adapter",
}


@pytest.fixture(scope="module")
def tunix() -> Any:
    if importlib.util.find_spec("tunix") is None:
        pytest.skip("google-tunix is not installed: docs/integrations.md says how")
    parts = {name: importlib.import_module(f"tunix.{path}") for name, path in MODULES.items()}
    ours = importlib.import_module("jaxspec.integrations.tunix")
    return SimpleNamespace(**parts, JaxspecRollout=ours.JaxspecRollout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("actor"), theta=5e5)


def new_actor(tunix: Any) -> nnx.Module:
    """Tunix's own class with the weights of the stand-in, whose paths are the same."""
    sizes = {"num_layers": nnx_llama.LAYERS, "vocab_size": nnx_llama.VOCAB}
    sizes |= {"embed_dim": nnx_llama.HIDDEN, "hidden_dim": nnx_llama.INNER}
    sizes |= {"num_heads": nnx_llama.HEADS, "num_kv_heads": nnx_llama.KV_HEADS}
    config = tunix.llama.ModelConfig(
        **sizes, head_dim=nnx_llama.WIDTH, rope_theta=500_000, norm_eps=nnx_llama.EPS
    )
    actor = tunix.llama.Llama3(config, rngs=nnx.Rngs(0))
    new = dict(nnx.to_flat_state(nnx.state(NnxLlama())))
    old = dict(nnx.to_flat_state(nnx.state(actor)))
    assert {path: leaf[...].shape for path, leaf in old.items()} == {
        path: leaf[...].shape for path, leaf in new.items()
    }
    changed = [(path, leaf.replace(new[path][...])) for path, leaf in old.items()]
    nnx.update(actor, nnx.from_flat_state(changed))
    return actor


def options(folder: Path, **changes: Any) -> RolloutOptions:
    engine = EngineConfig(max_rows=2 * G)
    shared: dict[str, Any] = {"names": "tunix.llama3", "engine": engine, "rope_theta": THETA}
    shared |= {"warm_up": False} | changes
    return RolloutOptions(folder, **shared)


def config_of(tunix: Any, **changes: Any) -> Any:
    values = {"max_tokens_to_generate": NEW, "max_prompt_length": WIDTH, "kv_cache_size": 64}
    values |= {"temperature": 1.0, "return_logprobs": True}
    return tunix.base.RolloutConfig(**values | changes)


def make(tunix: Any, actor: nnx.Module, config: Any, options: RolloutOptions) -> Any:
    given = {"tokenizer": LetterTokenizer(), "mesh": MESH, "rollout_config": config}
    return tunix.JaxspecRollout(rollout_actor=actor, **given, options=options)


def test_the_stub_has_the_signatures_of_the_package(tunix: Any):
    stub = dataclasses.fields(tunix_stub.RolloutConfig)
    theirs = {field.name: field.default for field in dataclasses.fields(tunix.base.RolloutConfig)}
    assert {field.name: field.default for field in stub}.items() <= theirs.items()
    names = [field.name for field in dataclasses.fields(tunix.base.RolloutOutput)]
    assert names == [field.name for field in dataclasses.fields(tunix_stub.RolloutOutput)]
    assert tunix.base.BaseRollout.__abstractmethods__ == (
        tunix_stub.BaseRollout.__abstractmethods__
    )
    for name in tunix_stub.BaseRollout.__abstractmethods__:
        found = inspect.signature(getattr(tunix.base.BaseRollout, name)).parameters
        assert [*found] == [*inspect.signature(getattr(tunix_stub.BaseRollout, name)).parameters]
    assert hasattr(tunix.adapter.TokenizerAdapter, "dedup_bos_ids")


def test_greedy_texts_are_those_of_tunix_sampler(tunix: Any, folder: Path):
    actor, config = new_actor(tunix), config_of(tunix)
    rollout = make(tunix, actor, config, options(folder))
    prompts = ["jaxspec", "a", "rollout", "engine"]
    ours = rollout.generate(prompts, dataclasses.replace(config, top_p=None))
    sizes = tunix.sampler.CacheConfig(64, nnx_llama.LAYERS, nnx_llama.KV_HEADS, nnx_llama.WIDTH)
    sampler = tunix.sampler.Sampler(actor, LetterTokenizer(), sizes)
    theirs = sampler(
        prompts,
        max_generation_steps=NEW,
        max_prompt_length=WIDTH,
        temperature=0.0,
        top_p=None,
        return_logprobs=True,
        forbidden_tokens=[PAD],
    )
    assert [each.tolist() for each in ours.tokens] == [list(each) for each in theirs.tokens]
    assert (ours.left_padded_prompt_tokens == theirs.padded_prompt_tokens).all()
    assert ours.text == theirs.text


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_those_of_the_trainer(tunix: Any, folder: Path, temperature: float):
    """Of prompts with pads inside, too; the pad token is banned, and they are those without ban."""
    actor, config = new_actor(tunix), config_of(tunix)
    config = dataclasses.replace(config, temperature=temperature)
    rollout = make(tunix, actor, config, options(folder))
    output = rollout.generate(["jaxspec", "a", "roll__out"], config)
    padded = np.stack([np.pad(ids, (0, NEW - len(ids))) for ids in output.tokens])
    arguments = {"prompt_tokens": jnp.asarray(output.left_padded_prompt_tokens)}
    arguments |= {"completion_tokens": jnp.asarray(padded)}
    expected = tunix.common.compute_per_token_logps(
        *nnx.split(actor), **arguments, pad_id=PAD, eos_id=EOS, temperature=temperature
    )
    again = rollout.get_per_token_logps(*arguments.values())
    for row, ids in enumerate(output.tokens):
        for found in (output.logprobs[row], again[row][: len(ids)]):
            np.testing.assert_allclose(found, expected[row, : len(ids)], atol=2e-5)


def test_lora_weights_of_qwix_are_merged(tunix: Any, folder: Path):
    qwix = pytest.importorskip("qwix")
    alpha, rank = 8.0, 4
    base: Any = new_actor(tunix)
    provider = qwix.LoraProvider(module_path=".*q_proj|.*o_proj|.*up_proj", rank=rank, alpha=alpha)
    actor = qwix.apply_lora_to_model(base, provider, **base.get_model_input())
    config = config_of(tunix)
    rollout = make(tunix, actor, config, options(folder, lora=(alpha, rank)))
    random = np.random.default_rng(0)
    state = nnx.state(actor, nnx.LoRAParam)
    changed = jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape), x.dtype) / 4, state)
    nnx.update(actor, changed)
    rollout.update_params(nnx.state(actor, nnx.LoRAParam), (nnx.LoRAParam,))
    output = rollout.generate(["jaxspec", "a"], config)
    padded = np.stack([np.pad(ids, (0, NEW - len(ids))) for ids in output.tokens])
    expected = tunix.common.compute_per_token_logps(
        *nnx.split(actor),
        prompt_tokens=jnp.asarray(output.left_padded_prompt_tokens),
        completion_tokens=jnp.asarray(padded),
        pad_id=PAD,
        eos_id=EOS,
    )
    for row, ids in enumerate(output.tokens):
        np.testing.assert_allclose(output.logprobs[row], expected[row, : len(ids)], atol=2e-5)


@dataclasses.dataclass
class Watched:
    """Seconds of calls and of changes of weights, and how many programs each compiled."""

    generate: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    sync: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    rewards: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0
    rounds: int = 0

    def watch(self, rollout: Any) -> None:
        """Note what the rollout does, on this object alone."""
        rollout.generate = self._timed(rollout.generate, self.generate, rollout)
        rollout.update_params = self._timed(rollout.update_params, self.sync, None)

    def _timed(self, method: Any, seconds: list[tuple[float, int]], rollout: Any) -> Any:
        @functools.wraps(method)
        def call(*args: Any) -> Any:
            started = time.perf_counter()
            with compilations_meanwhile() as compiled:
                result = method(*args)
            seconds.append((time.perf_counter() - started, len(compiled)))
            for each in [] if rollout is None else rollout.last:
                self.tokens += len(each.token_ids)
                self.rounds += each.statistics.rounds
            return result

        return call

    def reward(self, prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        """The share of letters in the first half of the vocabulary."""
        scores = [
            sum(ord(letter) < 97 + nnx_llama.VOCAB // 2 for letter in text) / max(1, len(text))
            for text in completions
        ]
        self.rewards.append(float(np.mean(scores)))
        return scores


def five_steps(
    tunix: Any, options: RolloutOptions, *, offload: bool = False
) -> tuple[Watched, Any]:
    """GRPO on a new actor; what was seen, and the actor's state at the end."""
    watched = Watched()
    training = tunix.cluster.RLTrainingConfig(
        actor_optimizer=optax.adam(3e-3),
        eval_every_n_steps=1000,
        max_steps=STEPS,
        mini_batch_size=2,
        train_micro_batch_size=2,
    )
    roles = tunix.cluster.Role
    cluster = tunix.cluster.RLCluster(
        actor=new_actor(tunix),
        tokenizer=LetterTokenizer(),
        cluster_config=tunix.cluster.ClusterConfig(
            role_to_mesh={role: MESH for role in (roles.ACTOR, roles.REFERENCE, roles.ROLLOUT)},
            rollout_engine=functools.partial(tunix.JaxspecRollout, options=options),
            rollout_config=config_of(tunix, temperature=0.3),  # n-grams come again
            training_config=training,
            offload_to_cpu=offload,
        ),
    )
    watched.watch(cluster.rollout)
    algorithm = tunix.grpo.GRPOConfig(num_generations=G, num_iterations=1, beta=0.0)
    learner = tunix.grpo.GRPOLearner(
        rl_cluster=cluster, reward_fns=watched.reward, algo_config=algorithm
    )
    assert learner.should_sync_weights != offload
    words = np.array(["jaxspec", "a", "rollouts", "trainer", "tree", "draft", "noise", "seed"] * 2)
    learner.train([{"prompts": words[2 * step : 2 * step + 2]} for step in range(STEPS)])
    changes = cluster.rollout.engine.version
    assert changes == len(watched.sync) == STEPS or (
        offload and STEPS < changes < len(watched.sync)
    )
    return watched, nnx.state(cluster.actor_trainer.model)


def test_grpo_learns_the_same_with_and_without_speculation(
    tunix: Any, folder: Path, capsys: pytest.CaptureFixture[str]
):
    """Bit for bit, as the texts are the same; nothing compiles after the first step."""
    chain = SpeculationConfig.chain(4)
    runs = {
        "plain": five_steps(tunix, options(folder, drafter="none", warm_up=True)),
        "speculative": five_steps(tunix, options(folder, speculation=chain, warm_up=True)),
    }
    (plain, plain_state), (speculative, state) = runs.values()
    with capsys.disabled():
        for name, (seen, _) in runs.items():
            print(f"\n{name}: rewards {[round(reward, 4) for reward in seen.rewards]}")
            print(f"  {seen.tokens} tokens in {seen.rounds} rounds of rows")
            print(f"  rollouts, ms: {[round(1e3 * seconds, 1) for seconds, _ in seen.generate]}")
            print(f"  weight sync, ms: {[round(1e3 * seconds, 1) for seconds, _ in seen.sync]}")
            print(f"  compiled: {[count for _, count in seen.generate + seen.sync]}")
    assert plain.rewards == speculative.rewards and len(set(plain.rewards)) > 1
    for one, other in zip(jax.tree.leaves(plain_state), jax.tree.leaves(state), strict=True):
        assert (np.asarray(one) == np.asarray(other)).all()
    assert speculative.rounds < 0.95 * plain.rounds, "hardly a draft was accepted"
    for seen, _ in runs.values():
        assert [count for _, count in seen.generate[1:] + seen.sync] == [0] * (2 * STEPS - 1)


def test_models_that_tunix_offloads_are_learnt_the_same(tunix: Any, folder: Path):
    """Tunix then gives weights before each call, on the device, and again after it, on the host."""
    kept, _ = five_steps(tunix, options(folder, drafter="none"))
    moved, _ = five_steps(tunix, options(folder, drafter="none", shares_model=True), offload=True)
    assert moved.rewards == kept.rewards


def test_the_example_of_the_page_runs(tunix: Any, folder: Path):
    [example] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    # Smaller than what a reader trains: the names that the page says are there, and fewer tokens.
    example = example.replace("=128", "=16").replace("=64", "=12")
    example = example.replace("max_rows=32", "max_rows=8), warm_up=False, page_size=(16")
    words = np.array(["jaxspec", "a", "rollouts", "tree"])
    prompts = [{"prompts": words[:2]}, {"prompts": words[2:]}]
    given = {"actor": new_actor(tunix), "tokenizer": LetterTokenizer(), "mesh": MESH}
    names: dict[str, Any] = given | {"folder": folder, "prompts": prompts}
    exec(compile(example, PAGE.name, "exec"), names)
    assert names["cluster"].rollout.engine.version == 2
