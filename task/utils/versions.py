"""Versions of packages and a digest of the code, both of which results depend on."""

import hashlib
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# what the server computes with; tables, pictures and commands change no result
PARTS = ("clients", "privacy", "rounds", "run_files", "secure_aggregation", "transport")
SERVER = ("strategies", *(f"server_app/{part}" for part in PARTS))
PACKAGES = ("fcil", "torch", "torchvision", "timm", "numpy", "flwr", "ray")


@cache
def package_version(name: str) -> str:
    """Installed version of a package, or "absent"."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def node_versions() -> list[str]:
    """What a node tells the server: name and version of the packages on which its results depend."""
    return [f"{name} {package_version(name)}" for name in ("torch", "timm", "flwr")]


def versions() -> dict[str, str]:
    """Version of Python and of each of PACKAGES."""
    return {"python": platform.python_version()} | {name: package_version(name) for name in PACKAGES}


@cache
def code_sha256(folders: tuple[str, ...] = ("task", "client_app")) -> str:
    """SHA-256 of all code in folders of the project, sub-folders included.

    By default it is the code that clients run; the server refuses a node with another digest of it.
    """
    total = hashlib.sha256()
    root = Path(__file__).parents[2]
    for path in sorted(p for folder in folders for p in (root / folder).rglob("*.py")):
        total.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return total.hexdigest()


def code_and_versions() -> dict[str, Any]:
    """SHA-256 of the clients' and of the server's code, and versions, by their names in config.yaml."""
    server = code_sha256(SERVER)
    return {"code-sha256": code_sha256(), "server-code-sha256": server, "versions": versions()}
