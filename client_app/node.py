"""A node's own settings, and its name, folders and stream of random numbers, which depend on them."""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from task.config.schema import Config
from task.data.image_folders import class_folders
from task.keys import ConfigError
from task.message import Scalar
from task.utils.paths import expand_home


@dataclass(frozen=True)
class Node:
    """The node's own settings: its name or partition-id, state-dir, and run keys.

    ``run`` is the id of the run; several may be under way at the same time. ``memory`` is what the node remembers
    between the messages of a run, not on disk: bytes, scalars and lists of these; it is changed in place.
    """

    settings: Mapping[str, Scalar]
    run: str = ""
    memory: dict[str, Any] = field(default_factory=dict)


def partition_id(node: Node) -> int:
    """The number of this client's part of the data.

    Raises:
        ConfigError: the node has no partition-id, or one that is no whole number from 0 on.
    """
    if "partition-id" not in node.settings:
        raise ConfigError(
            "this node has no partition-id: start it with --node-config 'partition-id=0 num-partitions=N', "
            "or for data of its own with 'name=... data-dir=...' and dataset = \"own\" in the run."
        )
    return _whole_number(node, "partition-id", "it counts from 0 on")


def num_partitions(node: Node, default: int) -> int:
    """Into how many parts the node takes the data to be divided; ``default`` if it does not say.

    Raises:
        ConfigError: it says what is no whole number.
    """
    return _whole_number(node, "num-partitions", "it is the number of clients", default)


def _whole_number(node: Node, name: str, meaning: str, default: int = 0) -> int:
    value = str(node.settings.get(name, default))
    if not value.isdecimal():
        raise ConfigError(f"{name} = {value!r} of this node is not possible: {meaning}.")
    return int(value)


def client_name(config: Config, node: Node) -> str:
    """Stable name of a client: the node's ``name``.

    Without one, it is the name of the node's folder if nodes with own data are simulated, else ``client-`` and the
    partition id.

    Raises:
        ConfigError: the node has neither a name nor a partition id.
    """
    if "name" in node.settings:
        return str(node.settings["name"])
    return _simulated_folder(config, node).name if config.own_data else f"client-{partition_id(node):04d}"


def own_data_dir(config: Config, node: Node) -> str:
    """The path of this node's images.

    Raises:
        ConfigError: the node has no data-dir, or it is simulated and there is no folder for it.
    """
    if "data-dir" in node.settings or "partition-id" not in node.settings:
        if not config.data_dir:
            raise ConfigError("this node has no data-dir: start it with --node-config 'name=... data-dir=\"/...\"'.")
        return config.data_dir
    return str(_simulated_folder(config, node))


def _simulated_folder(config: Config, node: Node) -> Path:
    """Simulated nodes share the run's data-dir: node i has the i-th folder in it, in the order of the names."""
    folders, index = class_folders(expand_home(config.data_dir, "data-dir")), partition_id(node)
    if not config.data_dir or index >= len(folders):
        raise ConfigError(
            f"data-dir = {config.data_dir!r} has no folder for node {index}: where nodes with data of their own are "
            "simulated, it holds one folder per node, and in that a folder of images per class."
        )
    return folders[index]


def state_dir(config: Config, node: Node) -> Path:
    """The folder in which this node keeps state between messages."""
    if "state-dir" in node.settings:
        return expand_home(str(node.settings["state-dir"]), "state-dir")
    home = expand_home(os.environ.get("XDG_STATE_HOME") or "~/.local/state", "state-dir")
    data_dir = hashlib.sha256(own_data_dir(config, node).encode()).hexdigest()[:12]
    return home / "fcil" / (re.sub(r"[^\w.-]", "_", client_name(config, node)) + "-" + data_dir)


def random_stream(config: Config, node: Node) -> int:
    """Number of this client's stream of random numbers: its partition id, or a number made from its name."""
    if not config.own_data:
        return partition_id(node)
    return int.from_bytes(hashlib.sha256(client_name(config, node).encode()).digest()[:8])
