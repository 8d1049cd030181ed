"""AFCL: the server's regression equals the centralised one, whatever the partition and the order of everything."""

import json

import numpy as np
import pytest
import safetensors.numpy
import torch

from server_app.rounds.run import execute
from server_app.transport.in_process import InProcessTransport
from strategies.afcl import AFCL, solve_ridge
from strategies.base import Moment, Update
from task.config.parsing import parse
from task.method_options import AFCLOptions
from task.models.evaluation import extract_features
from task.models.model import Head, build_model
from task.prototypes.statistics import Gram
from task.scenario.class_stream import Schedule
from task.scenario.scenario import build_world


def test_ridge_by_hand():
    """Features 1 and 2 of one dimension, classes a and b, lambda 3: W = (1 / (1 + 4 + 3), 2 / 8)."""
    weights = solve_ridge(torch.tensor([[5.0]]).double(), torch.tensor([[1.0], [2.0]]).double(), 3.0)
    assert weights.tolist() == [[pytest.approx(1 / 8)], [pytest.approx(2 / 8)]]


def test_statistics_are_sums_of_the_features():
    features = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    labels = np.array([7, 2, 7, 7, 2])
    found = Gram().compute(torch.from_numpy(features), torch.from_numpy(labels), AFCLOptions())
    assert found["class_ids"].tolist() == [2, 7]
    assert found["counts"].tolist() == [2, 3]
    assert np.allclose(found["sums"], [features[labels == c].sum(axis=0) for c in (2, 7)])
    wide = features.astype(np.float64)
    assert np.allclose(found["gram"][0], (wide.T @ wide)[np.triu_indices(3)], rtol=1e-12)
    assert {name: a.shape for name, a in found.items() if a.dtype == np.float64} == Gram().shapes(2, 3, AFCLOptions())


def numpy_ridge(features: np.ndarray, labels: np.ndarray, order: list[int], ridge: float) -> np.ndarray:
    """The centralised solution by NumPy's least squares on the augmented system, which forms no Gram matrix."""
    targets = (labels[:, None] == np.array(order)).astype(np.float64)
    dim = features.shape[1]
    stacked = np.concatenate([features.astype(np.float64), np.sqrt(ridge) * np.eye(dim)])
    return np.linalg.lstsq(stacked, np.concatenate([targets, np.zeros((dim, len(order)))]), rcond=None)[0].T


@pytest.mark.parametrize("random_features", [0, 60])
@pytest.mark.parametrize(
    "changes",
    [
        {"partition": "iid", "num-clients": 1, "num-tasks": 1},
        {"partition": "dirichlet", "dirichlet-beta": 0.05, "num-clients": 7},
        {"partition": "quantity", "classes-per-client": 2, "num-clients": 4, "class-order": "given"},
        {"partition": "iid", "num-clients": 3, "num-tasks": 6, "rounds-per-task": 2},
        {"partition": "class-share", "class-share": 0.5, "num-clients": 4},
        {"partition": "consensus", "consensus-rate": 0.2, "num-clients": 3},
        {"partition": "consensus", "consensus-rate": 0.5, "num-clients": 3, "num-tasks": 3},
    ],
    ids=[
        "one client, one task",
        "dirichlet",
        "quantity",
        "two rounds",
        "class-share",
        "consensus 0.2",
        "consensus 0.5",
    ],
)
def test_the_model_is_the_centralised_solution(changes, random_features, tiny, tmp_path):
    values = tiny | changes | {"method": "afcl", "afcl-random-features": random_features, "afcl-ridge": 2.0}
    config = parse(values)
    directory = execute(config, InProcessTransport(config.flat(), config.num_clients))
    arrays = safetensors.numpy.load_file(directory / "model.safetensors")
    order = json.loads((directory / "results.json").read_text())["class_order"]
    model, data = build_model(config, []), build_world(config).dataset
    features = model.head.lift(extract_features(model, data.train_images, np.arange(len(data.train_labels)))).numpy()
    expected = numpy_ridge(features, data.train_labels, order, 2.0)
    assert np.allclose(arrays["head.weight"], expected, atol=1e-4 * np.abs(expected).max())
    assert (arrays["head.bias"] == 0).all()


def update(client: str, features: np.ndarray, labels: list[int]) -> Update:
    statistics = Gram().compute(torch.from_numpy(features), torch.tensor(labels), AFCLOptions())
    return Update(client, len(labels), {}, statistics)


def bare_model(dim: int, classes: int):
    """All that refinement needs of a model."""
    head = Head(dim, 0)
    head.grow(classes)
    return type("Model", (), {"head": head, "device": torch.device("cpu")})()


def test_a_client_counts_once_per_task_and_an_unreported_class_never_wins():
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=(6, 4)).astype(np.float32), rng.normal(size=(3, 4)).astype(np.float32)
    schedule, server, model = Schedule([[4, 9, 1]], 2), AFCL(parse({"method": "afcl"})), bare_model(4, 3)
    updates = [update("a", first, [9, 4, 9, 4, 9, 9])]
    server.refine(model, updates, Moment(schedule, 1))
    assert model.head.bias[:2].tolist() == [0, 0]
    assert model.head.bias[2] < -1e20
    server.refine(model, [*updates, update("b", second, [4, 4, 9])], Moment(schedule, 2))
    expected = numpy_ridge(np.concatenate([first, second]), np.array([9, 4, 9, 4, 9, 9, 4, 4, 9]), [4, 9, 1], 1.0)
    assert np.allclose(model.head.weight.detach(), expected, atol=1e-5)


def test_random_features_are_a_relu_of_fixed_gaussians():
    """RanPAC: h = max(0, W^T f) with W the same on every machine."""
    head, again, other = Head(5, 3, projection=8), Head(5, 3, projection=8), Head(5, 4, projection=8)
    assert torch.equal(head.projection, again.projection)
    assert not torch.equal(head.projection, other.projection)
    features = torch.randn(4, 5)
    expected = np.maximum(features.numpy().astype(np.float64) @ head.projection.numpy(), 0)
    assert np.allclose(head.lift(features), expected, atol=1e-5)
    head.grow(3)
    assert head.weight.shape == (3, 8)
    assert head(features).shape == (4, 3)
