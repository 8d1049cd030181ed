"""What a client does with a message, free of any transport: answers hello, trains, evaluates."""

import json
import logging
import time
from collections.abc import Callable

import numpy as np
import torch

from client_app.node import Node, client_name, own_data_dir, partition_id, state_dir, stream_of
from client_app.objectives.base import LocalData
from client_app.training import DivergedError, train_locally
from task.config.parsing import apply_node_settings, parse
from task.config.schema import Config
from task.data.images import UnreadableImage
from task.data.load import default_augmentation
from task.data.node_images import load_inventory, open_inventory, scan_images
from task.keys import ConfigError
from task.message import Arrays, Kind, Packet
from task.methods import load_class
from task.models.device import resolve_device
from task.models.evaluation import confusion_counts
from task.models.load import load_backbone
from task.models.model import Model, build_model, to_arrays
from task.prototypes.noise import GaussianMechanism
from task.prototypes.statistics import Sample
from task.scenario.client_data import ClientTaskData, all_client_positions, client_task_data, node_task_data
from task.scenario.scenario import Scenario, build_scenario, image_size
from task.scenario.task_plan import TaskPlan
from task.utils.seeding import torch_rng
from task.utils.versions import code_sha256, package_version

log = logging.getLogger(__name__)


def handle(kind: Kind, packet: Packet, node: Node) -> Packet:
    """Answer one message; a failure is an answer too, its reason under ``error`` in the config.

    The server's resolved configuration travels in the message and goes before the node's own, but for what only the
    node can know: its device, and where its data and weights are.
    """
    try:
        sent = packet.config.get("run-config")
        config = parse(apply_node_settings(json.loads(str(sent)) if sent else node.values, node.settings))
        torch.set_num_threads(config.threads)
        return _without_lost(_HANDLERS[kind], packet, config, node)
    except (ConfigError, DivergedError) as error:
        log.warning("%s failed: %s", kind, error)
        return Packet(config={"error": str(error)})
    except Exception as error:
        log.exception("%s failed", kind)
        return Packet(config={"error": f"{type(error).__name__}: {error}"})


def _without_lost(
    answer: Callable[[Packet, Config, Node], Packet], packet: Packet, config: Config, node: Node
) -> Packet:
    """Answer once more without the files that can no longer be read, if few enough are lost; the log names them."""
    try:
        return answer(packet, config, node)
    except UnreadableImage:
        if not config.own_data:
            raise
    place = own_data_dir(config, node), state_dir(config, node), config.unreadable_share, node.run
    scan_images(*place, load_inventory(*place[:2], node.run))
    try:
        return answer(packet, config, node)
    except UnreadableImage as error:
        log.warning("%s", error)
        raise ConfigError("image files of this node vanish while it works; its log names one.") from error


def _hello(packet: Packet, config: Config, node: Node) -> Packet:
    # a prompt of every client, built for this alone, would leave its memory in pieces where one process serves them all
    device = str(resolve_device(config.device))
    backbone = load_backbone(config.backbone, config.backbone_weights, config.image_size, device)
    answer = _own_holdings(config, node) if config.own_data else _registered_share(config, node)
    answer.config |= {
        "name": client_name(config, node),
        "backbone-sha256": backbone.sha256,
        "code-sha256": code_sha256(),
        "versions": [f"{name} {package_version(name)}" for name in ("torch", "timm", "flwr")],
        "device": str(next(backbone.parameters()).device),
    }
    return answer


def _registered_share(config: Config, node: Node) -> Packet:
    place, dataset = partition_id(node), build_scenario(config).dataset
    if place >= config.num_clients:
        raise ConfigError(f"partition-id = {place} is not below num-clients = {config.num_clients}.")
    labels = dataset.train_labels[all_client_positions(config, place)]
    counts = np.bincount(labels, minlength=len(dataset.class_names))
    return Packet({"class_counts": counts}, config={"partition-id": place, "classes": list(dataset.class_names)})


def _own_holdings(config: Config, node: Node) -> Packet:
    stock = scan_images(own_data_dir(config, node), state_dir(config, node), config.unreadable_share, node.run)
    own = open_inventory(stock, image_size(config))
    parts = {"class_counts": own.train_labels, "test_counts": own.test_labels}
    counts = {name: np.bincount(labels, minlength=len(own.class_names)) for name, labels in parts.items()}
    held = np.flatnonzero(sum(counts.values()))  # an .npz may name classes of which it holds no image
    return Packet(
        {name: found[held] for name, found in counts.items()},
        config={
            "classes": [own.class_names[c] for c in held],
            "unreadable": len(stock.unreadable),
            "image-shape": list(own.image_shape),
        },
    )


def _world(packet: Packet, config: Config, node: Node) -> Scenario:
    if not config.own_data:
        return build_scenario(config)
    data_dir, state = own_data_dir(config, node), state_dir(config, node)
    stock = load_inventory(data_dir, state, node.run) or scan_images(data_dir, state, config.unreadable_share, node.run)
    return build_scenario(config, TaskPlan.read(packet.config), stock)


def _lesson(packet: Packet, config: Config, node: Node, scenario: Scenario) -> ClientTaskData:
    task, round = int(packet.config["task"]) - 1, int(packet.config["round"]) - 1  # type: ignore[arg-type]
    if config.own_data:
        return node_task_data(scenario, task)
    pools = packet.config.get("pool") == client_name(config, node)
    return client_task_data(config, partition_id(node), task, round, holds_pool=pools)


def _train(packet: Packet, config: Config, node: Node) -> Packet:
    scenario, name = _world(packet, config, node), client_name(config, node)
    task_data = _lesson(packet, config, node, scenario)
    answer = Packet(metrics={"num-examples": len(task_data.positions)}, config={"name": name})
    if not len(task_data.positions):
        return answer
    model = _model(packet, config, scenario)
    model.set_active_rows(scenario.rows[task_data.classes])
    data = _local_data(scenario, task_data.positions, config)
    place = stream_of(config, node), int(packet.config["server-round"])  # type: ignore[arg-type]
    mechanism = GaussianMechanism.of(config, *place)
    if config.row.client:
        answer.metrics |= _fit(model, packet, config, data, torch_rng(config.seed, "local", *place))
        answer.arrays = mechanism.arrays(to_arrays(model.trained_state()), packet.arrays)
    if mechanism.noise:
        model.load(answer.arrays or packet.arrays)  # what the server may know is all that statistics may depend on
    started = time.perf_counter()
    answer.statistics = _statistics(
        model, data, scenario.dataset.train_labels[task_data.positions], packet, config, mechanism
    )
    answer.metrics["seconds-statistics"] = time.perf_counter() - started
    return answer


def _model(packet: Packet, config: Config, scenario: Scenario) -> Model:
    """The global model; the node may have been restarted on other weights since it said hello."""
    model = build_model(config, scenario.task_sizes(int(packet.config["task"]) - 1))  # type: ignore[arg-type]
    if packet.config["backbone-sha256"] != model.backbone.sha256:
        raise ConfigError("this node has other backbone weights than the server: give it the same backbone-weights.")
    model.load(packet.arrays)
    return model


def _local_data(scenario: Scenario, positions: np.ndarray, config: Config) -> LocalData:
    data = scenario.dataset
    rows = scenario.rows[data.train_labels[positions]]
    return LocalData(data.train_images, positions, rows, default_augmentation(data, config.augmentation))


def _fit(model: Model, packet: Packet, config: Config, data: LocalData, rng: torch.Generator) -> dict[str, float]:
    started = time.perf_counter()
    objective = load_class(config.row.client)(config, packet)
    loss, accuracy = train_locally(model, objective, data, config, rng)
    measured = {} if config.privacy_noise else {"loss": loss, "accuracy": accuracy}
    return measured | {"seconds-train": time.perf_counter() - started}


def _statistics(
    model: Model, data: LocalData, labels: np.ndarray, packet: Packet, config: Config, mechanism: GaussianMechanism
) -> Arrays:
    kind = load_class(config.row.statistics)()
    many = np.bincount(labels)[labels] >= config.min_class_count
    if not kind.carries or (kind.at_task_end and not packet.config["ends-task"]) or not many.any():
        return {}
    model.eval()
    model.prompt.train()  # the task is known here: the prompt acts as in training
    on_device = (torch.from_numpy(values[many]).to(model.device) for values in (labels, data.rows))
    return kind.collect(model, Sample(data.images, data.positions[many], *on_device), config.options, mechanism)


def _evaluate(packet: Packet, config: Config, node: Node) -> Packet:
    """Counts over this client's part of the test images: all of its own, or every num-clients-th one."""
    scenario, task = _world(packet, config, node), int(packet.config["task"]) - 1  # type: ignore[arg-type]
    model = _model(packet, config, scenario)
    mine = np.arange(len(scenario.dataset.test_labels))
    mine = (
        mine[scenario.dataset.test_labels >= 0] if config.own_data else mine[partition_id(node) :: config.num_clients]
    )
    order = np.array(scenario.schedule.seen_classes(task))
    counts = confusion_counts(model, scenario.dataset, order, mine)
    cells = np.argwhere(counts)
    arrays = {
        "correct": counts.diagonal(),
        "total": counts.sum(axis=1),
        "confusion": np.column_stack([cells, counts[tuple(cells.T)]]),
    }
    return Packet(arrays=arrays, config={"name": client_name(config, node)})


_HANDLERS: dict[Kind, Callable[[Packet, Config, Node], Packet]] = {
    "hello": _hello,
    "train": _train,
    "evaluate": _evaluate,
}
