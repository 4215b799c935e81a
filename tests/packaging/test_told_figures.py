"""Figures that README.md and the pages quote are those of the result files that they link, and settings those that there are."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from runtime.settings import CHOICES, LISTS, MAY_BE_ZERO, PREFIX, RANGES, Settings

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
RESULTS = {
    path.stem: json.loads(path.read_text()) for path in (ROOT / "scripts/bench/results").glob("*.json")
}

Told = tuple[str, tuple[str | int, ...], str]
"""Result, path below its `targets` (one name) or its `figures`, and how the page says it."""
README: tuple[Told, ...] = (
    ("cold_start_vs_diffusers", ("first_dit_entry_vs_diffusers",), "15.6"),
    ("cold_start_vs_diffusers", ("diffusers", "first_dit_entry_s"), "31.9"),
    ("cold_start_vs_diffusers", ("ours", "first_dit_entry_s"), "2.05"),
    ("cold_start_vs_diffusers", ("warm_step_vs_diffusers",), "1.25"),
    ("cold_start_vs_diffusers", ("ours", "warm_step_s"), "2.45"),
    ("cold_start_vs_diffusers", ("diffusers", "warm_step_s"), "3.07"),
    ("cold_start_vs_diffusers", ("ours", "rows"), "22,726"),
    ("cold_start", ("first_dit_entry_vs_floor",), "1.13"),
    ("cold_start", ("throttle_11_vs_line",), "1.045"),
    ("cold_start", ("throttle", 2, "entry_s"), "4.78"),
    ("cold_start", ("starts", "all_weights_resident", "median"), "3.40"),
    ("cold_start", ("first_step_done_ratio",), "0.80"),
    ("cold_start", ("first_step", "first_step_done", "median"), "4.321"),
    ("cold_start", ("first_step", "all_weights_resident", "median"), "2.951"),
    ("cold_start", ("warm_step_s",), "2.453"),
    ("cold_start", ("cold_vs_warm_denoise",), "0.07 %"),
    ("cold_start_faster_host", ("throttle_11_vs_line",), "1.070"),
    ("cold_start_vs_diffusers_faster_host", ("first_dit_entry_vs_diffusers",), "19.2"),
    ("cold_start_slower_host", ("throttle_11_vs_line",), "1.068"),
    ("cold_start_slower_host", ("first_dit_entry_s",), "2.12"),
    ("warm_step", ("warm_step_vs_diffusers",), "1.16"),
    ("warm_step", ("vs_diffusers", "flash3", "22519"), "1.29"),
    ("load_state_dict", ("load_state_dict_vs_safetensors",), "4.6"),
    ("decode", ("decode_and_file_vs_diffusers",), "3.60"),
    ("decode", ("peer", "seconds", "total"), "27.6"),
    ("sp2_start", ("sp2_first_dit_entry_vs_sp1",), "1.09"),
    ("sp2_start", ("first_dit_entry_vs_diffusers_x2",), "14.7"),
    ("sp2_start", ("diffusers", "first_dit_entry_s"), "28.8"),
    ("sp2_denoise", ("sp2_denoise_speedup",), "1.85"),
    ("vae_decode_2gpu", ("vae_decode_2gpu_speedup",), "1.99"),
    ("codec_start", ("compressed_bytes_ratio",), "0.667"),
    ("codec_start", ("first_dit_entry_11gbps_vs_raw",), "1.42"),
    ("codec_start", ("start", "plain", "hot", "first_dit_entry", "median"), "2.54"),
    ("codec_start", ("start", "coded", "hot", "first_dit_entry", "median"), "2.09"),
    ("codec_start", ("start", "plain", "throttled", 1, "entry_s"), "5.10"),
    ("codec_start", ("start", "coded", "throttled", 1, "entry_s"), "3.60"),
    ("prepare_components", ("sums", "prepare_s"), "49"),
    ("prepare_components", ("sums", "validate_s"), "18"),
    ("prepare_full", ("prepare_vs_disk_copy",), "76 %"),
    ("prepare_full", ("runs", 1, "prepare_and_validate_vs_copy"), "57 %"),
    ("http_service", ("server_ready_s",), "0.33"),
    ("http_service", ("poll_overhead_ms_p99",), "6"),
    ("replay", ("replay_10m_s",), "1.05"),
    ("replay", ("numba_1000_busy", "cpu_s"), "1.28"),
    ("replay", ("replay_10m_python_s",), "7.57"),
    ("replay", ("python_1000_busy", "cpu_s"), "10.30"),
)
LOADER: tuple[Told, ...] = (
    ("codec_start", ("first_dit_entry_11gbps_vs_raw",), "1.42"),
    ("codec_start", ("start", "plain", "throttled", 1, "entry_s"), "5.103"),
    ("codec_start", ("start", "coded", "throttled", 1, "entry_s"), "3.597"),
    ("cold_start", ("throttle", 2, "entry_s"), "4.785"),
    ("stress_starts", ("killed_starts", "starts"), "25"),
    ("stress_starts", ("killed_starts", "killed"), "21"),
    ("stress_starts", ("starts_resident_growth_kib",), "408"),
    ("stress_starts_cpu", ("killed_starts", "starts"), "50"),
    ("stress_starts_cpu", ("killed_starts", "killed"), "47"),
    ("stress_starts_cpu", ("starts_resident_growth_kib",), "176"),
)
REPLAY: tuple[Told, ...] = (
    ("replay", ("replay_10m_s",), "1.05"),
    ("replay", ("numba_100_busy", "cpu_s"), "1.07"),
    ("replay", ("numba_1000_busy", "cpu_s"), "1.28"),
    ("replay", ("replay_10m_python_s",), "7.57"),
    ("replay", ("python_100_busy", "cpu_s"), "8.97"),
    ("replay", ("python_1000_busy", "cpu_s"), "10.30"),
)
LOG: tuple[Told, ...] = (
    ("cold_start_first", ("first_dit_entry_s",), "2.44"),
    ("cold_start_first", ("first_step_done_ratio",), "0.85"),
    ("cold_start_first", ("throttle", 2, "entry_s"), "5.21"),
    ("cold_start_first", ("warm_step_s",), "2.62"),
    ("peer_diffusers_first", ("warm_step_s",), "3.02"),
    ("cold_start_vs_diffusers_first", ("warm_step_vs_diffusers",), "1.13"),
    ("stress_starts", ("killed_starts", "killed"), "21"),
    ("stress_starts", ("starts_resident_growth_kib",), "408"),
    ("codec", ("decode", "batched", 13, "decode_gbps"), "1,536"),
    ("codec", ("decode", "batched", 10, "decode_gbps"), "574.5"),
    ("codec", ("decode", "batched", 14, "decode_gbps"), "1,828"),
    ("codec", ("decode", "batched", 13, "checksum_gbps"), "968"),
    ("codec", ("decode", "batched", 10, "checksum_gbps"), "517"),
    ("codec", ("decode", "batched", 11, "checksum_gbps"), "389"),
    ("codec", ("decode", "batched", 12, "checksum_gbps"), "530"),
    ("codec", ("decode", "batched", 13, "both_gbps"), "594"),
    ("codec", ("decode", "batched", 10, "both_gbps"), "272"),
    ("codec", ("decode", "batched", 11, "both_gbps"), "273"),
    ("codec", ("decode", "batched", 12, "both_gbps"), "387"),
    ("codec", ("decode", "python_codec", "96 pieces", "call_us"), "58.8"),
    ("codec", ("decode", "python_codec", "96 pieces", "gbps_with_the_call"), "153.5"),
    ("codec", ("decode", "python_codec", "768 pieces", "call_us"), "223"),
    ("codec", ("decode", "python_codec", "768 pieces", "gbps_with_the_call"), "312.6"),
)


@pytest.mark.parametrize(
    ("page", "told"),
    [
        *(("README.md", told) for told in README),
        *(("docs/loader.md", told) for told in LOADER),
        *(("docs/replay.md", told) for told in REPLAY),
        *(("docs/log.md", told) for told in LOG),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value[0]}-{value[1][-1]}-{value[2]}",
)
def test_a_figure_is_told_as_it_stands_in_the_result_linked_beside_it(page: str, told: Told) -> None:
    result, path, text = told
    said = re.compile(rf"(?<![\d.,]){re.escape(text)}(?![\d%]|[.,]\d)")
    linking = [block for block in _blocks((ROOT / page).read_text()) if f"results/{result}.json)" in block]
    assert any(said.search(block) for block in linking), linking
    assert _shown(_value(RESULTS[result], path), text) == text


def test_a_row_s_run_is_the_commit_of_its_result() -> None:
    readme = (ROOT / "README.md").read_text()
    commits = dict(re.findall(r"\b([abc]): (?:commit )?([0-9a-f]{7})", readme))
    rows = re.findall(r"\| ([abc]) \| \[(\w+)\]\(scripts", readme)
    assert set(commits) == {run for run, _ in rows} == {"a", "b", "c"}
    assert len(rows) == len(re.findall(r"^\|.*\[\w+\]\(scripts", readme.split("Two H200")[0], re.MULTILINE))
    for run, result in rows:
        assert RESULTS[result]["commit"].startswith(commits[run]), (run, result)
    two = ("sp2_start", "sp2_denoise", "vae_decode_2gpu")
    assert all(RESULTS[result]["commit"].startswith("df04d22") for result in two)
    assert "one request on both, commit df04d22:" in readme


def test_what_several_figures_make_is_told_as_they_make_it() -> None:
    """The parts of a ratio, and the ratio that coded starts would have against plain ones of later."""
    readme, loader = (ROOT / "README.md").read_text(), (ROOT / "docs/loader.md").read_text()
    assert "4.321 ÷ (2.951 + 2.453) of these starts, 0.80" in readme
    assert f"{4.321 / (2.951 + 2.453):.2f}" == "0.80"
    start = RESULTS["cold_start"]["figures"]
    share = start["entry_gb"] * 1e9 / start["ring_alone"][0]["bytes"]  # of all bytes, before the entry
    least = max(2.951, share * 2.951 + 2.453) / (2.951 + 2.453)
    assert f"least possible {least:.3f}" in readme
    coded = _value(RESULTS["codec_start"], ("start", "coded", "throttled", 1, "entry_s"))
    now = f"{_value(RESULTS['cold_start'], ('throttle', 2, 'entry_s')) / coded:.2f}"
    assert f"{now} times sooner, below the goal" in readme
    assert f"would be {now}, below the goal of 1.4" in loader
    hosts = ("cold_start", "cold_start_faster_host", "cold_start_slower_host")
    entries = sorted(_value(RESULTS[host], ("first_dit_entry_s",)) for host in hosts)
    assert f"{entries[0]:.2f} to {entries[-1]:.2f} s" in readme
    assert f"{entries[0]:.2f} to {entries[-1]:.2f} s" in loader


def test_single_runs_are_told_as_such() -> None:
    readme = (ROOT / "README.md").read_text()
    for result, option, words in (
        ("sp2_denoise", "--steps 1 ", "one step each"),
        ("vae_decode_2gpu", "--repeat 1 ", "one decode each"),
    ):
        rows = [row for row in readme.splitlines() if f"results/{result}.json" in row]
        assert option in RESULTS[result]["command"]
        assert all(words in row for row in rows), rows


def test_results_have_the_name_of_their_file() -> None:
    assert {name: result["name"] for name, result in RESULTS.items()} == {name: name for name in RESULTS}


def test_every_result_that_a_page_names_is_there() -> None:
    for page in PAGES:
        named = set(re.findall(r"results/(\w+)\.json", page.read_text()))
        assert named <= set(RESULTS), page.name


def test_settings_page_has_every_setting_of_a_worker_with_its_default() -> None:
    page = (ROOT / "docs/settings.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (.*?) \| (.+) \|$", page, re.MULTILINE)
    defaults = [
        (PREFIX + field.name.upper(), _default(field.default)) for field in dataclasses.fields(Settings)
    ]
    assert [(variable, default) for variable, default, _, _ in rows] == defaults
    for variable, _, allowed, _ in rows:
        name = variable.removeprefix(PREFIX).lower()
        words, items = LISTS.get(name, (CHOICES.get(name, ()), ()))
        assert set(re.findall(r"`(\w+)`", allowed)) == {*words, *items} - {""}, variable
        if name in RANGES:
            low, high = RANGES[name]
            zero = "0, or " if name in MAY_BE_ZERO else ""
            assert allowed == f"{zero}{low:g} to {high:g}", variable


def _default(value: object) -> str:
    text = value if isinstance(value, str) else f"{value:g}"
    return f"`{text}`" if text else "–"


def _blocks(page: str) -> list[str]:
    """Paragraphs, items of lists and rows of tables; of the log sections, which name their files once."""
    if page.startswith("# Experiment log"):
        return page.split("\n## ")
    return re.split(r"\n\s*\n|\n(?=[|-])", page)


def _value(result: dict[str, Any], path: tuple[str | int, ...]) -> Any:
    if len(path) == 1 and path[0] in result["targets"]:
        return result["targets"][path[0]]["value"]
    found = result["figures"]
    for name in path:
        found = found[name]
    return found


def _shown(value: float, text: str) -> str:
    """`value` with as many digits as `text`, in percent where that is."""
    number = text.removesuffix(" %")
    digits = len(number.partition(".")[2])
    return f"{value * 100:.{digits}f} %" if text.endswith("%") else f"{value:,.{digits}f}"
