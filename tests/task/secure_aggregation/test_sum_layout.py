"""What an answer adds to a round's sums, and what the sums stand for, against NumPy on all images in one place."""

import numpy as np
import pytest
import torch

from task.config.parsing import parse
from task.message import Packet
from task.models.model import build_model
from task.prototypes.scatter import ScatterStatistics, sketch_matrix
from task.prototypes.statistics import ClientStatistics, FisherStatistics, MeanStatistics, SumFrame
from task.secure_aggregation.sum_layout import SumLayout

CLASSES = (7, 2, 5)
DIM = 6
LABELS = [[7, 7, 2, 7, 2], [], [5, 2, 5, 5, 5, 2, 2]]
RNG = np.random.default_rng(1)
FEATURES = [RNG.normal(3, 2, (len(labels), DIM)).astype(np.float32) for labels in LABELS]


def add_up(kind: ClientStatistics, answers: list[Packet], **keys: object) -> Packet:
    """The answer that the sums of the clients' answers stand for."""
    config = parse({"method": "fedavg", "num-clients": 3, "secure-aggregation": "pairwise"} | keys)
    trained = {"w": (2, 2)} if config.trains_in(1) else {}
    sums = SumLayout(config, 1, SumFrame(CLASSES, DIM, trained | {"backbone": (4,)}, config.options), kind)
    for answer in answers:
        if answer.metrics["num-examples"] and trained:
            answer.arrays.setdefault("backbone", np.zeros(4, np.float32))
    rows = [sums.of_answer(answer) for answer in answers]
    assert {row.shape for row in rows} == {(sums.length,)}
    return sums.to_answer(np.sum(rows, axis=0))


def report(kind: ClientStatistics, client: int, options: object) -> dict:
    if not LABELS[client]:
        return {}
    return kind.compute(torch.from_numpy(FEATURES[client]), torch.tensor(LABELS[client]), options)


ALL = np.concatenate(FEATURES).astype(np.float64)
ALL_LABELS = np.array([label for labels in LABELS for label in labels])


@pytest.mark.parametrize("sketch", [0, 3])
def test_class_sums_and_gram_are_those_of_all_images(sketch: int) -> None:
    """Sum of h h^T over all twelve images, their number and mean by class; with a sketch times Omega and transposed."""
    keys = {"method": "afcl", "afcl-dtype": "fp64", "afcl-head": "discriminant", "afcl-sketch": sketch}
    options, kind = parse(keys).options, ScatterStatistics()
    answers = [Packet({}, report(kind, i, options), {"num-examples": len(LABELS[i])}) for i in range(3)]
    got = add_up(kind, answers, **keys).statistics
    assert got["class_ids"].tolist() == [7, 2, 5]
    assert got["counts"].tolist() == [3, 5, 4]
    for mean, c in zip(got["means"], CLASSES, strict=True):
        np.testing.assert_allclose(mean, ALL[c == ALL_LABELS].mean(axis=0), rtol=1e-12)
    gram = ALL.T @ ALL
    expected = (gram @ sketch_matrix(DIM, sketch).numpy()).T if sketch else gram
    np.testing.assert_allclose(got["gram"], expected, rtol=1e-12)


def test_means_are_those_of_all_images_and_a_class_that_nobody_has_is_left_out() -> None:
    kind = MeanStatistics()
    answers = [Packet({}, report(kind, i, None), {"num-examples": len(LABELS[i])}) for i in (0, 1)]
    got = add_up(kind, answers, method="ncm").statistics
    assert got["class_ids"].tolist() == [7, 2]
    np.testing.assert_allclose(got["means"][0], FEATURES[0][[0, 1, 3]].mean(axis=0), rtol=1e-6)
    assert got["means"].dtype == np.float32


def trained(images: int, value: float, **metrics: float) -> Packet:
    return Packet({"w": np.full((2, 2), value, np.float32)}, metrics={"num-examples": images, **metrics})


@pytest.mark.parametrize(("mean", "expected"), [("images", (3 * 2 + 1 * 10) / 4), ("plain", (2 + 10) / 2)])
def test_arrays_loss_and_accuracy_are_weighted_means(mean: str, expected: float) -> None:
    """Three images at 2.0 and one at 10.0; loss and accuracy are always weighted by images. The third has no image."""
    answers = [trained(3, 2.0, loss=1.0, accuracy=1.0), trained(1, 10.0, loss=5.0, accuracy=0.0)]
    got = add_up(ClientStatistics(), [*answers, Packet(metrics={"num-examples": 0})], **{"fedavg-mean": mean})
    assert got.arrays["w"].tolist() == [[expected] * 2] * 2
    assert got.metrics == {"num-examples": 4, "loss": 2.0, "accuracy": 0.75}


def test_fisher_information_is_weighted_by_images_of_the_clients_that_send_it() -> None:
    answers = [trained(3, 0.0), trained(1, 0.0), trained(8, 0.0)]
    for answer, value in zip(answers, (4.0, 12.0), strict=False):
        answer.statistics = {"class_ids": np.array([7]), "counts": np.array([1]), "fisher": np.full(4, value)}
    got = add_up(FisherStatistics(), answers, method="fedewc")
    assert got.statistics["fisher"].tolist() == [(3 * 4 + 12) / 4] * 4


def test_no_images_at_all_and_sums_that_nobody_can_have() -> None:
    assert add_up(ClientStatistics(), [Packet(metrics={"num-examples": 0})] * 3).metrics == {"num-examples": 0}
    config = parse({"method": "head-only"})
    sums = SumLayout(config, 1, SumFrame(CLASSES, DIM, {}, config.options), None)
    for images, weight in ((3, -3), (0, 3), (-3, -3)):
        assert sums.to_answer(np.array([images, weight, 0.0, 0.0])).metrics == {"num-examples": -1}


def test_a_secure_sum_of_noised_answers_has_no_loss() -> None:
    """Where clients send no loss, the results have none: a mean of zeros would be called a training loss of 0."""
    secure = {"method": "fedavg", "secure-aggregation": "pairwise", "num-clients": 3, "device": "cpu"}
    for private, names in (
        ({}, {"num-examples", "loss", "accuracy"}),
        ({"privacy-noise": 1.0, "privacy-clip": 1.0}, {"num-examples"}),
    ):
        config = parse(secure | private)
        model = build_model(config, [2])
        sums = SumLayout.of(config, 1, True, model, [0, 1])
        trained = {name: value.numpy() for name, value in model.trained_state().items()}
        answer = sums.to_answer(sums.of_answer(Packet(trained, metrics={"num-examples": 5})))
        assert answer.metrics.keys() == names
