"""A finished run beside all its training images in one place, and what NumPy makes of them without any federation."""

from typing import Any

import numpy as np
import safetensors.numpy
import torch

from server_app.rounds.run import run_experiment
from server_app.transport.in_process import InProcessTransport
from task.config.parsing import parse
from task.models.evaluation import extract_features
from task.models.model import Model, build_model
from task.scenario.scenario import build_scenario
from tests.helpers.runs import Values, results_of

PARTITIONS: dict[str, Values] = {
    "one client, one task": {"partition": "iid", "num-clients": 1, "num-tasks": 1},
    "dirichlet": {"partition": "dirichlet", "dirichlet-beta": 0.05, "num-clients": 7},
    "quantity": {"partition": "quantity", "classes-per-client": 2, "num-clients": 4, "class-order": "given"},
    "two rounds": {"partition": "iid", "num-clients": 3, "num-tasks": 6, "rounds-per-task": 2},
    "class-share": {"partition": "class-share", "class-share": 0.5, "num-clients": 4},
    "consensus 0.2": {"partition": "consensus", "consensus-rate": 0.2, "num-clients": 3},
    "consensus 0.5": {"partition": "consensus", "consensus-rate": 0.5, "num-clients": 3, "num-tasks": 3},
}


class Pooled:
    """A finished run, and all its training images in one place: features float64 [N, M], head rows [N]."""

    def __init__(self, values: Values) -> None:
        self.config = parse(values)
        self.folder = run_experiment(self.config, InProcessTransport(self.config.num_clients))
        self.results = results_of(self.folder)
        self.arrays = safetensors.numpy.load_file(self.folder / "model.safetensors")
        self.model = build_model(self.config, [len(task) for task in self.results["tasks"]])
        self.model.load(self.arrays)
        data = build_scenario(self.config).dataset
        self.features = features_of(self.model, data.train_images)
        self.test_features = features_of(self.model, data.test_images)
        order = self.results["class_order"]
        self.rows = np.array([order.index(c) for c in data.train_labels])
        self.classes = len(order)


def features_of(model: Model, images: Any) -> np.ndarray:
    """Float64 [N, M], what the head takes."""
    return model.head.project(extract_features(model, images, np.arange(len(images)))).numpy().astype(np.float64)


def moments(run: Pooled) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Class means [K, M], covariances [K, M, M] and the pooled one [M, M], from the raw features."""
    groups = [run.features[run.rows == c] for c in range(run.classes)]
    covariances = np.stack([np.cov(group.T) for group in groups])
    pooled = sum((len(g) - 1) * s for g, s in zip(groups, covariances, strict=True)) / (len(run.rows) - run.classes)
    return np.stack([group.mean(axis=0) for group in groups]), covariances, pooled


def numpy_regularised(run: Pooled, share: float, shrinkage: float) -> np.ndarray:
    """Log density of each test image by class, [N, K], each covariance inverted by itself."""
    means, covariances, pooled = moments(run)
    dim, logits = len(pooled), np.empty((len(run.test_features), run.classes))
    for c, covariance in enumerate(covariances):
        own = share * covariance + (1 - share) * pooled + shrinkage * np.trace(pooled) / dim * np.eye(dim)
        gaps = run.test_features - means[c]
        distance = np.einsum("nm,mk,nk->n", gaps, np.linalg.inv(own), gaps)
        logits[:, c] = -0.5 * distance - 0.5 * np.linalg.slogdet(own)[1]
    return logits


def check_regularised(run: Pooled, bound: float = 1e-5) -> None:
    """Up to what all classes of an image have in common; in float64, so that the solution alone is compared."""
    shrinkage = run.results["rounds"][-1]["server"]["shrinkage"]
    expected = numpy_regularised(run, run.config.options.own_covariance, shrinkage)
    with torch.no_grad():
        raw = torch.from_numpy(run.test_features)  # projected already
        head = run.model.head.double()
        head.projection = None
        logits = head(raw).numpy()
    logits, expected = logits - logits.mean(axis=1, keepdims=True), expected - expected.mean(axis=1, keepdims=True)
    assert np.abs(logits - expected).max() < bound * np.abs(expected).max()
    assert (logits.argmax(1) == expected.argmax(1)).mean() > 0.99
