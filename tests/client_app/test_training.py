"""Local training, image preparation and counting: by hand, or with Adam written in float64 NumPy."""

import itertools
import math

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.special import softmax
from timm.models import VisionTransformer
from torch import nn

from client_app.client import Node, handle
from client_app.node import random_stream
from client_app.objectives.base import LocalData, Objective
from client_app.request import DivergedError
from client_app.training import train_locally
from task.config.parsing import parse
from task.data.images import Dataset
from task.message import Packet
from task.models import feature_cache
from task.models.evaluation import confusion_counts, extract_features
from task.models.feature_cache import Inputs
from task.models.head import Head
from task.models.model import Model
from task.models.preprocessing import prepare, random_crop, random_flip
from task.models.vit import Early, ViT
from task.prompts.base import Prompt
from task.prompts.shared import SharedPrompt
from task.utils.seeding import torch_rng
from tests.helpers.own_data import OWN
from tests.helpers.prompts import prompt_config
from tests.helpers.runs import train_message


class Pixels(nn.Module):
    """Stands in for a backbone: the feature of an image is its normalised pixels."""

    def __init__(self, side=2, mean=0.5, std=0.25):
        super().__init__()
        self.image_size, self.dim, self.last = side, 3 * side * side, Early(0)
        self.register_buffer("mean", torch.full((1, 3, 1, 1), mean))
        self.register_buffer("std", torch.full((1, 3, 1, 1), std))

    def forward(self, images, prefixes=None, projects=False, early=()):
        return images.flatten(1)


def head_only(classes, backbone=None):
    backbone = backbone or Pixels()
    model = Model(backbone, Prompt(prompt_config(), 0), Head(backbone.dim, 0), "fp32")
    for number in classes:
        model.begin_task(number)
    return model


def prompted(classes):
    """A real ViT of two blocks with a prompt on both."""
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=8, patch_size=4, embed_dim=12, depth=2, num_heads=3, num_classes=0)
    model = Model(ViT(vit, (0.5,) * 3, (0.25,) * 3), SharedPrompt(prompt_config([0, 1], 4), 12), Head(12, 0), "fp32")
    for number in classes:
        model.begin_task(number)
    return model


def local_data(number, rows, side=2, seed=0, augmentation="none"):
    """Images at the odd positions of a larger source, so that positions and places differ."""
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (2 * number, side, side, 3), np.uint8)
    return LocalData(images, np.arange(1, 2 * number, 2), rng.choice(rows, number), augmentation)


def train(model, data, seed=1, **keys):
    keys = {name.replace("_", "-"): value for name, value in keys.items()}
    config = parse({"prompt": "none", "method": "head-only"} | keys)
    return train_locally(model, Objective(config, Packet()), data, config, torch.Generator().manual_seed(seed))


def test_local_loss_by_hand():
    """Rows 2 to 4 are current: logits (0, ln 2, ln 5) and (ln 3, 0, 0) give -ln(2/8) and -ln(3/5)."""
    model = head_only([2, 3], Pixels(1, mean=0.0, std=1.0))
    model.head.weight.data.zero_()
    model.head.weight.data[:, 0] = torch.tensor([50.0, -50.0, 0.0, math.log(2), math.log(5)])
    model.head.weight.data[:, 1] = torch.tensor([-7.0, 90.0, math.log(3), 0.0, 0.0])
    images = torch.tensor([[1.0, 0, 0], [0, 1.0, 0]])[:, :, None, None]
    loss, logits = Objective(parse({}), Packet()).loss(model, Inputs(images), torch.tensor([3, 2]))
    assert loss.item() == pytest.approx((math.log(4) + math.log(5 / 3)) / 2, rel=1e-6)
    assert torch.allclose(logits, torch.tensor([[0, 2.0, 5.0], [3.0, 0, 0]]).clamp(min=1).log())
    loss.backward()
    # softmax minus one-hot, halved: (1/8, 2/8 - 1, 5/8) / 2 at pixel 0 and (3/5 - 1, 1/5, 1/5) / 2 at pixel 1
    assert torch.allclose(model.head.weight.grad[2:, 0], torch.tensor([1 / 16, -3 / 8, 5 / 16]))
    assert torch.allclose(model.head.weight.grad[2:, 1], torch.tensor([-1 / 5, 1 / 10, 1 / 10]))
    assert not model.head.weight.grad[:2].any()
    assert not model.head.bias.grad[:2].any()


def test_the_local_loss_adds_the_penalty_of_the_prompt():
    """Logits of zero give ln 3 for three current classes, and a matching loss is below zero: keys go to queries."""
    model = head_only([2, 3])
    model.head.weight.data.zero_()
    model.prompt.penalty = -0.25
    loss, _ = Objective(parse({}), Packet()).loss(model, Inputs(torch.ones(2, 3, 2, 2)), torch.tensor([3, 2]))
    assert loss.item() == pytest.approx(math.log(3) - 0.25, rel=1e-6)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_only_current_rows_and_the_prompt_learn(optimizer):
    """Old rows and every weight of the backbone keep all their bits."""
    model = prompted([2, 3])
    before = {name: value.clone() for name, value in model.shared_state().items()}
    backbone = {name: value.clone() for name, value in model.backbone.state_dict().items()}
    data = local_data(9, [2, 3, 4], side=8, augmentation="crop-flip")
    train(model, data, optimizer=optimizer, local_epochs=2, batch_size=4, learning_rate=0.1)
    after = model.shared_state()
    assert torch.equal(after["head.weight"][:2], before["head.weight"][:2])
    assert torch.equal(after["head.bias"][:2], before["head.bias"][:2])
    assert (after["head.weight"][2:] != before["head.weight"][2:]).all()
    assert (after["head.bias"][2:] != before["head.bias"][2:]).all()
    assert (after["prompt.prefix"] != before["prompt.prefix"]).float().mean() > 0.9
    assert all(torch.equal(value, backbone[name]) for name, value in model.backbone.state_dict().items())


def features_of(data, mean=0.5, std=0.25):
    """Normalised pixels, channel by channel, in float64."""
    pixels = data.images[data.positions].astype(np.float64).transpose(0, 3, 1, 2).reshape(len(data.positions), -1)
    return (pixels / 255 - mean) / std


def numpy_gradients(w, b, x, y):
    logits = x @ w.T + b
    p = softmax(logits, axis=1)
    loss, right = -np.log(p[np.arange(len(y)), y]).sum(), (p.argmax(axis=1) == y).sum()
    p[np.arange(len(y)), y] -= 1
    return [p.T @ x / len(y), p.mean(axis=0)], loss, right


def numpy_adam(w, b, x, y, orders, batch, rate, clip):
    """Kingma and Ba 2015 with cosine steps and clipping of the joint norm; returns head, loss, accuracy, norms."""
    theta, m, v = [w, b], [0.0, 0.0], [0.0, 0.0]
    batches = [order[i : i + batch] for order in orders for i in range(0, len(order), batch)]
    per_epoch, losses, rights, norms = len(batches) // len(orders), [], [], []
    for t, indices in enumerate(batches):
        grads, loss, right = numpy_gradients(*theta, x[indices], y[indices])
        norm = math.sqrt(sum(np.square(g).sum() for g in grads))
        grads = [g * min(1, clip / (norm + 1e-6)) if clip else g for g in grads]
        eta = rate * (1 + math.cos(math.pi * t / len(batches))) / 2
        for i, g in enumerate(grads):
            m[i], v[i] = 0.9 * m[i] + 0.1 * g, 0.999 * v[i] + 0.001 * g**2
            unbiased_m, unbiased_v = m[i] / (1 - 0.9 ** (t + 1)), v[i] / (1 - 0.999 ** (t + 1))
            theta[i] = theta[i] - eta * unbiased_m / (np.sqrt(unbiased_v) + 1e-8)
        losses.append(loss), rights.append(right), norms.append(norm)
    number = len(orders[0])
    return theta, sum(losses[-per_epoch:]) / number, sum(rights[-per_epoch:]) / number, norms


@pytest.mark.parametrize("clip", [0.3, 0.0])
def test_training_equals_adam_in_float64_numpy(clip):
    """Three epochs of batches of 4, 4 and 2; the order of the images is torch's, the rest is NumPy."""
    model, data = head_only([2, 3]), local_data(10, [2, 3, 4])
    w, b = (model.head.weight.detach()[2:].double().numpy(), model.head.bias.detach()[2:].double().numpy())
    shuffling = torch.Generator().manual_seed(1)
    orders = [torch.randperm(10, generator=shuffling).numpy() for _ in range(3)]
    (expected_w, expected_b), expected_loss, expected_accuracy, norms = numpy_adam(
        w, b, features_of(data), data.rows - 2, orders, 4, 0.05, clip
    )
    loss, accuracy = train(model, data, local_epochs=3, batch_size=4, learning_rate=0.05, gradient_clip=clip)
    assert min(norms) > 0.3  # so the limit of 0.3 always cuts
    assert np.allclose(model.head.weight.detach()[2:], expected_w, atol=2e-5)
    assert np.allclose(model.head.bias.detach()[2:], expected_b, atol=2e-5)
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    assert accuracy == pytest.approx(expected_accuracy)
    assert np.abs(expected_w - w).max() > 0.2


def test_the_optimiser_starts_afresh():
    """A second training continues from the weights alone: NumPy's Adam begins again at t = 0 with empty moments."""
    model, data = head_only([3]), local_data(6, [0, 1, 2])
    x, every = features_of(data), [np.arange(6)] * 2  # one batch an epoch: the order only changes rounding
    train(model, data, local_epochs=2, batch_size=6, learning_rate=0.05, gradient_clip=1.0)
    w, b = model.head.weight.detach().double().numpy(), model.head.bias.detach().double().numpy()
    (expected_w, expected_b), *_ = numpy_adam(w, b, x, data.rows, every, 6, 0.05, 1.0)
    train(model, data, seed=2, local_epochs=2, batch_size=6, learning_rate=0.05, gradient_clip=1.0)
    assert np.allclose(model.head.weight.detach(), expected_w, atol=2e-5)
    assert np.allclose(model.head.bias.detach(), expected_b, atol=2e-5)


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_sgd_equals_float64_numpy(schedule):
    """Momentum 0.9: v <- 0.9 v + g, theta <- theta - eta v; whole batches, four epochs, cosine from 0.2 or all 0.2."""
    model, data = head_only([3]), local_data(6, [0, 1, 2])
    x, theta = (
        features_of(data),
        [model.head.weight.detach().double().numpy(), model.head.bias.detach().double().numpy()],
    )
    v = [0.0, 0.0]
    for t in range(4):
        grads, *_ = numpy_gradients(*theta, x, data.rows)
        v = [0.9 * old + g for old, g in zip(v, grads, strict=True)]
        eta = 0.2 * (1 + math.cos(math.pi * t / 4)) / 2 if schedule == "cosine" else 0.2
        theta = [p - eta * step for p, step in zip(theta, v, strict=True)]
    keys = {"optimizer": "sgd", "local_epochs": 4, "batch_size": 6, "gradient_clip": 0.0}
    train(model, data, learning_rate=0.2, learning_rate_schedule=schedule, **keys)
    assert np.allclose(model.head.weight.detach(), theta[0], atol=1e-5)
    assert np.allclose(model.head.bias.detach(), theta[1], atol=1e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_divergence_is_an_error_that_names_the_key(value):
    model = head_only([2])
    model.head.weight.data[1, 3] = value
    with pytest.raises(DivergedError, match="learning-rate"):
        train(model, local_data(5, [0, 1]), local_epochs=1)


def test_divergence_during_training_is_found():
    """Steps of 1e30 make the loss of finite weights infinite."""
    with pytest.raises(DivergedError, match=r"1e\+30"):
        train(prompted([2]), local_data(5, [0, 1], side=8), local_epochs=3, learning_rate=1e30, batch_size=2)


@pytest.mark.parametrize(("number", "batch"), [(1, 64), (5, 4), (3, 1)])
def test_batches_of_one_image(number, batch):
    """NumPy's Adam, one image at a time where the batches say so."""
    model, data = head_only([3]), local_data(number, [0, 1, 2])
    order = [torch.randperm(number, generator=torch.Generator().manual_seed(1)).numpy()]
    w, b = model.head.weight.detach().double().numpy(), model.head.bias.detach().double().numpy()
    (w, b), loss, accuracy, _ = numpy_adam(w, b, features_of(data), data.rows, order, batch, 0.05, 1.0)
    reported = train(model, data, local_epochs=1, batch_size=batch, learning_rate=0.05)
    assert np.allclose(model.head.weight.detach(), w, atol=2e-5)
    assert reported == pytest.approx((loss, accuracy), rel=1e-4)


def test_an_objective_is_told_which_epoch_begins() -> None:
    told = []

    class Noting(Objective):
        def begin_epoch(self, model: Model, data: LocalData, epoch: int, rng: torch.Generator) -> None:
            told.append(epoch)

    config = parse({"prompt": "none", "method": "head-only", "local-epochs": 3})
    train_locally(head_only([2]), Noting(config, Packet()), local_data(5, [0, 1]), config, torch.Generator())
    assert told == [0, 1, 2]


def test_training_repeats_with_its_generator():
    def weights(seed):
        model = prompted([2])
        train(model, local_data(7, [0, 1], side=8, augmentation="crop-flip"), seed, local_epochs=2, batch_size=3)
        return torch.cat([value.flatten() for value in model.shared_state().values()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_normalisation_by_hand():
    """51 / 255 = 0.2 and (0.2 - 0.5) / 0.25 = -1.2; 255 -> 2; 0 -> -2; channels stay where they are."""
    images = np.array([[[[51, 255, 0]]]], np.uint8)
    prepared = prepare(images, Pixels(1))
    assert prepared.shape == (1, 3, 1, 1)
    assert prepared.dtype == torch.float32
    assert prepared.flatten().tolist() == pytest.approx([-1.2, 2.0, -2.0])


def test_every_channel_has_its_own_normalisation():
    backbone = Pixels(1)
    backbone.mean, backbone.std = (
        torch.tensor([0.0, 0.2, 1.0]).view(1, 3, 1, 1),
        torch.tensor([1, 0.1, 0.5]).view(1, 3, 1, 1),
    )
    assert prepare(np.full((1, 1, 1, 3), 51, np.uint8), backbone).flatten().tolist() == pytest.approx([0.2, 0, -1.6])


def test_rows_and_columns_stay_and_grey_becomes_three_channels():
    images = np.array([[[[0], [51]], [[102], [255]]]], np.uint8)
    assert images.shape == (1, 2, 2, 1)
    prepared = prepare(images, Pixels(2, mean=0.0, std=1.0))
    assert torch.allclose(prepared, torch.tensor([[0, 0.2], [0.4, 1.0]]).expand(1, 3, 2, 2))


def with_more_rows(image, rows):
    """Rows by cubic convolution (Keys 1981, a = -0.75, edges repeated), in float64; [H, W] -> [rows, W]."""
    a = -0.75

    def kernel(d):
        d = abs(d)
        if d <= 1:
            return (a + 2) * d**3 - (a + 3) * d**2 + 1
        return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a if d < 2 else 0.0

    n, out = len(image), []
    for place in ((i + 0.5) * n / rows - 0.5 for i in range(rows)):
        near = range(math.floor(place) - 1, math.floor(place) + 3)
        out.append(sum(kernel(place - j) * image[min(max(j, 0), n - 1)] for j in near))
    return np.stack(out)


@pytest.mark.parametrize("side", [10, 7])
def test_enlarging_equals_bicubic_in_numpy(side):
    """A checked pattern overshoots, so what leaves 0..1 must be cut there."""
    rng = np.random.default_rng(0)
    images = (255 * rng.integers(0, 2, (1, 5, 5, 1))).astype(np.uint8)
    expected = with_more_rows(with_more_rows(images[0, :, :, 0] / 255, side).T, side).T
    assert expected.min() < -0.05
    assert expected.max() > 1.05
    prepared = prepare(images, Pixels(side, mean=0.0, std=1.0))[0]
    assert np.allclose(prepared, np.clip(expected, 0, 1), atol=1e-5)


@pytest.mark.parametrize("upright", [True, False])
@pytest.mark.parametrize("side", [12, 6])
def test_each_side_is_enlarged_by_itself(side, upright):
    image = np.random.default_rng(0).integers(0, 256, (5, 6), np.uint8)
    expected = np.clip(with_more_rows(with_more_rows(image / 255, side).T, side).T, 0, 1)
    pixels = image.T if upright else image
    prepared = prepare(np.ascontiguousarray(pixels)[None, :, :, None], Pixels(side, mean=0.0, std=1.0))[0]
    assert np.allclose(prepared, expected.T if upright else expected, atol=1e-5)


def test_shrinking_equals_pillow():
    """Pillow's bicubic filter on float pixels widens with the ratio, so it does not alias."""
    images = np.random.default_rng(0).integers(0, 256, (2, 12, 12, 3), np.uint8)
    prepared = prepare(images, Pixels(5, mean=0.0, std=1.0))
    for image, ours in zip(images, prepared, strict=True):
        for channel in range(3):
            pixels = Image.fromarray(image[:, :, channel].astype(np.float32) / 255)
            expected = np.clip(np.asarray(pixels.resize((5, 5), Image.Resampling.BICUBIC)), 0, 1)
            assert np.allclose(ours[channel], expected, atol=1e-5)


def windows(image, pad):
    """Every shift of an image inside zeros, [C, H, W], by (down, right); written with slices alone."""
    C, H, W = image.shape
    framed = np.zeros((C, H + 2 * pad, W + 2 * pad), image.dtype)
    framed[:, pad : pad + H, pad : pad + W] = image
    return {
        (top, left): framed[:, top : top + H, left : left + W]
        for top in range(2 * pad + 1)
        for left in range(2 * pad + 1)
    }


def shifts(originals, outputs, pad):
    """The one shift that makes each output of its original; fails where there is none or more than one."""
    fitting = []
    for image, output in zip(originals.numpy(), outputs.numpy(), strict=True):
        fits = [shift for shift, window in windows(image, pad).items() if np.array_equal(window, output)]
        assert len(fits) == 1
        fitting += fits
    return fitting


def coloured(batch, height, width, seed=0):
    return torch.randint(1, 256, (batch, 3, height, width), generator=torch.Generator().manual_seed(seed)).byte()


@pytest.mark.parametrize(("height", "width", "pad"), [(16, 16, 2), (5, 5, 1), (8, 11, 1)])
def test_random_crop_shifts_each_image_for_itself(height, width, pad):
    """An eighth of the side, at least one pixel; each shift has probability 1 / (2 pad + 1)^2, within 5 deviations."""
    x = coloured(400, height, width)
    outputs = random_crop(x, torch.Generator().manual_seed(1))
    assert outputs.shape == x.shape
    assert outputs.dtype == torch.uint8
    drawn_shifts = shifts(x, outputs, pad)
    p = 1 / (2 * pad + 1) ** 2
    times = [drawn_shifts.count(shift) for shift in windows(x[0].numpy(), pad)]
    assert sum(times) == 400
    assert all(abs(n - 400 * p) <= 5 * math.sqrt(400 * p * (1 - p)) for n in times)


def test_random_flip_mirrors_about_half_of_the_images():
    """Each output is its image or the mirror image; 1,000 fair coins stay within 5 deviations of 15.8."""
    x = coloured(1000, 2, 3)
    outputs = random_flip(x, torch.Generator().manual_seed(1)).numpy()
    mirrored = x.numpy()[:, :, :, ::-1]
    same, turned = (np.all(outputs == other, axis=(1, 2, 3)) for other in (x.numpy(), mirrored))
    assert np.all(same ^ turned)
    assert abs(turned.sum() - 500) <= 79


@pytest.mark.parametrize("change", [random_crop, random_flip])
def test_augmentation_repeats_with_its_generator(change):
    x = coloured(50, 8, 8)
    one, again, other = (change(x, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_prepare_augments_before_it_normalises():
    """Black moves in, which is -2 here, not 0; "crop" never mirrors, "crop-flip" does both."""
    images = coloured(200, 8, 8).permute(0, 2, 3, 1).numpy()
    plain = prepare(images, Pixels(8))
    cropped = prepare(images, Pixels(8), "crop", torch.Generator().manual_seed(1))
    both = prepare(images, Pixels(8), "crop-flip", torch.Generator().manual_seed(1))
    assert float(plain.min()) > -2
    crop_shifts = shifts(plain + 2, cropped + 2, 1)  # + 2: the zeros of the frame are then black
    assert len(set(crop_shifts)) == 9
    mirrored = 0
    for image, output in zip((plain + 2).numpy(), (both + 2).numpy(), strict=True):
        as_is, turned = (
            any(np.array_equal(w, o) for w in windows(image, 1).values()) for o in (output, output[:, :, ::-1])
        )
        assert as_is != turned
        mirrored += turned
    assert abs(mirrored - 100) <= 5 * math.sqrt(200 / 4)


class Oracle:
    """Predicts the head row that an image's grey value names."""

    def __init__(self):
        self.backbone = Pixels(1, mean=0.0, std=1 / 255)
        self.sizes = []
        self.reuses_query = self.adapts = False
        self.prompted = True

    def __call__(self, images, query=None):
        self.sizes.append(len(images))
        return nn.functional.one_hot(images[:, 0, 0, 0].round().long(), 3).float()


def graded(rows, labels):
    images = np.array(rows, np.uint8)[:, None, None, None].repeat(3, axis=3)
    return Dataset(tuple("abcde"), images[:0], np.array([], np.int64), images, np.array(labels), "none")


@pytest.mark.parametrize("batch", [2, 3, 256])
def test_confusion_by_hand(monkeypatch, batch):
    """Rows are the classes 4, 0, 2; class 1 is not seen yet, and position 6 is not asked for."""
    monkeypatch.setattr(feature_cache, "BATCH", batch)
    #          said:  4  4  0  2  0  2  4  0      true: 4  0  0  2  1  4  4  0
    dataset = graded([0, 0, 1, 2, 1, 2, 0, 1], [4, 0, 0, 2, 1, 4, 4, 0])
    oracle = Oracle()
    counts = confusion_counts(oracle, dataset, np.array([4, 0, 2]), np.array([7, 0, 1, 2, 3, 4, 5]))
    expected = np.zeros((5, 5))
    expected[0, [0, 4]] = 2, 1  # the 0 at 7 and 2 right, that at 1 taken for a 4
    expected[2, 2] = 1
    expected[4, [2, 4]] = 1
    assert counts.tolist() == expected.tolist()
    assert counts.dtype == np.int64
    assert sum(oracle.sizes) == 6
    assert max(oracle.sizes) == min(batch, 6)


def test_confusion_of_nothing():
    counts = confusion_counts(Oracle(), graded([0], [1]), np.array([4, 0, 2]), np.array([0]))
    assert counts.tolist() == [[0] * 5] * 5


def test_extract_features_in_order_and_of_nothing(monkeypatch):
    """The feature is the pixel itself, so features and positions must line up."""
    monkeypatch.setattr(feature_cache, "BATCH", 2)
    model, images = head_only([2], Pixels(1, mean=0.0, std=1 / 255)), graded([9, 8, 7, 6, 5], [0] * 5).test_images
    features = extract_features(model, images, np.array([4, 0, 2]))
    assert torch.allclose(features, torch.tensor([[5.0], [9.0], [7.0]]).expand(3, 3))
    assert extract_features(model, images, np.array([], np.int64)).shape == (0, 3)


def test_features_do_not_depend_on_the_batch():
    """Predicting one image at a time gives what predicting all of them gives."""
    model, images = prompted([3]), local_data(5, [0], side=8).images
    together = extract_features(model, images, np.arange(10))
    for i in range(10):
        assert torch.allclose(together[i], extract_features(model, images, np.array([i]))[0], atol=1e-5)


def test_a_new_task_keeps_old_rows_and_starts_new_ones_alike_everywhere():
    """Rows depend on the seed and their place; a model that sees all tasks at once has the same ones."""
    grown, fresh = head_only([2, 3]), head_only([2, 3])
    assert torch.equal(grown.head.weight, fresh.head.weight)
    kept = grown.head.weight.detach().clone()
    grown.begin_task(4)
    assert grown.head.weight.shape == (9, 12)
    assert torch.equal(grown.head.weight[:5], kept)
    assert grown.current_rows().tolist() == [5, 6, 7, 8]


def test_every_seed_client_and_round_trains_with_random_numbers_of_its_own(
    tiny: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = []

    def spied(*stream, **more):
        rng = torch_rng(*stream, **more)
        seeds.append(rng.initial_seed())
        return rng

    monkeypatch.setattr("client_app.learning.torch_rng", spied)
    for seed, partition_id, server_round in itertools.product((0, 1), (0, 1), (1, 2)):
        config = parse(tiny | {"seed": seed})
        message = train_message(config)
        message.config["server-round"] = server_round
        handle("train", message, Node({"partition-id": partition_id}))
    assert len(seeds) == len(set(seeds)) == 8


def test_a_client_computes_with_as_many_threads_as_the_run_says(tiny: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a deployment each message starts a process, which would take all cores."""
    numbers: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    handle("train", train_message(parse(tiny | {"threads": 3})), Node({"partition-id": 0}))
    assert numbers == [3]


def test_nodes_with_data_of_their_own_have_random_numbers_of_their_own() -> None:
    nodes = [Node({"name": name, "data-dir": "/data"}) for name in ("north", "south")]
    assert len({random_stream(parse(OWN), node) for node in nodes}) == 2
