"""A run's problem as plain files: images, labels, tasks, every client's images by round, and the frozen backbone."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import safetensors.torch

from server_app.clients.sampling import sample_clients
from task.config.schema import FROM_SCRATCH, Config
from task.data.images import Dataset
from task.data.load import default_augmentation
from task.keys import ConfigError
from task.models.bundled import BUNDLED, read_description
from task.models.feature_cache import batches
from task.models.load import configured_backbone
from task.models.weights import build_vit
from task.scenario.adaptation import choose_adaptation_rounds, count_first_images, set_adaptation_rounds
from task.scenario.client_data import ClientTaskData, client_task_data
from task.scenario.scenario import Scenario, build_scenario
from task.utils.atomic import write_atomically, write_json
from task.utils.versions import versions

README = Path(__file__).with_name("problem_readme.md")


def write_problem(config: Config, folder: Path) -> list[Path]:
    """Write data.npz, indices.npz, backbone.safetensors, problem.json and README.md, which says what is in them.

    ``num-clients`` must be known. Returns the paths of the files.

    Raises:
        ConfigError: keys, data or weights that cannot be used, or a folder that holds files already.
        OSError: something cannot be written.
    """
    _require_writable(config, folder)
    if config.leaves_adaptation_open:
        config = set_adaptation_rounds(config, choose_adaptation_rounds(count_first_images(config), config))
    scenario = build_scenario(config)
    rounds = list(_rounds(config, scenario))  # before anything is written: an error names the key
    description = _describe(config, scenario)
    folder.mkdir(parents=True, exist_ok=True)
    description["backbone"] |= _write_backbone(config, folder / "backbone.safetensors")
    _write_data(scenario.dataset, folder)
    indices = {
        f"task{task + 1}-round{round + 1}-{name}": data.positions
        for task, round, by_name in rounds
        for name, data in by_name.items()
    }
    np.savez(folder / "indices.npz", **indices)  # type: ignore[arg-type]  # numpy's stub takes any name for a flag
    description["participants"] = [list(by_name) for _, _, by_name in rounds]
    if scenario.streams:
        description["client_classes"] = dict(zip(_client_names(config), scenario.streams, strict=True))
    write_json(folder / "problem.json", description)
    (folder / "README.md").write_text(README.read_text(encoding="utf-8"), encoding="utf-8")
    return sorted(folder.iterdir())


def _require_writable(config: Config, folder: Path) -> None:
    if config.own_data:
        raise ConfigError(f"dataset = {config.dataset!r} is not possible: the images stay on the nodes.")
    if config.backbone in FROM_SCRATCH:
        raise ConfigError(f"backbone = {config.backbone!r} is not possible: only a ViT of timm is written.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{str(folder)!r} is there already: name a folder that is new or empty.")


def _client_names(config: Config) -> list[str]:
    return [f"client-{client:04d}" for client in range(config.num_clients)]


def _rounds(config: Config, scenario: Scenario) -> Iterator[tuple[int, int, dict[str, ClientTaskData]]]:
    """Task, round within the task, both from 0, and the data of each client that is drawn, by its name."""
    schedule, names = scenario.schedule, _client_names(config)
    for server_round in range(1, schedule.total_rounds + 1):
        task, round = schedule.locate(server_round)
        drawn = sample_clients(names, config, server_round)
        yield task, round, {n: client_task_data(config, names.index(n), task, round, n == drawn[0]) for n in drawn}


def _describe(config: Config, scenario: Scenario) -> dict[str, Any]:
    dataset, schedule = scenario.dataset, scenario.schedule
    backbone = configured_backbone(config)
    augmentation = default_augmentation(dataset, config.augmentation)
    return {
        "schema": 1,
        # those of a run on data.npz, whose default augmentation is another; held-out images are test images there
        "config": config.flat() | {"augmentation": augmentation, "validation-share": 0.0},
        "seed": config.seed,
        "class_names": list(dataset.class_names),
        "class_order": schedule.seen_classes(schedule.num_tasks - 1),
        "tasks": [list(classes) for classes in schedule.tasks],
        "rounds_per_task": schedule.rounds_per_task,
        "clients": _client_names(config),
        "augmentation": augmentation,
        "backbone": {
            "name": config.backbone,
            "sha256": backbone.sha256,
            "image_size": backbone.image_size,
            "mean": backbone.mean.flatten().tolist(),
            "std": backbone.std.flatten().tolist(),
        },
        "versions": versions(),
    }


def _write_backbone(config: Config, path: Path) -> dict[str, Any]:
    """Write timm's state dict of the backbone at the run's image size; returns how timm builds the model for it."""
    vit, _, _ = build_vit(config.backbone, config.backbone_weights, config.seed)
    side = config.image_size or vit.patch_embed.img_size[0]
    if side != vit.patch_embed.img_size[0]:
        vit.set_input_size(img_size=(side, side))
    write_atomically(path, safetensors.torch.save(vit.state_dict()))
    if config.backbone in BUNDLED:
        architecture = read_description(config.backbone)["architecture"]
        return {"class": "timm.models.VisionTransformer", "arguments": {**architecture, "img_size": side}}
    return {"class": "", "arguments": {"img_size": side}}


def _write_data(dataset: Dataset, folder: Path) -> None:
    """Training images, then test images, as ``dataset=npz`` reads them; in memory is one batch at a time."""
    parts = (dataset.train_images, dataset.test_images)
    shape = dataset.train_images[np.zeros(1, np.int64)].shape[1:]
    split = np.repeat(np.arange(2, dtype=np.uint8), [len(images) for images in parts])
    with TemporaryDirectory(dir=folder) as scratch:
        all_images = np.lib.format.open_memmap(Path(scratch) / "images.npy", "w+", np.uint8, (len(split), *shape))
        written = 0
        for images in parts:
            for batch in batches(np.arange(len(images))):
                all_images[written : written + len(batch)] = images[batch]
                written += len(batch)
        labels = np.concatenate([dataset.train_labels, dataset.test_labels])
        names, groups = np.array(dataset.class_names, np.str_), dataset.train_groups
        more: dict[str, Any] = {}
        if groups is not None:  # no test image is in the group of a training image
            more["groups"] = np.append(groups, groups.max() + 1 + np.arange(len(dataset.test_labels)))
        np.savez(folder / "data.npz", images=all_images, labels=labels, split=split, class_names=names, **more)
        del all_images  # some systems delete no file that is mapped
