"""`jaxspec bench drafters`: speed, acceptance and memory of drafters beside plain decoding."""

import json
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from jaxspec.checkpoints.block import save_block_head
from jaxspec.checkpoints.safetensors_io import save_decoder
from jaxspec.commands.bench import drafters as bench_drafters
from jaxspec.commands.bench.drafter_plot import draw_depths, draw_speedups, styles_of
from jaxspec.commands.bench.drafter_tables import (
    by_run,
    full_width,
    run_names,
    run_of,
    speed_table,
)
from jaxspec.commands.shared.shell import table_console
from tests.helpers.block_checkpoints import published_head
from tests.helpers.block_heads import EXTRAS, block_target, random_head
from tests.helpers.checkpoints import (
    changed_copy,
    normal,
    save_byte_tokenizer,
    tiny_byte_llama,
    tiny_eagle3_head,
)
from tests.helpers.json_lines import joined
from tests.helpers.random_models import tiny_config


@pytest.mark.slow
def test_every_run_is_raced_at_every_temperature_and_batch_size(sources, tmp_path, capsys):
    plot = tmp_path / "new" / "plot.png"
    code = bench_drafters.main(
        ["--data", str(sources), "--by-file", "--batch", "1", "2", "--batches", "2", "--turns",
         "2", "--prompt-tokens", "16", "--max-tokens", "24", "--temperatures", "0", "1", "--plot",
         str(plot), "--json", "--run", "ngram", "chain:3", "tree:4:2:2", "default"]
    )  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0, printed.err
    results = joined(printed.out, "rows")
    rows = results["rows"]
    assert [(row["temperature"], row["batch"], row["mode"], row["texts"]) for row in rows] == [
        (temperature, batch, mode, 2 * batch)
        for temperature in (0, 1)
        for batch in (1, 2)
        for mode in ("plain", "chain:3", "tree:4:2:2", "default")
    ]
    assert results["target_weight_bytes"] > 0 and results["target_token_bytes"] > 0
    for row in rows:
        found = row["acceptance"]
        assert row["kind"] == sources.stem and len(row["speedups"]) == 2
        assert row["identical"] == row["texts"] == found["prompts"]
        assert row["round_ms"] > 0 and row["weight_bytes"] == row["token_bytes"] == 0
        low, high = found["length_interval"]
        assert low <= found["length"] <= high
        if row["mode"] == "plain":
            assert row["speedup"] == found["length"] == 1 and found["by_depth"] == []
        else:
            assert row["speedup"] > 0 and 1 <= found["length"] <= 4
            low, high = row["speedup_interval"]
            assert low <= row["speedup"] <= high
    assert "ngram chain:3" in printed.err and "programs compiled" in printed.err
    assert plot.stat().st_size > 5_000


@pytest.mark.slow
def test_all_kinds_of_drafters_stand_in_one_table(sources, tmp_path, capsys):
    model = tiny_byte_llama(tmp_path / "model")
    heads = {
        "draft": tiny_byte_llama(tmp_path / "draft", seed=1),
        "eagle3": tiny_eagle3_head(tmp_path / "eagle3", model),
        "dflash": published_head(tmp_path / "dflash", model, "dflash"),
        "dspark": published_head(tmp_path / "dspark", model, "dspark"),
    }
    names = ["suffix", *map(str, heads.values()), f"suffix+{heads['dspark']}"]
    runs = [word for name in names for word in ("--run", name, "chain:2")]
    code = bench_drafters.main(
        ["--model", str(model), "--data", str(sources), "--batch", "2", "--batches", "1",
         "--prompt-tokens", "8", "--max-tokens", "8", "--json", *runs]
    )  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0, printed.err
    measured = joined(printed.out, "rows")["rows"]
    names = run_names(measured)
    rows = {names[run_of(row)]: row for row in measured}
    assert list(rows) == [
        "plain", "suffix chain:2", *(f"{name} chain:2" for name in heads), "suffix+dspark chain:2"
    ]  # fmt: skip
    for name, row in rows.items():
        assert row["identical"] == row["texts"] == 2
        has_weights = name not in ("plain", "suffix chain:2")
        assert (row["weight_bytes"] > 0) == (row["token_bytes"] > 0) == has_weights


@pytest.mark.slow
def test_all_block_heads_and_drafts_of_text_stand_in_one_table(sources, tmp_path, capsys):
    model, target = tmp_path / "model", block_target(tiny_config(vocab_size=257, num_layers=3))
    save_decoder(target, model)
    save_byte_tokenizer(model)
    kinds = [*EXTRAS, "windowed", "causal"]
    for kind in kinds:
        save_block_head(random_head(target.config, kind), tmp_path / kind, target)
    eagle3 = tiny_eagle3_head(tmp_path / "eagle3", model)
    mask = normal(np.random.default_rng(0), 1, 1, 3 * target.config.hidden_size)
    config = {"architectures": ["PEagleDraftModel"], "mask_token_id": 95}
    changed_copy(eagle3, tmp_path / "p-eagle", config, mask_hidden=mask)
    text = f"text:{tiny_byte_llama(tmp_path / 'writer', seed=1)}"
    drafters = [text, *(str(tmp_path / kind) for kind in ("p-eagle", *kinds))]
    chains = [word for name in drafters for word in ("--run", name, "chain:4")]
    trees = [word for kind in ("dflash2", "lilicorr") for word in ("--run", str(tmp_path / kind),
             "12:4:3")]  # fmt: skip
    code = bench_drafters.main(
        ["--model", str(model), "--data", str(sources), "--batch", "2", "--batches", "1",
         "--prompt-tokens", "8", "--max-tokens", "8", "--json", *chains, *trees]
    )  # fmt: skip
    printed = capsys.readouterr()
    assert code == 0, printed.err
    measured = joined(printed.out, "rows")["rows"]
    names = run_names(measured)
    assert [names[run_of(row)] for row in measured] == [
        "plain", *(f"{name} chain:4" for name in ("text:writer", "p-eagle", *kinds)),
        "dflash2 12:4:3", "lilicorr 12:4:3",
    ]  # fmt: skip
    for row in measured:
        assert row["identical"] == row["texts"] == 2
        assert (row["weight_bytes"] > 0) == (row["token_bytes"] > 0) == (row["mode"] != "plain")


def made_row(batch: int, drafter: str, mode: str, speedup: float = 1.0) -> dict[str, Any]:
    acceptance = {
        "length": 2.5,
        "length_interval": (2.4, 2.7),
        "by_depth": [0.75, batch / 100],
        "by_depth_intervals": [(0.7, 0.8), (0.0, 0.2)],
    }
    return {
        "temperature": 0.0,
        "batch": batch,
        "drafter": drafter,
        "mode": mode,
        "tokens_per_second": 1234.0,
        "round_ms": 0.5,
        "speedup": speedup,
        "speedup_interval": (speedup - 0.1, speedup + 0.2),
        "acceptance": acceptance,
        "identical": batch - 1,
        "texts": batch,
    }


RUNS = (("none", "plain"), ("a/h", "chain:3"), ("suffix+b/h", "chain:3"))
ROWS = [made_row(batch, *run, batch + i) for batch in (16, 1) for i, run in enumerate(RUNS)]


def test_numbers_are_printed_whole_however_long_names_are():
    name = f"runs/{'long-' * 20}name"
    rows = [made_row(batch, name, f"chain:{batch}") for batch in (1, 4, 16, 64)]
    table = speed_table("", rows, run_names(rows))
    console = table_console(stderr=False, width=full_width(table))
    with console.capture() as printed:
        console.print(table)
    assert "…" not in printed.get() and "0.50 1.00x" in printed.get()


def test_each_run_is_a_line_of_its_own_in_both_panels():
    runs = by_run([row for row in ROWS if row["mode"] != "plain"])
    styles = styles_of(ROWS)
    speeds, depths = Figure().subplots(1, 2)
    draw_speedups(speeds, runs, styles)
    draw_depths(depths, runs, styles)
    drawn = {line.get_label(): line for line in speeds.get_lines()}
    for i, name in enumerate(("a/h chain:3", "suffix+b/h chain:3")):
        assert [round(place) for place in drawn[name].get_xdata()] == [0, 1]
        assert list(drawn[name].get_ydata()) == [17 + i, 2 + i]
    assert styles[RUNS[1]]["color"] != styles[RUNS[2]]["color"]
    assert len(depths.containers) == 2
    assert [text.get_text() for text in speeds.get_xticklabels()] == ["batch 16", "batch 1"]


def made_parts() -> list[dict[str, Any]]:
    facts = {"model": "m", "dtype": "bfloat16", "device": "D", "date": "today", "jax": "0",
        "command": "c", "target_weight_bytes": 8_000_000, "target_token_bytes": 9.0}  # fmt: skip
    sizes = {"weight_bytes": 2_000_000, "token_bytes": 3.0}
    return [
        facts | {"rows": [row | sizes for row in ROWS if row["batch"] == batch]}
        for batch in (16, 1)
    ]


def test_what_another_machine_measured_is_shown(tmp_path, capsys):
    measured, plot = tmp_path / "run.jsonl", tmp_path / "plot.png"
    measured.write_text("".join(f"{json.dumps(part)}\n" for part in made_parts()))
    assert bench_drafters.main(["--from", str(measured), "--plot", str(plot)]) == 0
    printed = capsys.readouterr().out
    assert "m, bfloat16, temperature 0, on D" in printed and "17.00x" in printed
    lines = [list(map(str.strip, line.split("│"))) for line in printed.splitlines()]
    assert ["", "a/h chain:3", "2.00", "3", ""] in lines
    # A line has the speeds of all batch sizes, and acceptance is that of most texts.
    for name, (first, second) in {"a/h": (17, 2), "suffix+b/h": (18, 3)}.items():
        speeds = [
            f"1,234    0.50 {gain:.2f}x ({gain - 0.1:.2f} to {gain + 0.2:.2f})"
            for gain in (first, second)
        ]
        assert ["", f"{name} chain:3", *speeds, "15 of 17", ""] in lines
        assert ["", f"{name} chain:3", "2.50 (2.40 to 2.70)", "75±5  16±10", ""] in lines
    assert plot.stat().st_size > 5_000


@pytest.mark.parametrize("arguments", [["--batch", "4"], ["--run", "ngram", "chain:3"]])
def test_options_of_a_measurement_do_not_go_with_an_earlier_one(arguments, tmp_path, capsys):
    measured = tmp_path / "run.jsonl"
    measured.write_text("".join(f"{json.dumps(part)}\n" for part in made_parts()))
    assert bench_drafters.main(["--from", str(measured), *arguments]) == 2
    assert f"{arguments[0]} and --from exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "1\n", '{"rows": []}\n', '{"rows": [', "no json"])
def test_other_files_are_not_shown(text, tmp_path, capsys):
    path = tmp_path / "file"
    path.write_text(text)
    assert bench_drafters.main(["--from", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("drafters", "names"),
    [
        (["ngram", "runs/eagle3"], ["ngram", "eagle3"]),
        (["ngram+runs/eagle3", "runs/eagle3"], ["ngram+eagle3", "eagle3"]),
        (["ngram+head"], ["ngram+head"]),
        (["runs/a/h", "runs/b/h", "h"], ["a/h", "b/h", "h"]),
        (
            ["a/x/h", "b/x/h", "suffix+b/x/h", "dflash"],
            ["a/x/h", "b/x/h", "suffix+b/x/h", "dflash"],
        ),
        (["/x/h", "/y/x/h"], ["/x/h", "y/x/h"]),
        (
            ["text:/x/h", "/x/g", "text:http://127.0.0.1:8000"],
            ["text:h", "g", "text:127.0.0.1:8000"],
        ),
    ],
)
def test_a_run_is_named_by_the_end_of_its_path_that_no_other_has(drafters, names):
    rows = [made_row(1, drafter, "chain:5") for drafter in ("none", *drafters)]
    rows[0]["mode"] = "plain"
    assert list(run_names(rows).values()) == ["plain", *(f"{name} chain:5" for name in names)]


def test_small_batches_are_spread_over_all_prompts():
    prompts = [[i] for i in range(12)]
    assert bench_drafters.batches_of(prompts, 1, 3) == [[[0]], [[5]], [[11]]]
    assert bench_drafters.batches_of(prompts, 4, 5) == [prompts[:4], prompts[4:8], prompts[8:]]


def test_kinds_of_prompts_stand_in_tables_of_their_own(tmp_path, capsys):
    files = []
    for number, part in enumerate(made_parts()):
        rows = [row | {"kind": kind} for kind in ("chat", "code") for row in part["rows"]]
        files.append(tmp_path / f"{number}.jsonl")
        part |= {"rows": rows, "prompt_tokens": 8, "max_tokens": 9, "commit": "0123456789ab-dirty",
                 "command": f"call {number}"}  # fmt: skip
        files[-1].write_text(json.dumps(part))
    assert bench_drafters.main(["--from", *map(str, files), "--markdown"]) == 0
    printed = capsys.readouterr().out
    titles = [line for line in printed.splitlines() if "tokens a round |" in line]
    assert titles == [
        f"| {kind} temperature 0 | batch 16 | batch 1 | tokens a round |"
        for kind in ("chat", "code")
    ]
    cells = [
        "**1,234, 0.50 ms, 18.00x (17.90 to 18.20)**", "**1,234, 0.50 ms, 3.00x (2.90 to 3.20)**"
    ]  # fmt: skip
    line = f"| `suffix+b/h chain:3` | {' | '.join(cells)} | 2.50 (2.40 to 2.70) |"
    assert printed.count(line) == 2
    assert printed.count("| plain decoding | 1,234, 0.50 ms | 1,234, 0.50 ms | 1 |") == 2
    for number in (0, 1):
        assert f"# today, commit 01234567-dirty\ncall {number}\n" in printed


def test_runs_of_different_devices_do_not_stand_in_one_table(tmp_path, capsys):
    files = [tmp_path / "0.jsonl", tmp_path / "1.jsonl"]
    for file, part in zip(files, made_parts(), strict=True):
        file.write_text(json.dumps(part | {"device": file.stem}))
    assert bench_drafters.main(["--from", *map(str, files)]) == 2
    assert "do not belong together: device is 0, 1" in capsys.readouterr().err


def test_kinds_need_different_names(tmp_path, capsys):
    (tmp_path / "a").mkdir()
    paths = [tmp_path / "chat.jsonl", tmp_path / "a" / "chat.jsonl"]
    assert bench_drafters.main(["--by-file", "--data", *map(str, paths)]) == 2
    assert "--by-file needs paths of different names" in capsys.readouterr().err
