"""What a client does with a message, free of any transport: answers hello, trains, evaluates."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from client_app.objective import LocalData
from client_app.training import DivergedError, train_locally
from task.config import Config, ConfigError, parse
from task.data import default_augmentation
from task.evaluation import confusion_counts
from task.lessons import ever_held, lesson_of
from task.methods import load_half
from task.model import Model, build_model, to_arrays
from task.packet import Arrays, Kind, Packet, Scalar
from task.seeding import torch_rng
from task.statistics import Sample
from task.versions import code_sha256, package_version
from task.world import World, build_world

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Node:
    """Where a message arrives: the run's flat configuration and the node's own settings (partition-id, name, ...)."""

    values: Mapping[str, Scalar]
    settings: Mapping[str, Scalar]


def handle(kind: Kind, packet: Packet, node: Node) -> Packet:
    """Answer one message; a failure is an answer too, its reason under ``error`` in the config.

    The server's resolved configuration travels in the message and goes before the node's own.
    """
    try:
        sent = packet.config.get("run-config")
        config = parse(json.loads(str(sent)) if sent else node.values)
        torch.set_num_threads(config.threads)
        return _HANDLERS[kind](packet, config, node)
    except (ConfigError, DivergedError) as error:
        log.warning("%s failed: %s", kind, error)
        return Packet(config={"error": str(error)})
    except Exception as error:
        log.exception("%s failed", kind)
        return Packet(config={"error": f"{type(error).__name__}: {error}"})


def client_name(node: Node) -> str:
    """Stable name of a client: the node's own, else from its partition id.

    Raises:
        ConfigError: the node has no partition id.
    """
    return str(node.settings.get("name", f"client-{_partition_id(node):04d}"))


def _partition_id(node: Node) -> int:
    if "partition-id" not in node.settings:
        raise ConfigError(
            "this node has no partition-id: start it with --node-config 'partition-id=0 num-partitions=N'."
        )
    return int(node.settings["partition-id"])


def _hello(packet: Packet, config: Config, node: Node) -> Packet:
    world, model = build_world(config), build_model(config, [])
    place = _partition_id(node)
    if place >= config.num_clients:
        raise ConfigError(f"partition-id = {place} is not below num-clients = {config.num_clients}.")
    labels = world.dataset.train_labels[ever_held(config, place)]
    counts = np.bincount(labels, minlength=len(world.dataset.class_names))
    return Packet(
        arrays={"class_counts": counts.astype(np.int64)},
        config={
            "name": client_name(node),
            "partition-id": place,
            "classes": list(world.dataset.class_names),
            "backbone-sha256": model.backbone.sha256,
            "code-sha256": code_sha256(),
            "versions": [f"{name} {package_version(name)}" for name in ("torch", "timm", "flwr")],
            "device": str(model.device),
        },
    )


def _train(packet: Packet, config: Config, node: Node) -> Packet:
    world, task = build_world(config), int(packet.config["task"]) - 1  # type: ignore[arg-type]
    name, round = client_name(node), int(packet.config["round"]) - 1  # type: ignore[arg-type]
    lesson = lesson_of(config, _partition_id(node), task, round, holds_pool=packet.config.get("pool") == name)
    answer = Packet(metrics={"num-examples": len(lesson.positions)}, config={"name": name})
    if not len(lesson.positions):
        return answer
    model = build_model(config, world.task_sizes(task))
    model.load(packet.arrays)
    model.learn(world.rows[lesson.classes])
    data = _local_data(world, lesson.positions, config)
    if config.row.client:
        rng = torch_rng(config.seed, "local", _partition_id(node), int(packet.config["server-round"]))  # type: ignore[arg-type]
        answer.metrics |= _fit(model, packet, config, data, rng)
        answer.arrays = to_arrays(model.trained())
    started = time.perf_counter()
    answer.prototypes = _statistics(model, data, world.dataset.train_labels[lesson.positions], packet, config)
    answer.metrics["seconds-statistics"] = time.perf_counter() - started
    return answer


def _local_data(world: World, positions: np.ndarray, config: Config) -> LocalData:
    data = world.dataset
    rows = world.rows[data.train_labels[positions]]
    return LocalData(data.train_images, positions, rows, default_augmentation(data, config.augmentation))


def _fit(model: Model, packet: Packet, config: Config, data: LocalData, rng: torch.Generator) -> dict[str, float]:
    started = time.perf_counter()
    objective = load_half(config.row.client)(config, packet)
    loss, accuracy = train_locally(model, objective, data, config, rng)
    return {"loss": loss, "accuracy": accuracy, "seconds-train": time.perf_counter() - started}


def _statistics(model: Model, data: LocalData, labels: np.ndarray, packet: Packet, config: Config) -> Arrays:
    kind = load_half(config.row.statistics)()
    if not kind.carries or (kind.at_task_end and not packet.config["ends-task"]):
        return {}
    model.eval()
    model.prompt.train()  # the task is known here: the prompt acts as in training
    on_device = (torch.from_numpy(values).to(model.device) for values in (labels, data.rows))
    return kind.collect(model, Sample(data.images, data.positions, *on_device), config.options)


def _evaluate(packet: Packet, config: Config, node: Node) -> Packet:
    """Counts over this client's part of the test images: every num-clients-th one."""
    world, task = build_world(config), int(packet.config["task"]) - 1  # type: ignore[arg-type]
    model = build_model(config, world.task_sizes(task))
    model.load(packet.arrays)
    mine = np.arange(_partition_id(node), len(world.dataset.test_labels), config.num_clients)
    order = np.array(world.schedule.seen_classes(task))
    counts = confusion_counts(model, world.dataset, order, mine)
    cells = np.argwhere(counts)
    arrays = {
        "correct": counts.diagonal(),
        "total": counts.sum(axis=1),
        "confusion": np.column_stack([cells, counts[tuple(cells.T)]]),
    }
    return Packet(arrays=arrays, config={"name": client_name(node)})


_HANDLERS: dict[Kind, Callable[[Packet, Config, Node], Packet]] = {
    "hello": _hello,
    "train": _train,
    "evaluate": _evaluate,
}
