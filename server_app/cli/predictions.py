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


def classify_files(predictor: Predictor, files: Sequence[str], top: int) -> list[Answer]:
    """The ``top`` most probable classes of each file; a file that cannot be read gets an error instead."""
    return [answer for i in range(0, len(files), BATCH) for answer in _batch(predictor, files[i : i + BATCH], top)]


def _batch(predictor: Predictor, files: Sequence[str], top: int) -> list[Answer]:
    images: dict[int, np.ndarray] = {}
    errors: dict[int, str] = {}
    for i, file in enumerate(files):
        try:
            images[i] = predictor.read(file)
        except ConfigError as error:
            errors[i] = str(error)
    best = dict(zip(images, predictor.predict(list(images.values())).top(top), strict=True))
    return [Answer(file, best.get(i, []), errors.get(i, "")) for i, file in enumerate(files)]


def as_table(answers: Sequence[Answer]) -> list[str]:
    """A heading, and an aligned line for each file and class; files with an error are left out."""
    rows = [("file", "class", "probability")]
    rows += [(a.file, name, f"{probability:.4f}") for a in answers for name, probability in a.classes]
    first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
    return [f"{file:<{first}}  {name:<{second}}  {probability}" for file, name, probability in rows]


def as_json(answers: Sequence[Answer]) -> str:
    """A JSON list with the classes or the error of each file."""
    return json.dumps([_entry(answer) for answer in answers], indent=1)


def _entry(answer: Answer) -> dict[str, object]:
    if answer.error:
        return {"file": answer.file, "error": answer.error}
    classes = [{"class": name, "probability": probability} for name, probability in answer.classes]
    return {"file": answer.file, "classes": classes}
