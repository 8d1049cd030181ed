"""The table of methods: each is a composition of a prompt, a client half, statistics and a server half.

The halves are named as ``module:class`` and loaded where they are needed, so that this module, which both sides read,
depends on neither. A method from outside the project is a row in any module that can be imported: :func:`adopt`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, Literal

from task.keys import ConfigError, Key, key, keys_of
from task.packet import Scalar

Packing = Literal["diagonal", "full", "low-rank"]


@dataclass(frozen=True)
class Options:
    """A method's own run keys (none here); subclasses add fields, users see them behind the method's name."""

    @property
    def packing(self) -> Packing:
        """How a class covariance travels."""
        return "diagonal"

    @property
    def packing_rank(self) -> int:
        """Rank of the low-rank packing."""
        return 1

    @property
    def projection(self) -> int:
        """Random features under the head; 0 = it stands on the backbone's own."""
        return 0


@dataclass(frozen=True)
class FedAvgOptions(Options):
    """Keys of FedAvg (McMahan et al. 2017), which weighs by images; PIP's Fed-L2P and Fed-DualPrompt do not."""

    mean: str = key("images", "what a client weighs by: its images, or nothing", choices=("images", "plain"))


@dataclass(frozen=True)
class HGPOptions(Options):
    """Keys of HGP (Salami et al. 2024, sections 3.3 and 3.4, appendix B.1)."""

    covariance: str = key("diagonal", "covariance that clients send", choices=("diagonal", "full", "low-rank"))
    rank: int = key(8, "rank of the low-rank covariance", minimum=1, maximum=10_000, only=("covariance", "low-rank"))
    rebalance: str = key("all", "classes whose head rows are retrained", choices=("all", "current", "old", "off"))
    scale: float = key(3.0, "s of eq. 6: covariances are multiplied by it", above=0)
    samples_per_class: int = key(256, "synthetic features drawn per class, on average", minimum=1, maximum=100_000)
    class_weights: str = key("uniform", "omega of eq. 6: share of each class", choices=("uniform", "count"))
    draw: str = key("epoch", "a new synthetic set each epoch, or once per round", choices=("epoch", "once"))
    epochs: int = key(5, "epochs of rebalancing per round", minimum=1)
    batch_size: int = key(256, "synthetic features per step", minimum=1)
    learning_rate: float = key(0.01, "SGD step size of rebalancing", above=0)
    momentum: float = key(0.9, "SGD momentum of rebalancing", minimum=0, maximum=0.999)
    logit_temperature: float = key(0.0, "divide L2-normalised logits by this; 0 = plain logits", minimum=0)

    @property
    def packing(self) -> Packing:
        """As the run key hgp-covariance says."""
        return self.covariance  # type: ignore[return-value]  # its choices are checked when the key is read

    @property
    def packing_rank(self) -> int:
        """As the run key hgp-rank says."""
        return self.rank


@dataclass(frozen=True)
class PIPOptions(Options):
    """Keys of PIP (Ma'sum et al. 2024)."""

    copies: int = key(5, "largest m of eq. 11: noisy copies of an injected prototype; 0 = prototype alone", minimum=0)
    logits: str = key("current", "classes that the loss chooses among", choices=("current", "seen"))


@dataclass(frozen=True)
class HePCoOptions(Options):
    """Keys of HePCo (Halbe et al. 2024, section 4)."""

    lambda_kl: float = key(1.0, "weight of the divergence that the generator seeks", minimum=0)
    lambda_mse: float = key(
        0.1, "weight of the difference of prompts that the generator seeks", minimum=0, only=("query-gradient", True)
    )
    query_gradient: bool = key(False, "let lambda-mse reach the generator (eq. 4); the public code detaches the query")
    generator_steps: int = key(100, "steps of each generator per round", minimum=1)
    generator_learning_rate: float = key(1e-4, "Adam step size of the generators", above=0)
    embedding: int = key(64, "generator: length of the label embedding", minimum=1, maximum=10_000)
    noise: int = key(64, "generator: length of the noise", minimum=1, maximum=10_000)
    hidden_first: int = key(256, "generator: width of the first hidden layer", minimum=1, maximum=10_000)
    hidden_second: int = key(1024, "generator: width of the second hidden layer", minimum=1, maximum=10_000)
    batch_size: int = key(64, "latent samples per step, of the current task's classes", minimum=2, maximum=10_000)
    replay_ratio: float = key(
        0.5, "samples of earlier tasks for each current one in distillation; 0 = none", minimum=0, maximum=10
    )
    prompt_steps: int = key(200, "steps that distil keys and prompts", minimum=1)
    head_steps: int = key(200, "steps that distil the head", minimum=1)
    distillation_learning_rate: float = key(1e-4, "Adam step size of distillation", above=0)

    @property
    def replay_size(self) -> int:
        """Samples of earlier tasks in a composite batch; a small ratio is one, and not none."""
        return math.ceil(self.batch_size * self.replay_ratio)


@dataclass(frozen=True)
class FedCPromptOptions(Options):
    """Keys of Fed-CPrompt (Bagwe et al. 2023)."""

    weight: float = key(1.0, "weight of the contrastive loss", minimum=0)
    margin: float = key(1.0, "margin of the contrastive loss", minimum=0)
    push: float = key(0.5, "how much the nearest older task's prompt pushes", minimum=0)


@dataclass(frozen=True)
class FPPLOptions(Options):
    """Keys of FPPL (He et al. 2024)."""

    tau: float = key(0.2, "temperature of the unified representation loss, eq. 6", minimum=1e-3)
    debias_epochs: int = key(5, "epochs of debiasing the head per round", minimum=1)
    debias_batch_size: int = key(128, "local prototypes per step of debiasing", minimum=1)
    debias_learning_rate: float = key(1e-3, "Adam step size of debiasing", above=0)


@dataclass(frozen=True)
class FedProKOptions(Options):
    """Keys of FedProK (Gao et al. 2024); the default of beta is ours."""

    beta: float = key(0.5, "share of the new mean in the prototype of a known class, eq. 9", minimum=0, maximum=1)


@dataclass(frozen=True)
class FedProxOptions(Options):
    """Keys of FedProx (Li et al. 2020), whose mu is tuned in 0.001 .. 1; the default is one of those values."""

    mu: float = key(0.01, "weight of the proximal term mu / 2 |theta - theta_global|^2", minimum=0)


@dataclass(frozen=True)
class CCVROptions(Options):
    """Keys of CCVR (Luo et al. 2021); where it gives no value for this setting, HGP's."""

    covariance: str = key("full", "covariance that clients send", choices=("full", "diagonal"))
    samples_per_class: int = key(256, "virtual features drawn per class, on average", minimum=1, maximum=100_000)
    epochs: int = key(5, "epochs of calibration after each task", minimum=1)
    learning_rate: float = key(0.01, "SGD step size of calibration", above=0)
    logit_temperature: float = key(0.0, "divide L2-normalised logits by this; 0 = plain logits", minimum=0)

    @property
    def packing(self) -> Packing:
        """As the run key ccvr-covariance says."""
        return self.covariance  # type: ignore[return-value]  # its choices are checked when the key is read


@dataclass(frozen=True)
class FedSLCAOptions(CCVROptions):
    """Keys of SLCA's classifier alignment (Zhang et al. 2023); its slow learner is backbone-learning-rate."""

    logit_temperature: float = key(0.1, "divide L2-normalised logits by this; 0 = plain logits", minimum=0)


@dataclass(frozen=True)
class FedEWCOptions(Options):
    """Keys of EWC (Kirkpatrick et al. 2017), federated."""

    strength: float = key(1000.0, "lambda: weight of lambda / 2 sum_i F_i (theta_i - theta*_i)^2", minimum=0)


@dataclass(frozen=True)
class AFCLOptions(Options):
    """Keys of analytic federated continual learning (Tang et al. 2025), with RanPAC's random features."""

    ridge: float = key(1.0, "lambda of the ridge regression", above=0)
    random_features: int = key(
        0,
        "M random ReLU features under the regression; 0 = none; 8 M^2 bytes a client, 3.2 GB at 20,000",
        minimum=0,
        maximum=20_000,
    )

    @property
    def projection(self) -> int:
        """As the run key afcl-random-features says."""
        return self.random_features


@dataclass(frozen=True)
class Method:
    """One row of the table.

    ``prompts`` lists what the run key ``prompt`` may be, the default first. ``client`` is empty for a method that
    trains nothing. ``statistics`` is what clients send beside arrays. ``defaults`` fills keys left at "auto". With
    ``pooled`` one client of each round, the first of those drawn, has all images of all tasks so far, the others none.
    ``backbone`` is frozen, trained, or either: trained where it is one of FROM_SCRATCH.
    ``asynchronous`` says whether clients may have class sequences of their own.
    """

    name: str
    prompts: tuple[str, ...]
    client: str
    statistics: str
    server: str
    options: type[Options] = Options
    defaults: dict[str, Scalar] = field(default_factory=dict)
    pooled: bool = False
    backbone: Literal["frozen", "trained", "either"] = "frozen"
    asynchronous: bool = False

    def own_keys(self) -> Mapping[str, Key]:
        """The method's own run keys."""
        return keys_of(self.options, prefix=f"{self.name}-")  # type: ignore[arg-type]  # a class has a hash


@dataclass(frozen=True)
class PromptKind:
    """Where a prompt's class is, and its L_p, pool size and step size when the run keys are left at "auto".

    ``fewest_blocks`` must be prompted; with ``shared_out`` each task takes its part of the pool.
    """

    path: str
    length: int = 1
    pool: int = 1
    learning_rate: float = 1e-3
    fewest_blocks: int = 1
    shared_out: bool = False


PROMPTS: dict[str, PromptKind] = {
    "none": PromptKind("task.prompts:Prompt"),
    "shared": PromptKind("task.prompts:SharedPrompt", length=8),
    "decomposed": PromptKind("task.prompt_decomposed:DecomposedPrompt", length=10, pool=100),
    "coda": PromptKind("task.prompt_coda:CodaPrompt", length=4, pool=100, shared_out=True),
    "l2p": PromptKind("task.prompt_l2p:L2P", length=5, pool=10, learning_rate=0.02),
    "dualprompt": PromptKind("task.prompt_dualprompt:DualPrompt", length=5, learning_rate=0.02, fewest_blocks=3),
    "fused": PromptKind("task.prompt_fused:FusedPrompt", length=20),
}

# Backbones without pre-trained weights, and the smallest side at which batch normalisation can do with a batch of one
# image: the last layer's map, an eighth of the side rounded up, must have more than one place.
FROM_SCRATCH = {"resnet18_cifar": 9}

_ANY = ("shared", *(name for name in PROMPTS if name != "shared"))
_CROSS_ENTROPY = "client_app.objective:Objective"
_NOTHING = "task.statistics:Nothing"
_MEAN = "strategies.base:Strategy"
_ONE_ROUND: dict[str, Scalar] = {"rounds-per-task": 1}

METHODS: dict[str, Method] = {
    row.name: row
    for row in (
        #       name         prompts             client half     statistics   server half                    own keys
        Method("hgp", ("shared",), _CROSS_ENTROPY, "task.statistics:Gaussians", "strategies.hgp:HGP", HGPOptions),
        Method(
            "fedavg",
            _ANY,
            _CROSS_ENTROPY,
            _NOTHING,
            "strategies.fedavg:FedAvg",
            FedAvgOptions,
            backbone="either",
            asynchronous=True,
        ),
        Method("joint", _ANY, _CROSS_ENTROPY, _NOTHING, _MEAN, pooled=True, backbone="either", asynchronous=True),
        Method(
            "head-only",
            ("none",),
            _CROSS_ENTROPY,
            _NOTHING,
            _MEAN,
            defaults={"learning-rate": 0.01},
            asynchronous=True,
        ),
        Method(
            "ncm",
            ("none",),
            "",
            "task.statistics:Means",
            "strategies.ncm:NearestMean",
            defaults=_ONE_ROUND,
            asynchronous=True,
        ),
        Method(
            "afcl",
            ("none",),
            "",
            "task.statistics:Gram",
            "strategies.afcl:AFCL",
            AFCLOptions,
            _ONE_ROUND,
            asynchronous=True,
        ),
        Method(
            "pip",
            ("dualprompt", "l2p"),
            "client_app.pip:InjectedPrototypes",
            "task.statistics:Variances",
            "strategies.pip:PIP",
            PIPOptions,
        ),
        Method(
            "fppl",
            ("fused",),
            "client_app.fppl:FPPLObjective",
            "task.statistics:Means",
            "strategies.fppl:FPPL",
            FPPLOptions,
            defaults={"batch-size": 128},
        ),
        Method(
            "fedprok",
            ("none", "shared"),
            "client_app.fedprok:FedProKObjective",
            "task.statistics:Means",
            "strategies.fedprok:FedProK",
            FedProKOptions,
            defaults={"learning-rate": 0.01},
            backbone="either",
            asynchronous=True,
        ),
        Method(
            "fedprox",
            _ANY,
            "client_app.fedprox:FedProxObjective",
            _NOTHING,
            _MEAN,
            FedProxOptions,
            backbone="either",
            asynchronous=True,
        ),
        Method("ccvr", _ANY, _CROSS_ENTROPY, "task.statistics:Gaussians", "strategies.ccvr:CCVR", CCVROptions),
        Method(
            "hepco",
            ("decomposed",),
            _CROSS_ENTROPY,
            "task.statistics:Counts",
            "strategies.hepco:HePCo",
            HePCoOptions,
        ),
        Method("fedavg-ft", ("none",), _CROSS_ENTROPY, _NOTHING, _MEAN, backbone="trained", asynchronous=True),
        Method(
            "fedewc",
            ("none",),
            "client_app.fedewc:FedEWCObjective",
            "task.statistics:Fisher",
            "strategies.fedewc:FedEWC",
            FedEWCOptions,
            backbone="trained",
        ),
        Method(
            "fedlwf",
            ("none",),
            "client_app.fedlwf:FedLwFObjective",
            _NOTHING,
            "strategies.fedlwf:FedLwF",
            defaults={"learning-rate": 0.01},
            backbone="trained",
        ),
        Method(
            "fedslca",
            ("none",),
            _CROSS_ENTROPY,
            "task.statistics:Gaussians",
            "strategies.ccvr:CCVR",
            FedSLCAOptions,
            defaults={"optimizer": "sgd", "learning-rate": 0.01},
            backbone="trained",
        ),
        Method("fed-cprompt", ("coda",), "client_app.fed_cprompt:FedCPrompt", _NOTHING, _MEAN, FedCPromptOptions),
    )
}


def adopt(name: str) -> None:
    """Add a method from outside the project: ``name`` is ``module:object`` of its row, importable wherever it runs.

    Its own keys start with the row's own name.

    Raises:
        ConfigError: there is no such module, or the object is no row.
    """
    if ":" not in name or name in METHODS:
        return
    try:
        row = resolve_name(name)
    except Exception as error:  # a module of somebody else's may raise anything
        raise ConfigError(
            f"method = {name!r} cannot be imported ({error}): write module:object, both there."
        ) from error
    if not isinstance(row, Method) or row.name in METHODS:
        raise ConfigError(f"method = {name!r} must be a Method of task.methods with a name that is not taken.")
    METHODS[name] = row


def load_half(path: str) -> Any:
    """The class that ``module:class`` names."""
    return resolve_name(path)
