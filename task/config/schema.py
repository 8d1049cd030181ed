"""Every run key with its type, default, limits and help, and the resolved, frozen Config."""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from task.keys import AUTO, ConfigError, Key, key, keys_of
from task.message import Scalar
from task.method_options import Options
from task.methods import METHODS, Method
from task.prompt_kinds import PROMPTS

OWN = "own"  # the data set of nodes that each have images of their own
EMBEDDED = ("digits", "synthetic")
BUNDLED_BACKBONE = "vit_glyphs"  # comes with the project
NO_FILE = (AUTO, "random")  # values of backbone-weights that name no file
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
IMAGE_FILES = tuple(name for name in FROM_PATH if name not in ("npz", "cifar10", "cifar100"))  # the others are arrays
REGISTERED = EMBEDDED + FROM_PATH
APPEARING = "appearing"
PROMPTED = tuple(name for name in PROMPTS if name != "none")
PREFIXED = tuple(name for name in PROMPTED if name not in ("l2p", "fused", "lora"))  # the others are no prefixes
REDRAWN = ("split-ratio",)  # partitions that are drawn anew in every round
ASYNCHRONOUS = ("consensus",)  # partitions whose clients have class sequences of their own
PARTITIONS = ("dirichlet", "iid", "quantity", "class-share", "split-ratio", *ASYNCHRONOUS)

# Groups of what a key may affect, see task.keys.Affects.
OF_THE_NODE = ("files", "device")  # a node's own settings win over the run's
OF_THE_SERVER = ("folder", "output")  # clients are not told
MAY_CHANGE = ("waiting", *OF_THE_SERVER)  # when a run is resumed
# these keys change measurements by rounding only, and on a GPU by the random numbers that a server draws there
SAME_RESULT = ("device", "speed", *MAY_CHANGE)

# Backbones without pre-trained weights, and the smallest image side with which batch normalisation can train on a batch
# of one image: the last feature map, whose side is an eighth of it rounded up, must have more than one position.
FROM_SCRATCH = {"resnet18_cifar": 9}


@dataclass(frozen=True)
class Config:
    """Every run key, resolved. Users write the names with hyphens; ``options`` holds the method's own keys."""

    method: str = key("hgp", "method to run, or module:object of one from outside")
    prompt: str = key(AUTO, "prompt of the backbone", choices=tuple(PROMPTS), auto="")
    prompt_length: int = key(
        AUTO,
        "L_p: prefix vectors of a block for keys, and as many for values; tokens of l2p and fused; rank of lora",
        minimum=1,
        maximum=1_000,
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
        "folder (or .npz file) of the data set; a node's own setting overrides it",
        only=("dataset", *FROM_PATH, OWN),
        affects="files",
    )
    unreadable_share: float = key(
        0.05, "share of a node's image files that may be unreadable", minimum=0, maximum=1, only=("dataset", OWN)
    )
    max_image_pixels: int = key(
        50_000_000,
        "largest image that is decoded; a larger JPEG is decoded at a smaller scale",
        minimum=1,
        maximum=170_000_000,  # Pillow refuses 178,956,971 and more
        only=("dataset", *IMAGE_FILES, OWN),
        affects="files",
    )
    augmentation: str = key(
        AUTO,
        "random changes of training images; auto is the data set's own choice",
        choices=(AUTO, "none", "crop", "crop-flip"),
        affects="local training",
    )
    class_order: str = key(
        "shuffled",
        "order in which classes arrive; appearing: each task has the classes that nodes newly hold",
        choices=("shuffled", "given", APPEARING),
    )
    num_tasks: int = key(
        5, "T: tasks that the classes are split into; the most that can come with class-order=appearing", minimum=1
    )
    class_wait: float = key(
        0.0,
        "seconds to wait for new classes before the run ends",
        minimum=0,
        only=("class-order", APPEARING),
        affects="waiting",
    )
    validation_share: float = key(
        0.0,
        "share of training images kept back and evaluated instead of the test set",
        minimum=0,
        maximum=0.5,
        only=("dataset", *REGISTERED),
    )

    backbone: str = key(BUNDLED_BACKBONE, "bundled vit_glyphs, any plain ViT of timm, or resnet18_cifar")
    backbone_weights: str = key(AUTO, "auto: bundled, or timm's pre-trained; a file; or random", affects="files")
    image_size: int = key(0, "side of the input in pixels; 0 = the backbone's own", minimum=0, maximum=4096)

    head_init: str = key(
        "normal",
        "initial values of the head's new rows: normal with deviation 0.02, or those of torch's Linear, uniform",
        choices=("normal", "linear"),
        affects="local training",
    )

    rounds_per_task: int = key(AUTO, "R: rounds of each task", minimum=1, auto=5)
    local_epochs: int = key(
        5,
        "E: epochs of a local training; the keys of local training are ignored where nothing is trained",
        minimum=1,
        affects="local training",
    )
    batch_size: int = key(AUTO, "images per local step", minimum=1, auto=64, affects="local training")
    optimizer: str = key(
        AUTO,
        "local optimiser; sgd has a momentum of 0.9",
        choices=("adam", "sgd"),
        auto="adam",
        affects="local training",
    )
    learning_rate: float = key(
        AUTO, "local step size, the first one of its schedule", above=0, auto=1e-3, affects="local training"
    )
    learning_rate_schedule: str = key(
        AUTO,
        "step sizes within each local training: from learning-rate to 0, or constant",
        choices=("cosine", "constant"),
        auto="cosine",
        affects="local training",
    )
    backbone_learning_rate: float = key(AUTO, "local step size of a trained backbone", above=0, auto=1e-4)
    statistics_rounds: str = key(
        "every", "rounds of a task in which clients send class statistics", choices=("every", "last")
    )
    gradient_clip: float = key(
        1.0, "largest norm of a local gradient; 0 = no limit", minimum=0, affects="local training"
    )

    num_clients: int = key(
        0,
        "clients; 0 = all connected nodes (fcil run: 10, or one a folder with dataset=own)",
        minimum=0,
        maximum=10_000,
    )
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
        0.1,
        "share of a class's images that each client draws in a round",
        above=0,
        maximum=1,
        only=("partition", "split-ratio"),
    )
    category_ratio: float = key(
        0.6,
        "share of a task's classes that each client draws in a round",
        above=0,
        maximum=1,
        only=("partition", "split-ratio"),
    )
    imbalance_ratio: float = key(
        1.0,
        "images of a client's smallest class over those of its largest",
        above=0,
        maximum=1,
        only=("partition", "split-ratio"),
    )
    consensus_rate: float = key(
        0.5, "share of a client's classes that all clients have", minimum=0, maximum=1, only=("partition", "consensus")
    )

    seed: int = key(0, "seed of everything random", minimum=0, maximum=2**63 - 1, affects="seed")
    device: str = key(AUTO, "auto, cpu, cuda or cuda:N", affects="device")
    threads: int = key(1, "torch threads of each client and of the server", minimum=1, maximum=1024, affects="speed")
    precision: str = key("fp32", "arithmetic of the backbone", choices=("fp32", "bf16"))
    feature_cache: str = key(
        AUTO,
        "auto: frozen features of 1,000 images or more are computed once and kept on disk; off: never on disk",
        choices=(AUTO, "off"),
        only=("dataset", *FROM_PATH),
        affects="speed",
    )
    evaluate: str = key(
        "server",
        "who evaluates: the server, or each client on its part of the test images",
        choices=("server", "clients"),
    )
    federated_bias: bool = key(False, "measure the local models of each task too: an evaluation per client and task")
    quorum: int = key(1, "clients that must answer in every round in which any is asked", minimum=1)
    start_timeout: float = key(
        15.0, "seconds to wait for each further node to connect, up to num-clients nodes", above=0, affects="waiting"
    )
    round_timeout: float = key(
        3600.0,
        "seconds to wait for answers in a round: to training, or evaluation; in secure sums to four messages together",
        above=0,
        affects="waiting",
    )

    min_class_count: int = key(
        0,
        "a client sends no statistics of classes of which it has fewer images",
        minimum=0,
        affects="privacy",
    )
    privacy_clip: float = key(
        0.0, "C: largest L2 norm of what a client's training changes; 0 = no clipping", minimum=0, affects="privacy"
    )
    privacy_feature_clip: float = key(
        0.0,
        "B: largest L2 norm of an image's features in class statistics; 0 = no clipping",
        minimum=0,
        affects="privacy",
    )
    privacy_noise: float = key(
        0.0, "z: Gaussian noise in all that is sent, of deviation z C in arrays; 0 = none", minimum=0, affects="privacy"
    )
    privacy_delta: float = key(
        1e-5, "delta of the (epsilon, delta) that results.json names", above=0, maximum=0.5, affects="privacy"
    )
    privacy_seeded: bool = key(
        False, "noise from the run's seed, which the server knows: for tests and simulations", affects="privacy"
    )

    secure_aggregation: str = key(
        "off",
        "pairwise: masks that cancel in a round's sum hide what each client sends, so that the server sees sums alone",
        choices=("off", "pairwise"),
    )
    secure_aggregation_threshold: int = key(
        0,
        "clients of a round that must stay to its end, more than half; 0 = two thirds",
        minimum=0,
        maximum=10**6,
        only=("secure-aggregation", "pairwise"),
    )
    secure_aggregation_range: float = key(
        1e9,
        "largest number in a client's sums, such as images times a weight; a client beyond it is left out",
        minimum=1,
        maximum=1e15,
        only=("secure-aggregation", "pairwise"),
    )

    max_update_norm: float = key(
        0.0, "refuse what a client changed if its L2 norm, over all arrays, is above this; 0 = off", minimum=0
    )
    max_update_ratio: float = key(
        0.0,
        "refuse a change whose norm is above this many times the median of three or more in a round; 0 = off",
        minimum=0,
    )

    output_dir: str = key("runs", "folder of all runs", affects="folder")
    run_name: str = key("", "folder of this run; empty = method, data set, seed and time", affects="folder")

    tensorboard: bool = key(False, "write scalars for TensorBoard into the run's folder too", affects="output")

    on_end: str = key(
        "",
        "command or http(s) URL that is told, as JSON, how the run ended; $NAME: the server's variable",
        affects="output",
    )

    resume: str = key("", "folder of an unfinished run to continue with its own settings", affects="folder")

    options: Options = field(default_factory=Options)

    @property
    def method_row(self) -> Method:
        """The method's row in the table."""
        return METHODS[self.method]

    @property
    def adapts(self) -> bool:
        """Whether clients train in the first rounds of the first task only."""
        return self.method_row.adapts and self.prompt != "none"

    @property
    def adaptation_rounds(self) -> int:
        """The first rounds of the run, in which a method that adapts trains; 1 until their number is chosen."""
        return max(self.options.adaptation_rounds, 1) if self.adapts else 0

    @property
    def leaves_adaptation_open(self) -> bool:
        """Whether the server has yet to choose the number of rounds of adaptation, by the clients' images."""
        return self.adapts and not self.options.adaptation_rounds

    def trains_in(self, server_round: int) -> bool:
        """Whether clients train in a round of the run, counted from 1."""
        row = self.method_row
        return server_round <= self.adaptation_rounds if row.adapts else bool(row.objective)

    def unmask_threshold(self, present: int) -> int:
        """How many of a round's clients must answer to the end of a secure sum.

        By default two thirds of the planned clients: a sum of very few would show what each of them sent. Always more
        than half of those ``present``, which may be more than were planned.
        """
        planned = self.clients_per_round or self.num_clients
        return max(self.secure_aggregation_threshold or math.ceil(2 * planned / 3), present // 2 + 1)

    @property
    def trains_locally(self) -> bool:
        """Whether clients ever train."""
        return self.trains_in(1)

    @property
    def trains_backbone(self) -> bool:
        """Whether clients train the backbone too, which then travels."""
        return self.method_row.backbone == "trained" or self.backbone in FROM_SCRATCH

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
        """Parameters of the chosen partition, with underscores in their names."""
        names = [n for n, k in keys_of(Config).items() if k.rule.only == ("partition", self.partition)]
        return {name.replace("-", "_"): getattr(self, name.replace("-", "_")) for name in names}

    def flat(self) -> dict[str, Scalar]:
        """The resolved keys as users write them, with the method's own; parsing them gives an equal object."""
        values = {name: getattr(self, name.replace("-", "_")) for name in keys_of(Config)}
        values |= {f"{self.method_row.name}-{k.replace('_', '-')}": v for k, v in asdict(self.options).items()}
        keys = known_keys()
        unread = {name for name in values if missing_setting(keys[name], values, keys)}
        return {name: keys[name].default if name in unread else value for name, value in values.items()}

    def for_clients(self) -> dict[str, Scalar]:
        """The keys that are sent to clients: all but those about the server's own files."""
        hidden = keys_affecting(*OF_THE_SERVER)
        return {name: value for name, value in self.flat().items() if name not in hidden}

    def blocks(self) -> list[int]:
        """Prompted blocks, counted from 0, ascending.

        Raises:
            ConfigError: ``prompt-blocks`` is neither a range nor a list of numbers from 1.
        """
        blocks: list[int] = []
        if re.fullmatch(r"\d{1,3}(-\d{1,3})?(,\d{1,3}(-\d{1,3})?)*", self.prompt_blocks):
            spans = [[int(n) for n in part.split("-")] for part in self.prompt_blocks.split(",")]
            blocks = sorted({b - 1 for span in spans for b in range(span[0], span[-1] + 1)})
        if not blocks or blocks[0] < 0:
            raise ConfigError(f"prompt-blocks = {self.prompt_blocks!r} is not possible: write 1-5, or 1,3 and so on.")
        return blocks


def known_keys() -> dict[str, Key]:
    """Every run key of the core and of all methods, by name."""
    keys = dict(keys_of(Config))
    for method in METHODS.values():
        keys |= method.own_keys()
    return keys


def keys_affecting(*categories: str) -> list[str]:
    """Names of the run keys that affect one of ``categories``, see :data:`task.keys.Affects`."""
    return [name for name, k in known_keys().items() if k.rule.affects in categories]


def changed_keys(values: Mapping[str, Scalar], usual: Mapping[str, Scalar], *categories: str) -> dict[str, Scalar]:
    """The run's ``values`` that affect one of ``categories`` and differ from ``usual``; no key of another method."""
    return {n: values[n] for n in keys_affecting(*categories) if n in values and values[n] != usual[n]}


def defaults() -> dict[str, Scalar]:
    """Every run key with its default, as in pyproject.toml."""
    return {name: k.default for name, k in known_keys().items()}


def missing_setting(key: Key, values: Mapping[str, Scalar], keys: Mapping[str, Key]) -> str:
    """The setting that a run lacks so that ``key`` is read, in words; empty if the run reads it."""
    if not key.rule.only:
        return ""
    owner = str(key.rule.only[0])
    if values[owner] in key.rule.only[1:]:
        return missing_setting(keys[owner], values, keys)
    return f"{key.rule.only[0]} = {' or '.join(map(repr, key.rule.only[1:]))}"
