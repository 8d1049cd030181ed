"""Methods that train the backbone: what travels, slow and fast step sizes, and the equations of EWC and LwF."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.models import VisionTransformer

from client_app.objectives.base import LocalData, Objective
from client_app.objectives.fedewc import FedEWCObjective
from client_app.objectives.fedlwf import FedLwFObjective, binary_loss
from client_app.training import train_locally
from strategies.base import Moment, Update
from strategies.fedewc import FedEWC
from strategies.fedlwf import FedLwF
from task.config.parsing import parse
from task.keys import ConfigError
from task.message import Packet
from task.models.feature_cache import Inputs
from task.models.model import Model, build_model
from task.models.resnet import load_resnet18
from task.models.vit import ViT
from task.prompts.base import Prompt
from task.prototypes.noise import Guard, system_normal
from task.prototypes.statistics import Fisher, Sample, empirical_fisher
from task.scenario.class_stream import Schedule


def small_model(classes: tuple[int, ...] = (2, 3)) -> Model:
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=8, patch_size=4, embed_dim=12, depth=1, num_heads=3, num_classes=0)
    model = Model(ViT(vit, (0.5,) * 3, (0.25,) * 3), Prompt(), 0, "fp32", trains_backbone=True)
    for number in classes:
        model.begin_task(number)
    return model


def some_images(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)


def test_the_trained_backbone_is_a_copy_that_travels_as_one_array():
    model = small_model()
    arrays = model.export()
    assert set(arrays) == {"backbone", "head.weight", "head.bias"}
    assert arrays["backbone"].size == sum(value.numel() for value in model.own.vit.state_dict().values())
    model.load(arrays | {"backbone": 2 * arrays["backbone"]})
    assert (model.own.vit.cls_token.flatten() == torch.from_numpy(2 * arrays["backbone"][:12])).all()
    assert (model.export()["backbone"] == 2 * arrays["backbone"]).all()
    assert all(not p.requires_grad for p in model._shared[0].parameters())


def test_order_of_the_packed_array_is_that_of_the_state_dict():
    model = small_model()
    expected = np.concatenate([v.numpy().ravel() for v in model.own.state_dict().values()])
    assert (model.export()["backbone"] == expected).all()


def test_running_statistics_of_a_resnet_travel_and_counters_do_not():
    model = Model(load_resnet18("random", 0), Prompt(), 0, "fp32", trains_backbone=True)
    state = model.own.network.state_dict()
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


def trained(model: Model, objective: Objective, config, augmentation: str = "none") -> tuple[float, float]:
    data = LocalData(some_images(6), np.arange(6), np.array([2, 3, 4, 2, 3, 4]), augmentation)
    return train_locally(model, objective, data, config, torch.Generator().manual_seed(0))


def test_backbone_and_head_have_step_sizes_of_their_own():
    """One step of plain SGD without momentum history: the change is step size times gradient."""
    values = {"method": "fedslca", "local-epochs": 1, "gradient-clip": 0.0, "batch-size": 6}
    config = parse(values | {"learning-rate": 0.01, "backbone-learning-rate": 0.0001})
    model = small_model()
    before = copy.deepcopy({name: p.detach() for name, p in model.named_parameters()})
    twin = small_model()
    images = (torch.from_numpy(some_images(6)).permute(0, 3, 1, 2) / 255 - 0.5) / 0.25
    F.cross_entropy(twin(images)[:, 2:], torch.tensor([0, 1, 2, 0, 1, 2])).backward()
    trained(model, Objective(config, Packet()), config)
    for name, p in model.named_parameters():
        rate = 0.0001 if name.startswith("own.") else 0.01
        gradient = dict(twin.named_parameters())[name].grad
        assert torch.allclose(p, before[name] - rate * gradient, atol=1e-6), name
    assert (model.own.vit.cls_token != before["own.vit.cls_token"]).any()


def test_running_statistics_change_in_training_and_never_in_evaluation():
    config = parse({"method": "fedavg", "prompt": "none", "backbone": "resnet18_cifar", "backbone-weights": "random"})
    model = build_model(config, [5])
    statistics = model.own.network.bn1.running_mean
    before = statistics.clone()
    model.train()
    with model.resting():
        model(torch.randn(4, 3, 32, 32))
    assert torch.equal(statistics, before)
    assert model.own.training
    model(torch.randn(4, 3, 32, 32))
    assert not torch.equal(statistics, before)


def test_fisher_is_the_mean_of_squared_gradients_of_single_images():
    """Against one backward pass per image in float64."""
    model, images = small_model(), some_images(5)
    rows = torch.tensor([2, 4, 3, 3, 2])
    found = empirical_fisher(model, Sample(images, np.arange(5), rows + 10, rows))
    twin = copy.deepcopy(model).double()
    prepared = (torch.from_numpy(images).permute(0, 3, 1, 2).double() / 255 - 0.5) / 0.25
    expected = 0.0
    for image, row in zip(prepared, rows, strict=True):
        twin.zero_grad()
        features = twin.own(image[None])
        F.cross_entropy(F.linear(features, twin.head.weight, twin.head.bias)[:, 2:], row[None] - 2).backward()
        expected = expected + torch.cat([p.grad.flatten() for p in twin.own.parameters()]) ** 2 / 5
    assert found.shape == model.packed_backbone().shape
    assert np.allclose(found.numpy(), expected.numpy(), rtol=1e-3, atol=1e-9)
    assert found.max() > 1e-5


def test_fisher_of_a_resnet_leaves_running_statistics_alone():
    model = Model(load_resnet18("random", 8), Prompt(), 0, "fp32", trains_backbone=True)
    model.begin_task(2)
    model.eval()
    before = model.packed_backbone().detach().clone()
    found = Fisher().collect(
        model,
        Sample(some_images(3), np.arange(3), torch.tensor([0, 1, 1]), torch.tensor([0, 1, 1])),
        None,
        Guard(0, 0, 0, system_normal),
    )
    assert torch.equal(model.packed_backbone(), before)
    assert found["fisher"].shape == tuple(before.shape)
    assert found["counts"].tolist() == [1, 2]


def test_ewc_penalty_by_hand():
    model = small_model()
    config = parse({"method": "fedewc", "fedewc-strength": 3.0})
    anchor = model.export()["backbone"]
    fisher = np.zeros_like(anchor)
    fisher[[0, 5]] = 2.0, 4.0
    anchor[0] -= 0.5
    anchor[5] += 1.0
    anchor[7] += 9.0  # no information, no penalty
    inputs, rows = Inputs(torch.zeros(2, 3, 8, 8)), torch.tensor([2, 4])
    plain = Objective(config, Packet()).loss(model, inputs, rows)[0]
    objective = FedEWCObjective(config, Packet(prototypes={"fisher": fisher, "anchor": anchor}))
    objective.begin_epoch(model, None, 0, None)
    assert float((objective.loss(model, inputs, rows)[0] - plain).detach()) == pytest.approx(
        1.5 * (2 * 0.25 + 4 * 1.0), rel=1e-5
    )
    assert torch.equal(FedEWCObjective(config, Packet()).loss(model, inputs, rows)[0], plain)


def test_ewc_server_averages_by_images_and_adds_up_over_tasks():
    server, model, schedule = FedEWC(parse({"method": "fedewc"})), small_model(), Schedule([[0, 1], [2, 3, 4]], 2)
    size = model.packed_backbone().numel()

    def take(server_round: int, *values: float) -> None:
        moment, sent = (
            Moment(schedule, server_round),
            [{"fisher": np.full(size, value, np.float32)} for value in values],
        )
        updates = [Update(str(i), images, {}, one) for i, (images, one) in enumerate(zip((10, 30), sent, strict=False))]
        for update in updates:
            server.receive(model, update, moment)
        server.refine(model, updates, moment)
        assert not any(update.prototypes for update in updates)

    take(1, 1.0, 3.0)
    assert server.broadcast(Moment(schedule, 2)) == {}
    take(2, 1.0, 3.0)
    known = server.broadcast(Moment(schedule, 3))
    assert np.allclose(known["fisher"], 2.5)  # (10 * 1 + 30 * 3) / 40
    assert (known["anchor"] == model.export()["backbone"]).all()
    with torch.no_grad():
        model.own.vit.cls_token += 1.0
    take(3, 9.0)
    assert server.broadcast(Moment(schedule, 4)) is known  # within a task both stay
    take(4, 4.0)
    renewed = server.broadcast(Moment(schedule, 4))
    assert np.allclose(renewed["fisher"], 6.5)
    assert np.allclose((renewed["anchor"] - known["anchor"])[:12], 1.0)  # the class token is packed first


def test_lwf_loss_by_hand():
    """One image, logits 0 and ln 3, targets 1 and 0.25: ln 2 - 0.25 ln 0.75 - 0.75 ln 0.25."""
    loss = binary_loss(torch.tensor([[0.0, np.log(3)]]).float(), torch.tensor([[1.0, 0.25]]))
    assert float(loss) == pytest.approx(np.log(2) - 0.25 * np.log(0.75) - 0.75 * np.log(0.25), rel=1e-6)


def test_lwf_teaches_old_classes_from_the_last_tasks_model_and_new_ones_from_labels(tiny):
    config = parse(tiny | {"method": "fedlwf"})
    teacher, model = build_model(config, [6]), build_model(config, [6, 6])
    with torch.no_grad():
        teacher.head.weight.normal_(generator=torch.Generator().manual_seed(1))
    objective = FedLwFObjective(config, Packet(prototypes=teacher.export()))
    objective.begin_epoch(model, None, 0, None)
    inputs, rows = Inputs(torch.randn(3, 3, 16, 16)), torch.tensor([6, 9, 11])
    loss, logits = objective.loss(model, inputs, rows)
    s = model(*inputs).detach().double().sigmoid().numpy()
    targets = np.concatenate([teacher(*inputs).detach().double().sigmoid().numpy(), np.eye(12)[rows][:, 6:]], axis=1)
    expected = -(targets * np.log(s) + (1 - targets) * np.log(1 - s)).sum(axis=1).mean()
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    assert logits.shape == (3, 6)
    loss.backward()
    assert model.head.weight.grad[:6].any()
    assert all(p.grad is None for p in objective.teacher.parameters())


def test_lwf_server_keeps_the_model_of_a_tasks_end():
    server, model, schedule = FedLwF(parse({"method": "fedlwf"})), small_model((2,)), Schedule([[0, 1], [2, 3, 4]], 2)
    server.refine(model, [], Moment(schedule, 1))
    assert server.broadcast(Moment(schedule, 2)) == {}
    server.refine(model, [], Moment(schedule, 2))
    kept = server.broadcast(Moment(schedule, 3))
    model.begin_task(3)
    assert kept["head.weight"].shape == (2, 12)
    assert set(kept) == {"backbone", "head.weight", "head.bias"}
