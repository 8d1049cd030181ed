"""Combinations of run keys that cannot work together; each error says what to change."""

from collections.abc import Mapping
from typing import Any

from task.config.schema import (
    APPEARING,
    BUNDLED_BACKBONE,
    FROM_PATH,
    FROM_SCRATCH,
    OWN,
    REDRAWN,
    Config,
    changed_keys,
    defaults,
)
from task.keys import AUTO, ConfigError
from task.method_options import PATCHES
from task.methods import METHODS, load_class
from task.prompt_kinds import PROMPTS

MAX_SECURE_CLIENTS = 300  # in a round; the server opens a sum of 100 in about 20 s, and the time grows with the cube


def check_combination(config: Config) -> None:
    """Refuse keys that are possible one by one but not together.

    Raises:
        ConfigError: names the keys, their values and what to change.
    """
    _check_method(config)
    _check_unread(config)
    _check_backbone(config)
    _check_prompt(config)
    _check_sizes(config)
    _check_own_data(config)
    _check_bounds(config)
    _check_privacy(config)
    _check_secure_aggregation(config)
    if config.dataset in FROM_PATH and not config.data_dir:
        raise ConfigError(
            f"data-dir = '' is not possible with dataset {config.dataset!r}: name the data's path "
            "(where published data are not there yet, the next error says what belongs there and where to get it)."
        )
    if "/" in config.run_name or config.run_name in (".", ".."):
        raise ConfigError(f"run-name = {config.run_name!r} is not possible: it names a folder, output-dir says where.")


def _check_prompt(config: Config) -> None:
    kind, blocks = PROMPTS[config.prompt], config.blocks()
    if len(blocks) < kind.fewest_blocks:
        raise ConfigError(
            f"prompt-blocks = {config.prompt_blocks!r} is not possible with prompt {config.prompt!r}: it needs at "
            f"least {kind.fewest_blocks} blocks."
        )
    if kind.shared_out and config.prompt_pool < config.num_tasks:
        raise ConfigError(
            f"prompt-pool = {config.prompt_pool} is not possible with prompt {config.prompt!r}: "
            f"each of the {config.num_tasks} tasks needs at least one component."
        )


def _check_method(config: Config) -> None:
    if config.prompt not in config.method_row.prompts:
        raise ConfigError(
            f"prompt = {config.prompt!r} does not go with method {config.method!r}, "
            f"which takes {', '.join(config.method_row.prompts)}."
        )
    if config.asynchronous and not config.method_row.asynchronous:
        able = ", ".join(row.name for row in METHODS.values() if row.asynchronous)
        raise ConfigError(
            f"partition = {config.partition!r} does not go with method = {config.method!r}: "
            f"of clients that have class sequences of their own only {able} can learn."
        )
    if config.statistics_rounds == "last" and not config.method_row.last_statistics:
        able = ", ".join(row.name for row in METHODS.values() if row.last_statistics)
        raise ConfigError(
            f"statistics-rounds = 'last' does not go with method {config.method!r}, which sends no class statistics or "
            f"uses them in every round: write every. It goes with {able}."
        )
    if config.federated_bias and (config.method_row.adapts or not config.trains_locally):
        raise ConfigError(f"federated-bias = True is not possible: {config.method!r} trains no model in every task.")


def _check_unread(config: Config) -> None:
    """Refuse keys of a method that its other keys leave without effect."""
    name, options = config.method_row.name, config.options
    if config.method_row.adapts and not config.adapts:
        key, rounds = config.method_row.own_keys()[f"{name}-adaptation-rounds"], options.adaptation_rounds
        if rounds not in (config.method_row.defaults.get(key.name, key.default), key.rule.auto):
            raise ConfigError(f"{key.name} = {rounds} would be ignored: it needs a prompt to adapt, not none.")
    # class-token is not refused: a suite may set it for all rows, also for those without an early feature
    chosen = options.early_feature == PATCHES and options.early_feature != type(options).early_feature
    if chosen and not (0 < options.depth < 1 or 0 < options.frozen_depth < 1):
        raise ConfigError(
            f"{name}-early-feature = {options.early_feature!r} would be ignored: it needs {name}-depth or "
            f"{name}-frozen-depth between 0 and 1, which say after which blocks."
        )
    fixed = config.prompt == "none" and not config.trains_backbone
    for field in ("features", "prototypes"):
        value = getattr(options, field)
        if fixed and value != getattr(type(options), field):
            raise ConfigError(
                f"{name}-{field} = {value!r} would be ignored: with prompt none and a frozen backbone features never "
                "change."
            )


def doubt_backbone(settings: Mapping[str, Any]) -> str:
    """A warning if the bundled backbone sees images of somebody's own, else empty; ``settings`` are run keys."""
    if settings.get("backbone") != BUNDLED_BACKBONE or settings.get("dataset") not in (OWN, "folder", "npz"):
        return ""
    return f"backbone = {BUNDLED_BACKBONE!r} is for digits and sees 32 x 32 pixels: name another for other images"


def _check_backbone(config: Config) -> None:
    if config.backbone not in FROM_SCRATCH:
        return
    if config.method_row.backbone == "frozen" or config.prompt != "none":
        fitting = [m.name for m in METHODS.values() if m.backbone != "frozen" and "none" in m.prompts]
        raise ConfigError(
            f"backbone = {config.backbone!r} is trained from scratch and has no blocks to prompt, which does not go "
            f"with method {config.method!r} and prompt {config.prompt!r}: use prompt none and {' or '.join(fitting)}."
        )
    if config.backbone_weights == AUTO:
        raise ConfigError(
            f"backbone-weights = {AUTO!r} is not possible with backbone {config.backbone!r}, which has no pre-trained "
            "ones: write random, to train it from scratch, or name a file."
        )
    if 0 < config.image_size < FROM_SCRATCH[config.backbone]:
        raise ConfigError(
            f"image-size = {config.image_size} is not possible: {config.backbone!r} needs at least "
            f"{FROM_SCRATCH[config.backbone]}, for the batch normalisation of a batch of one image."
        )


def _check_own_data(config: Config) -> None:
    if not config.own_data:
        if config.class_order == APPEARING:
            raise ConfigError(f"class-order = {APPEARING!r} needs nodes with data of their own: dataset = {OWN!r}.")
        return
    if config.evaluate == "server":
        raise ConfigError(f"evaluate = 'server' is not possible with dataset {OWN!r}: only the clients have images.")
    if config.method_row.pooled or config.federated_bias:
        what = f"method = {config.method!r}" if config.method_row.pooled else "federated-bias = True"
        raise ConfigError(f"{what} is not possible with dataset {OWN!r}: the server has none of the nodes' images.")


def _check_bounds(config: Config) -> None:
    if 0 < config.max_update_ratio < 1:
        raise ConfigError(
            f"max-update-ratio = {config.max_update_ratio:g} is not possible: below 1 it would refuse most honest "
            "clients; 0 means no bound."
        )
    for name, value in {"norm": config.max_update_norm, "ratio": config.max_update_ratio}.items():
        if value and not config.trains_locally:
            raise ConfigError(f"max-update-{name} = {value:g} would be ignored: {config.method!r} trains no arrays.")


def _check_privacy(config: Config) -> None:
    changed = changed_keys(config.flat(), defaults(), "privacy")
    if not changed:
        return
    kind = load_class(config.method_row.statistics)()  # here and not above: it loads torch
    unread = {
        "min-class-count": "" if kind.carries else f"method {config.method!r} sends no class statistics",
        "privacy-clip": "" if config.trains_locally else f"method {config.method!r} trains no arrays",
        "privacy-feature-clip": "" if kind.needs_features else f"method {config.method!r} sends no feature statistics",
        "privacy-seeded": "" if config.privacy_noise else "privacy-noise is 0",
        "privacy-delta": "" if config.privacy_noise else "privacy-noise is 0",
    }
    for name, value in changed.items():
        if unread.get(name):
            raise ConfigError(f"{name} = {value!r} would be ignored: {unread[name]}.")
    if config.privacy_noise:
        _check_noise(config, kind)


def _check_noise(config: Config, kind: Any) -> None:
    """Refuse noise without the bounds that it needs, and with statistics ``kind`` that it cannot protect."""
    z = f"privacy-noise = {config.privacy_noise:g}"
    if config.trains_locally and not config.privacy_clip:
        raise ConfigError(f"{z} needs privacy-clip above 0: without it no amount of noise protects anything.")
    if kind.needs_features and not config.privacy_feature_clip:
        raise ConfigError(f"{z} needs privacy-feature-clip above 0, as {config.method!r} sends feature statistics.")
    if what := kind.unprotected(config.options):
        raise ConfigError(f"{z} is not possible: method {config.method!r} sends {what}, which cannot be noised here.")
    if kind.carries and "releases" not in vars(type(kind)):  # an inherited number may leave out arrays that it adds
        raise ConfigError(f"{z} is not possible: {type(kind).__name__} must define how many releases a message has.")
    if config.backbone in FROM_SCRATCH:
        raise ConfigError(f"{z} is not possible with {config.backbone!r}: noise makes running variances negative.")
    if config.method_row.pooled or config.partition in REDRAWN:
        what = f"method {config.method!r}" if config.method_row.pooled else f"partition {config.partition!r}"
        raise ConfigError(f"{z} is not possible with {what}: there an image is many clients', and its epsilon unknown.")


def _check_secure_aggregation(config: Config) -> None:
    if config.secure_aggregation == "off":
        return
    row, setting = config.method_row, f"secure-aggregation = {config.secure_aggregation!r}"
    if not row.sums:
        able = ", ".join(other.name for other in METHODS.values() if other.sums)
        raise ConfigError(
            f"{setting} does not go with method {config.method!r}, whose server needs the answer of each client by "
            f"itself. It goes with {able}."
        )
    kind = load_class(row.statistics)()
    if what := kind.not_summable(config.options):
        raise ConfigError(f"{setting} is not possible: method {config.method!r} sends {what}, which do not add up.")
    if kind.carries and not kind.at_task_end and config.rounds_per_task > 1:
        raise ConfigError(
            f"{setting} needs rounds-per-task = 1 with method {config.method!r}, not {config.rounds_per_task}: clients "
            "send the same sums in each round of a task, and two rounds that differ in one client give that one's away."
        )
    for name in ("max-update-norm", "max-update-ratio", "federated-bias"):
        if value := config.flat()[name]:
            advice = "" if config.federated_bias else " To limit what one client changes, use privacy-clip."
            reason = f"the server sees no client's own model.{advice}"
            raise ConfigError(f"{setting} is not possible with {name} = {value!r}: {reason}")
    _check_threshold(config)


def require_few(clients: int) -> None:
    """Refuse a secure sum that would take the server hours to open.

    Raises:
        ConfigError: ``clients`` are too many.
    """
    if clients > MAX_SECURE_CLIENTS:
        raise ConfigError(
            f"secure-aggregation is not possible with a sum of {clients} clients: the server's time to open it grows "
            f"with their cube. At most {MAX_SECURE_CLIENTS} can be: clients-per-round draws some of them for training, "
            "evaluate=clients asks all."
        )


def _check_threshold(config: Config) -> None:
    """Check how many clients a round's secure sum has, and how many of them must answer to open it.

    More than half must: otherwise the server could split them into two groups and open a sum of each. With too many
    clients the server would need too long.
    """
    clients = config.clients_per_round or config.num_clients
    if not clients:
        return  # this check is repeated when the nodes have connected
    require_few(config.num_clients if config.evaluate == "clients" else clients)  # all of them evaluate
    threshold = config.secure_aggregation_threshold or config.unmask_threshold(clients)
    if not max(1, clients / 2) < threshold <= clients:
        raise ConfigError(
            f"secure-aggregation-threshold = {threshold} is not possible with {clients} clients in a round: it must be "
            "more than half of them, at least 2 and at most all, so that the server can open one sum only."
        )


def _check_sizes(config: Config) -> None:
    per_round = config.clients_per_round or config.num_clients
    if config.num_clients and per_round > config.num_clients:
        raise ConfigError(f"clients-per-round = {per_round} is more than num-clients = {config.num_clients}.")
    if per_round and config.quorum > per_round:
        raise ConfigError(f"quorum = {config.quorum} can never be met: only {per_round} clients take part in a round.")
