"""A method's row in the table, and its own run keys."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from task.keys import AUTO, Key, key, keys_of
from task.message import Scalar

CLASS_TOKEN, PATCHES = "class-token", "patches"  # what of an earlier block is a feature


@dataclass(frozen=True)
class Options:
    """A method's own run keys, none here. A subclass adds fields: field ``scale`` of hgp is the run key hgp-scale.

    Code that all methods share reads the attributes below; a subclass replaces one by a field of the same name.
    """

    covariance = "diagonal"  # form in which a class covariance travels: diagonal, full or low-rank
    rank = 1  # of the low-rank covariance
    random_features = 0  # number of random features under the head; 0 = the backbone's own features
    depth = 0.0  # after this share of the blocks another feature is taken; 0 = after the last block only
    early_feature = CLASS_TOKEN  # what that is: class-token, or patches, the mean of the patch tokens
    adaptation_rounds = 0  # rounds in which a method that adapts trains its prompt
    frozen_depth = 0.0  # after this share of the blocks, without prompt, another is taken; 1 = the last feature
    features = "every-task"  # tasks in which prompt and trained backbone learn: every-task or first-task
    prototypes = "after"  # statistics are of the model after local training, or of that before

    @property
    def class_rank(self) -> int:
        """Directions of each class's own covariance that the head takes; 0 = the head is linear."""
        return 0

    def client_weight(self, num_examples: int) -> float:
        """Weight, in a round's mean, of a client with ``num_examples`` images."""
        return num_examples

    @property
    def statistics_first(self) -> bool:
        """Whether statistics are of the model as the client received it, and not as it trained it."""
        return self.prototypes == "before"


@dataclass(frozen=True)
class FedAvgOptions(Options):
    """Keys of FedAvg (McMahan et al. 2017), which weighs by images; Fed-L2P and Fed-DualP of PIP's paper do not."""

    mean: str = key(
        "images",
        "weight of a client in the mean: its number of images, or the same for all",
        choices=("images", "plain"),
    )

    def client_weight(self, num_examples: int) -> float:
        """n_m, or 1 for every client."""
        return 1.0 if self.mean == "plain" else num_examples


_RETRAINED = ("all", "current", "old")
_of_rebalancing = partial(key, only=("rebalance", *_RETRAINED))


@dataclass(frozen=True)
class HGPOptions(Options):
    """Keys of HGP (Salami et al. 2024, sections 3.3 and 3.4, appendix B.1)."""

    covariance: str = key("diagonal", "covariance that clients send", choices=("diagonal", "full", "low-rank"))
    rank: int = key(8, "rank of the low-rank covariance", minimum=1, maximum=10_000, only=("covariance", "low-rank"))
    rebalance: str = key("all", "classes whose head rows are retrained", choices=(*_RETRAINED, "off"))
    scale: float = _of_rebalancing(3.0, "s of eq. 6: covariances are multiplied by it", above=0)
    samples_per_class: int = _of_rebalancing(
        256, "synthetic features drawn per class, on average", minimum=1, maximum=100_000
    )
    class_weights: str = _of_rebalancing("uniform", "omega of eq. 6: share of each class", choices=("uniform", "count"))
    draw: str = _of_rebalancing("epoch", "a new synthetic set each epoch, or once per round", choices=("epoch", "once"))
    epochs: int = _of_rebalancing(5, "epochs of rebalancing per round", minimum=1)
    batch_size: int = _of_rebalancing(256, "synthetic features per step", minimum=1)
    learning_rate: float = _of_rebalancing(0.01, "SGD step size of rebalancing", above=0)
    momentum: float = _of_rebalancing(0.9, "SGD momentum of rebalancing", minimum=0, maximum=0.999)
    logit_temperature: float = _of_rebalancing(0.0, "divide L2-normalised logits by this; 0 = plain logits", minimum=0)


@dataclass(frozen=True)
class PIPOptions(Options):
    """Keys of PIP (Ma'sum et al. 2024)."""

    copies: int = key(5, "largest m of eq. 11: noisy copies of an injected prototype; 0 = prototype alone", minimum=0)
    logits: str = key("current", "classes that the loss chooses among", choices=("current", "seen"))


@dataclass(frozen=True)
class HePCoOptions(Options):
    """Keys of HePCo (Halbe et al. 2024, section 4)."""

    lambda_kl: float = key(1.0, "weight of the divergence that the generator seeks", minimum=0)
    divergence: str = key(
        "server-client",
        "divergence that the generator seeks: KL(server || client) of eq. 3, or the public code's KL(client || server)",
        choices=("server-client", "client-server"),
    )
    lambda_mse: float = key(
        0.1, "weight of the difference of prompts that the generator seeks", minimum=0, only=("query-gradient", True)
    )
    query_gradient: bool = key(False, "let lambda-mse reach the generator (eq. 4); the public code detaches the query")
    generator_steps: int = key(100, "steps of each generator per round", minimum=1)
    replay_steps: int = key(
        0, "further steps of the generator of earlier classes for each earlier task; the public code has 50", minimum=0
    )
    replay_rows: str = key(
        "old",
        "classes over which the generator of earlier classes compares old and new server: the old classes, or all seen",
        choices=("old", "seen"),
    )
    rows: str = key(
        "current",
        "classes among which the generator of current classes chooses: the current task's, as clients do, or all seen, "
        "as in the public code",
        choices=("current", "seen"),
    )
    sample_weights: str = key(
        "class",
        "weight of a client: its images of a class over all of that class, or of the round as in the public code",
        choices=("class", "round"),
    )
    generator_learning_rate: float = key(1e-4, "Adam step size of the generators", above=0)
    batch_size: int = key(64, "latent samples per step, of the current task's classes", minimum=2, maximum=10_000)
    replay_ratio: float = key(
        0.5, "samples of earlier tasks for each current one in distillation; 0 = none", minimum=0, maximum=10
    )
    prompt_steps: int = key(200, "steps that distil keys and prompts", minimum=1)
    head_steps: int = key(200, "steps that distil the head", minimum=1)
    distillation_learning_rate: float = key(1e-4, "Adam step size of distillation", above=0)

    @property
    def replay_size(self) -> int:
        """Samples of earlier tasks in a composite batch; at least one unless the ratio is 0."""
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
    fusion: str = key(
        "tasks",
        "what eq. 9 mixes: the prototypes of a class in several tasks, or also in several rounds",
        choices=("tasks", "rounds"),
    )
    features: str = key(
        "first-task", "tasks in which F, prompt or trained backbone, learns", choices=("first-task", "every-task")
    )
    prototypes: str = key(
        "before", "prototypes are of the round's model before or after local training", choices=("before", "after")
    )


@dataclass(frozen=True)
class FedProxOptions(Options):
    """Keys of FedProx (Li et al. 2020), whose mu is tuned in 0.001 .. 1; the default is one of those values."""

    mu: float = key(0.01, "weight of the proximal term mu / 2 |theta - theta_global|^2", minimum=0)


@dataclass(frozen=True)
class CCVROptions(Options):
    """Keys of CCVR (Luo et al. 2021); where the paper gives no value for this setting, the default is HGP's."""

    covariance: str = key("full", "covariance that clients send", choices=("full", "diagonal"))
    samples_per_class: int = key(256, "virtual features drawn per class, on average", minimum=1, maximum=100_000)
    epochs: int = key(5, "epochs of calibration after each task", minimum=1)
    learning_rate: float = key(0.01, "SGD step size of calibration", above=0)
    logit_temperature: float = key(0.0, "divide L2-normalised logits by this; 0 = plain logits", minimum=0)


@dataclass(frozen=True)
class FedSLCAOptions(CCVROptions):
    """Keys of SLCA's classifier alignment (Zhang et al. 2023); its slow learner is backbone-learning-rate."""

    logit_temperature: float = key(0.1, "divide L2-normalised logits by this; 0 = plain logits", minimum=0)


@dataclass(frozen=True)
class FedEWCOptions(Options):
    """Keys of EWC (Kirkpatrick et al. 2017), federated."""

    strength: float = key(1000.0, "lambda: weight of lambda / 2 sum_i F_i (theta_i - theta*_i)^2", minimum=0)


MAX_FEATURES = 2400  # with more features no shrinkage is chosen: the eigenvalues of every fold would take minutes


@dataclass(frozen=True)
class AFCLOptions(Options):
    """Keys of analytic federated continual learning (Tang et al. 2025) and of other heads from the same sums."""

    head: str = key(
        "ridge",
        "ridge regression, linear discriminant, or a discriminant with a share of each class's own covariance",
        choices=("ridge", "discriminant", "regularised"),
    )
    ridge: float = key(
        AUTO,
        "lambda of the ridge regression; auto or 0: by generalised cross-validation",
        minimum=0,
        auto=0.0,
        only=("head", "ridge"),
    )
    shrinkage: float = key(
        AUTO,
        f"s: share of the mean variance that is added to the diagonal of covariances; auto or 0: by cross-validation, "
        f"but 0.01 with a sketch, more than {MAX_FEATURES:,} features, or more than 20 million images times "
        "features",
        minimum=0,
        auto=0.0,
        only=("head", "discriminant", "regularised"),
    )
    own_covariance: float = key(
        0.1, "a: weight of a class's own covariance", above=0, maximum=0.999, only=("head", "regularised")
    )
    rank: int = key(
        32, "directions of a class's own covariance", minimum=1, maximum=10_000, only=("head", "regularised")
    )
    priors: str = key(
        "equal",
        "prior probabilities of the classes: equal, or counts: in proportion to their images",
        choices=("equal", "counts"),
        only=("head", "discriminant", "regularised"),
    )
    random_features: int = key(
        0,
        "M random ReLU features under the head; 0 = none; the server holds 8 M^2 bytes, 3.2 GB at 20,000",
        minimum=0,
        maximum=20_000,
    )
    depth: float = key(
        0.0, "share of the blocks after which another feature is taken; 0 = after the last only", minimum=0, maximum=1
    )
    early_feature: str = key(
        CLASS_TOKEN,
        "what that feature is: class-token, or patches: the mean of the patch tokens",
        choices=(CLASS_TOKEN, PATCHES),
    )
    sketch: int = key(
        0,
        "rank of the sketch that travels instead of a larger matrix; 0 = none",
        minimum=0,
        maximum=20_000,
        only=("head", "discriminant"),
    )
    dtype: str = key("fp32", "type of the numbers that travel", choices=("fp64", "fp32", "fp16"))
    adaptation_rounds: int = key(
        5, "rounds of the first task in which a prompt is trained; it is frozen from then on", minimum=1
    )
    frozen_depth: float = key(
        0.0,
        "share of the blocks after which another such feature is taken, without prompt; 1 = the last feature itself, "
        "if there is a prompt; 0 = none",
        minimum=0,
        maximum=1,
    )

    @property
    def class_rank(self) -> int:
        """Directions of each class's own covariance that travel; 0 if the head has no use for them."""
        return self.rank if self.head == "regularised" else 0


@dataclass(frozen=True)
class FedRDAOptions(AFCLOptions):
    """Keys of FedRDA, the project's own method: a regularised discriminant on features of an adapted prompt."""

    head: str = key("regularised", "see afcl-head", choices=("ridge", "discriminant", "regularised"))
    depth: float = key(0.5, "see afcl-depth", minimum=0, maximum=1)
    early_feature: str = key(PATCHES, "see afcl-early-feature", choices=(CLASS_TOKEN, PATCHES))
    dtype: str = key("fp16", "type of the numbers that travel", choices=("fp64", "fp32", "fp16"))
    adaptation_rounds: int = key(
        AUTO,
        "see afcl-adaptation-rounds; auto or 0: as many as make 60 local steps, 5 to 20; 5 with privacy-noise",
        minimum=0,
        auto=0,
    )
    frozen_depth: float = key(0.33, "see afcl-frozen-depth", minimum=0, maximum=1)


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        name: of the method; its own run keys begin with it.
        prompts: what the run key ``prompt`` may be, the default first.
        objective: ``module:class`` of the local objective; empty for a method that trains nothing.
        statistics: ``module:class`` of what clients send beside arrays.
        strategy: ``module:class`` of the strategy.
        options: the class of its own run keys.
        defaults: of shared run keys that are left at "auto".
        pooled: the first client drawn in a round has all images of all tasks so far, the others have none.
        backbone: frozen, trained, or either: then trained only where it is one of FROM_SCRATCH.
        asynchronous: whether each client may have a class sequence of its own.
        adapts: local training is of the prompt alone, in the first rounds of the first task; then it is frozen, and
            the head follows from statistics. Without a prompt nothing is trained.
        last_statistics: whether statistics may be sent in a task's last round only (run key statistics-rounds).
        sums: whether the server needs no more of a round than sums over its clients, with weights of
            :meth:`Options.client_weight` (run key secure-aggregation).
    """

    name: str
    prompts: tuple[str, ...]
    objective: str
    statistics: str
    strategy: str
    options: type[Options] = Options
    defaults: dict[str, Scalar] = field(default_factory=dict)
    pooled: bool = False
    backbone: Literal["frozen", "trained", "either"] = "frozen"
    asynchronous: bool = False
    adapts: bool = False
    last_statistics: bool = False
    sums: bool = False

    def own_keys(self) -> Mapping[str, Key]:
        """The method's own run keys."""
        return keys_of(self.options, prefix=f"{self.name}-")  # type: ignore[arg-type]  # a class has a hash
