"""A user's own data: arrays in an .npz file or a folder of .npy files, or a folder of images per class."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from zipfile import ZipInfo

import numpy as np

from task.data.class_names import require_printable
from task.data.image_folders import class_folders, images_by_class, require_classes
from task.data.images import Dataset, ImageFiles
from task.data.splits import HELD_OUT, draw_held_out, select_by_digest, split_dataset
from task.keys import ConfigError
from task.utils.memory import available_memory

_ARRAYS = ("images", "labels", "split", "groups", "class_names")  # others in an .npz file are passed over


def npz(path: Path, side: int, max_pixels: int, by_content: bool = False) -> Dataset:
    """Arrays: images uint8 [N, H, W, 3] or [N, H, W] and labels [N].

    Optional are class names, split [N] (1 = test), and groups [N], whole numbers or texts: images of one group, such as
    those of one patient, are either training or test images, all of them.

    ``path`` is an .npz file, whose arrays of these names are read into memory, or a folder of images.npy, labels.npy,
    split.npy, groups.npy and class_names.txt (one name per line), whose images are memory-mapped: only those that are
    used are read. Without a split a fifth of each class is held out at random. With ``by_content`` about a fifth is
    held out by a digest of each image, or of its group, so that training images stay training images when the file
    grows.

    Raises:
        ConfigError: missing, unreadable, of the wrong shapes or types, names, groups or split that do not fit the
            labels, or a split that divides a group.
    """
    try:
        arrays = _decode_names(_npy_folder(path) if path.is_dir() else _npz_file(path))
    except Exception as error:  # of a damaged file NumPy and zipfile raise nearly any kind
        what = "folder of .npy files" if path.is_dir() else ".npz file"
        reason = " ".join(str(error).split())
        if isinstance(error, ValueError) and "pickle" in reason:  # NumPy advises to run the code that a file may hold
            reason = "it is damaged, or holds more than arrays of numbers and texts; np.array(values, str) makes texts"
        raise ConfigError(f"data-dir = {str(path)!r} is not a readable {what} ({reason}).") from error
    if "class_names" in arrays:
        _check_names(arrays["class_names"], path)
    images, labels = _check_arrays(arrays, path)
    groups = _read_groups(arrays["groups"], labels, path) if "groups" in arrays else None
    names = arrays.get("class_names", np.arange(labels.max() + 1))
    if "split" in arrays:
        test = _read_split(arrays["split"], labels, path)
        _refuse_divided(groups, test, path)
    elif by_content:
        test = select_by_digest(_contents(images, arrays.get("groups")))
    else:
        test = draw_held_out(labels, HELD_OUT, 0, "npz", groups)
    if not by_content and (test.all() or not test.any()):
        raise ConfigError(
            f"data-dir = {str(path)!r}: {test.sum()} of its {len(test)} images are test images (split = 1)."
        )
    return split_dataset(test, images, labels, tuple(map(str, names)), groups=groups)


def _contents(images: np.ndarray, groups: np.ndarray | None) -> Iterator[bytes]:
    """What decides by its digest whether an image is held out: its pixels, or the text of its group."""
    if groups is None:
        return (image.tobytes() for image in images)
    return (str(group).encode("utf-8", "surrogatepass") for group in groups)


def _read_groups(groups: np.ndarray, labels: np.ndarray, path: Path) -> np.ndarray:
    if groups.shape != labels.shape or groups.dtype.kind not in "iuU":
        raise ConfigError(
            f"data-dir = {str(path)!r}: groups must be a whole number or a text for each of the {len(labels)} labels, "
            f"not bytes, the same for images that belong together; it is {groups.dtype} {list(groups.shape)}."
        )
    return np.unique(groups, return_inverse=True)[1].astype(np.int64)


def _refuse_divided(groups: np.ndarray | None, test: np.ndarray, path: Path) -> None:
    if groups is not None and (divided := np.intersect1d(groups[test], groups[~test])).size:
        first = np.flatnonzero(groups == divided[0])
        raise ConfigError(
            f"data-dir = {str(path)!r}: its split divides {divided.size} of its groups, such as that of the images "
            f"{first[:5].tolist()}: images of one group must be all for training or all for the test. Where a "
            "class has one group only, give each of its images a group of its own."
        )


def _read_split(split: np.ndarray, labels: np.ndarray, path: Path) -> np.ndarray:
    fits = split.shape == labels.shape and split.dtype.kind in "biuf"
    others = np.setdiff1d(split, [0, 1]) if fits else np.empty(0)
    if not fits or others.size:
        raise ConfigError(
            f"data-dir = {str(path)!r}: split must be a number for each of the {len(labels)} labels, 1 for a test "
            f"image and 0 for one to train on; it is {split.dtype} {list(split.shape)}"
            + (f", and has {others[0]:g} too." if others.size else ".")
        )
    return np.asarray(split) == 1


def _check_names(names: np.ndarray, path: Path) -> None:
    counts = Counter(map(str, names.ravel())).items()
    wrong = [text for text, count in counts if count > 1 or not text.strip() or not text.isprintable()]
    if names.ndim != 1 or wrong:
        raise ConfigError(
            f"data-dir = {str(path)!r}: class_names must be a list of different names, each one line that can be "
            f"shown, not {wrong[:1]} among names of shape {list(names.shape)}."
        )


def _npz_file(path: Path) -> dict[str, np.ndarray]:
    file = np.load(path, allow_pickle=False)
    if isinstance(file, np.ndarray):
        raise ValueError("it holds one array without a name")
    with file:
        _check_members(file.zip.infolist())
        arrays = {name: file[name] for name in _ARRAYS if name in file.files}
    if foreign := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:
        raise ValueError(f"{foreign[0]!r} in it is no array")
    return arrays


def _check_members(members: Sequence[ZipInfo]) -> None:
    """A ValueError unless the arrays are there and fit in memory; nothing is unpacked yet, as zeros pack to nothing."""
    sizes = {member.filename.removesuffix(".npy"): member.file_size for member in members}
    if not {"images", "labels"} <= sizes.keys():
        raise ValueError(f"it needs 'images' and 'labels', and holds {', '.join(map(repr, sizes)) or 'nothing'}")
    size, free = sum(sizes.get(name, 0) for name in _ARRAYS), available_memory()
    if size > free:
        raise ValueError(
            f"it takes {size / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free; .npy files in a folder take less"
        )


def _npy_folder(path: Path) -> dict[str, np.ndarray]:
    files, names = list(path.glob("*.npy")), path / "class_names.txt"
    arrays = {file.stem: np.load(file, mmap_mode="r", allow_pickle=False) for file in files}
    if names.exists():
        arrays["class_names"] = np.array(names.read_text(encoding="utf-8").splitlines())
    return arrays


def _decode_names(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same with names of classes as text where they are bytes."""
    names = arrays.get("class_names", np.empty(0))
    return arrays | ({"class_names": np.char.decode(names, "utf-8")} if names.dtype.kind == "S" else {})


def _check_arrays(arrays: dict[str, np.ndarray], path: Path) -> tuple[np.ndarray, np.ndarray]:
    images, labels = arrays.get("images", np.empty(0)), arrays.get("labels", np.empty(0))
    images = images[..., None] if images.ndim == 3 else images
    fits = images.ndim == 4 and images.shape[-1] in (1, 3) and images.dtype == np.uint8
    if not arrays and path.is_dir():
        raise ConfigError(f"data-dir = {str(path)!r} is a folder without .npy files: of images it is dataset=folder.")
    if not fits or not images.size or labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        held = ", ".join(f"{n} {a.dtype} {list(a.shape)}" for n, a in arrays.items())
        raise ConfigError(
            f"data-dir = {str(path)!r} needs 'images', uint8 [N, H, W, 3], and 'labels', whole numbers [N]; it holds "
            f"{held}."
        )
    # without names, the classes are those of the labels
    if labels.min() < 0 or labels.max() >= arrays.get("class_names", labels).size:
        limits = f"they go from {labels.min()} to {labels.max()}"
        if "class_names" in arrays:
            limits += f", and there are {len(arrays['class_names'])} class_names"
        raise ConfigError(f"data-dir = {str(path)!r}: labels must start at 0 and leave no number out; {limits}.")
    return images, np.array(labels, np.int64)


def folder(path: Path, side: int, max_pixels: int) -> Dataset:
    """A folder per class of image files; train/ and test/ above them are used when both are there.

    Raises:
        ConfigError: no such folder, no class in it, a class without images or with a name that cannot be shown, or
            different classes in train/ and test/.
    """
    if not path.is_dir():
        problem = "this is a file, no folder" if path.exists() else "there is no such folder"
        raise ConfigError(f"data-dir = {str(path)!r}: {problem} for dataset 'folder'.")
    if not ((path / "train").is_dir() and (path / "test").is_dir()):
        names, images, labels = _scan(path, side, max_pixels)
        return split_dataset(draw_held_out(labels, HELD_OUT, 0, "folder"), images, labels, names)
    names, train, train_labels = _scan(path / "train", side, max_pixels)
    test_names, test, test_labels = _scan(path / "test", side, max_pixels)
    if names != test_names:
        odd = sorted(set(names) ^ set(test_names))
        raise ConfigError(f"data-dir = {str(path)!r}: train/ and test/ differ in the classes {odd}.")
    return Dataset(names, train, train_labels, test, test_labels)


def _scan(path: Path, side: int, max_pixels: int) -> tuple[tuple[str, ...], ImageFiles, np.ndarray]:
    folders = class_folders(path)
    names = tuple(p.name for p in folders)
    require_classes(folders)
    require_printable(names, str(path))
    images, labels = images_by_class(folders, side, max_pixels)
    empty = [names[c] for c in np.setdiff1d(np.arange(len(names)), labels)]
    if not names or empty:
        problem = f"the classes {empty} hold no image file: fill or remove these folders"
        what = problem if empty else "it holds no class folder"
        raise ConfigError(f"data-dir = {str(path)!r} must hold one folder of images per class, but {what}.")
    return names, images, labels
