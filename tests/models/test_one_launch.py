"""A layer after its attention in one launch: when, and that its weights are those of the layer."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config.quantization import Scheme
from jaxspec.models import decoder
from jaxspec.models.attention import dense_causal_attend
from jaxspec.models.decoder import Decoder, decoder_shapes
from jaxspec.models.forward_pass import ForwardPass
from jaxspec.models.linear import Linear
from jaxspec.models.one_launch import layer_launch, layer_weights
from jaxspec.models.quantized.schemes import ROUNDINGS, in_scheme
from jaxspec.parallel import WHOLE, Layout
from pallas_kernels.add_rms_norm.reference import rms_norm
from pallas_kernels.o_gate_up_down.meeting import make_meeting, meeting_shape
from pallas_kernels.o_gate_up_down.reference import o_gate_up_down_reference
from pallas_kernels.selection import NO_KERNELS, Kernels
from tests.helpers.kernels import lowered
from tests.helpers.random_models import as_dtype, random_target, tiny_config

SIZES: dict[str, Any] = dict(hidden_size=1024, intermediate_size=512, head_dim=128, num_layers=1)
KERNELS = Kernels(frozenset({"o_gate_up_down"}))
LAUNCH = "o_gate_up_down_kernel"
FLOAT8 = Kernels(frozenset({"o_gate_up_down", "float8_layers"}))
GROUPS = Kernels(frozenset({"o_gate_up_down", "float8_group_layers"}))


def target(scheme: Scheme | None = "w4a16", **config: Any) -> Decoder:
    """Shapes of a model, with a place where thread blocks meet."""
    model = decoder_shapes(tiny_config(**(SIZES | config)), jnp.dtype("bfloat16"))
    return in_scheme(model, scheme, lm_head=False).replace(exchange=meeting_shape())


def changed(**fields: Any) -> Decoder:
    """The model, with other fields of its layer."""
    model = target()
    return model.replace(layers=tuple(layer.replace(**fields) for layer in model.layers))


def program(model: Decoder, kernels: Kernels = KERNELS, rows: int = 8, **options: Any) -> str:
    def run(model: Decoder, tokens: jax.Array) -> jax.Array:
        states, attend = model.no_states(), dense_causal_attend
        return decoder.run(model, tokens, tokens, states, attend, (), kernels, **options)[0]

    return lowered(run, model, jax.ShapeDtypeStruct((1, rows), jnp.int32))


def test_on_a_gpu_it_is_one_launch_of_every_layer():
    assert program(target(num_layers=2)).count("call @o_gate_up_down_mosaic") == 2
    assert LAUNCH in program(target("w4a16-zeros"), rows=2)
    assert LAUNCH in program(target("fp8"), FLOAT8)
    assert LAUNCH in program(target("fp8-block"), GROUPS)


NORM = jax.ShapeDtypeStruct((1024,), jnp.bfloat16)
OTHERS: dict[str, tuple[Decoder, dict[str, Any]]] = {
    "no kernel of it": (target(), {"kernels": NO_KERNELS}),
    "no place to meet": (target().replace(exchange=None), {}),
    "more rows than it takes": (target(), {"rows": 9}),
    "blocks that are compiled by themselves": (target(), {"isolate_blocks": True}),
    "weights of 16 bits": (target(None), {}),
    "rows of 8 bits": (target("w4a8"), {}),
    "8-bit floats, whose kernel was not chosen": (target("fp8"), {"kernels": GROUPS}),
    "8-bit floats in groups, likewise": (target("fp8-block"), {"kernels": FLOAT8}),
    "a bias": (target(o_bias=True), {}),
    "a stream that it does not take": (target(hidden_size=1280), {}),
    "a norm of what attention gives": (changed(mixer_norm=NORM), {}),
    "a norm of what the MLP gives": (changed(mlp_norm=NORM), {}),
    "a scale of what blocks give": (changed(residual_scale=0.5), {}),
    "an MLP that reads what attention reads": (changed(parallel=True), {}),
}


@pytest.mark.parametrize("model, options", OTHERS.values(), ids=OTHERS)
def test_other_layers_take_several_launches(model: Decoder, options: dict[str, Any]):
    assert LAUNCH not in program(model, **options)


def launched(model: Decoder, x: jax.Array, layout: Layout) -> Any:
    [layer] = model.layers
    mixer: Any = layer.mixer
    mlp: Any = layer.mlp
    shared = dense_causal_attend, {}, {}, 1e-5, layout, KERNELS
    step = ForwardPass(*shared, exchange=model.exchange)
    mixed = mixer.o.product(x[..., : mixer.o.values.shape[1]], "o")
    return layer_launch(step, x, mixed, layer.post_norm, mlp.gate_up, mlp.down)


STREAM = jax.ShapeDtypeStruct((1, 8, 1024), jnp.bfloat16)


def test_a_split_model_takes_several_launches():
    taken = []

    def look(model: Decoder, x: jax.Array) -> jax.Array:
        for layout in (WHOLE, Layout(heads=("x",), ff=("x",))):
            taken.append(launched(model, x, layout) is not None)
        return x

    jax.eval_shape(look, target(), STREAM)
    assert taken == [True, False]


def test_a_cpu_has_no_place_to_meet():
    assert make_meeting(jnp.zeros(1)) is None


def test_its_weights_are_those_of_the_layer():
    rng = np.random.default_rng(0)

    def noise(*shape: int) -> jax.Array:
        return as_dtype(rng.standard_normal(shape, np.float32) / shape[0] ** 0.5, np.float32)

    def rounded(*shape: int) -> Any:
        axes = ("in", "two", "out") if len(shape) == 3 else ("in", "out")
        return jax.jit(ROUNDINGS["w4a16-zeros"])(Linear(weight=noise(*shape), axes=axes))

    o, gate_up, down = rounded(384, 256), rounded(256, 2, 512), rounded(512, 256)
    layer = 1 + noise(256), o, gate_up, down
    rows = noise(3, 384), noise(3, 256)  # attention's, and the stream

    @jax.jit
    def in_one(layer: Any, attended: jax.Array, stream: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights = layer_weights(*layer)
        assert weights is not None
        total, [added] = o_gate_up_down_reference(attended, stream, weights, 1e-5)
        return total, added

    @jax.jit
    def in_order(layer: Any, attended: jax.Array, stream: jax.Array) -> tuple[jax.Array, jax.Array]:
        norm, o, gate_up, down = layer
        total = stream + o(attended)
        gate, up = jnp.moveaxis(gate_up(rms_norm(total, norm, 1e-5)), -2, 0)
        return total, down(jax.nn.silu(gate) * up)

    (total, added), (sums, wanted) = in_one(layer, *rows), in_order(layer, *rows)
    np.testing.assert_allclose(total, sums, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(added, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 5, 8])
@pytest.mark.parametrize(
    ("scheme", "kernels"),
    [("w4a16", KERNELS), ("fp8", FLOAT8), ("fp8-block", GROUPS)],
    ids=str,
)
def test_on_the_device_a_model_computes_what_it_does_in_several_launches(
    rows: int, scheme: Scheme, kernels: Kernels
):
    config = tiny_config(**SIZES, vocab_size=512)
    meeting = make_meeting(jnp.zeros(1))
    assert meeting is not None, "no GPU with as many multiprocessors as an H100 SXM"
    model = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_target(config, context=1.0))
    model = in_scheme(model, scheme, lm_head=False)

    def hidden(model: Decoder, kernels: Kernels) -> np.ndarray:
        def run(model: Decoder, tokens: jax.Array) -> jax.Array:
            states, attend = model.no_states(), dense_causal_attend
            return decoder.run(model, tokens, tokens, states, attend, (), kernels)[0]

        return np.asarray(jax.jit(run)(model, jnp.arange(rows)[None]), np.float64)

    others = {"packed_product", "add_rms_norm", "round_tokens"}
    expected = hidden(model, Kernels(frozenset(others)))
    chosen = Kernels.parse("auto").operations - FLOAT8.operations | kernels.operations
    found = hidden(model.replace(exchange=meeting), Kernels(chosen))
    assert np.linalg.norm(found - expected) <= 0.02 * np.linalg.norm(expected)
    assert not meeting.any()
