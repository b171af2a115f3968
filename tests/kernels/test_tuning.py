"""How attention, products, top_k and truncate divide their work."""

from collections.abc import Callable

import pytest

from pallas_kernels.expert_product.tuning import ExpertTuning
from pallas_kernels.h100 import MULTIPROCESSORS
from pallas_kernels.packed_product.tuning import PackedTuning, packed_tuning
from pallas_kernels.paged_attention.tuning import (
    AttentionTuning,
    attention_tuning,
    float8_tuning,
)
from pallas_kernels.ring import ring_stages
from pallas_kernels.selection import Kernels, fewest_rows
from pallas_kernels.split_k import choose_split_k
from pallas_kernels.top_k.mosaic_gpu import top_k_shares
from pallas_kernels.truncate.mosaic_gpu import truncate_shares


@pytest.mark.parametrize("batch", [1, 2, 8, 32, 128])
@pytest.mark.parametrize("kv_heads", [1, 3, 8])
@pytest.mark.parametrize("slots", [64, 256, 8192])
def test_splits_keep_every_block_resident_and_busy(batch: int, kv_heads: int, slots: int):
    for row_tiles in (1, 2, 4):
        chosen = attention_tuning(batch, kv_heads, row_tiles, slots, page_size=64)
        assert kv_heads % chosen.heads == 0
        assert chosen.splits in (1, 2, 4, 8)
        assert chosen.registers is None or chosen.producer_registers >= 24
        assert chosen.splits == 1 or batch * kv_heads * chosen.splits <= MULTIPROCESSORS
        assert chosen.splits <= 2 or batch * kv_heads * chosen.splits <= 66, "clusters need room"
        assert chosen.splits <= max(slots // chosen.block, 1)


@pytest.mark.parametrize(
    ("rows", "depth", "width", "splits"),
    [
        *((6, 4096, 4096, 4), (6, 4096, 6144, 4), (6, 4096, 28672, 1)),
        *((80, 4096, 4096, 4), (192, 4096, 6144, 2), (192, 4096, 28672, 1)),
        *((5, 14336, 4096, 4), (6, 14336, 4096, 8), (64, 14336, 4096, 8), (80, 14336, 4096, 4)),
        *((5, 7168, 8192, 2), (6, 7168, 8192, 4), (80, 7168, 8192, 2), (32, 14336, 8192, 2)),
        *((6, 28672, 8192, 2), (6, 12288, 4096, 4), (6, 8192, 6144, 4)),
        *((480, 4096, 4096, 1), (6, 512, 4096, 4), (6, 100, 4096, 1)),
    ],
)
def test_narrow_products_are_split_for_a_kernel(rows: int, depth: int, width: int, splits: int):
    assert choose_split_k(rows, depth, width) == splits


@pytest.mark.parametrize(
    ("names", "rows"),
    [((), 1), (("paged_attention",), 1), (("add_rms_norm",), 2), (("rope_kv_write", "top_k"), 2)],
)
def test_a_row_is_padded_for_kernels_that_add_up_partial_sums(names: tuple[str, ...], rows: int):
    assert fewest_rows(Kernels(frozenset(names))) == rows


def test_two_heads_share_a_block_only_where_pairs_outnumber_the_multiprocessors():
    assert attention_tuning(32, 8, 1, 8192, 64).heads == 2
    assert attention_tuning(8, 8, 1, 8192, 64).heads == 1
    assert attention_tuning(200, 1, 1, 8192, 64).heads == 1


@pytest.mark.parametrize("tuning", [attention_tuning, float8_tuning])
def test_long_contexts_of_few_rows_are_read_in_parts(tuning: Callable[..., AttentionTuning]):
    """By nearly all multiprocessors, where clusters would take half of them; a merge is a launch
    more, so shorter contexts are shared by clusters."""
    for batch, kv_heads, row_tiles in ((1, 8, 1), (1, 8, 4), (1, 2, 1), (4, 8, 1)):
        blocks = batch * kv_heads * -(-row_tiles // 2)
        for slots in (8192 if kv_heads == 8 else 65_536, 131_072):
            long = tuning(batch, kv_heads, row_tiles, slots, 64)
            assert long.splits == 1
            assert 120 <= blocks * long.parts <= MULTIPROCESSORS
        short = tuning(batch, kv_heads, row_tiles, 4096, 64)
        assert short.parts == 1 < short.splits
    assert tuning(16, 8, 1, 131_072, 64).parts == 1, "128 pairs keep all multiprocessors busy"
    assert tuning(1, 8, 32, 131_072, 64).parts == 1, "so do the tokens of a prompt"


def test_ping_pong_scheduling_needs_pages_that_load_fast_enough():
    assert attention_tuning(8, 8, 4, 8192, 64).ping_pong
    assert not attention_tuning(8, 8, 4, 8192, 16).ping_pong
    assert not attention_tuning(8, 8, 1, 8192, 64).ping_pong
    for warpgroups, heads in ((1, 1), (1, 2), (2, 2)):
        with pytest.raises(ValueError, match="two warpgroups of one head"):
            AttentionTuning(64, 2, warpgroups=warpgroups, heads=heads, ping_pong=True)


@pytest.mark.parametrize("size", [128, 4096, 4224, 32_000, 65_536])
def test_a_row_is_shared_so_that_registers_hold_it(size: int):
    shares = top_k_shares(size)
    assert shares in (1, 2, 4, 8) and size / shares <= 8192
    assert shares == 1 or size / shares > 2048


@pytest.mark.parametrize(("size", "shares"), [(128, 1), (4096, 2), (32_000, 8), (262_144, 8)])
def test_a_row_of_logits_is_shared_by_its_size(size: int, shares: int):
    assert truncate_shares(size) == shares


def test_threads_cannot_ask_for_more_registers_than_there_are():
    """3 warpgroups start with 168 registers a thread; a request for too many would wait forever."""
    assert AttentionTuning(128, 2, warpgroups=2, registers=240).producer_registers == 24
    with pytest.raises(ValueError, match="leave 8 to the producer: it needs 24"):
        AttentionTuning(128, 2, warpgroups=2, registers=248)


def test_rings_are_as_deep_as_they_were_timed():
    def stages(config: PackedTuning | ExpertTuning, stage: int, results: int = 0) -> int:
        return ring_stages(config.ctas, stage << 10, results << 10, config.most_stages)

    assert stages(packed_tuning(72, 4096, 4096), 13, 36) == 8, "though 14 would fit"
    assert stages(PackedTuning(), 1) == 8
    assert stages(ExpertTuning(), 1) == 16
    assert stages(ExpertTuning(ctas=1), 33) == 6, "as many as fit"
    with pytest.raises(ValueError, match="two blocks of 204800 bytes do not fit"):
        stages(ExpertTuning(), 200)
