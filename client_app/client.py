"""What a client does with a message, whatever the transport: it answers hello, trains or evaluates."""

import json
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from client_app import secure_aggregation
from client_app.node import Node, client_name, own_data_dir, partition_id, random_stream, state_dir
from client_app.objectives.base import LocalData
from client_app.training import DivergedError, train_locally
from task.config.parsing import apply_node_settings, parse
from task.config.schema import Config
from task.data.images import UnreadableImage
from task.data.load import default_augmentation
from task.data.node_images import Inventory, load_inventory, open_inventory, scan_images, unreadable_classes
from task.keys import ConfigError
from task.message import SECURE_SUM, Arrays, Kind, Packet
from task.methods import load_class
from task.models.device import resolve_device
from task.models.evaluation import confusion_counts
from task.models.load import load_backbone
from task.models.model import Model, build_model, to_arrays
from task.prototypes.noise import GaussianMechanism
from task.prototypes.statistics import Sample
from task.scenario.client_data import (
    ClientTaskData,
    all_client_positions,
    client_task_data,
    learnable_classes,
    node_task_data,
)
from task.scenario.scenario import Scenario, build_scenario, image_size
from task.scenario.task_plan import TaskPlan
from task.secure_sum.round_sums import RoundSums
from task.utils.seeding import torch_rng
from task.utils.versions import code_sha256, package_version

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Request:
    """A message that came to a node, with the run's settings as they are on this node."""

    packet: Packet
    config: Config
    node: Node

    def number(self, name: str) -> int:
        """A whole number in the message's config."""
        return int(str(self.packet.config[name]))

    @property
    def task(self) -> int:
        """The task, counted from 0; in the message it counts from 1."""
        return self.number("task") - 1

    @property
    def client(self) -> str:
        """The client's name."""
        return client_name(self.config, self.node)

    def list_images(self, previous: Inventory | None = None) -> Inventory:
        """Scan the node's own images; given an earlier list, look for those of it that have been lost."""
        config, folder = self.config, own_data_dir(self.config, self.node)
        share, max_pixels = config.unreadable_share, config.max_image_pixels
        return scan_images(folder, state_dir(config, self.node), share, self.node.run, previous, max_pixels)

    def listed_images(self) -> Inventory | None:
        """The list of the last scan in this run."""
        return load_inventory(own_data_dir(self.config, self.node), state_dir(self.config, self.node), self.node.run)


def handle(kind: Kind, packet: Packet, node: Node) -> Packet:
    """Answer one message; a failure is an answer too, its reason under ``error`` in the config.

    The run's settings come with the message. The node's own device, data-dir and backbone-weights override them.
    """
    if kind in SECURE_SUM:
        return secure_aggregation.handle(kind, packet, node)
    try:
        run_config = packet.config.get("run-config")
        config = parse(apply_node_settings(json.loads(str(run_config)) if run_config else node.values, node.settings))
        torch.set_num_threads(config.threads)
        return _answer_without_lost_files(_HANDLERS[kind], Request(packet, config, node))
    except (ConfigError, DivergedError) as error:
        log.warning("%s failed: %s", kind, error)
        return Packet(config={"error": str(error)})
    except Exception as error:
        log.exception("%s failed", kind)
        return Packet(config={"error": f"{type(error).__name__}: {error}"})


def _answer_without_lost_files(handler: Callable[[Request], Packet], request: Request) -> Packet:
    """Answer; if an image of the node's own cannot be read any more, scan the images again and answer once more."""
    try:
        return handler(request)
    except UnreadableImage:
        if not request.config.own_data:
            raise
    request.list_images(request.listed_images())
    try:
        return handler(request)
    except UnreadableImage as error:
        log.warning("%s", error)
        raise ConfigError("image files of this node vanish while it works; its log names one.") from error


def _hello(request: Request) -> Packet:
    config = request.config
    # the backbone alone: a model per client would fragment the memory of a process that serves them all
    device = str(resolve_device(config.device))
    backbone = load_backbone(config.backbone, config.backbone_weights, config.image_size, device)
    answer = _count_own_images(request) if config.own_data else _count_partition(request)
    answer.config |= {
        "name": request.client,
        "backbone-sha256": backbone.sha256,
        "code-sha256": code_sha256(),
        "versions": [f"{name} {package_version(name)}" for name in ("torch", "timm", "flwr")],
        "device": str(next(backbone.parameters()).device),
        "free-disk": _free_disk(request),
    }
    return answer


def _free_disk(request: Request) -> int:
    """Bytes free where this node keeps what it must remember; without such a folder, where it was started."""
    keeps = request.config.own_data or "state-dir" in request.node.settings
    folder = (state_dir(request.config, request.node) if keeps else Path.cwd()).absolute()
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists())).free


def _count_partition(request: Request) -> Packet:
    """Images of each class in this client's part of a registered data set."""
    config, partition, dataset = request.config, partition_id(request.node), build_scenario(request.config).dataset
    if partition >= config.num_clients:
        raise ConfigError(f"partition-id = {partition} is not below num-clients = {config.num_clients}.")
    labels = dataset.train_labels[all_client_positions(config, partition)]
    counts = np.bincount(labels, minlength=len(dataset.class_names))
    return Packet({"class_counts": counts}, config={"partition-id": partition, "classes": list(dataset.class_names)})


def _count_own_images(request: Request) -> Packet:
    """Training and test images of each class that this node holds."""
    inventory = request.list_images()
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
    inventory = request.listed_images() or request.list_images()
    return build_scenario(request.config, TaskPlan.read(request.packet.config), inventory)


def _train(request: Request) -> Packet:
    """Trained arrays and statistics in the clear; or what they add to the round's sums, under this node's masks."""
    scenario, in_sum = _load_scenario(request), request.config.secure_aggregation != "off"
    task_data = _task_data(request, scenario)
    answer = Packet(metrics={"num-examples": len(task_data.positions)}, config={"name": request.client})
    if not (len(task_data.positions) or in_sum):
        return answer
    model = _load_model(request, scenario)
    if len(task_data.positions):
        _learn(answer, request, scenario, model, task_data)
    return _hide(answer, request, scenario, model) if in_sum else answer


def _task_data(request: Request, scenario: Scenario) -> ClientTaskData:
    if request.config.own_data:
        return node_task_data(scenario, request.task)
    holds_pool, round = request.packet.config.get("pool") == request.client, request.number("round") - 1
    return client_task_data(request.config, partition_id(request.node), request.task, round, holds_pool)


def _learn(answer: Packet, request: Request, scenario: Scenario, model: Model, task_data: ClientTaskData) -> None:
    """Train, and put trained arrays, statistics and metrics into the answer."""
    packet, config = request.packet, request.config
    model.set_active_rows(scenario.rows[task_data.classes])
    dataset = scenario.dataset
    labels = dataset.train_labels[task_data.positions]
    augmentation = default_augmentation(dataset, config.augmentation)
    data = LocalData(dataset.train_images, task_data.positions, scenario.rows[labels], augmentation)
    stream = random_stream(config, request.node), request.number("server-round")
    mechanism = GaussianMechanism.of(config, *stream)
    if config.options.statistics_first:
        _add_statistics(answer, request, model, data, labels, mechanism)
    if config.trains_in(request.number("server-round")):
        answer.metrics |= _fit(request, model, data, torch_rng(config.seed, "local", *stream))
        answer.arrays = mechanism.arrays(to_arrays(model.trained_state()), packet.arrays)
    if not config.options.statistics_first:
        if mechanism.noise:
            model.load(answer.arrays or packet.arrays)  # statistics may depend only on what leaves the client
        _add_statistics(answer, request, model, data, labels, mechanism)


def _hide(answer: Packet, request: Request, scenario: Scenario, model: Model) -> Packet:
    """The answer as numbers that only the sum over clients gives back; seconds are as they are."""
    config, server_round = request.config, request.number("server-round")
    classes = learnable_classes(config, scenario.schedule, request.task)
    sums = RoundSums.of(config, server_round, bool(request.packet.config["ends-task"]), model, classes)
    seconds = {name: value for name, value in answer.metrics.items() if name.startswith("seconds-")}
    return Packet(_hidden(sums.of_answer(answer), request), metrics=seconds, config=answer.config)


def _hidden(values: np.ndarray, request: Request) -> Arrays:
    largest = request.config.secure_aggregation_range
    return {"hidden": secure_aggregation.hide_in_sum(values, largest, request.packet, request.node)}


def _load_model(request: Request, scenario: Scenario) -> Model:
    """The global model; the node may have been restarted with other backbone weights since it said hello."""
    model = build_model(request.config, scenario.task_sizes(request.task))
    if request.packet.config["backbone-sha256"] != model.backbone.sha256:
        raise ConfigError("this node has other backbone weights than the server: give it the same backbone-weights.")
    model.load(request.packet.arrays)
    return model


def _fit(request: Request, model: Model, data: LocalData, rng: torch.Generator) -> dict[str, float]:
    """Train in place; returns loss, accuracy and seconds, with noise the seconds alone."""
    config, started = request.config, time.perf_counter()
    objective = load_class(config.method_row.objective)(config, request.packet)
    loss, accuracy = train_locally(model, objective, data, config, rng)
    metrics = {} if config.privacy_noise else {"loss": loss, "accuracy": accuracy}
    return metrics | {"seconds-train": time.perf_counter() - started}


def _add_statistics(
    answer: Packet, request: Request, model: Model, data: LocalData, labels: np.ndarray, mechanism: GaussianMechanism
) -> None:
    """Put into the answer what the method sends beside arrays, and the seconds that it took."""
    started = time.perf_counter()
    answer.statistics = _collect_statistics(request, model, data, labels, mechanism)
    answer.metrics["seconds-statistics"] = time.perf_counter() - started


def _collect_statistics(
    request: Request, model: Model, data: LocalData, labels: np.ndarray, mechanism: GaussianMechanism
) -> Arrays:
    """Statistics of the classes with at least min-class-count images."""
    config = request.config
    statistics = load_class(config.method_row.statistics)()
    counted = np.bincount(labels)[labels] >= config.min_class_count
    due = statistics.due(config, request.number("server-round"), bool(request.packet.config["ends-task"]))
    if not due or not counted.any():
        return {}
    model.eval()
    model.prompt.train(not config.method_row.adapts)  # the task is known here: the prompt acts as in training
    on_device = (torch.from_numpy(values[counted]).to(model.device) for values in (labels, data.rows))
    sample = Sample(data.images, data.positions[counted], *on_device)
    return statistics.collect(model, sample, config.options, mechanism)


def _evaluate(request: Request) -> Packet:
    """Counts over this client's part of the test images: all of its own, or every num-clients-th one."""
    scenario, config = _load_scenario(request), request.config
    labels = scenario.dataset.test_labels
    if config.own_data:
        positions = np.flatnonzero(labels >= 0)
    else:
        positions = np.arange(partition_id(request.node), len(labels), config.num_clients)
    order = np.array(scenario.schedule.seen_classes(request.task))
    counts = confusion_counts(_load_model(request, scenario), scenario.dataset, order, positions)
    if config.secure_aggregation != "off":
        in_order = counts[np.ix_(order, order)].ravel().astype(np.float64)
        return Packet(_hidden(in_order, request), config={"name": request.client})
    cells = np.argwhere(counts)
    arrays = {
        "correct": counts.diagonal(),
        "total": counts.sum(axis=1),
        "confusion": np.column_stack([cells, counts[tuple(cells.T)]]),
    }
    return Packet(arrays=arrays, config={"name": request.client})


_HANDLERS: dict[Kind, Callable[[Request], Packet]] = {
    "hello": _hello,
    "train": _train,
    "evaluate": _evaluate,
}
