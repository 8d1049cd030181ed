"""Before the first round: clients, classes and tasks; and the classes that appear while a run goes on."""

import logging
import time
from collections.abc import Mapping, Sequence

from server_app.clients.client_info import ClientInfo
from server_app.clients.hello import wait_for_nodes
from server_app.clients.registry import ClientRegistry
from server_app.rounds.progress import first_names
from server_app.transport.base import Transport
from task.config.checks import doubt_backbone
from task.config.parsing import set_num_clients
from task.config.schema import APPEARING, Config
from task.data.class_names import class_ids
from task.data.digests import count_copies, describe_copies
from task.data.images import Dataset
from task.data.load import default_augmentation, require_readable
from task.keys import ConfigError
from task.message import Scalar
from task.models.feature_cache import store_queries
from task.models.model import Model, build_model
from task.scenario.adaptation import choose_adaptation_rounds, count_first_images, set_adaptation_rounds
from task.scenario.client_data import client_task_data
from task.scenario.scenario import Scenario, build_scenario, image_size
from task.scenario.task_plan import TaskPlan, first_task_plan
from task.utils.versions import code_sha256

log = logging.getLogger(__name__)

POLL = 30.0  # seconds between two looks for new classes


def connect_clients(config: Config, transport: Transport, planned: Sequence[str]) -> tuple[Config, ClientRegistry, int]:
    """Wait for the nodes and ask them who they are; returns the run keys with the number of clients, and the clients.

    Settings, weights and data are checked before. The third value is how many of the test images are training images
    too, as far as the server has them. ``planned`` are the classes of a run that is resumed, where nodes have images of
    their own.

    Raises:
        ConfigError: settings, weights, data or partitions that cannot work.
        RunError: too few nodes, or nodes that cannot work together.
    """
    backbone = build_model(config, []).backbone
    if doubt := doubt_backbone(config.flat()):
        log.warning(doubt)
    dataset = None if config.own_data else build_scenario(config).dataset
    copies = 0
    if dataset:
        require_readable(dataset, config.dataset)
        if copies := count_copies(dataset, config.dataset):
            log.warning(describe_copies(copies, len(dataset.test_labels)))
    # a resumed run goes on without nodes that are gone: at night nobody may be there to start them
    minimum = config.quorum if config.resume else None
    nodes = wait_for_nodes(transport, config.num_clients, config.start_timeout, minimum)
    expected = 0 if config.resume else config.num_clients
    config = set_num_clients(config, config.num_clients or len(nodes))
    if dataset:
        client_task_data(config, client=0, task=0, round=0)
    checksums = (backbone.sha256, code_sha256())
    return config, ClientRegistry(transport, nodes, config, dataset, checksums, expected, planned), copies


def prepare_features(config: Config, model: Model, dataset: Dataset) -> None:
    """Fill the feature cache before the first message, if this run takes its frozen features from there.

    Raises:
        ConfigError: the cache cannot be written.
    """
    stored, augmentation = store_queries(model, dataset), default_augmentation(dataset, config.augmentation)
    if stored and augmentation != "none" and config.trains_locally and not model.prompted:
        log.warning(
            "augmentation = %r: every training step computes features anew; with augmentation=none training too takes "
            "them from the feature cache",
            augmentation,
        )


def plan_tasks(config: Config, clients: Sequence[ClientInfo]) -> TaskPlan | None:
    """Classes and tasks of a run whose nodes have images of their own; None for any other run.

    Raises:
        ConfigError: no class, or more tasks than classes.
    """
    if not config.own_data:
        return None
    if not _held_classes(clients):
        raise ConfigError("no node holds an image: the data-dir of each needs a folder of images per class.")
    shapes = {client.image_shape for client in clients if client.classes}
    side = image_size(config)
    height, width = shapes.pop() if len(shapes) == 1 else (side, side)
    return first_task_plan(config, _held_classes(clients), (height, width))


def _held_classes(clients: Sequence[ClientInfo]) -> list[str]:
    """Class names of all clients; one that several clients hold comes several times."""
    return [name for client in clients for name in client.classes]


def lay_out_tasks(config: Config, plan: TaskPlan | None, registry: ClientRegistry) -> Scenario:
    """The data and tasks of a run; with a plan, the clients' images are counted by its class ids."""
    if plan:
        registry.assign_class_ids(plan.class_names)
        names = sorted(set(_held_classes(registry.clients)))
        unplanned = [n for n, c in zip(names, class_ids(names, plan.class_names).tolist(), strict=True) if c < 0]
        if unplanned and config.class_order != APPEARING:
            log.warning("not in the plan of this run, so left out: %s", ", ".join(unplanned))
    return build_scenario(config, plan)


def settle_adaptation(
    config: Config, clients: Sequence[ClientInfo], scenario: Scenario, saved: Mapping[str, Scalar]
) -> Config:
    """The run keys with the number of rounds of adaptation, if that depends on the clients' images.

    ``saved`` are the keys of the run that is resumed, which has chosen it already.
    """
    if not config.leaves_adaptation_open:
        return config
    chosen = saved.get(f"{config.method_row.name}-adaptation-rounds")
    if chosen is not None:
        return set_adaptation_rounds(config, int(chosen))
    first = scenario.schedule.current_classes(0)
    images = [int(c.class_counts[first].sum()) for c in clients] if config.own_data else count_first_images(config)
    number = choose_adaptation_rounds(images, config)
    log.info("%d rounds of adaptation come first", number)
    return set_adaptation_rounds(config, number)


def log_tasks(scenario: Scenario, first: int = 0) -> None:
    """Log the classes of each task from ``first`` on, counted from 0."""
    for task, classes in enumerate(scenario.schedule.tasks[first:], first + 1):
        log.info("classes of task %d: %s", task, first_names([scenario.dataset.class_names[c] for c in classes]))


def wait_for_new_classes(config: Config, plan: TaskPlan | None, registry: ClientRegistry) -> TaskPlan | None:
    """The plan with one more task, of classes that nodes newly hold; waits ``class-wait`` seconds for some.

    Returns:
        None if no class came, or where classes do not appear while a run goes on.
    """
    if not plan or config.class_order != APPEARING or len(plan.tasks) >= config.num_tasks:
        return None
    deadline = time.monotonic() + config.class_wait
    log.info("looking for new classes, for %g s at most", config.class_wait)
    while True:
        registry.admit_new()
        registry.refresh_counts()
        extended = plan.add_task(_held_classes(registry.clients))
        if extended.tasks[-1]:
            return extended
        if time.monotonic() >= deadline:
            log.info("no new class has come")
            return None
        time.sleep(min(POLL, max(0.0, deadline - time.monotonic())))
