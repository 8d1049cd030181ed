"""The answers of fcil predict as a table or as JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from task.inference import Predictor
from task.keys import ConfigError
from task.models.feature_cache import BATCH


@dataclass(frozen=True)
class Answer:
    """The most probable classes of a file and their probabilities, or why there are none."""

    file: str
    classes: list[tuple[str, float]]
    error: str = ""


def answers(predictor: Predictor, files: Sequence[str], top: int) -> list[Answer]:
    """The ``top`` most probable classes of each file; one that cannot be read keeps no other from its answer."""
    return [a for i in range(0, len(files), BATCH) for a in _some(predictor, files[i : i + BATCH], top)]


def _some(predictor: Predictor, files: Sequence[str], top: int) -> list[Answer]:
    images: dict[int, np.ndarray] = {}
    failed: dict[int, str] = {}
    for place, file in enumerate(files):
        try:
            images[place] = predictor.read(file)
        except ConfigError as error:
            failed[place] = str(error)
    best = dict(zip(images, predictor.predict(list(images.values())).top(top), strict=True))
    return [Answer(file, best.get(i, []), failed.get(i, "")) for i, file in enumerate(files)]


def table(found: Sequence[Answer]) -> list[str]:
    """A line for each file and class, aligned, below a heading; files without an answer are left out."""
    rows = [("file", "class", "probability")]
    rows += [(a.file, name, f"{probability:.4f}") for a in found for name, probability in a.classes]
    first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
    return [f"{file:<{first}}  {name:<{second}}  {probability}" for file, name, probability in rows]


def as_json(found: Sequence[Answer]) -> str:
    """A list with, for each file, its classes or its error."""
    return json.dumps([_entry(answer) for answer in found], indent=1)


def _entry(answer: Answer) -> dict[str, object]:
    if answer.error:
        return {"file": answer.file, "error": answer.error}
    classes = [{"class": name, "probability": probability} for name, probability in answer.classes]
    return {"file": answer.file, "classes": classes}
