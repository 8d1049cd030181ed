"""A run tried out for a moment: device, weights, data, one forward pass, one local step, and how many go at once."""

import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from client_app.objectives.base import LocalData
from client_app.training import train_locally
from server_app.doctor.finding import GB, Finding, available_memory
from server_app.simulation.superlink import default_workers
from strategies.base import Moment
from task.config.schema import Config
from task.data.images import Dataset
from task.data.load import default_augmentation, load_dataset
from task.data.node_images import Inventory, open_holdings, take_stock
from task.keys import ConfigError
from task.message import Packet
from task.methods import load_half
from task.models.device import resolve_device
from task.models.load import load_backbone
from task.models.model import Model, build_model
from task.models.preprocessing import prepare
from task.scenario.client_data import lesson_of, own_lesson
from task.scenario.scenario import World, build_world, image_size
from task.scenario.task_plan import first_plan
from task.utils.seeding import torch_rng

SIDE = 224  # of decoded images where the backbone cannot say
CONTEXT = 0.5 * GB  # of a GPU's memory, which every process takes before its first array


def attempt(config: Config) -> Iterator[Finding]:
    """Device, weights and data; if they are there, the tasks and the times. The number of clients must be known."""
    torch.set_num_threads(config.threads)
    ready = True
    for stage in (_device, _weights, _data):
        finding = _tried(stage, config)
        ready &= finding.level != "problem"
        yield finding
    if ready:
        for stage in (_tasks, _forward, _step, _workers):
            yield _tried(stage, config)


def _tried(stage: Callable[[Config], Finding], config: Config) -> Finding:
    try:
        return stage(config)
    except ConfigError as error:
        return Finding("problem", str(error))
    except (RuntimeError, OSError, MemoryError) as error:  # a device without memory, a loss that is no number
        return Finding("problem", f"{type(error).__name__}: {error}")


def _device(config: Config) -> Finding:
    device = resolve_device(config.device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
        return Finding("ok", f"device {device}: {name}, {free / GB:.1f} of {total / GB:.1f} GB free")
    if shutil.which("nvidia-smi") and not torch.cuda.is_available():
        advice = "this torch was built without CUDA or for another driver: pytorch.org/get-started names the right one"
        return Finding("warning", "device cpu, though the machine seems to have a GPU", advice)
    return Finding("ok", f"device {device}, {config.threads} threads")


def _weights(config: Config) -> Finding:
    device = str(resolve_device(config.device))
    backbone = load_backbone(config.backbone, config.backbone_weights, config.image_size, device)
    size = sum(p.numel() for p in backbone.parameters()) / 1e6
    text = f"backbone {config.backbone}: {size:.1f} million weights, {backbone.image_size} pixels"
    return Finding("ok", f"{text}, SHA-256 {backbone.sha256[:12]}")


def _data(config: Config) -> Finding:
    """Counts, and one image of each class and part read."""
    try:
        side = image_size(config)
    except ConfigError:
        side = config.image_size or SIDE
    data = _dataset(config, side)
    for images, labels in ((data.train_images, data.train_labels), (data.test_images, data.test_labels)):
        images[np.unique(labels, return_index=True)[1]]
    text = f"data {config.dataset}: {len(data.train_labels)} training and {len(data.test_labels)} test images, "
    return Finding("ok", text + _counts(data.class_names, np.bincount(data.train_labels)))


def _dataset(config: Config, side: int) -> Dataset:
    if config.own_data:
        return open_holdings(_stock(config), side)
    return load_dataset(config.dataset, config.data_dir, side, config.validation_share, config.seed)


@lru_cache(maxsize=1)
def _stock(config: Config) -> Inventory:
    """Of a node that is tried out alone; what a run remembers there stays as it is."""
    if not config.data_dir:
        raise ConfigError("data-dir = '': where nodes have data of their own, name those of this one.")
    with TemporaryDirectory() as state:
        return take_stock(config.data_dir, Path(state), config.unreadable_share)


@lru_cache(maxsize=1)
def _world(config: Config) -> World:
    """The run's, or what it would be if this node with data of its own were the only one."""
    if not config.own_data:
        return build_world(config)
    stock = _stock(config)
    own = open_holdings(stock, image_size(config))
    alone = replace(config, num_tasks=min(config.num_tasks, len(own.class_names)))
    return build_world(config, first_plan(alone, own.class_names, own.image_shape), stock)


def _counts(names: tuple[str, ...], counts: np.ndarray) -> str:
    """Training images by class, of many classes the extremes."""
    if len(names) <= 12:
        return ", ".join(f"{name}: {count}" for name, count in zip(names, counts, strict=True))
    few, many = counts.argmin(), counts.argmax()
    return f"{len(names)} classes from {names[few]} ({counts[few]}) to {names[many]} ({counts[many]})"


def _tasks(config: Config) -> Finding:
    if config.own_data:
        images = len(own_lesson(_world(config), 0).positions)
        return Finding("ok", f"alone, this node would learn from {images} images in the first task")
    clients = range(config.num_clients)
    sizes = [len(lesson_of(config, c, task=0, round=0, holds_pool=c == 0).positions) for c in clients]
    tasks = len(_world(config).schedule.tasks)
    text = f"{tasks} tasks; in the first, {len(sizes)} clients learn from {min(sizes)} to {max(sizes)} images each"
    return Finding("ok", text)


def _forward(config: Config) -> Finding:
    world, model = _world(config), _model(config)
    some = np.arange(len(world.dataset.train_labels))[: config.batch_size]
    images = prepare(world.dataset.train_images[some], model.backbone)
    with torch.inference_mode():
        seconds = _seconds(lambda: model(images), model)
    return Finding("ok", f"a forward pass of {len(some)} images takes {1000 * seconds:.0f} ms")


def _step(config: Config) -> Finding:
    if not config.row.client:
        return Finding("ok", f"method {config.method} has no training step")
    world, model = _world(config), _model(config)
    positions = np.flatnonzero(np.isin(world.dataset.train_labels, world.schedule.tasks[0]))[: config.batch_size]
    rows = world.rows[world.dataset.train_labels[positions]]
    augmentation = default_augmentation(world.dataset, config.augmentation)
    data = LocalData(world.dataset.train_images, positions, rows, augmentation)
    moment = Moment(world.schedule, 1)
    sent = load_half(config.row.server)(config).broadcast(moment)
    packet = Packet(prototypes=sent, config={"task": 1, "round": 1, "classes": list(world.schedule.tasks[0])})
    objective = load_half(config.row.client)(config, packet)
    once = replace(config, local_epochs=1)
    seconds = _seconds(lambda: train_locally(model, objective, data, once, torch_rng(0, "local")), model)
    return Finding("ok", f"a local step of {len(positions)} images takes {1000 * seconds:.0f} ms")


def _model(config: Config) -> Model:
    return build_model(config, _world(config).task_sizes(0))


def _seconds(action: Callable[[], object], model: Model) -> float:
    """Time of the second go: the first one also loads code and queries."""
    for _ in range(2):
        started = time.perf_counter()
        action()
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
    return time.perf_counter() - started


def _workers(config: Config) -> Finding:
    """As many clients at once as have cores and memory, by what this process has needed for one."""
    unit = 1 if sys.platform == "darwin" else 1024
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    fitting = available_memory() / used
    text = f"a client takes about {used / GB:.1f} GB of memory"
    device = resolve_device(config.device)
    if device.type == "cuda":
        on_device = torch.cuda.max_memory_reserved(device) + CONTEXT
        fitting = min(fitting, torch.cuda.mem_get_info(device)[0] / on_device)
        text += f" and {on_device / GB:.1f} GB of the GPU's"
    text += f": --workers {max(1, min(default_workers(config), int(fitting)))}"
    if fitting < 1:
        return Finding("warning", text, "this is more than is free: take a smaller batch-size or backbone")
    return Finding("ok", text)
