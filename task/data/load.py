"""Loading a run's data set by its name in the table.

The classes and images of a published data set are counted; other numbers than the published ones are refused.
"""

import logging
from functools import lru_cache
from pathlib import Path

import numpy as np

from task.data.images import MAX_PIXELS, Dataset, UnreadableImage, find_unreadable
from task.data.published import IncompleteError
from task.data.registry import SOURCES, Source
from task.data.splits import split_validation
from task.keys import ConfigError
from task.utils.paths import expand_home

log = logging.getLogger(__name__)

_NAMED = 5  # files in one error


@lru_cache(maxsize=2)
def load_dataset(
    name: str, data_dir: str, image_size: int, validation_share: float, seed: int, max_image_pixels: int = MAX_PIXELS
) -> Dataset:
    """The one copy of a data set in this process; arguments are the run keys of the same names.

    Raises:
        ConfigError: the path is missing, empty, incomplete or not in the expected form, or has one class.
    """
    try:
        dataset = read_source(SOURCES[name], expand_home(data_dir, "data-dir"), image_size, max_image_pixels)
    except OSError as error:  # such as a path that is too long, or no right to read
        raise ConfigError(f"data-dir = {data_dir!r} cannot be read: {error}.") from error
    if len(dataset.class_names) < 2:
        raise ConfigError(
            f"data-dir = {data_dir!r} has one class, {dataset.class_names[0]!r}: give two or more, "
            "in a folder of images a folder for each."
        )
    if validation_share:
        dataset = split_validation(dataset, validation_share, seed)
    for part in (dataset.train_labels, dataset.test_labels):
        missing = np.flatnonzero(np.bincount(part, minlength=len(dataset.class_names)) == 0)
        if len(missing):
            names = [dataset.class_names[c] for c in missing[:5]]
            asked = f", validation-share = {validation_share:g}" if validation_share else ""
            kind = "validation" if validation_share else "test"
            together = "" if dataset.train_groups is None else ", and images of one of its groups stay together"
            raise ConfigError(
                f"data-dir = {data_dir!r}{asked}: too few images of {names}; each class needs one for training and one "
                f"as {kind} image, at least{together}."
            )
    return dataset


def require_readable(dataset: Dataset, name: str) -> None:
    """Decode each file of a user's own folder once: a damaged one would end the run when its turn comes.

    Published sets, of which there are large ones, are only counted.

    Raises:
        UnreadableImage: names the first five files that cannot be read, and says how many more there are.
    """
    if is_published(name):
        return
    log.info("reading %d images", len(dataset.train_labels) + len(dataset.test_labels))
    problems = find_unreadable(dataset.train_images) + find_unreadable(dataset.test_images)
    if problems:
        raise UnreadableImage(" ".join(problems[:_NAMED]) + f" {len(problems)} files in all." * (len(problems) > 1))


def is_published(name: str) -> bool:
    """Whether a data set has a known number of classes and images, which are counted when it is loaded."""
    return bool(SOURCES[name].classes)


def default_augmentation(dataset: Dataset, asked: str) -> str:
    """The run key ``augmentation``, resolved."""
    return dataset.augmentation if asked == "auto" else asked


def read_source(source: Source, path: Path, side: int, max_pixels: int = MAX_PIXELS) -> Dataset:
    """Load and count a data set.

    ``path`` is the published folder's parent or that folder; ``side`` of decoded files in pixels, not of arrays, and
    ``max_pixels`` as :func:`task.data.images.read_rgb` has it.

    Raises:
        ConfigError: missing, incomplete or malformed; says what was found, what is expected and where it comes from.
    """
    if not source.classes:
        return source.load(path, side, max_pixels)
    root = path if path.name == source.folder else path / source.folder
    try:
        dataset = source.load(root, side, max_pixels)
        _check_counts(dataset, source)
        return dataset
    except FileNotFoundError as error:
        raise _refusal(source, path, root, f"{error.filename} is missing") from error
    except IncompleteError as error:
        raise _refusal(source, path, root, str(error)) from error
    except (OSError, LookupError, ValueError) as error:
        raise _refusal(source, path, root, f"its files are not as published ({error!r})") from error


def _refusal(source: Source, path: Path, root: Path, problem: str) -> ConfigError:
    return ConfigError(
        f"data-dir = {str(path)!r}: {problem}. Expected in {str(root)!r}: {source.holds}; "
        f"{_counts(source.classes, source.train, source.test)}. "
        f"Get it from {source.address}; nothing is downloaded during a run."
    )


def _counts(classes: int, train: int, test: int) -> str:
    images = f"{train:,} training and {test:,} test images" if test else f"{train:,} images"
    return f"{images} of {classes} classes"


def _check_counts(dataset: Dataset, source: Source) -> None:
    classes, train, test = len(dataset.class_names), len(dataset.train_labels), len(dataset.test_labels)
    counts = (classes, train, test) if source.test else (classes, train + test, 0)
    if counts == (source.classes, source.train, source.test):
        return
    problem = f"found {_counts(*counts)}"
    if classes and counts[1] < source.train:
        each = np.bincount(dataset.train_labels, minlength=classes)
        problem += f"; {dataset.class_names[each.argmin()]!r} has the fewest training images, {each.min()}"
    raise IncompleteError(problem)
