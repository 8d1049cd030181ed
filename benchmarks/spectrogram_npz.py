"""Make a data set that is far from photographs: spectrograms of synthetic calls, 64 pixels wide, in shades of grey.

    python -m benchmarks.spectrogram_npz spectrograms.npz --classes 20 --train 60 --test 30 --seed 0

A class is a call of two to four notes: start, length, frequency and its change over time, number of harmonics. An image
is one performance of it: notes are shifted, stretched and transposed a little, in noise.
"""

import argparse
from pathlib import Path

import numpy as np

from benchmarks.drawn_set import labelled
from task.utils.seeding import numpy_rng

SIDE = 64


def draw_class(rng: np.random.Generator) -> np.ndarray:
    """Notes of a call, [notes, 5]: start, length, frequency, slope (all in shares of the image), harmonics."""
    notes = int(rng.integers(2, 5))
    return np.column_stack(
        [
            rng.uniform(0.05, 0.7, notes),
            rng.uniform(0.1, 0.35, notes),
            rng.uniform(0.1, 0.5, notes),
            rng.uniform(-0.6, 0.6, notes),
            rng.integers(1, 4, notes),
        ]
    )


def perform(notes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One spectrogram of the call, uint8 [SIDE, SIDE, 3]; low frequencies at the bottom."""
    time, frequency = np.meshgrid(np.linspace(0, 1, SIDE), np.linspace(1, 0, SIDE))
    shift, transpose, stretch = rng.normal(0, 0.04), rng.normal(0, 0.03), rng.normal(1, 0.08)
    power = rng.gamma(2.0, 0.12, (SIDE, SIDE))
    for start, length, pitch, slope, harmonics in notes:
        begin = start + shift + rng.normal(0, 0.02)
        inside = 1 / (1 + np.exp(-(time - begin) / 0.01)) / (1 + np.exp((time - begin - length * stretch) / 0.01))
        for harmonic in range(1, int(harmonics) + 1):
            line = harmonic * (pitch + transpose) + slope * (time - begin)
            loudness = rng.uniform(0.7, 1.3) / harmonic
            power += loudness * inside * np.exp(-(((frequency - line) / 0.02) ** 2))
    grey = np.clip(255 * np.log1p(power) / np.log(3), 0, 255).astype(np.uint8)
    return np.repeat(grey[:, :, None], 3, axis=2)


def make(classes: int, train: int, test: int, seed: int) -> dict[str, np.ndarray]:
    """Images uint8 [N, SIDE, SIDE, 3], labels int64 [N], split [N] (0 = train, 1 = test) and class names."""
    rng = numpy_rng(seed, "spectrograms")
    calls = [draw_class(rng) for _ in range(classes)]
    images = [perform(call, rng) for call in calls for _ in range(train + test)]
    names = np.array([f"call-{c:02}" for c in range(classes)])
    return labelled(images, classes, train, test) | {"class_names": names}


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path)
    for name, default in {"classes": 20, "train": 60, "test": 30, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    arrays = make(args.classes, args.train, args.test, args.seed)
    np.savez(args.target, allow_pickle=False, **arrays)
    print(f"{args.target}: {args.classes} classes, {args.train} + {args.test} images each, seed {args.seed}")


if __name__ == "__main__":
    _main()
