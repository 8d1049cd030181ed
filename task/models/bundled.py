"""The backbones that come with the code, as their files describe them; imports no torch."""

import json
from typing import Any

from task.utils.assets import ASSETS

BUNDLED = {path.stem: path for path in ASSETS.glob("vit_*.json")}


def read_description(name: str) -> dict[str, Any]:
    """A bundled backbone: architecture (as timm names it), mean and std, and its weights: files of base64, SHA-256."""
    return dict(json.loads(BUNDLED[name].read_text()))
