"""A dry run: device, weights, data, one forward pass, one local step, and how many workers fit."""

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
from server_app.doctor.finding import GB, Finding
from server_app.simulation.superlink import fitting_workers
from strategies.base import RoundContext
from task.config.checks import doubt_backbone
from task.config.schema import Config
from task.data.digests import count_copies, describe_copies
from task.data.load import default_augmentation, load_dataset, require_readable
from task.data.node_images import Inventory, open_inventory, scan_images
from task.keys import ConfigError
from task.message import Packet
from task.methods import load_class
from task.models.device import gpus_are_hidden, has_unusable_gpu, resolve_device
from task.models.load import configured_backbone
from task.models.model import Model, build_model
from task.models.preprocessing import prepare
from task.scenario.client_data import client_task_data, node_task_data
from task.scenario.scenario import Scenario, build_scenario, image_size
from task.scenario.task_plan import first_task_plan
from task.utils.memory import available_memory, peak_memory
from task.utils.seeding import torch_rng

IMAGE_SIZE = 224  # of decoded images where the backbone could not be loaded
CUDA_CONTEXT = 0.5 * GB  # GPU memory that a process takes before its first array


def dry_run(config: Config) -> Iterator[Finding]:
    """Check device, weights and data; if these are usable, count images and measure times.

    ``num-clients`` must be known.
    """
    torch.set_num_threads(config.threads)
    config = replace(config, feature_cache="off")  # so nothing is written, and not all images pass the backbone
    ready = True
    for stage in (_check_device, _load_weights, _read_data):
        finding = _run_stage(stage, config)
        ready &= finding.level != "problem"
        yield finding
    if ready:
        for stage in (_count_images, _time_forward, _time_step, _suggest_workers):
            finding = _run_stage(stage, config)
            yield finding
            if finding.level == "problem":  # the others would say the same
                return


def _run_stage(stage: Callable[[Config], Finding], config: Config) -> Finding:
    try:
        return stage(config)
    except ConfigError as error:
        return Finding("problem", str(error))
    except (RuntimeError, OSError, MemoryError) as error:  # a device without memory, a loss that is no number
        return Finding("problem", f"{type(error).__name__}: {error}")


def _check_device(config: Config) -> Finding:
    device = resolve_device(config.device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
        return Finding("ok", f"device {device}: {name}, {free / GB:.1f} of {total / GB:.1f} GB free")
    if config.device == "auto" and has_unusable_gpu():
        advice = "this torch was built without CUDA or for another driver: pytorch.org/get-started names the right one"
        if gpus_are_hidden():
            advice = "CUDA_VISIBLE_DEVICES hides it: unset it to use the GPU"
        return Finding("warning", "device cpu, though the machine seems to have a GPU", advice)
    return Finding("ok", f"device {device}, threads={config.threads}")


def _load_weights(config: Config) -> Finding:
    backbone = configured_backbone(config)
    size = sum(p.numel() for p in backbone.parameters()) / 1e6
    text = f"backbone {config.backbone}: {size:.1f} million weights, {backbone.image_size} pixels"
    doubt = doubt_backbone(config.flat())
    return Finding("warning" if doubt else "ok", f"{text}, SHA-256 {backbone.sha256[:12]}", doubt)


def _read_data(config: Config) -> Finding:
    """Count the images, and read one of each class, training and test."""
    try:
        side = image_size(config)
    except ConfigError:
        side = config.image_size or IMAGE_SIZE
    if config.own_data:
        data = open_inventory(_inventory(config), side, config.max_image_pixels)
    else:
        share, limit = config.validation_share, config.max_image_pixels
        data = load_dataset(config.dataset, config.data_dir, side, share, config.seed, limit)
        require_readable(data, config.dataset)
    for images, labels in ((data.train_images, data.train_labels), (data.test_images, data.test_labels)):
        images[np.unique(labels, return_index=True)[1]]
    text = f"data {config.dataset}: {len(data.train_labels)} training and {len(data.test_labels)} test images, "
    text += _describe_counts(data.class_names, np.bincount(data.train_labels, minlength=len(data.class_names)))
    copies = 0 if config.own_data else count_copies(data, config.dataset)
    doubt = describe_copies(copies, len(data.test_labels))
    return Finding("warning", text, doubt) if doubt else Finding("ok", text)


@lru_cache(maxsize=1)
def _inventory(config: Config) -> Inventory:
    """The images of a node with data of its own; the state that a run keeps there is not changed."""
    if not config.data_dir:
        raise ConfigError("data-dir = '': where nodes have data of their own, name those of this one.")
    with TemporaryDirectory() as state:
        return scan_images(config.data_dir, Path(state), config.unreadable_share, max_pixels=config.max_image_pixels)


@lru_cache(maxsize=1)
def _scenario(config: Config) -> Scenario:
    """The run's scenario; with data of its own, that of a run in which this node is the only client."""
    if not config.own_data:
        return build_scenario(config)
    inventory = _inventory(config)
    dataset = open_inventory(inventory, image_size(config), config.max_image_pixels)
    alone = replace(config, num_tasks=min(config.num_tasks, len(dataset.class_names)))
    return build_scenario(config, first_task_plan(alone, dataset.class_names, dataset.image_shape), inventory)


def _describe_counts(names: tuple[str, ...], counts: np.ndarray) -> str:
    """Training images by class; of more than 12 classes, the smallest and the largest."""
    if len(names) <= 12:
        return ", ".join(f"{name}: {count}" for name, count in zip(names, counts, strict=True))
    smallest, largest = counts.argmin(), counts.argmax()
    if counts[smallest] == counts[largest]:
        return f"{len(names)} classes with {counts[0]} of each"
    return f"{len(names)} classes from {names[smallest]} ({counts[smallest]}) to {names[largest]} ({counts[largest]})"


def _count_images(config: Config) -> Finding:
    if config.own_data:
        images = len(node_task_data(_scenario(config), 0).positions)
        return Finding("ok", f"alone, this node would learn from {images} images in the first task")
    clients = range(config.num_clients)
    sizes = [len(client_task_data(config, c, task=0, round=0, holds_pool=c == 0).positions) for c in clients]
    tasks = len(_scenario(config).schedule.tasks)
    each = f"from {min(sizes)} to {max(sizes)} images each"
    return Finding("ok", f"{tasks} tasks; in the first, {len(sizes)} clients learn {each}")


def _time_forward(config: Config) -> Finding:
    scenario = _scenario(config)
    model = build_model(config, scenario.task_sizes(0))
    positions = np.arange(len(scenario.dataset.train_labels))[: config.batch_size]
    images = prepare(scenario.dataset.train_images[positions], model.backbone)
    with torch.inference_mode():
        seconds = _measure_seconds(lambda: model(images), model)
    return Finding("ok", f"a forward pass of {len(positions)} images takes {1000 * seconds:.0f} ms")


def _time_step(config: Config) -> Finding:
    if not config.trains_locally:
        return Finding("ok", f"method {config.method} has no training step")
    scenario = _scenario(config)
    model = build_model(config, scenario.task_sizes(0))
    positions = np.flatnonzero(np.isin(scenario.dataset.train_labels, scenario.schedule.tasks[0]))[: config.batch_size]
    if not len(positions):  # a node whose own data has test images alone of these classes
        return Finding("warning", "no training image of the first task's classes: no step was timed")
    rows = scenario.schedule.head_rows[scenario.dataset.train_labels[positions]]
    augmentation = default_augmentation(scenario.dataset, config.augmentation)
    data = LocalData(scenario.dataset.train_images, positions, rows, augmentation)
    context = RoundContext(scenario.schedule, 1)
    statistics = load_class(config.method_row.strategy)(config).broadcast(context)
    packet = Packet(statistics=statistics, config={"task": 1, "round": 1, "classes": list(scenario.schedule.tasks[0])})
    objective = load_class(config.method_row.objective)(config, packet)
    one_step = replace(config, local_epochs=1)
    seconds = _measure_seconds(lambda: train_locally(model, objective, data, one_step, torch_rng(0, "local")), model)
    return Finding("ok", f"a local step of {len(positions)} images takes {1000 * seconds:.0f} ms")


def _measure_seconds(action: Callable[[], object], model: Model) -> float:
    """Seconds of the second call: the first one also loads code and computes queries."""
    for _ in range(2):
        started = time.perf_counter()
        action()
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
    return time.perf_counter() - started


def _suggest_workers(config: Config) -> Finding:
    """As many workers as have cores and memory; a worker needs the peak memory of this process."""
    peak = peak_memory()
    workers = available_memory() / peak
    text = f"a client takes about {peak / GB:.1f} GB of memory"
    device = resolve_device(config.device)
    if device.type == "cuda":
        on_device = torch.cuda.max_memory_reserved(device) + CUDA_CONTEXT
        workers = min(workers, torch.cuda.mem_get_info(device)[0] / on_device)
        text += f" and {on_device / GB:.1f} GB of the GPU's"
    text += f": --workers {max(1, min(fitting_workers(config), int(workers)))}"
    if workers < 1:
        return Finding("warning", text, "this is more than is free: take a smaller batch-size or backbone")
    return Finding("ok", text)
