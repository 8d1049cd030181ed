"""The table of methods: each row is a prompt, a local objective, what clients send beside arrays, and a strategy.

Objectives, statistics and strategies are named as ``module:class`` and loaded where they are needed. So client and
server both read this module without importing each other's half. A method from outside the project is a row in any
module that can be imported, see :func:`register`.
"""

from pkgutil import resolve_name
from typing import Any

from task import method_options as options
from task.keys import ConfigError
from task.message import Scalar
from task.method_options import Method
from task.prompt_kinds import PROMPTS

ANY_PROMPT: tuple[str, ...] = ("shared", *(name for name in PROMPTS if name != "shared"))
NONE_OR_ANY = tuple(PROMPTS)  # none is the first
LORA_OR_ANY = ("lora", *(name for name in PROMPTS if name != "lora"))
CROSS_ENTROPY = "client_app.objectives.base:Objective"
WEIGHTED_MEAN = "strategies.base:Strategy"
NO_STATISTICS = "task.prototypes.statistics:ClientStatistics"
COUNTS = "task.prototypes.statistics:CountStatistics"
MEANS = "task.prototypes.statistics:MeanStatistics"
VARIANCES = "task.prototypes.statistics:VarianceStatistics"
GAUSSIANS = "task.prototypes.statistics:GaussianStatistics"
SCATTER = "task.prototypes.scatter:ScatterStatistics"
FISHER = "task.prototypes.statistics:FisherStatistics"
ONE_ROUND: dict[str, Scalar] = {"rounds-per-task": 1}

# fmt: off
#      name, prompts, local objective, what clients also send, strategy, keys of its own; then what else is special
ROWS = (
Method("hgp", ("shared",), CROSS_ENTROPY, GAUSSIANS, "strategies.hgp:HGP", options.HGPOptions,
       last_statistics=True),
Method("pip", ("dualprompt", "l2p"), "client_app.objectives.pip:InjectedPrototypes", VARIANCES, "strategies.pip:PIP",
       options.PIPOptions),
Method("fppl", ("fused",), "client_app.objectives.fppl:FPPLObjective", MEANS, "strategies.fppl:FPPL",
       options.FPPLOptions, {"batch-size": 128, "learning-rate-schedule": "constant"}),
Method("hepco", ("decomposed",), CROSS_ENTROPY, COUNTS, "strategies.hepco:HePCo", options.HePCoOptions),
Method("fedprok", ("none", "shared"), "client_app.objectives.fedprok:FedProKObjective", MEANS,
       "strategies.fedprok:FedProK", options.FedProKOptions, {"learning-rate": 0.01}, backbone="either",
       asynchronous=True, last_statistics=True),
# our own
Method("fedrda", LORA_OR_ANY, CROSS_ENTROPY, SCATTER, "strategies.afcl:AFCL", options.FedRDAOptions, ONE_ROUND,
       asynchronous=True, adapts=True, sums=True),
# what they are compared with
Method("fedavg", ANY_PROMPT, CROSS_ENTROPY, NO_STATISTICS, WEIGHTED_MEAN, options.FedAvgOptions, backbone="either",
       asynchronous=True, sums=True),
Method("fedprox", ANY_PROMPT, "client_app.objectives.fedprox:FedProxObjective", NO_STATISTICS, WEIGHTED_MEAN,
       options.FedProxOptions, backbone="either", asynchronous=True, sums=True),
Method("fed-cprompt", ("coda",), "client_app.objectives.fed_cprompt:FedCPrompt", NO_STATISTICS, WEIGHTED_MEAN,
       options.FedCPromptOptions, sums=True),
Method("ccvr", ANY_PROMPT, CROSS_ENTROPY, GAUSSIANS, "strategies.ccvr:CCVR", options.CCVROptions,
       last_statistics=True),
Method("head-only", ("none",), CROSS_ENTROPY, NO_STATISTICS, WEIGHTED_MEAN, options.Options, {"learning-rate": 0.01},
       asynchronous=True, sums=True),
Method("joint", ANY_PROMPT, CROSS_ENTROPY, NO_STATISTICS, WEIGHTED_MEAN, pooled=True, backbone="either",
       asynchronous=True),
# closed forms: nothing is trained, or a prompt in the first task
Method("ncm", ("none",), "", MEANS, "strategies.ncm:NearestMean", options.Options, ONE_ROUND, asynchronous=True,
       sums=True),
Method("afcl", NONE_OR_ANY, CROSS_ENTROPY, SCATTER, "strategies.afcl:AFCL", options.AFCLOptions,
       ONE_ROUND, asynchronous=True, adapts=True, sums=True),
# the whole backbone is trained
Method("fedavg-ft", ("none",), CROSS_ENTROPY, NO_STATISTICS, WEIGHTED_MEAN, backbone="trained", asynchronous=True,
       sums=True),
Method("fedewc", ("none",), "client_app.objectives.fedewc:FedEWCObjective", FISHER, "strategies.fedewc:FedEWC",
       options.FedEWCOptions, backbone="trained", sums=True),
Method("fedlwf", ("none",), "client_app.objectives.fedlwf:FedLwFObjective", NO_STATISTICS, "strategies.fedlwf:FedLwF",
       options.Options, {"learning-rate": 0.01}, backbone="trained", sums=True),
Method("fedslca", ("none",), CROSS_ENTROPY, GAUSSIANS, "strategies.ccvr:CCVR", options.FedSLCAOptions,
       {"optimizer": "sgd", "learning-rate": 0.01}, backbone="trained", last_statistics=True),
)
# fmt: on
METHODS: dict[str, Method] = {row.name: row for row in ROWS}


def register(name: str) -> None:
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
            f"method = {name!r} cannot be imported ({error}): write module:object, and name the module's folder in "
            "PYTHONPATH."
        ) from error
    if not isinstance(row, Method) or row.name in {known.name for known in METHODS.values()}:
        raise ConfigError(f"method = {name!r} must be a Method of task.methods with a name that is not taken.")
    if unknown := [prompt for prompt in row.prompts if prompt not in PROMPTS]:
        raise ConfigError(
            f"method = {name!r}: prompt {unknown[0]!r} of its row does not exist; there are {list(PROMPTS)}."
        )
    if row.adapts and f"{row.name}-adaptation-rounds" not in row.own_keys():
        raise ConfigError(f"method = {name!r} adapts: its options need a key adaptation_rounds, as AFCLOptions has.")
    METHODS[name] = row


def load_class(path: str) -> Any:
    """The class that ``module:class`` names."""
    return resolve_name(path)
