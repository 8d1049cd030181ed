"""A method that is not the project's and adapts: FedRDA under another name."""

from task.method_options import FedRDAOptions, Method
from task.methods import METHODS

FEDRDA = METHODS["fedrda"]
ROW = Method(
    "adapting",
    ("lora",),
    FEDRDA.objective,
    FEDRDA.statistics,
    FEDRDA.strategy,
    FedRDAOptions,
    FEDRDA.defaults,
    adapts=True,
)
