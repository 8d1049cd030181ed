"""Make a data set of 20 classes of emoji, each emoji drawn by four makers, of packages that a registry keeps.

    for maker in twitter google apple facebook; do
        npm pack emoji-datasource-$maker@16.0.0 && mkdir $maker && tar xzf emoji-datasource-$maker-16.0.0.tgz -C $maker
    done
    python -m benchmarks.emoji_npz . emoji.npz

The four drawings of an emoji are one group: they are all for training or all for the test.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from task.data.images import read_rgb

MAKERS = ("twitter", "google", "apple", "facebook")
CLASSES = ["animal-bird", "animal-bug", "animal-mammal", "animal-marine", "book-paper", "clothing", "computer", "drink"]
CLASSES += ["event", "food-asian", "food-fruit", "food-prepared", "food-sweet", "food-vegetable", "game", "household"]
CLASSES += ["light & video", "office", "place-building", "sky & weather"]
MOST, SHARE, SIDE = 20, 0.7, 64  # emoji of a class, share of them for training, pixels


def draw(file: Path) -> np.ndarray:
    """A drawing on white, uint8 [SIDE, SIDE, 3]."""
    return np.asarray(read_rgb(str(file)).resize((SIDE, SIDE)))


def choose_emoji(source: Path) -> list[tuple[int, int, str]]:
    """Class id, 1 for the test, and file name of each emoji, training ones first; drawn with seed 0."""
    known = json.loads((source / MAKERS[0] / "package" / "emoji.json").read_text(encoding="utf-8"))
    rng, chosen = np.random.default_rng(0), list[tuple[int, int, str]]()
    for label, name in enumerate(CLASSES):
        files = [emoji["image"] for emoji in known if emoji["subcategory"] == name]
        files = [file for file in files if all(_path(source, maker, file).exists() for maker in MAKERS)]
        drawn = rng.permutation(len(files))[:MOST]
        train = round(SHARE * len(drawn))
        chosen += [(label, int(n >= train), files[i]) for n, i in enumerate(drawn)]
    return sorted(chosen, key=lambda emoji: emoji[1])


def make(source: Path) -> dict[str, np.ndarray]:
    """Arrays of an .npz file: images uint8 [N, SIDE, SIDE, 3], labels, split (1 = test), groups and class names."""
    labels, split, files = zip(*choose_emoji(source), strict=True)
    return {
        "images": np.stack([draw(_path(source, maker, file)) for file in files for maker in MAKERS]),
        "labels": np.repeat(labels, len(MAKERS)),
        "split": np.repeat(split, len(MAKERS)),
        "groups": np.repeat(np.arange(len(files)), len(MAKERS)),
        "class_names": np.array(CLASSES),
    }


def _path(source: Path, maker: str, file: str) -> Path:
    return source / maker / "package" / "img" / maker / "64" / file


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    arrays = make(args.source)
    np.savez(args.target, allow_pickle=False, **arrays)
    print(f"{args.target}: {len(CLASSES)} classes, {(arrays['split'] == 0).sum()} + {arrays['split'].sum()} images")


if __name__ == "__main__":
    _main()
