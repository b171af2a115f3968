"""The compiled decode program: no copies of large arrays, one trace for equal shapes."""

import re

import jax
import numpy as np
import pytest

from jaxspec import functional
from jaxspec.cache import PagedKV
from jaxspec.config.speculation import PLAIN, SpeculationConfig, TreeShape
from jaxspec.decoding.state import EngineState
from jaxspec.functional import EngineParams
from tests.helpers.marks import slow
from tests.helpers.programs import decode_hlo, new_jit, traces
from tests.helpers.random_models import make_params

CHAIN = SpeculationConfig.chain(2)
TREE = SpeculationConfig(num_nodes=6, max_depth=2, top_k=3)


def empty_state(params: EngineParams) -> EngineState:
    return functional.init_state(params, 3, 40, page_size=4)


def page_shapes(state: EngineState) -> set[tuple[int, ...]]:
    """Shapes [P, G, K, D] of the target's and the drafter's KV pages."""
    layers = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, PagedKV))
    return {layer.k.shape for layer in layers if isinstance(layer, PagedKV)}


def copies(hlo: str, shape: tuple[int, ...]) -> list[str]:
    """Lines of a compiled program that copy an array of ``shape``, whatever its layout."""
    dimensions = ",".join(map(str, shape))
    copy = re.compile(rf"= \(?\w+\[{dimensions}\]\S* (copy|copy-start|transpose)\(")
    return [line.strip() for line in hlo.splitlines() if copy.search(line)]


@pytest.mark.parametrize("drafter", ["eagle3", slow("eagle1"), slow("draft_model")])
def test_every_float32_product_has_full_precision_on_a_gpu(drafter: str):
    """By default a GPU rounds float32 operands to TF32, and texts would differ by their shapes."""
    params = make_params(drafter, TREE)
    state = empty_state(params)

    def generate(params: EngineParams, state: EngineState) -> EngineState:
        state, _ = functional.prefill(params, state, width=4)
        return functional.decode(params, state, 2)[0]

    lowered = jax.jit(generate).trace(params, state).lower(lowering_platforms=("cuda",))
    products = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
    layers = params.target.config.num_layers
    assert len(products) > 2 * 6 * layers, "the target's own, in both functions"
    for product in products:
        if "xf32>" in product:
            assert "precision = [HIGHEST, HIGHEST]" in product, product


@pytest.mark.parametrize(
    ("drafter", "speculation", "shape"),
    [
        slow("none", CHAIN, None),
        slow("ngram", CHAIN, None),
        slow("draft_model", CHAIN, None),
        slow("eagle3", CHAIN, None),
        slow("eagle3", TREE, None),
        ("mixed", TREE, None),  # all that an EAGLE-3 tree does, and a lookup
        slow("eagle3", TREE, PLAIN),  # and the drafter catches up
        slow("draft_model", CHAIN, TreeShape(2, 1)),
        slow("mtp3", TREE, None),
        slow("mtp3", CHAIN, PLAIN),
    ],
    ids=[
        "none",
        "ngram",
        "draft_model",
        "chain",
        "tree",
        "mixed tree",
        "plain call",
        "shorter chain",
        "several heads",
        "several heads, plain call",
    ],
)
def test_no_kv_pages_are_copied(
    drafter: str, speculation: SpeculationConfig, shape: TreeShape | None
):
    params = make_params(drafter, speculation)
    state = empty_state(params)
    hlo = decode_hlo(params, state, shape=shape, greedy=drafter == "mixed")  # a smaller program
    for pages in page_shapes(state):
        assert f"[{','.join(map(str, pages))}]" in hlo, "the pages are not recognized"
        assert not copies(hlo, pages)


@pytest.mark.slow
def test_the_last_of_several_heads_computes_keys_and_values_alone_before_its_step():
    """What else it makes of these tokens is for nobody, and XLA leaves it out."""
    chain = SpeculationConfig.chain(3)
    params = make_params("mtp3", chain)
    hlo = decode_hlo(params, empty_state(params))
    committed, drafted = 3 * (chain.max_depth + 1), 3  # tokens of three rows
    qkv, up = 128, 96  # widths of these products; the LM head has the latter, too

    def products(tokens: int, width: int) -> int:
        return len(re.findall(rf"= f32\[{tokens},{width}\]\S* dot\(", hlo))

    target = params.target.config.num_layers
    assert products(committed, qkv) == target + 3 and products(drafted, qkv) == 2 + 1
    assert products(committed, up) == target + 1 + 2 and products(drafted, up) == 3 + 1 + 1


@pytest.mark.slow
def test_without_donation_pages_are_copied():
    """A caller who keeps the old state makes the program copy its pages."""
    params = make_params("none", CHAIN)
    state = empty_state(params)
    hlo = decode_hlo(params, state, donate=False)
    assert all(copies(hlo, shape) for shape in page_shapes(state))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["none", "eagle3"])
def test_equal_shapes_are_traced_once(drafter: str):
    params = make_params(drafter, CHAIN)
    state = empty_state(params)
    admit, release = new_jit(functional.admit), new_jit(functional.release)
    prefill, decode = new_jit(functional.prefill, "width"), new_jit(functional.decode, "max_rounds")
    tokens = np.ones((3, 2), np.int32)
    for call in range(10):
        rows = np.array([call % 3, 3, 3], np.int32)
        state = release(params, state, rows)
        state = admit(params, state, rows, tokens, np.array([1 + call % 2, 1, 1], np.int32))
        counts = np.array([call % 2, 1, 2], np.int32)
        state, _ = prefill(params, state, np.arange(3, dtype=np.int32), counts, width=2)
        state, _ = decode(params, state, call, max_rounds=9)
    assert [traces(jitted) for jitted in (admit, prefill, decode, release)] == [1, 1, 1, 1]
