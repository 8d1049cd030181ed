"""The folder in which a path would be made."""

import os
from pathlib import Path


def nearest_existing(folder: Path) -> Path:
    """An absolute path itself, or the nearest folder above it that exists."""
    # Path.exists raises an error without the right to look
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))
