"""Make a data set that is far from photographs: the letters a to t, each drawn once in 160 fonts of a folder.

    while read name; do npm pack @fontsource/$name; done < benchmarks/fonts.txt
    for file in *.tgz; do tar xzf $file --wildcards --strip-components=2 'package/files/*-latin-400-normal.woff'; done
    python -m benchmarks.letters_npz . letters.npz --train 100 --test 60 --seed 0

A font is one of training or of test images, never of both.
"""

import argparse
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from benchmarks.drawn_set import labelled
from task.utils.seeding import numpy_rng

LETTERS = "abcdefghijklmnopqrst"
SIDE, MARGIN = 64, 6


def draw(letter: str, font: Path) -> np.ndarray:
    """The letter in black on white, as large as fits, uint8 [SIDE, SIDE, 3]."""
    drawn = ImageFont.truetype(str(font), 2 * SIDE)
    left, top, right, bottom = drawn.getbbox(letter)
    ink = Image.new("L", (int(right - left), int(bottom - top)), 255)
    ImageDraw.Draw(ink).text((-left, -top), letter, font=drawn, fill=0)
    ink.thumbnail((SIDE - 2 * MARGIN, SIDE - 2 * MARGIN))
    image = Image.new("RGB", (SIDE, SIDE), (255, 255, 255))
    image.paste(ink.convert("RGB"), ((SIDE - ink.width) // 2, (SIDE - ink.height) // 2))
    return np.asarray(image)


def make(fonts: list[Path], train: int, test: int, seed: int) -> dict[str, np.ndarray]:
    """Images uint8 [N, SIDE, SIDE, 3], labels int64 [N], split [N] (0 = train, 1 = test) and class names.

    Raises:
        SystemExit: there are too few fonts.
    """
    if len(fonts) < train + test:
        raise SystemExit(f"{train} + {test} fonts are needed, {len(fonts)} .woff files were found")
    drawn = numpy_rng(seed, "letters").permutation(np.array(sorted(fonts), object))[: train + test]
    images = [draw(letter, font) for letter in LETTERS for font in drawn]
    return labelled(images, len(LETTERS), train, test) | {"class_names": np.array(list(LETTERS))}


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fonts", type=Path)
    parser.add_argument("target", type=Path)
    for name, default in {"train": 100, "test": 60, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    arrays = make(list(args.fonts.glob("*.woff")), args.train, args.test, args.seed)
    np.savez(args.target, allow_pickle=False, **arrays)
    print(f"{args.target}: {len(LETTERS)} classes, {args.train} + {args.test} images each, seed {args.seed}")


if __name__ == "__main__":
    _main()
