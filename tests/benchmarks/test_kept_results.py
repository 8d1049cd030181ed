"""The tables of docs/results.md and of FedRDA's variants have the figures of the kept runs, and miss none of them.

Other pages' tables have the figures of docs/results.md; and the classes of a kept run come in its order today, too.
"""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml

from task.config.parsing import parse
from task.scenario.class_stream import class_order
from task.scenario.scenario import build_scenario
from tests.helpers.documents import PAGES, ROOT, commands, section

PAGE = "docs/results.md"
VARIANTS = "docs/fedrda-choices.md"
KEPT = ROOT / "benchmarks" / "results"
FIGURE = r"\d+\.\d ± \d+\.\d"
CIFAR = "100 classes of CIFAR-100"
FINAL = "final average accuracy, %"
METRICS = {
    FINAL: "final_average_accuracy",
    "average incremental, %": "average_incremental_accuracy",
    "forgetting, points": "forgetting",
}
TABLES = {  # section of the page -> folder of its runs, and the part of it that stands below a row's folder
    "Digits": ("digits", ""),
    CIFAR: ("cifar100-cpu", "beta-0.5"),
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
# columns that a section's table does without, and what stands for their cells
LEFT_OUT = {"All images of CIFAR-100": {"seeds": "0", "step size": "-"}}
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
    rows = [LEFT_OUT.get(heading, {}) | row for row in named(tables(heading)[0])] + variants
    return [row for row in rows if "one task" not in row["row"] and "not run" not in "".join(row.values())]


def label(name: str) -> str:
    """The suite's label of a row: of `hgp`, 2 rounds of 2 epochs, it is hgp-2x2."""
    return name.split("`")[1] + "-2x2" * ("2 rounds of 2 epochs" in name)


def read(path: Path) -> dict[str, Any]:
    """A results.json."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def kept(folder: Path) -> list[dict[str, Any]]:
    """results.json of the seeds below a folder, in order."""
    return [read(path) for path in sorted(folder.glob("seed*/results.json"))]


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
        assert row["seeds"] == ", ".join(str(run["seed"]) for run in runs), name


@pytest.mark.parametrize("heading", TABLES)
def test_step_sizes_and_traffic(heading):
    folder, below = TABLES[heading]
    for row in rows_of_runs(heading):
        runs = kept(KEPT / folder / label(row["row"]) / below)
        step = row["step size"].split(",")[0]
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


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_digits_runs_have_their_classes_in_the_order_of_today(seed: int) -> None:
    """By all that makes a run's schedule; for all kept runs by their number of classes, see the next test."""
    for run in (kept(folder)[seed] for folder in (KEPT / "digits").iterdir()):
        config = parse({"dataset": "digits", "seed": run["seed"], "num-tasks": run["num-tasks"]})
        tasks = build_scenario(config).schedule.tasks
        assert [c for task in tasks for c in task] == run["class_order"]


def test_every_kept_run_has_its_classes_in_the_order_of_today() -> None:
    for path in KEPT.rglob("results.json"):
        run = read(path)
        order = run["class_order"]
        assert order == class_order(len(order), run["seed"], run["class-order"]), path


SUITES = [folder.name for folder in sorted(KEPT.iterdir()) if (ROOT / "suites" / f"{folder.name}.yaml").exists()]


@pytest.mark.parametrize("name", SUITES)
def test_suites_plan_the_seeds_that_are_kept(name):
    suite = yaml.safe_load((ROOT / "suites" / f"{name}.yaml").read_text(encoding="utf-8"))
    planned = {variant["label"]: set(variant.get("seeds", suite["seeds"])) for variant in suite["variants"]}
    rows = {path.name: path for path in (KEPT / name).iterdir() if path.name in planned}
    assert rows
    for row, path in rows.items():
        seeds = {read(run)["seed"] for run in path.rglob("results.json")}
        assert seeds <= planned[row], row


def test_one_suite_on_several_sets_has_several_folders():
    """A folder that holds other runs is refused."""
    given = [dict(word.split("=", 1) for word in words[3:] if "=" in word)
             for words in commands(PAGE) if words[:3] == ["fcil", "bench", "suites/compare.yaml"]]  # fmt: skip
    assert len(given) > 5
    assert len({keys["output-dir"] for keys in given}) == len(given)


def starts_with_figure(cell: str, figure: str) -> bool:
    """Whether a cell is the figure or has words after it: 39.1 does not begin 39.1 ± 0.2, nor 39.12."""
    return cell.startswith(figure) and not re.match(r" ±|[\d.,]", cell[len(figure) :])


def cell_of(heading: str, row: str, column: str) -> str:
    """The cell of a section's row, by its label."""
    [cell] = [line[column] for line in rows_of_runs(heading) if label(line["row"]) == row]
    return cell


def test_in_short_has_the_figures_of_the_sections():
    head, *rows = tables("In short")[0]
    assert {row[0].partition("]")[0][1:] for row in rows} == set(TABLES)
    for name, *cells in rows:
        images = name.partition("]")[0][1:]
        assert cells == [cell_of(images, label(method), FINAL) for method in head[1:]], images


def test_readme_has_figures_of_the_page():
    figures = re.findall(FIGURE, PAGES["README.md"])
    assert len(figures) > 5
    assert not [figure for figure in figures if figure not in PAGES[PAGE]]


def test_the_table_of_the_readme_has_the_figures_of_its_section() -> None:
    """A row is named by its label, or by several, or by the one in brackets."""
    rows = named(tables("Results", "README.md")[0])
    assert len(rows) > 10
    for row in rows:
        labels = re.findall(r"\(`([\w-]+)`\)", row["method"]) or re.findall("`([^`]+)`", row["method"])
        labels = labels[: len(row[FINAL].split(", "))]
        for column in (FINAL, "MB up a client, whole run"):
            figures = [cell_of(CIFAR, one, column) for one in labels]
            assert row[column] == ", ".join(figures), row["method"]


# page -> of its rows, in their order, how they start, the section with their figures, and the row of each cell there
ROWS_OF_METHODS: dict[str, list[tuple[str, str, list[str]]]] = {
    "hgp": [
        ("digits, `hgp`", "Digits", ["hgp", "hgp"]),
        ("digits, `fedavg` with", "Digits", ["fedavg", "fedavg"]),
        ("100 classes", CIFAR, ["hgp", "hgp"]),
        ("the same, `hgp-batch-size=32`", CIFAR, ["hgp-batch-32", "hgp-batch-32"]),
    ],
    "pip": [
        ("digits, dualprompt", "Digits", ["pip-dualprompt", "fedavg-dualprompt"]),
        ("digits, l2p", "Digits", ["pip-l2p", "fedavg-l2p"]),
        ("100 classes", CIFAR, ["pip-dualprompt"]),
        ("the same, Dirichlet 0.5, l2p", CIFAR, ["pip-l2p", "fedavg-l2p"]),
    ],
    "fppl": [
        ("digits", "Digits", ["fppl", "fppl", "fedavg-fused"]),
        ("100 classes", CIFAR, ["fppl", "fppl", "fedavg-fused"]),
    ],
    "hepco": [
        ("digits, step sizes chosen", "Digits", ["hepco", "fedavg-decomposed-plain"]),
        ("the same, `hepco-rows=seen`", "Digits", ["hepco-all-rows", "fedavg-decomposed-plain"]),
        ("100 classes", CIFAR, ["hepco", "fedavg-decomposed-plain"]),
        ("the same, `hepco-rows=seen`", CIFAR, ["hepco-all-rows", "fedavg-decomposed-plain"]),
    ],
    "fedprok": [
        ("digits, no prompt", "Digits", ["fedprok", "fedprok", "head-only"]),
        ("digits, prompt shared", "Digits", ["fedprok-shared", "fedprok-shared", "fedavg"]),
        ("100 classes", CIFAR, ["fedprok", "fedprok", "head-only"]),
        ("the same, prompt shared", CIFAR, ["fedprok-shared", "fedprok-shared"]),
    ],
    "fedrda": [
        (start, heading, ["fedrda", "fedrda-frozen"])
        for start, heading in {
            "digits": "Digits",
            "100 classes": CIFAR,
            "the same, all images": "All images of CIFAR-100",
            "uneven classes": "Uneven classes of CIFAR-100",
            "letters": "Letters",
            "emoji": "Emoji",
            "drawings of graphs": "Graphs",
            "drawn shapes": "Shapes",
            "Fashion-MNIST": "Fashion-MNIST",
            "spectrograms": "Spectrograms",
            "clip art": "Clip art",
        }.items()
    ],
    "afcl": [
        ("digits", "Digits", ["afcl", "afcl"]),
        ("100 classes", CIFAR, ["afcl", "afcl"]),
        ("the same, `afcl-head=discriminant`", CIFAR, ["afcl-discriminant", "afcl-discriminant"]),
        ("the same, `afcl-head=regularised`", CIFAR, ["afcl-regularised", "afcl-regularised"]),
        ("the same, `afcl-random-features=1000`", CIFAR, ["afcl-random-features", "afcl-random-features"]),
        ("the same, `prompt=lora`", CIFAR, ["afcl-lora", "afcl-lora"]),
    ],
    "ccvr": [
        ("digits, `ccvr`", "Digits", ["ccvr", "ccvr"]),
        ("digits, `fedslca`", "Digits", ["fedslca", "fedslca"]),
        ("100 classes of CIFAR-100, `fedslca`", CIFAR, ["fedslca", "fedslca"]),
        ("100 classes of CIFAR-100, `ccvr`", CIFAR, ["ccvr", "ccvr"]),
    ],
}


@pytest.mark.parametrize("method", ROWS_OF_METHODS)
def test_pages_of_methods_have_the_figures_of_the_sections(method: str) -> None:
    """Forgetting where the column says so; all else is the final average accuracy."""
    lines = tables("Its results", f"docs/methods/{method}.md")
    rows = ((row, table[0]) for table in lines for row in table[1:])
    for start, heading, labels in ROWS_OF_METHODS[method]:
        cells, head = next(pair for pair in rows if pair[0][0].startswith(start))
        for cell, column, row in zip(cells[1:], head[1:], labels, strict=False):
            figure = cell_of(heading, row, column if column in METRICS else FINAL)
            assert starts_with_figure(cell, figure), (start, column)


@pytest.mark.parametrize("method", ROWS_OF_METHODS)
def test_other_figures_of_the_pages_of_methods_are_on_the_page_of_results(method: str) -> None:
    results = section(f"docs/methods/{method}.md", "Its results")
    lines = re.findall(r"^\| (?:digits|100 classes|the same, `|spectrograms|letters).*", results, re.MULTILINE)
    figures = re.findall(FIGURE, "\n".join(lines))
    assert len(figures) > 2
    assert not [figure for figure in figures if figure not in PAGES[PAGE]]
