"""The answers of fcil predict."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from server_app.clients.registry import align
from task.inference import Predictor
from task.keys import ConfigError
from task.models.feature_cache import BATCH


def classify_files(predictor: Predictor, files: Sequence[str], top: int) -> list[dict[str, Any]]:
    """The ``top`` most probable classes of each file; a file that cannot be read gets an error instead."""
    answers: list[dict[str, Any]] = [{"file": file} for file in files]
    for start in range(0, len(answers), BATCH):
        images, readable = list[np.ndarray](), list[dict[str, Any]]()
        for answer in answers[start : start + BATCH]:
            try:
                images.append(predictor.read(answer["file"]))
                readable.append(answer)
            except ConfigError as error:
                answer["error"] = str(error)
        for answer, best in zip(readable, predictor.predict(images).top(top), strict=True):
            answer["classes"] = [{"class": name, "probability": probability} for name, probability in best]
    return answers


def as_table(answers: Sequence[dict[str, Any]]) -> str:
    """A heading, and an aligned line for each file and class; files with an error are left out."""
    rows = [("file", "class", "probability")]
    rows += [(a["file"], c["class"], f"{c['probability']:.4f}") for a in answers for c in a.get("classes", [])]
    return "\n".join(align(rows))
