"""Attribution of profiler events to scopes, on a program and events as a GPU has them."""

import re

import pytest

from jaxspec.evaluation.benchmarks.hlo import Program, Scope, count_by_scope, parse_scope
from jaxspec.evaluation.benchmarks.profile import Event, profile_rounds, summarize
from jaxspec.evaluation.benchmarks.prompt_profile import kind_of, profile_prompt

# Two equal products (draft, verify) run one kernel; that of `o` was split by XLA, which left it
# without a name; the attention is a library's; the copy has no name at all.
HLO = """\
HloModule jit_decode, is_scheduled=true

%product.1 (p.0: bf16[8], p.1: bf16[8]) -> f32[8] {
  %p.0 = bf16[8]{0} parameter(0)
  %p.1 = bf16[8]{0} parameter(1)
  ROOT %dot.1 = f32[8]{0} dot(%p.0, %p.1), metadata={op_name="jit(decode)/while/body/draft/mlp/dot"}
}

%product.2 (p.2: bf16[8], p.3: bf16[8]) -> f32[8] {
  %p.2 = bf16[8]{0} parameter(0)
  %p.3 = bf16[8]{0} parameter(1)
  ROOT %dot.2 = f32[8]{0} dot(%p.2, %p.3), metadata={op_name="jit(decode)/while/body/verify/mlp/dot"}
}

%product.3 (p.4: bf16[8], p.5: bf16[8]) -> f32[2,8] {
  %p.4 = bf16[8]{0} parameter(0)
  %p.5 = bf16[8]{0} parameter(1)
  ROOT %dot.3 = f32[2,8]{1,0} dot(%p.4, %p.5), metadata={scheduling_name="dot.3"}
}

%fused_add (p.6: bf16[8], p.7: f32[2,8]) -> bf16[8] {
  %p.6 = bf16[8]{0} parameter(0)
  %p.7 = f32[2,8]{1,0} parameter(1)
  %reduce.1 = f32[8]{0} reduce(%p.7), dimensions={0}, to_apply=%sum
  %convert.1 = bf16[8]{0} convert(%reduce.1), metadata={op_name="jit(decode)/while/body/verify/o/dot"}
  %mul.1 = bf16[8]{0} multiply(%p.6, %p.6), metadata={op_name="jit(decode)/while/body/verify/norm/mul"}
  %mul.2 = bf16[8]{0} multiply(%mul.1, %p.6), metadata={op_name="jit(decode)/while/body/verify/norm/mul"}
  ROOT %add.1 = bf16[8]{0} add(%convert.1, %mul.2), metadata={op_name="jit(decode)/while/body/verify/add"}
}

%body (carry: (s32[], bf16[8])) -> (s32[], bf16[8]) {
  %carry = (s32[], /*index=1*/bf16[8]{0}) parameter(0)
  %x = bf16[8]{0} get-tuple-element(%carry), index=1
  %w = bf16[8]{0} get-tuple-element(%carry), index=1
  %gemm_fusion_dot.1 = f32[8]{0} fusion(%x, %w), kind=kCustom, calls=%product.1, metadata={deduplicated_name="gemm_fusion_dot.1"}
  %copy.5 = bf16[8]{0} copy(%x)
  %attention.7 = bf16[8]{0} custom-call(%copy.5), custom_call_target="mosaic", metadata={op_name="jit(decode)/while/body/verify/attention/call"}
  %gemm_fusion_dot.3 = f32[2,8]{1,0} fusion(%attention.7, %w), kind=kCustom, calls=%product.3
  %loop_add_fusion = bf16[8]{0} fusion(%x, %gemm_fusion_dot.3), kind=kLoop, calls=%fused_add, metadata={op_name="jit(decode)/while/body/verify/add"}
  %gemm_fusion_dot.2 = f32[8]{0} fusion(%loop_add_fusion, %w), kind=kCustom, calls=%product.2, metadata={deduplicated_name="gemm_fusion_dot.1"}
  ROOT %tuple.1 = (s32[], bf16[8]{0}) tuple(%x, %w)
}

%fused_and (p.8: (s32[], bf16[8])) -> pred[] {
  %p.8 = (s32[], bf16[8]{0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.8), index=0
  ROOT %lt.1 = pred[] compare(%i.1, %i.1), direction=LT, metadata={op_name="jit(decode)/while/cond/lt"}
}

%cond (carry.1: (s32[], bf16[8])) -> pred[] {
  %carry.1 = (s32[], bf16[8]{0}) parameter(0)
  ROOT %loop_and_fusion = pred[] fusion(%carry.1), kind=kLoop, calls=%fused_and, metadata={op_name="jit(decode)/while/cond/and"}
}

ENTRY %main (a: bf16[8]) -> (s32[], bf16[8]) {
  %a = bf16[8]{0} parameter(0)
  %copy.9 = bf16[8]{0} copy(%a)
  %tuple.2 = (s32[], bf16[8]{0}) tuple(%a, %copy.9)
  ROOT %while.4 = (s32[], bf16[8]{0}) while(%tuple.2), condition=%cond, body=%body
}
"""  # noqa: E501

ROUND = (
    ("gemm_fusion_dot_1", Scope("draft", "mlp")),
    ("memcpy_post", Scope("verify", "attention")),
    ("flash_kernel", Scope("verify", "attention")),
    ("gemm_fusion_dot_3", Scope("verify", "o")),
    ("loop_add_fusion", Scope("verify", "norm")),
    ("gemm_fusion_dot_1", Scope("verify", "mlp")),
)
CONDITION = (("loop_and_fusion", Scope()), ("MemcpyD2H", Scope()))


def gpu_events(num_calls: int, rounds: int, pause_ns: float = 50_000) -> list[Event]:
    """Kernels of 10 us, 2 us apart (a condition's 5), but for a library's two that overlap by 4."""
    events, now = [], 0.0

    def add(name: str, hlo_op: str, gap: float = 2_000) -> None:
        nonlocal now
        events.append(Event(name, hlo_op, now + gap, 10_000))
        now += gap + 10_000

    for _ in range(num_calls):
        add("MemcpyD2D", "copy.9", pause_ns)
        for _ in range(rounds):
            add("loop_and_fusion", "loop_and_fusion", 5_000)
            add("MemcpyD2H", "while.4")
            for name, _ in ROUND:
                add(name, "command_buffer_4", -4_000 if name == "flash_kernel" else 2_000)
        add("loop_and_fusion", "loop_and_fusion", 5_000)
        add("MemcpyD2H", "while.4")
    return events


def test_each_launch_is_attributed_to_its_instruction():
    profile = profile_rounds(gpu_events(2, 4), Program(HLO), rounds_per_call=4, num_calls=2)
    assert len(profile.rounds) == 6
    for one in profile.rounds:
        found = [(span.name, span.scope) for span in one.spans]
        # Rounds are cut at the first kernel that is its own in each.
        assert found == [*ROUND[3:], *CONDITION, *ROUND[:3]]


def test_times_and_gaps_make_the_round():
    profile = profile_rounds(gpu_events(2, 4), Program(HLO), rounds_per_call=4, num_calls=2)
    for one in profile.rounds:
        assert one.length_us == pytest.approx(8 * 10 + 6 * 2 + 5 - 4)
        assert one.gaps_us == pytest.approx(6 * 2 + 5)
        assert one.longest_gap_us == pytest.approx(5)
        flash = next(span for span in one.spans if span.name == "flash_kernel")
        assert (flash.duration_us, flash.counted_us) == (pytest.approx(10), pytest.approx(6))
    costs = summarize(profile.rounds, lambda span: span.scope)
    assert costs[Scope("verify", "attention")].us == pytest.approx(16)
    assert costs[Scope("verify", "attention")].launches == 2
    assert profile.host_gap_us == pytest.approx(50)


def test_a_single_call_has_no_pause():
    profile = profile_rounds(gpu_events(1, 3), Program(HLO), rounds_per_call=3, num_calls=1)
    assert (len(profile.rounds), profile.host_gap_us) == (2, None)


def test_several_kernels_of_one_instruction_are_all_its_own():
    events = [
        twin
        for event in gpu_events(1, 3)
        for twin in ([event, event] if event.name == "flash_kernel" else [event])
    ]
    profile = profile_rounds(events, Program(HLO), rounds_per_call=3, num_calls=1)
    scopes = [span.scope for span in profile.rounds[0].spans if span.name == "flash_kernel"]
    assert scopes == [Scope("verify", "attention")] * 2


@pytest.mark.parametrize(
    ("op_name", "scope"),
    [
        ("jit(decode)/while/body/verify/mlp/activation/mul", Scope("verify", "activation")),
        ("jit(decode)/while/body/draft/jit(take)/gather", Scope("draft", "other")),
        ("jit(prefill)/norm/mul", Scope("other", "norm")),
        ("", Scope()),
    ],
)
def test_scopes_of_names(op_name: str, scope: Scope):
    assert parse_scope(op_name) == scope


def test_what_cannot_be_cut_into_rounds_is_refused():
    with pytest.raises(ValueError, match="no instruction of the loop has 7 events"):
        profile_rounds(gpu_events(1, 3), Program(HLO), rounds_per_call=7, num_calls=1)
    with pytest.raises(ValueError, match="no loop"):
        Program(HLO.replace(" while(", " other(")).loop()


def test_lines_are_counted_by_their_scope():
    dots = {"draft/mlp": 1, "other/other": 1, "verify/mlp": 1}  # that of `o` has no name of its own
    assert count_by_scope(HLO, re.compile(r" dot\(")) == dots
    named = count_by_scope(HLO, re.compile(r" (dot|multiply)\("))
    assert named == {f"dot {scope}": 1 for scope in dots} | {"multiply verify/norm": 2}
    assert list(named) == sorted(named)
    assert count_by_scope(HLO, re.compile("all-reduce")) == {}


def test_the_reading_of_prompts_is_divided_by_kernels():
    """Kernels outside of CUDA graphs say which instruction launched them."""
    launched = [
        ("gemm_fusion_dot_1", "gemm_fusion_dot.1"),
        ("flash_kernel", "attention.7"),
        ("flash_kernel", "attention.7"),
        ("gemm_fusion_dot_2", ""),
        ("memset", ""),
        ("while.4", "while.4"),
    ]
    events = [Event(name, op, 12_000 * i, 10_000) for i, (name, op) in enumerate(launched)]
    profile = profile_prompt(events, Program(HLO))
    found = {(k.part, k.kernel): (k.us, k.launches) for k in profile.kernels}
    assert found == {
        ("mlp", "gemm_fusion_dot"): (20, 2),
        ("attention", "flash_kernel"): (20, 2),
        ("other", "memset"): (10, 1),
    }
    assert (profile.length_us, profile.gaps_us) == (58, 8)
    with pytest.raises(ValueError, match="no events of the device"):
        profile_prompt(events[-1:], Program(HLO))


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("loop_fusion_12", "loop_fusion"),
        ("wrapped_add.3", "wrapped_add"),
        ("sort_19_1__2", "sort"),
        ("nvjet_sm90_tst_64x8", "nvjet_sm90_tst_64x8"),
        ("expert_product_kernel", "expert_product_kernel"),
    ],
)
def test_kinds_of_kernels_have_no_numbers_of_xla(kernel: str, kind: str):
    assert kind_of(kernel) == kind
