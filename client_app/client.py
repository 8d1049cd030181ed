"""What a client does with a message, whatever the transport: it answers hello, trains or evaluates.

Imports no torch: in a deployment every message starts a process, and not every message needs a model.
"""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from client_app.node import Node, num_partitions, partition_id, state_dir
from client_app.request import DivergedError, Request
from client_app.secure_aggregation import SUM_STEPS, hide_in_sum
from task.config.parsing import apply_node_settings, parse
from task.data.images import UnreadableImage
from task.data.node_images import open_inventory, unreadable_classes
from task.keys import ConfigError
from task.message import Kind, Packet
from task.scenario.client_data import all_client_positions, client_task_data, evaluated_part, node_task_data
from task.scenario.scenario import Scenario, build_scenario, image_size
from task.scenario.task_plan import TaskPlan
from task.utils.paths import nearest_existing
from task.utils.versions import code_sha256, node_versions

log = logging.getLogger(__name__)


def handle(kind: Kind, packet: Packet, node: Node) -> Packet:
    """Answer one message; a failure is an answer too, its reason under ``error`` in the config.

    The run's settings come with the message. The node's own settings win for the keys that belong to the node, see
    :func:`task.config.parsing.apply_node_settings`.
    """
    try:
        if kind in SUM_STEPS:
            return SUM_STEPS[kind](packet, node)
        config = parse(apply_node_settings(json.loads(str(packet.config["run-config"])), node.settings))
        return _answer_without_lost_files(_HANDLERS[kind], Request(packet, config, node))
    except (ConfigError, DivergedError) as error:
        log.warning("%s failed: %s", kind, error)
        reason = str(error)
    except Exception as error:
        log.exception("%s failed", kind)
        reason = f"{type(error).__name__}: {error}"
    # before its hello is answered the server does not know whose error it is
    name = f"{node.settings['name']}: " if kind == "hello" and "name" in node.settings else ""
    return Packet(config={"error": f"{name}{reason}"})


def _answer_without_lost_files(handler: Callable[[Request], Packet], request: Request) -> Packet:
    """Answer; if an image of the node's own cannot be read any more, scan the images again and answer once more."""
    try:
        return handler(request)
    except UnreadableImage:
        if not request.config.own_data:
            raise
    request.scan_images(request.last_scan())
    try:
        return handler(request)
    except UnreadableImage as error:
        log.warning("%s", error)
        raise ConfigError("image files of this node vanish while it works; its log names one.") from error


def _hello(request: Request) -> Packet:
    from client_app.learning import load_node_backbone

    config, backbone = request.config, load_node_backbone(request.config)
    answer = _count_own_images(request) if config.own_data else _count_partition(request)
    answer.config |= {
        "name": request.client,
        "backbone-sha256": backbone.sha256,
        "code-sha256": code_sha256(),
        "versions": node_versions(),
        "device": str(next(backbone.parameters()).device),
        "free-disk": _free_disk(request),
    }
    return answer


def _free_disk(request: Request) -> int:
    """Free bytes on the disk of this node's state folder, or of the working directory where none is needed."""
    keeps = request.config.own_data or "state-dir" in request.node.settings
    folder = (state_dir(request.config, request.node) if keeps else Path.cwd()).absolute()
    return shutil.disk_usage(nearest_existing(folder)).free


def _count_partition(request: Request) -> Packet:
    """Images of each class in this client's part of a registered data set."""
    config, partition, dataset = request.config, partition_id(request.node), build_scenario(request.config).dataset
    if partition >= config.num_clients:
        raise ConfigError(f"partition-id = {partition} is not below num-clients = {config.num_clients}.")
    if (parts := num_partitions(request.node, config.num_clients)) < config.num_clients:
        raise ConfigError(
            f"num-partitions = {parts} of this node is below the run's num-clients = {config.num_clients}: "
            "both say into how many parts the data are divided."
        )
    labels = dataset.train_labels[all_client_positions(config, partition)]
    counts = np.bincount(labels, minlength=len(dataset.class_names))
    return Packet({"class_counts": counts}, config={"partition-id": partition, "classes": list(dataset.class_names)})


def _count_own_images(request: Request) -> Packet:
    """Training and test images of each class that this node holds."""
    inventory = request.scan_images()
    dataset = open_inventory(inventory, image_size(request.config), request.config.max_image_pixels)
    labels_by_name = {"class_counts": dataset.train_labels, "test_counts": dataset.test_labels}
    counts = {n: np.bincount(labels, minlength=len(dataset.class_names)) for n, labels in labels_by_name.items()}
    present = np.flatnonzero(sum(counts.values()))  # an .npz may name classes of which it holds no image
    return Packet(
        {name: count[present] for name, count in counts.items()},
        config={
            "classes": [dataset.class_names[c] for c in present],
            "unreadable": len(inventory.unreadable),
            "unreadable-classes": unreadable_classes(inventory),
            "image-shape": list(dataset.image_shape),
        },
    )


def _load_scenario(request: Request) -> Scenario:
    if not request.config.own_data:
        return build_scenario(request.config)
    inventory = request.last_scan() or request.scan_images()
    plan, side = TaskPlan.read(request.packet.config), request.number("image-size")
    return build_scenario(request.config, plan, inventory, side)


def _train(request: Request) -> Packet:
    """Answer with trained arrays and statistics, or in a secure sum with the masked numbers that these add to it."""
    config, scenario = request.config, _load_scenario(request)
    if config.own_data:
        task_data = node_task_data(scenario, request.task)
    else:
        holds_pool, round = request.packet.config.get("pool") == request.client, request.number("round") - 1
        task_data = client_task_data(config, partition_id(request.node), request.task, round, holds_pool)
    answer = Packet(metrics={"num-examples": len(task_data.positions)}, config={"name": request.client})
    if not len(task_data.positions) and config.secure_aggregation == "off":
        return answer
    from client_app.learning import train

    return train(answer, request, scenario, task_data)


def _evaluate(request: Request) -> Packet:
    """Answer with counts over this client's test images: all of its own, or every num-clients-th of the data set."""
    scenario, config = _load_scenario(request), request.config
    labels = scenario.dataset.test_labels
    if config.own_data:
        positions = np.flatnonzero(labels >= 0)
    else:
        positions = evaluated_part(partition_id(request.node), len(labels), config.num_clients)
    order = np.array(scenario.schedule.seen_classes(request.task))
    counts = _count_predictions(request, scenario, order, positions)
    if config.secure_aggregation != "off":
        in_order = counts[np.ix_(order, order)].ravel().astype(np.float64)
        hidden = hide_in_sum(in_order, config.secure_aggregation_range, request.packet, request.node)
        return Packet({"hidden": hidden}, config={"name": request.client})
    cells = np.argwhere(counts)
    arrays = {
        "correct": counts.diagonal(),
        "total": counts.sum(axis=1),
        "confusion": np.column_stack([cells, counts[tuple(cells.T)]]),
    }
    return Packet(arrays=arrays, config={"name": request.client})


def _count_predictions(request: Request, scenario: Scenario, order: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Confusion counts int64 [C, C]; zeros, without a model, if none of the images is of a class seen so far."""
    if not len(scenario.dataset.test_positions(order, positions)):
        return np.zeros((len(scenario.dataset.class_names),) * 2, np.int64)
    from client_app.learning import load_model
    from task.models.evaluation import confusion_counts

    return confusion_counts(load_model(request, scenario), scenario.dataset, order, positions)


_HANDLERS: dict[Kind, Callable[[Request], Packet]] = {
    "hello": _hello,
    "train": _train,
    "evaluate": _evaluate,
}
