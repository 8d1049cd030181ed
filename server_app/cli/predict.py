"""fcil predict: classes of images, by the model of a run."""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server_app.cli.common import DEVICES, FAILED, MODELS, OK, complain, positive, tell_unfinished
from task.keys import AUTO, ConfigError

if TYPE_CHECKING:
    from task.inference import Predictor


def describe(parser: argparse.ArgumentParser) -> None:
    """Arguments of fcil predict."""
    parser.description = (
        "Print the most probable classes of images. Exit code 1 if there is no model, or an image cannot be read; the "
        "others are answered."
    )
    parser.add_argument("model", metavar="RUN_DIR", help=MODELS)
    parser.add_argument("words", nargs="+", metavar="IMAGE", help="image files of any size, or folders of them")
    parser.add_argument("--top", type=positive, default=1, metavar="K", help="classes per image (default: 1)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--device", default=AUTO, help=DEVICES)
    parser.set_defaults(command=_run_command)


def _run_command(args: argparse.Namespace) -> int:
    from server_app.tables import align
    from task.inference import load_predictor

    errors = list[str]()
    files = [file for word in args.words for file in _list_files(word, errors)]
    predictor = load_predictor(args.model, args.device)
    tell_unfinished(predictor.metadata)
    answers = _classify_files(predictor, files, args.top)
    rows = [(a["file"], c["class"], f"{c['probability']:.4f}") for a in answers for c in a.get("classes", [])]
    table = "\n".join(align([("file", "class", "probability"), *rows])) if rows else ""
    print(json.dumps(answers, indent=1) if args.json else table, end="\n" if rows or args.json else "")
    errors += [answer["error"] for answer in answers if "error" in answer]
    return max([OK, *(complain(error, FAILED) for error in errors)])


def _list_files(word: str, errors: list[str]) -> list[str]:
    """The image files below a folder, by name; a word that names none stays as it is. ``errors`` gets what failed."""
    from task.data.image_folders import image_files

    if not os.path.isdir(word):
        return [word]
    unread = list[OSError]()
    files = sorted(image_files(Path(word), unread.append))
    errors += map(str, unread) if unread or files else [f"{word!r} is a folder without images."]
    return files


def _classify_files(predictor: "Predictor", files: Sequence[str], top: int) -> list[dict[str, Any]]:
    """The ``top`` most probable classes of each file; a file that cannot be read gets an error instead."""
    from task.models.feature_cache import BATCH

    answers: list[dict[str, Any]] = [{"file": file} for file in files]
    for start in range(0, len(answers), BATCH):
        images, readable = [], []
        for answer in answers[start : start + BATCH]:
            try:
                images.append(predictor.read(answer["file"]))
                readable.append(answer)
            except ConfigError as error:
                answer["error"] = str(error)
        for answer, best in zip(readable, predictor.predict(images).top(top), strict=True):
            answer["classes"] = [{"class": name, "probability": probability} for name, probability in best]
    return answers
