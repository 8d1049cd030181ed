"""Suites of two short runs: their variants, finished runs by their files alone, and the table read back."""

import json

import yaml

from server_app.run_files.writers import origin
from tests.conftest import TINY

KEYS = {name: value for name, value in TINY.items() if name != "partition"}
NCM, HEAD = {"label": "means", "method": "ncm"}, {"label": "head", "method": "head-only"}


def run_results(accuracies, seconds=60.0, up=1000, status="finished"):
    """A results.json of two tasks; ``accuracies`` after task 1 on it, after task 2 on both."""
    first, again, second = accuracies
    return {
        "schema": 1,
        "status": status,
        "method": "ncm",
        "dataset": "synthetic",
        "num_tasks": 2,
        "accuracy_matrix": [[first, None], [again, second]] if status == "finished" else [],
        "per_task_seen_accuracy": [first, (again + 3 * second) / 4] if status == "finished" else [],
        "metrics": {},
        "communication": {
            "bytes_up": 4e6,
            "bytes_down": 1e6,
            "bytes_up_per_client_round": up,
            "bytes_down_per_client_round": 500,
        },
        "seconds": {"total": seconds},
        "rounds": [{"failures": []}, {"failures": [{"name": "client-0001", "reason": "gone"}]}],
    }


def fill(planned, results, made_by=None, **changed):
    """Lay a run into a planned one's folder, with the planned keys but for those ``changed``."""
    planned.directory.mkdir(parents=True)
    (planned.directory / "results.json").write_text(json.dumps(results | {"seed": planned.seed}))
    keys = {**planned.config.flat(), **{name.replace("_", "-"): value for name, value in changed.items()}}
    (planned.directory / "config.yaml").write_text(yaml.safe_dump(keys | (made_by or origin())))


def table(folder):
    """Rows of table.md by method and setting."""
    lines = [line for line in (folder / "table.md").read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return rows[0], {tuple(row[:2]): row[2:] for row in rows[2:]}
