"""Tables of the results of `jaxspec bench serving`."""

import itertools
from pathlib import Path
from typing import Any

from rich.table import Table

from jaxspec.commands.shared.shell import device_line, left_table


def as_ms(times: dict[str, float]) -> str:
    return " / ".join(f"{1e3 * value:,.1f}" for value in times.values())


def as_times(ratios: dict[str, float | None]) -> str:
    return " / ".join("-" if ratio is None else f"{ratio:.3g}x" for ratio in ratios.values())


def structured_lines(run: dict[str, Any]) -> dict[str, str]:
    """Lines about a run that has requests with a structured output."""
    if not run["structured"]:
        return {}
    return {
        "requests with structured output": str(run["structured"]),
        "between tokens of these, ms": as_ms(run["structured_between_tokens"]),
        "of the others, ms": as_ms(run["unstructured_between_tokens"]),
        "others: seconds, new tokens/s": f"{run['unstructured_seconds']:.3f}, "
        f"{run['unstructured_per_second']:,.0f}",
    }


def beside_lines(run: dict[str, Any]) -> dict[str, str]:
    """Lines about a run that was compared with another; structured outputs do not count."""
    beside = run.get("beside")
    if not beside:
        return {}
    return {
        "beside": beside["run"],
        "first token, times as long": as_times(beside["first_token"]),
        "between tokens, times as long": as_times(beside["unstructured_between_tokens"]),
        "new tokens/s, times as many": f"{beside['unstructured_per_second']:.3g}x",
    }


def as_lines(run: dict[str, Any]) -> dict[str, str]:
    """The figures of a run as the table shows them."""
    depths = " ".join(f"{share:.2f}" for share in run["accepted_by_depth"])
    rounds = ", ".join(f"{count:,} {name}" for name, count in run["rounds_by_shape"].items())
    preempted = ", ".join(f"{count} by {how}" for how, count in run["preemptions"].items())
    bare = run.get("bare")
    beside = {
        "bare rounds: prefill ms, ms/round": f"{bare['prefill_ms']:.1f}, {bare['round_ms']:.3f}",
        "bare rounds: total tokens/s": f"{bare['total_per_second']:,.0f}",
        "share of them": f"{run['total_per_second'] / bare['total_per_second']:.1%}",
    } if bare else {}  # fmt: skip
    return {
        "requests, failed": f"{run['requests']}, {run['failed']}",
        "arrivals": "at once" if run["rate"] is None else f"{run['rate']:.2f} a second",
        "seconds": f"{run['seconds']:.3f}",
        "generated tokens/s": f"{run['generated_per_second']:,.0f}",
        "total tokens/s": f"{run['total_per_second']:,.0f}",
        **beside,
        "first token, ms (p50 / p90 / p99)": as_ms(run["first_token"]),
        "between tokens, ms": as_ms(run["between_tokens"]),
        "between deliveries, ms": as_ms(run["between_deliveries"]),
        "longest gap, ms": f"{1e3 * run['longest_gap']:,.1f}",
        "device idle": f"{run['device_idle']:.1%}",
        "without requests": f"{run['without_requests']:.1%}",
        "KV waste": f"{run['kv_waste']:.1%}",
        "most KV pages held": f"{run['kv_used']:.1%}",
        "prefix cache": "on" if run["prefix_cache"] else "off",
        "prefix hits": f"{run['prompt_hits']:.1%} of the prompts' tokens, "
        f"{run['prompt_hit_tokens']:,}",
        "tokens a round": f"{run['tokens_per_round']:.2f}",
        "accepted by depth": depths or "-",
        "rounds": rounds,
        "preemptions": preempted,
        "compiled after warm-up": str(run["compiled"]),
        **structured_lines(run),
        **beside_lines(run),
    }


def title(results: dict[str, Any], mode: str = "") -> str:
    arguments = results["arguments"]
    model = arguments["shape"] or Path(arguments["model"]).name
    return f"{model}, {mode}{', ' if mode else ''}{arguments['rows']} rows, {device_line(results)}"


def make_tables(results: dict[str, Any]) -> list[Table]:
    """One for each mode."""
    tables = []
    for mode in dict.fromkeys(run["mode"] for run in results["runs"]):
        caption = f"kernels: {results['pallas_kernels']}\n{results['command']}"
        table = left_table(title(results, mode), caption)
        table.show_header = False
        columns = [as_lines(run) for run in results["runs"] if run["mode"] == mode]
        for line in dict.fromkeys(itertools.chain(*columns)):
            table.add_row(line, *(column.get(line, "-") for column in columns))
        tables.append(table)
    return tables
