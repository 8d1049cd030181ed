"""Backbones that are trained: what travels, running statistics, and combinations that are refused."""

import numpy as np
import pytest
import torch

from client_app.objectives.base import LocalData, Objective
from client_app.training import train_locally
from task.config.parsing import parse
from task.keys import ConfigError
from task.message import Packet
from task.models.evaluation import extract_features
from task.models.head import Head
from task.models.model import Model, build_model
from task.models.resnet import load_resnet18
from task.prompts.base import Prompt
from tests.helpers.prompts import prompt_config
from tests.helpers.trained_backbone import small_model, some_images


def test_the_trained_backbone_is_a_copy_that_travels_as_one_array():
    model = small_model()
    arrays = model.export()
    assert set(arrays) == {"backbone", "head.weight", "head.bias"}
    assert arrays["backbone"].size == sum(value.numel() for value in model.trained_backbone.vit.state_dict().values())
    model.load(arrays | {"backbone": 2 * arrays["backbone"]})
    assert (model.trained_backbone.vit.cls_token.flatten() == torch.from_numpy(2 * arrays["backbone"][:12])).all()
    assert (model.export()["backbone"] == 2 * arrays["backbone"]).all()
    assert all(not p.requires_grad for p in model._shared[0].parameters())


def test_order_of_the_packed_array_is_that_of_the_state_dict():
    model = small_model()
    expected = np.concatenate([v.numpy().ravel() for v in model.trained_backbone.state_dict().values()])
    assert (model.export()["backbone"] == expected).all()


def test_running_statistics_of_a_resnet_travel_and_counters_do_not():
    model = Model(load_resnet18("random", 0), Prompt(prompt_config(), 0), Head(512, 0), "fp32", trains_backbone=True)
    state = model.trained_backbone.network.state_dict()
    floats = [value for value in state.values() if value.is_floating_point()]
    assert len(floats) < len(state)
    assert model.export()["backbone"].size == sum(value.numel() for value in floats)


def test_resnet_is_the_one_for_small_images():
    """ResNet-18 has 11,689,512 weights; less its classifier, 513,000, and its 7 x 7 stem, 9,408; plus 3 x 3, 1,728."""
    network = load_resnet18("random", 0)
    assert sum(p.numel() for p in network.parameters()) == 11_689_512 - 513_000 - 9_408 + 1_728
    assert network.network.layer1(network.network.bn1(network.network.conv1(torch.zeros(1, 3, 32, 32)))).shape[-1] == 32
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 512)
    assert network.sha256 == load_resnet18("random", 0).sha256


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"method": "hgp", "backbone": "resnet18_cifar"}, ["backbone", "'resnet18_cifar'", "'hgp'", "fedprok"]),
        ({"method": "head-only", "backbone": "resnet18_cifar"}, ["backbone", "'head-only'"]),
        ({"method": "fedavg", "prompt": "shared", "backbone": "resnet18_cifar"}, ["prompt", "'shared'", "none"]),
    ],
)
def test_impossible_combinations_are_named(values, words):
    with pytest.raises(ConfigError) as caught:
        parse(values)
    assert all(word in str(caught.value) for word in words), caught.value


def test_resnet_without_weights_is_never_random_in_silence():
    with pytest.raises(ConfigError, match=r"backbone-weights = 'auto'.*random"):
        parse({"method": "fedavg", "prompt": "none", "backbone": "resnet18_cifar"})
    with pytest.raises(ConfigError, match=r"backbone-weights = 'auto'.*random"):
        load_resnet18("auto", 0)


def test_a_resnet_learns_from_a_batch_of_one_image_or_is_refused():
    """At a side of 8 the last map has one place, and batch normalisation of one image nothing to average."""
    values = {"method": "fedavg", "prompt": "none", "backbone": "resnet18_cifar", "backbone-weights": "random"}
    with pytest.raises(ConfigError, match=r"image-size = 8 .* at least 9"):
        parse(values | {"image-size": 8})
    config = parse(values | {"image-size": 9, "batch-size": 2, "local-epochs": 1})
    model = build_model(config, [2])
    before = model.export()["backbone"]
    data = LocalData(some_images(3), np.arange(3), np.array([0, 1, 1]), "none")
    loss, _ = train_locally(model, Objective(config, Packet()), data, config, torch.Generator().manual_seed(0))
    assert np.isfinite(loss)
    assert not np.allclose(before, model.export()["backbone"])


def test_running_statistics_change_in_training_and_never_in_evaluation():
    keys = {"method": "fedavg", "prompt": "none", "backbone": "resnet18_cifar", "backbone-weights": "random"}
    model = build_model(parse(keys | {"device": "cpu"}), [5])
    statistics = model.trained_backbone.network.bn1.running_mean
    before = statistics.clone()
    model.train()
    extract_features(model, np.zeros((4, 32, 32, 3), np.uint8), np.arange(4))
    assert torch.equal(statistics, before)
    assert model.trained_backbone.training
    model(torch.randn(4, 3, 32, 32))
    assert not torch.equal(statistics, before)
