"""One typed, validated, frozen object made from Flower's flat run config."""

import difflib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from task.keys import AUTO, ConfigError, Key, key, keys_of
from task.methods import FROM_SCRATCH, METHODS, PROMPTS, Method, Options, adopt, load_half
from task.packet import Scalar

__all__ = ["Config", "ConfigError", "defaults", "known_keys", "parse", "parse_text", "typed"]

OWN = "own"  # the data set of nodes that each have images of their own
EMBEDDED = ("digits", "synthetic")
FROM_PATH = (
    "npz",
    "folder",
    "cifar10",
    "cifar100",
    "tiny-imagenet",
    "mini-imagenet",
    "cub200",
    "imagenet-r",
    "domainnet",
)
REGISTERED = EMBEDDED + FROM_PATH
APPEARING = "appearing"
OF_THE_NODE = ("device", "data-dir", "backbone-weights")  # a node's own settings of these names win over the run's
WAITING = ("start-timeout", "round-timeout")  # keys that change what a run waits for and not what it finds
PROMPTED = tuple(name for name in PROMPTS if name != "none")
LOCAL = ("local_epochs", "batch_size", "optimizer", "learning_rate", "gradient_clip", "augmentation")
PREFIXED = tuple(name for name in PROMPTED if name != "l2p")  # the others are tokens
ASYNCHRONOUS = ("consensus",)  # partitions whose clients have class sequences of their own
PARTITIONS = ("dirichlet", "iid", "quantity", "class-share", "split-ratio", *ASYNCHRONOUS)


@dataclass(frozen=True)
class Config:
    """Every run key, resolved. Users write the names with hyphens; ``options`` holds the method's own keys."""

    method: str = key("hgp", "method to run, or module:object of one from outside")
    prompt: str = key(AUTO, "prompt of the backbone", choices=tuple(PROMPTS), auto="")
    prompt_length: int = key(
        AUTO,
        "L_p: prefix vectors per block, for keys and for values",
        minimum=1,
        maximum=10_000,
        auto=1,
        only=("prompt", *PROMPTED),
    )
    prompt_projected: bool = key(
        False, "project prefixes as the block does its tokens (PIP eq. 3-4)", only=("prompt", *PREFIXED)
    )
    prompt_pool: int = key(
        AUTO, "prompts in the pool", minimum=1, maximum=10_000, auto=1, only=("prompt", "l2p", "coda", "decomposed")
    )
    prompt_matching: float = key(
        0.1,
        "lambda of the loss that pulls keys of l2p and dualprompt to queries",
        minimum=0,
        only=("prompt", "l2p", "dualprompt"),
    )
    prompt_orthogonality: float = key(
        0.1, "weight of the orthogonality penalty of coda", minimum=0, only=("prompt", "coda")
    )
    prompt_blocks: str = key(
        "1-5", "prompted blocks, counted from 1: a range or a list such as 1,3", only=("prompt", *PROMPTED)
    )

    dataset: str = key("digits", "data set; own: each node's, see its data-dir", choices=(*REGISTERED, OWN))
    data_dir: str = key(
        "",
        "folder (or .npz file) of the data set; a node's own setting goes before it",
        only=("dataset", *FROM_PATH, OWN),
    )
    unreadable_share: float = key(
        0.05, "of a node's image files that may be unreadable", minimum=0, maximum=1, only=("dataset", OWN)
    )
    similar_classes: bool = key(
        False, "accept class names of different nodes that look like misspellings", only=("dataset", OWN)
    )
    augmentation: str = key(
        AUTO, "of training images; auto is the data set's own choice", choices=(AUTO, "none", "crop", "crop-flip")
    )
    class_order: str = key(
        "shuffled",
        "order in which classes arrive; appearing: a task of what nodes newly hold",
        choices=("shuffled", "given", APPEARING),
    )
    num_tasks: int = key(5, "T: tasks that the classes are split into, or at most come", minimum=1)
    class_wait: float = key(
        0.0, "seconds to wait for new classes before the run ends", minimum=0, only=("class-order", APPEARING)
    )
    validation_share: float = key(
        0.0,
        "share of training images kept back and evaluated instead of the test set",
        minimum=0,
        maximum=0.5,
        only=("dataset", *REGISTERED),
    )

    backbone: str = key("vit_glyphs", "bundled vit_glyphs, any plain ViT of timm, or resnet18_cifar")
    backbone_weights: str = key(AUTO, "auto: bundled, or timm's pre-trained; a file; or random")
    image_size: int = key(0, "side of the input in pixels; 0 = the backbone's own", minimum=0)

    rounds_per_task: int = key(AUTO, "R: rounds of each task", minimum=1, auto=5)
    local_epochs: int = key(5, "E: epochs of a local training; ncm and afcl read no key of it", minimum=1)
    batch_size: int = key(AUTO, "images per local step", minimum=1, auto=64)
    optimizer: str = key(AUTO, "local optimiser", choices=("adam", "sgd"), auto="adam")
    learning_rate: float = key(AUTO, "local step size, cosine within each local training", above=0, auto=1e-3)
    backbone_learning_rate: float = key(AUTO, "local step size of a trained backbone", above=0, auto=1e-4)
    gradient_clip: float = key(1.0, "largest norm of a local gradient; 0 = no limit", minimum=0)

    num_clients: int = key(0, "clients; 0 = as many nodes as are connected", minimum=0)
    clients_per_round: int = key(0, "clients drawn each round; 0 = all", minimum=0)
    partition: str = key(
        "dirichlet", "how training images are divided", choices=PARTITIONS, only=("dataset", *REGISTERED)
    )
    dirichlet_beta: float = key(0.5, "concentration; small is uneven", above=0, only=("partition", "dirichlet"))
    dirichlet_min_size: int = key(
        0, "images that each client has at least in each task", minimum=0, only=("partition", "dirichlet")
    )
    classes_per_client: int = key(2, "classes per task and client", minimum=1, only=("partition", "quantity"))
    class_share: float = key(
        0.6, "share of a task's classes that a client holds", above=0, maximum=1, only=("partition", "class-share")
    )
    split_ratio: float = key(
        0.1, "share of a class's images that a round draws", above=0, maximum=1, only=("partition", "split-ratio")
    )
    category_ratio: float = key(
        0.6, "share of a task's classes that a round draws", above=0, maximum=1, only=("partition", "split-ratio")
    )
    imbalance_ratio: float = key(
        1.0, "smallest over largest class of a client", above=0, maximum=1, only=("partition", "split-ratio")
    )
    consensus_rate: float = key(
        0.5, "share of a client's classes that all clients have", minimum=0, maximum=1, only=("partition", "consensus")
    )

    seed: int = key(0, "seed of everything random", minimum=0, maximum=2**63 - 1)
    device: str = key(AUTO, "auto, cpu, cuda or cuda:N")
    threads: int = key(1, "torch threads of each client and of the server", minimum=1, maximum=1024)
    precision: str = key("fp32", "arithmetic of the backbone", choices=("fp32", "bf16"))
    evaluate: str = key("server", "who evaluates: the server, or each client its part", choices=("server", "clients"))
    federated_bias: bool = key(False, "measure the local models of each task too: an evaluation per client and task")
    quorum: int = key(1, "clients that must answer in every round", minimum=1)
    start_timeout: float = key(15.0, "seconds to wait for each further one of num-clients nodes to connect", above=0)
    round_timeout: float = key(3600.0, "seconds to wait for the answers of a round", above=0)

    min_class_count: int = key(
        0, "a client sends no statistics of classes of which it has fewer images", minimum=0, maximum=10**9
    )
    privacy_clip: float = key(0.0, "C: largest L2 norm of what a client's training changes; 0 = no clipping", minimum=0)
    privacy_feature_clip: float = key(
        0.0, "B: largest L2 norm of an image's features in class statistics; 0 = no clipping", minimum=0
    )
    privacy_noise: float = key(
        0.0, "z: Gaussian noise in all that is sent, of deviation z C in arrays; 0 = none", minimum=0
    )
    privacy_delta: float = key(1e-5, "delta of the (epsilon, delta) that results.json names", above=0, maximum=0.5)
    privacy_seeded: bool = key(False, "noise from the run's seed, which the server knows: for tests and simulations")

    max_update_norm: float = key(
        0.0, "L2 norm, over all arrays, above which what a client changed is refused; 0 = off", minimum=0
    )
    max_update_ratio: float = key(
        0.0, "likewise, in medians of a round's norms, if three or more updates came; 0 = off", minimum=0
    )

    output_dir: str = key("runs", "folder of all runs")
    run_name: str = key("", "folder of this run; empty = method, data set, seed and time")

    tensorboard: bool = key(False, "write scalars for TensorBoard into the run's folder too")

    resume: str = key("", "folder of an unfinished run to go on with, by its own settings")

    options: Options = field(default_factory=Options)

    @property
    def row(self) -> Method:
        """The method's row in the table."""
        return METHODS[self.method]

    @property
    def trains_backbone(self) -> bool:
        """Whether clients train the backbone too, which then travels."""
        return self.row.backbone == "trained" or self.backbone in FROM_SCRATCH

    @property
    def own_data(self) -> bool:
        """Whether each node has images of its own, and the server none."""
        return self.dataset == OWN

    @property
    def asynchronous(self) -> bool:
        """Whether each client has a class sequence of its own."""
        return self.partition in ASYNCHRONOUS

    @property
    def partition_parameters(self) -> dict[str, Any]:
        """What the chosen partition takes beside labels, clients, tasks and seed."""
        names = {f.name: f.metadata["rule"].only for f in fields(self) if "rule" in f.metadata}
        return {n: getattr(self, n) for n, only in names.items() if only == ("partition", self.partition)}

    def unread(self) -> list[str]:
        """Keys of local training that are not at their defaults, where the method trains nothing locally.

        They are accepted, as one set of keys may serve many methods.
        """
        usual = parse({"method": self.method, "prompt": self.prompt})
        changed = [n for n in LOCAL if getattr(self, n) != getattr(usual, n)]
        return [] if self.row.client else [n.replace("_", "-") for n in changed]

    def flat(self) -> dict[str, Scalar]:
        """The resolved keys as users write them, the method's own included; parsing them gives this object again."""
        core = {name: getattr(self, name.replace("-", "_")) for name in keys_of(Config)}
        own = {f"{self.row.name}-{k.replace('_', '-')}": v for k, v in asdict(self.options).items()}
        known, values = known_keys(), core | own
        return {name: known[name].default if _reader(known[name], values, known) else v for name, v in values.items()}

    def with_clients(self, number: int) -> "Config":
        """The same run with the number of clients known.

        Raises:
            ConfigError: too few for clients-per-round or the quorum.
        """
        known = replace(self, num_clients=number)
        _check_combination(known)
        return known

    def for_clients(self) -> dict[str, Scalar]:
        """What travels to clients: all but what is about the server's own files."""
        own = {"output-dir", "run-name", "tensorboard", "resume"}
        return {name: value for name, value in self.flat().items() if name not in own}

    def blocks(self) -> list[int]:
        """Prompted blocks, counted from 0, ascending.

        Raises:
            ConfigError: ``prompt-blocks`` is neither a range nor a list of numbers from 1.
        """
        found: list[int] = []
        if re.fullmatch(r"\d{1,3}(-\d{1,3})?(,\d{1,3}(-\d{1,3})?)*", self.prompt_blocks):
            spans = [[int(n) for n in part.split("-")] for part in self.prompt_blocks.split(",")]
            found = sorted({b - 1 for span in spans for b in range(span[0], span[-1] + 1)})
        if not found or found[0] < 0:
            raise ConfigError(f"prompt-blocks = {self.prompt_blocks!r} is not possible: write 1-5, or 1,3 and so on.")
        return found


def known_keys() -> dict[str, Key]:
    """Every run key of the core and of all methods, by name."""
    found = dict(keys_of(Config))
    for method in METHODS.values():
        found |= method.own_keys()
    return found


def defaults() -> dict[str, Scalar]:
    """Every run key with its default, as in pyproject.toml."""
    return {name: k.default for name, k in known_keys().items()}


def at_node(values: Mapping[str, Scalar], settings: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """A run's values where a node computes: its device and its paths go before the run's, if the run reads them."""
    known, run = known_keys(), {**defaults(), **values}
    own = {n: v for n, v in settings.items() if n in OF_THE_NODE and not _reader(known[n], run, known)}
    return {**values, **own}


def parse_text(pairs: Mapping[str, str]) -> dict[str, Scalar]:
    """Typed values from unquoted command-line text.

    Raises:
        ConfigError: an unknown key or a text that the key's type cannot be.
    """
    adopt(pairs.get("method", ""))
    known = known_keys()
    _refuse_unknown(pairs, known)
    return {name: known[name].from_text(text) for name, text in pairs.items()}


def typed(values: Mapping[str, Any]) -> dict[str, Scalar]:
    """The same run keys, each checked by itself and in its key's type.

    Raises:
        ConfigError: an unknown key or a value that the key cannot have.
    """
    adopt(str(values.get("method", "")))
    known = known_keys()
    _refuse_unknown(values, known)
    return {name: known[name].check(value) for name, value in values.items()}


def parse(values: Mapping[str, Scalar]) -> Config:
    """Check every value and every combination, and fill keys left at "auto" from the method.

    Args:
        values: run keys in kebab-case; missing ones take their defaults.

    Raises:
        ConfigError: names the key, the value given and what is allowed.
    """
    given = typed(values)
    known = known_keys()
    checked = defaults() | given
    method = METHODS.get(str(checked["method"]))
    if method is None:
        raise ConfigError(_unknown("method", str(checked["method"]), list(METHODS)))
    prompt = str(method.prompts[0] if checked["prompt"] == AUTO else checked["prompt"])
    _refuse_unread(checked | {"prompt": prompt}, method, known)
    core = {n.replace("-", "_"): _resolve(k, checked[n], method, prompt) for n, k in keys_of(Config).items()}
    own = {name.removeprefix(f"{method.name}-").replace("-", "_"): checked[name] for name in method.own_keys()}
    config = Config(**core, options=method.options(**own))  # type: ignore[arg-type]  # each was checked above
    step = "backbone-learning-rate"
    if not config.trains_backbone and config.backbone_learning_rate != _resolve(known[step], AUTO, method, prompt):
        raise ConfigError(f"{step} = {checked[step]!r} would be ignored: this run's backbone is frozen.")
    _check_combination(config)
    return config


def _resolve(k: Key, value: Scalar, method: Method, prompt: str) -> Scalar:
    if value != AUTO or k.rule.auto is None:
        return value
    kind = PROMPTS[prompt]
    of_prompt: dict[str, Scalar] = {
        "prompt": prompt,
        "prompt-length": kind.length,
        "prompt-pool": kind.pool,
        "learning-rate": kind.learning_rate,
    }
    return method.defaults.get(k.name, of_prompt.get(k.name, k.rule.auto))


def _refuse_unknown(values: Mapping[str, Any], known: Mapping[str, Key]) -> None:
    for name in values:
        if name not in known:
            raise ConfigError(_unknown("run key", name, list(known)))


def _unknown(what: str, name: str, names: list[str]) -> str:
    near = difflib.get_close_matches(name.replace("_", "-"), names, n=1, cutoff=0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{what} {name!r} does not exist.{hint} Allowed: {', '.join(sorted(names))}."


def _refuse_unread(checked: Mapping[str, Scalar], method: Method, known: Mapping[str, Key]) -> None:
    """A key that this run would ignore must not look as if it did something."""
    mine = {**keys_of(Config), **method.own_keys()}
    for name, value in checked.items():
        if value != known[name].default:
            owner = next((m.name for m in METHODS.values() if name in m.own_keys()), "")
            reader = _reader(known[name], checked, known) if name in mine else f"method {owner!r}"
            if reader:
                raise ConfigError(f"{name} = {value!r} would be ignored: only {reader} reads it.")


def _reader(key: Key, values: Mapping[str, Scalar], known: Mapping[str, Key]) -> str:
    """The settings under which a key is read, in words, unless they are the run's."""
    if not key.rule.only:
        return ""
    owner = str(key.rule.only[0])
    if values[owner] in key.rule.only[1:]:
        return _reader(known[owner], values, known)
    return f"{key.rule.only[0]} = {' or '.join(map(repr, key.rule.only[1:]))}"


def _check_combination(config: Config) -> None:
    _check_method(config)
    _check_backbone(config)
    _check_prompt(config)
    _check_sizes(config)
    _check_own_data(config)
    _check_bounds(config)
    _check_privacy(config)
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
    if config.prompt not in config.row.prompts:
        raise ConfigError(
            f"prompt = {config.prompt!r} does not go with method {config.method!r}, "
            f"which takes {', '.join(config.row.prompts)}."
        )
    if config.asynchronous and not config.row.asynchronous:
        able = ", ".join(row.name for row in METHODS.values() if row.asynchronous)
        raise ConfigError(
            f"partition = {config.partition!r} does not go with method = {config.method!r}: "
            f"of clients that have class sequences of their own only {able} can learn."
        )
    if config.federated_bias and not config.row.client:
        raise ConfigError(f"federated-bias = True is not possible: method {config.method!r} trains no local model.")


def _check_backbone(config: Config) -> None:
    if config.backbone not in FROM_SCRATCH:
        return
    if config.row.backbone == "frozen" or config.prompt != "none":
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
    if config.row.pooled or config.federated_bias:
        what = f"method = {config.method!r}" if config.row.pooled else "federated-bias = True"
        raise ConfigError(f"{what} is not possible with dataset {OWN!r}: the server has none of the nodes' images.")


def _check_bounds(config: Config) -> None:
    if 0 < config.max_update_ratio < 1:
        raise ConfigError(
            f"max-update-ratio = {config.max_update_ratio:g} is not possible: below 1 it would refuse most honest "
            "clients; 0 means no bound."
        )
    for name, value in {"norm": config.max_update_norm, "ratio": config.max_update_ratio}.items():
        if value and not config.row.client:
            raise ConfigError(f"max-update-{name} = {value:g} would be ignored: {config.method!r} trains no arrays.")


def _check_privacy(config: Config) -> None:
    row, wanted = config.row, {n: getattr(config, n.replace("-", "_")) for n in _PRIVACY}
    if not any(wanted.values()) and config.privacy_delta == Config.privacy_delta:
        return
    kind = load_half(row.statistics)()  # here and not above: it loads torch
    unread = {
        "min-class-count": "" if kind.carries else f"method {config.method!r} sends no class statistics",
        "privacy-clip": "" if row.client else f"method {config.method!r} trains no arrays",
        "privacy-feature-clip": "" if kind.needs_features else f"method {config.method!r} sends no feature statistics",
        "privacy-seeded": "" if config.privacy_noise else "privacy-noise is 0",
    }
    for name, reason in unread.items():
        if wanted[name] and reason:
            raise ConfigError(f"{name} = {wanted[name]!r} would be ignored: {reason}.")
    if not config.privacy_noise and config.privacy_delta != Config.privacy_delta:
        raise ConfigError(f"privacy-delta = {config.privacy_delta:g} would be ignored: privacy-noise is 0.")
    if config.privacy_noise:
        _check_noise(config, kind)


_PRIVACY = ("min-class-count", "privacy-clip", "privacy-feature-clip", "privacy-noise", "privacy-seeded")


def _check_noise(config: Config, kind: Any) -> None:
    """What noise needs, or cannot protect; ``kind`` are the method's statistics."""
    from task.partition import REDRAWN  # loads torch

    z = f"privacy-noise = {config.privacy_noise:g}"
    if config.row.client and not config.privacy_clip:
        raise ConfigError(f"{z} needs privacy-clip above 0: without it no amount of noise protects anything.")
    if kind.needs_features and not config.privacy_feature_clip:
        raise ConfigError(f"{z} needs privacy-feature-clip above 0, as {config.method!r} sends feature statistics.")
    if what := kind.unprotected(config.options):
        raise ConfigError(f"{z} is not possible: method {config.method!r} sends {what}, which cannot be noised here.")
    if config.backbone in FROM_SCRATCH:
        raise ConfigError(f"{z} is not possible with {config.backbone!r}: noise makes running variances negative.")
    if config.row.pooled or config.partition in REDRAWN:
        what = f"method {config.method!r}" if config.row.pooled else f"partition {config.partition!r}"
        raise ConfigError(f"{z} is not possible with {what}: there an image is many clients', and its epsilon unknown.")


def _check_sizes(config: Config) -> None:
    drawn = config.clients_per_round or config.num_clients
    if config.num_clients and drawn > config.num_clients:
        raise ConfigError(f"clients-per-round = {drawn} is more than num-clients = {config.num_clients}.")
    if drawn and config.quorum > drawn:
        raise ConfigError(f"quorum = {config.quorum} can never be met: only {drawn} clients take part in a round.")
