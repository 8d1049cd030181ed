"""The table of methods: each is a composition of a prompt, a client half, statistics and a server half.

The halves are named as ``module:class`` and loaded where they are needed, so that this module, which both sides read,
depends on neither. A method from outside the project is a row in any module that can be imported: :func:`adopt`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, Literal

from task.keys import ConfigError, Key, keys_of
from task.message import Scalar
from task.method_options import (
    AFCLOptions,
    CCVROptions,
    FedAvgOptions,
    FedCPromptOptions,
    FedEWCOptions,
    FedProKOptions,
    FedProxOptions,
    FedSLCAOptions,
    FPPLOptions,
    HePCoOptions,
    HGPOptions,
    Options,
    PIPOptions,
)
from task.prompts.kinds import PROMPTS


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


# Backbones without pre-trained weights, and the smallest side at which batch normalisation can do with a batch of one
# image: the last layer's map, an eighth of the side rounded up, must have more than one place.
FROM_SCRATCH = {"resnet18_cifar": 9}

_ANY = ("shared", *(name for name in PROMPTS if name != "shared"))
_CROSS_ENTROPY = "client_app.objectives.base:Objective"
_NOTHING = "task.prototypes.statistics:Nothing"
_MEAN = "strategies.base:Strategy"
_ONE_ROUND: dict[str, Scalar] = {"rounds-per-task": 1}

METHODS: dict[str, Method] = {
    row.name: row
    for row in (
        #       name         prompts             client half     statistics   server half                    own keys
        Method(
            "hgp", ("shared",), _CROSS_ENTROPY, "task.prototypes.statistics:Gaussians", "strategies.hgp:HGP", HGPOptions
        ),
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
            "task.prototypes.statistics:Means",
            "strategies.ncm:NearestMean",
            defaults=_ONE_ROUND,
            asynchronous=True,
        ),
        Method(
            "afcl",
            ("none",),
            "",
            "task.prototypes.statistics:Gram",
            "strategies.afcl:AFCL",
            AFCLOptions,
            _ONE_ROUND,
            asynchronous=True,
        ),
        Method(
            "pip",
            ("dualprompt", "l2p"),
            "client_app.objectives.pip:InjectedPrototypes",
            "task.prototypes.statistics:Variances",
            "strategies.pip:PIP",
            PIPOptions,
        ),
        Method(
            "fppl",
            ("fused",),
            "client_app.objectives.fppl:FPPLObjective",
            "task.prototypes.statistics:Means",
            "strategies.fppl:FPPL",
            FPPLOptions,
            defaults={"batch-size": 128},
        ),
        Method(
            "fedprok",
            ("none", "shared"),
            "client_app.objectives.fedprok:FedProKObjective",
            "task.prototypes.statistics:Means",
            "strategies.fedprok:FedProK",
            FedProKOptions,
            defaults={"learning-rate": 0.01},
            backbone="either",
            asynchronous=True,
        ),
        Method(
            "fedprox",
            _ANY,
            "client_app.objectives.fedprox:FedProxObjective",
            _NOTHING,
            _MEAN,
            FedProxOptions,
            backbone="either",
            asynchronous=True,
        ),
        Method(
            "ccvr", _ANY, _CROSS_ENTROPY, "task.prototypes.statistics:Gaussians", "strategies.ccvr:CCVR", CCVROptions
        ),
        Method(
            "hepco",
            ("decomposed",),
            _CROSS_ENTROPY,
            "task.prototypes.statistics:Counts",
            "strategies.hepco:HePCo",
            HePCoOptions,
        ),
        Method("fedavg-ft", ("none",), _CROSS_ENTROPY, _NOTHING, _MEAN, backbone="trained", asynchronous=True),
        Method(
            "fedewc",
            ("none",),
            "client_app.objectives.fedewc:FedEWCObjective",
            "task.prototypes.statistics:Fisher",
            "strategies.fedewc:FedEWC",
            FedEWCOptions,
            backbone="trained",
        ),
        Method(
            "fedlwf",
            ("none",),
            "client_app.objectives.fedlwf:FedLwFObjective",
            _NOTHING,
            "strategies.fedlwf:FedLwF",
            defaults={"learning-rate": 0.01},
            backbone="trained",
        ),
        Method(
            "fedslca",
            ("none",),
            _CROSS_ENTROPY,
            "task.prototypes.statistics:Gaussians",
            "strategies.ccvr:CCVR",
            FedSLCAOptions,
            defaults={"optimizer": "sgd", "learning-rate": 0.01},
            backbone="trained",
        ),
        Method(
            "fed-cprompt", ("coda",), "client_app.objectives.fed_cprompt:FedCPrompt", _NOTHING, _MEAN, FedCPromptOptions
        ),
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
