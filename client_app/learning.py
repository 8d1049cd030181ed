"""What a client does with a model: it trains it, takes statistics with it, or lets it predict.

Importing this takes seconds, as it imports torch and timm. A node that answers each message in a new process does so
only for messages that need a model.
"""

import time

import numpy as np
import torch

from client_app.node import random_stream
from client_app.objectives.base import LocalData, Objective
from client_app.request import Request
from client_app.secure_aggregation import hide_in_sum
from client_app.training import train_locally
from task.config.schema import Config
from task.data.load import default_augmentation
from task.keys import ConfigError
from task.message import Packet
from task.methods import load_class
from task.models.load import configured_backbone
from task.models.model import Model, build_model, to_arrays
from task.models.vit import Backbone
from task.prototypes.noise import GaussianMechanism
from task.prototypes.statistics import Sample
from task.scenario.client_data import ClientTaskData, learnable_classes
from task.scenario.scenario import Scenario
from task.secure_aggregation.sum_layout import SumLayout
from task.utils.seeding import torch_rng


def load_node_backbone(config: Config) -> Backbone:
    """The backbone without head and prompt: a model per client would fragment the memory of a process that serves all.

    Raises:
        ConfigError: this node does not have the device or the weights.
    """
    torch.set_num_threads(config.threads)
    return configured_backbone(config)


def train(answer: Packet, request: Request, scenario: Scenario, task_data: ClientTaskData) -> Packet:
    """``answer`` with trained arrays, statistics and metrics; with secure aggregation, their masked numbers instead.

    Raises:
        ConfigError: other backbone weights than the server's, or arrays that do not fit.
        DivergedError: the loss is not finite.
    """
    config, model = request.config, load_model(request, scenario)
    if len(task_data.positions):
        _add_local_update(answer, request, scenario, model, task_data)
    if config.secure_aggregation == "off":
        return answer
    classes = learnable_classes(config, scenario.schedule, request.task)
    ends_task = bool(request.packet.config["ends-task"])
    layout = SumLayout.of(config, request.number("server-round"), ends_task, model, classes)
    hidden = hide_in_sum(layout.of_answer(answer), config.secure_aggregation_range, request.packet, request.node)
    seconds = {name: value for name, value in answer.metrics.items() if name.startswith("seconds-")}
    return Packet({"hidden": hidden}, metrics=seconds, config=answer.config)


def _add_local_update(
    answer: Packet, request: Request, scenario: Scenario, model: Model, task_data: ClientTaskData
) -> None:
    """Train, and put trained arrays, statistics and metrics into the answer."""
    packet, config = request.packet, request.config
    dataset, head_rows = scenario.dataset, scenario.schedule.head_rows
    model.set_active_rows(head_rows[task_data.classes])
    labels = dataset.train_labels[task_data.positions]
    augmentation = default_augmentation(dataset, config.augmentation)
    data = LocalData(dataset.train_images, task_data.positions, head_rows[labels], augmentation)
    client_and_round = random_stream(config, request.node), request.number("server-round")
    mechanism = GaussianMechanism.of(config, *client_and_round)
    if config.options.statistics_first:
        _add_statistics(answer, request, model, data, labels, mechanism)
    if config.trains_in(request.number("server-round")):
        objective = load_class(config.method_row.objective)(config, packet)
        answer.metrics |= _fit(request, model, objective, data, torch_rng(config.seed, "local", *client_and_round))
        fixed = np.setdiff1d(np.arange(sum(model.task_sizes)), objective.learned_rows(model).cpu().numpy())
        answer.arrays = mechanism.arrays(to_arrays(model.trained_state()), packet.arrays, fixed)
    if not config.options.statistics_first:
        if mechanism.noise:
            model.load(answer.arrays or packet.arrays)  # statistics may depend only on what leaves the client
        _add_statistics(answer, request, model, data, labels, mechanism)


def load_model(request: Request, scenario: Scenario) -> Model:
    """The global model; the node may have been restarted with other backbone weights since it said hello.

    Raises:
        ConfigError: other backbone weights than the server's, or arrays that do not fit.
    """
    torch.set_num_threads(request.config.threads)
    model = build_model(request.config, scenario.task_sizes(request.task))
    if request.packet.config["backbone-sha256"] != model.backbone.sha256:
        raise ConfigError("this node has other backbone weights than the server: give it the same backbone-weights.")
    model.load(request.packet.arrays)
    return model


def _fit(
    request: Request, model: Model, objective: Objective, data: LocalData, rng: torch.Generator
) -> dict[str, float]:
    """Train in place; returns loss, accuracy and seconds, with noise the seconds alone."""
    config, started = request.config, time.perf_counter()
    loss, accuracy = train_locally(model, objective, data, config, rng)
    metrics = {} if config.privacy_noise else {"loss": loss, "accuracy": accuracy}
    return metrics | {"seconds-train": time.perf_counter() - started}


def _add_statistics(
    answer: Packet, request: Request, model: Model, data: LocalData, labels: np.ndarray, mechanism: GaussianMechanism
) -> None:
    """Put into the answer statistics of the classes with at least min-class-count images, and the seconds they took."""
    started, config = time.perf_counter(), request.config
    statistics = load_class(config.method_row.statistics)()
    counted = np.bincount(labels)[labels] >= config.min_class_count
    due = statistics.due(config, request.number("server-round"), bool(request.packet.config["ends-task"]))
    if due and counted.any():
        model.eval()
        # the task is known here, so the prompt acts as in training; one that adapts is the same for all tasks
        model.prompt.train(not config.method_row.adapts)
        on_device = (torch.from_numpy(values[counted]).to(model.device) for values in (labels, data.rows))
        sample = Sample(data.images, data.positions[counted], *on_device)
        answer.statistics = statistics.collect(model, sample, config.options, mechanism)
    answer.metrics["seconds-statistics"] = time.perf_counter() - started
