"""Write task/assets/digits.json, the embedded data set, from scikit-learn's copy.

    python -m benchmarks.bundle_digits

The app bundle carries no binary files, so the pixels (0..16) travel as compressed base64 text.
"""

import argparse
import base64
import json
import zlib

import numpy as np
from sklearn.datasets import load_digits

from task.utils.assets import ASSETS


def _main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    digits = load_digits()
    pixels = digits.images.astype(np.uint8)
    content = {
        "source": "UCI Optical Recognition of Handwritten Digits, as in scikit-learn's load_digits (CC BY 4.0)",
        "labels": base64.b64encode(digits.target.astype(np.uint8).tobytes()).decode(),
        "pixels": base64.b64encode(zlib.compress(pixels.tobytes(), 9)).decode(),
    }
    (ASSETS / "digits.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    _main()
