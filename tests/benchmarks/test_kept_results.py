"""The tables of docs/results.md and of FedRDA's variants have the figures of the kept runs, and miss none of them."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.documents import PAGES, ROOT, commands, section

PAGE = "docs/results.md"
VARIANTS = "docs/fedrda-choices.md"
KEPT = ROOT / "benchmarks" / "results"
FIGURE = r"\d+\.\d ± \d+\.\d"
METRICS = {
    "final average accuracy, %": "final_average_accuracy",
    "average incremental, %": "average_incremental_accuracy",
    "forgetting, points": "forgetting",
}
TABLES = {  # section of the page -> folder of its runs, and the part of it that stands below a row's folder
    "Digits": ("digits", ""),
    "100 classes of CIFAR-100": ("cifar100-cpu", "beta-0.5"),
    "All images of CIFAR-100": ("cifar100-closed-form", ""),
    "Uneven classes of CIFAR-100": ("cifar100-uneven", ""),
    "Spectrograms": ("spectrograms", ""),
    "Letters": ("letters", ""),
    "Emoji": ("emoji", ""),
    "Graphs": ("graphs", ""),
    "Shapes": ("shapes", ""),
    "Clip art": ("clipart", ""),
    "Fashion-MNIST": ("fashion", ""),
}
PARTITIONS = {
    "Dirichlet 0.5": "beta-0.5",
    "Dirichlet 0.1": "beta-0.1",
    "2 classes a client": "quantity-2",
    "as PIP's paper": "of-pip",
    "as HePCo's paper": "of-hepco",
}


def tables(heading: str, page: str = PAGE) -> list[list[list[str]]]:
    """The tables of a section of a page: of each its lines, the headings first, of each line its cells."""
    blocks = re.findall(r"(?:^\|.*\|\n)+", section(page, heading), re.MULTILINE)
    lines = [[line for line in block.splitlines() if not set(line) <= set("| -")] for block in blocks]
    return [[[cell.strip() for cell in line[1:-1].split("|")] for line in table] for table in lines]


def named(table: list[list[str]]) -> list[dict[str, str]]:
    """The rows of a table as heading -> cell."""
    return [dict(zip(table[0], row, strict=True)) for row in table[1:]]


def rows_of_runs(heading: str) -> list[dict[str, str]]:
    """What was run of a section's first table and of FedRDA's variants, but for rows of one task, kept elsewhere."""
    variants = [row for row in named(tables("Variants", VARIANTS)[1]) if row["images"] == heading]
    rows = named(tables(heading)[0]) + variants
    return [row for row in rows if "one task" not in row["row"] and "not run" not in "".join(row.values())]


def label(name: str) -> str:
    """The suite's label of a row: of `hgp`, 2 rounds of 2 epochs, it is hgp-2x2."""
    return name.split("`")[1] + "-2x2" * ("2 rounds of 2 epochs" in name)


def kept(folder: Path) -> list[dict[str, Any]]:
    """results.json of the seeds below a folder, in order."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("seed*/results.json"))]


def percent(runs: list[dict[str, Any]], metric: str) -> object:
    """What page() must be: the mean over runs in percent, and the sample standard deviation if they are several."""
    values = [100 * run["metrics"][metric] for run in runs]
    spread = [statistics.stdev(values)] if len(values) > 1 else []
    return pytest.approx([statistics.mean(values), *spread], abs=0.0501)


def page(cell: str) -> list[float]:
    """The numbers of a cell such as 74.9 ± 0.7."""
    return [float(part) for part in cell.split(" ± ")]


@pytest.mark.parametrize("heading", TABLES)
def test_main_table(heading):
    folder, below = TABLES[heading]
    rows = {label(row["row"]): row for row in rows_of_runs(heading)}
    found = {path.name: runs for path in (KEPT / folder).iterdir() if (runs := kept(path / below))}
    assert set(found) - {"fedavg-none"} == set(rows)  # head-only's row is fedavg-none's too
    for name, row in rows.items():
        runs = found[name]
        for head, metric in METRICS.items():
            assert page(row[head]) == percent(runs, metric), (name, head)
        assert row.get("seeds", "0") == ", ".join(str(run["seed"]) for run in runs), name


@pytest.mark.parametrize("heading", TABLES)
def test_step_sizes_and_traffic(heading):
    folder, below = TABLES[heading]
    for row in rows_of_runs(heading):
        runs = kept(KEPT / folder / label(row["row"]) / below)
        step = row.get("step size", "-").split(",")[0]
        assert step == "-" or {float(step)} == {run["learning-rate"] for run in runs}, row["row"]
        sent = statistics.mean(run["communication"]["bytes_up"] for run in runs)
        megabytes = sent / runs[0]["num-clients"] / 1e6
        assert float(row["MB up a client, whole run"]) == pytest.approx(megabytes, rel=0.006, abs=0.006), row["row"]


@pytest.mark.parametrize("heading", TABLES)
def test_core_minutes(heading):
    folder, below = TABLES[heading]
    for row in rows_of_runs(heading):
        runs = kept(KEPT / folder / label(row["row"]) / below)
        cell = re.split("[,;]", row["core-minutes"])[0]
        half_a_digit = 0.51 * 10.0 ** -len(cell.partition(".")[2])
        # "0.02; 0.42 with the first pass": one of three seeds has computed the features
        average = statistics.median if ";" in row["core-minutes"] else statistics.mean
        minutes = average(run["seconds"]["cpu_total"] for run in runs) / 60
        assert float(cell) == pytest.approx(minutes, abs=half_a_digit), row["row"]


def test_partitions():
    folder = KEPT / "cifar100-cpu"
    for row in named(tables("100 classes of CIFAR-100")[1]) + named(tables("Variants", VARIANTS)[2]):
        for head, part in PARTITIONS.items():
            runs = kept(folder / label(row["row"]) / part)[:1]
            expected = percent(runs, "final_average_accuracy") if runs else "not run"
            assert (page(row[head]) if runs else row[head]) == expected, (row["row"], head)


SUITES = [folder.name for folder in sorted(KEPT.iterdir()) if (ROOT / "suites" / f"{folder.name}.yaml").exists()]


@pytest.mark.parametrize("name", SUITES)
def test_suites_plan_the_seeds_that_are_kept(name):
    suite = yaml.safe_load((ROOT / "suites" / f"{name}.yaml").read_text(encoding="utf-8"))
    planned = {variant["label"]: set(variant.get("seeds", suite["seeds"])) for variant in suite["variants"]}
    rows = {path.name: path for path in (KEPT / name).iterdir() if path.name in planned}
    assert rows
    for row, path in rows.items():
        seeds = {json.loads(run.read_text(encoding="utf-8"))["seed"] for run in path.rglob("results.json")}
        assert seeds <= planned[row], row


def test_one_suite_on_several_sets_has_several_folders():
    """A folder that holds other runs is refused."""
    given = [dict(word.split("=", 1) for word in words[3:] if "=" in word)
             for words in commands(PAGE) if words[:3] == ["fcil", "bench", "suites/compare.yaml"]]  # fmt: skip
    assert len(given) > 5
    assert len({keys["output-dir"] for keys in given}) == len(given)


def test_in_short_has_the_figures_of_the_sections():
    head, *rows = tables("In short")[0]
    assert {row[0].partition("]")[0][1:] for row in rows} == set(TABLES)
    for name, *cells in rows:
        images = name.partition("]")[0][1:]
        first, *lines = tables(images)[0]
        column = first.index("final average accuracy, %")
        figures = {line[0]: line[column] for line in lines}
        assert cells == [figures[label] for label in head[1:]], images


def test_readme_has_figures_of_the_page():
    figures = re.findall(FIGURE, PAGES["README.md"])
    assert len(figures) > 5
    assert not [figure for figure in figures if figure not in PAGES[PAGE]]


@pytest.mark.parametrize("method", ["hgp", "pip", "fppl", "hepco", "fedprok", "fedrda", "afcl", "ccvr"])
def test_pages_of_methods_have_figures_of_the_page(method):
    results = section(f"docs/methods/{method}.md", "Its results")
    tables = re.findall(r"^\| (?:digits|100 classes|the same, `|spectrograms|letters).*", results, re.MULTILINE)
    figures = re.findall(FIGURE, "\n".join(tables))
    assert len(figures) > 2
    assert not [figure for figure in figures if figure not in PAGES[PAGE]]
