"""A finished round and a finished run in words; imports nothing heavy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from server_app.run_files.status import incomplete_tests, read_results, untested_classes

NAMED = 40  # classes or tasks
_RESULTS = ("results.json", "accuracy.png", "forgetting.png", "report.html")


def describe_round(line: Mapping[str, Any], number: int) -> list[str]:
    """Describe the ``number``-th round of a run, from its line of rounds.jsonl: its outcome, and each failed client."""
    failures, tasks, rounds = line["failures"], line["num_tasks"], line["rounds_per_task"]
    # a client may fail twice, in training and evaluation, and clients evaluate that were not drawn to train
    failed = len({failure["name"] for failure in failures} & set(line["participants"]))
    idle = len(line["idle"])  # they have no image of the task
    seconds_left = line["elapsed"] / number * (line["total_rounds"] - number)
    parts = [
        f"task {line['task']}/{tasks}, round {line['round']}/{rounds}",
        f"{len(line['participants'])} clients" + f", {idle} idle" * bool(idle) + f", {failed} failed" * bool(failed),
        f"loss {line['train_loss']:.3f}" if line["train_loss"] is not None else "",
        f"accuracy on all seen classes {line['seen_accuracy']:.1%}" if line["seen_accuracy"] is not None else "",
        f"{_clock(line['elapsed'])}, about {_clock(seconds_left)} left",
    ]
    return ["  ".join(filter(None, parts)), *(f"    {f['name']}: {f['reason']}" for f in failures)]


def summary(directory: Path) -> list[str]:
    """The outcome of a finished run, what was not tested or not learned, and the paths of its files, in lines."""
    results = read_results(directory)
    metrics, untested = results.get("metrics", {}), untested_classes(results)
    shown = {"final_average_accuracy": "final average accuracy", "forgetting": "forgetting"}
    outcome = ", ".join(f"{text} {metrics[name]:.1%}" for name, text in shown.items() if metrics.get(name) is not None)
    outcome += " on validation images" * bool(outcome and "validation_share" in results)
    missing = f"without a test image of {first_names(untested)}" if untested else ""
    away = [f"task {task} on {now} of {held}" for task, now, held in incomplete_tests(results)]
    fewer = f"measured on fewer test images, as nodes were away: after {first_names(away)}" if away else ""
    lost = results.get("tasks_not_learned")
    unlearned = f"not learned, and not tried again: task{'s' * (len(lost) > 1)} {first_names(lost)}" if lost else ""
    return [
        *filter(None, [outcome, fewer, missing, unlearned]),
        *(str(directory / n) for n in _RESULTS if (directory / n).exists()),
    ]


def first_names(names: Sequence[str | int]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(map(str, names[:NAMED])) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
