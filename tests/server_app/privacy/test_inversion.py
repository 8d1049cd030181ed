"""``fcil privacy``: SSIM against an independent computation, an inversion that must succeed, and the command itself."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import ndimage

from server_app.cli import main as cli
from server_app.privacy.inversion import (
    Inversion,
    _attack_targets,
    _compare_with_real,
    _reported_positions,
    attack,
    differentiable_features,
    invert,
    privacy_score,
    smallest_mse,
    ssim,
    total_variation,
)
from task.config.parsing import parse
from task.models.model import build_model
from task.scenario.scenario import build_scenario
from task.utils.seeding import torch_rng
from tests.helpers.runs import run


def test_ssim_of_flat_images_by_hand() -> None:
    """Without variance the second factor is 1: (2 x 0.2 x 0.6 + 1e-4) / (0.04 + 0.36 + 1e-4)."""
    flat = torch.ones(2, 3, 16, 16) * torch.tensor([0.2, 0.6])[:, None, None, None]
    assert ssim(flat, flat).tolist() == pytest.approx([1, 1], abs=1e-4)
    assert ssim(flat[:1], flat[1:]).item() == pytest.approx(0.2401 / 0.4001, abs=1e-3)


def test_ssim_agrees_with_windows_of_scipy() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.random((2, 20, 17))

    def mean(values: np.ndarray) -> np.ndarray:
        return ndimage.gaussian_filter(values, 1.5, radius=5)[5:-5, 5:-5]

    mx, my = mean(x), mean(y)
    vx, vy, c = mean(x * x) - mx * mx, mean(y * y) - my * my, mean(x * y) - mx * my
    expected = ((2 * mx * my + 1e-4) * (2 * c + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4))).mean()
    similarity = ssim(torch.from_numpy(x)[None, None], torch.from_numpy(y)[None, None])
    assert similarity.item() == pytest.approx(expected, abs=1e-6)


def test_privacy_by_hand() -> None:
    """Images of two pixels, 0.2 and 0.6 off, then 0.4 and 0: MSE (0.04 + 0.36) / 2 = 0.2 and 0.08 -> P 0.08 / 1.08."""
    real = np.array([[[[51], [255]]], [[[0], [102]]]], np.uint8)
    mse = smallest_mse(np.array([[[0.4], [0.4]]]), real)
    assert mse == pytest.approx(0.08)
    assert privacy_score(mse) == pytest.approx(0.08 / 1.08)
    assert privacy_score(0.0) == 0


def test_targets_of_half_precision_do_not_overflow() -> None:
    """300 squared is above what fp16 holds: the gap would be 0 whatever the image is."""
    config = parse({"method": "afcl", "afcl-dtype": "fp16"})
    targets = _attack_targets({"means": np.full((2, 3), 300, np.float16)}, "mean", config)
    assert targets.square().sum().item() == 6 * 300**2


def test_a_sample_is_a_draw_of_the_class_gaussian() -> None:
    """Mean 3, and a deviation of 2: from the diagonal alone, or 3 of its variance 4 from two directions."""
    means, ones = np.full((1, 4096), 3, np.float32), np.ones((1, 4096), np.float32)
    for packing, spread in {
        "diagonal": {"variances": 4 * ones},
        "low-rank": {"variances": ones, "factors": np.stack([ones, 2**0.5 * ones], axis=1)},
    }.items():
        config = parse({"method": "hgp", "hgp-covariance": packing})
        statistics = {"class_ids": np.array([0]), "counts": np.array([9]), "means": means} | spread
        assert (_attack_targets(statistics, "mean", config) == 3).all()
        away = _attack_targets(statistics, "sample", config)[0] - 3
        if packing == "diagonal":
            assert away.mean().abs() < 0.2
            assert away.std() == pytest.approx(2, abs=0.1)
        else:  # both directions move all numbers alike, and the diagonal each on its own
            assert away.mean().abs() > 0.2
            assert away.std() == pytest.approx(1, abs=0.1)


def test_a_reconstruction_is_compared_with_the_images_of_its_client_and_with_those_of_the_others(tiny: dict) -> None:
    """It is one of the client's images, so it differs from all images of the others."""
    config = parse(tiny)
    scenario, attacked = build_scenario(config), SimpleNamespace()
    attacked.metadata, attacked.model = SimpleNamespace(task_sizes=[6]), build_model(config, [6])
    own, others = (_reported_positions(config, attacked, client) for client in (0, 1))
    assert not set(own) & set(others)
    pixels, class_id = scenario.dataset.train_images, scenario.dataset.train_labels[own[0]]
    of_class = own[scenario.dataset.train_labels[own] == class_id]

    def compared(position: int, with_positions: np.ndarray) -> Inversion:
        image = torch.from_numpy(pixels[position] / 255).float().permute(2, 0, 1)
        return _compare_with_real(scenario, with_positions, class_id, image, 0.5, attacked)

    found, foreign = compared(own[0], own), compared(own[0], others)
    assert (found.name, found.images, found.distance) == (scenario.dataset.class_names[class_id], len(of_class), 0.5)
    np.testing.assert_array_equal(found.real, pixels[own[0]] / 255)
    assert (found.ssim, found.mse) == pytest.approx((1, 0), abs=1e-5)
    assert found.ssim_others < 0.99
    assert found.ssim_real == pytest.approx(np.mean([compared(i, own).ssim_others for i in of_class]))
    assert (foreign.ssim_others, foreign.mse > 0) == (pytest.approx(1, abs=1e-5), True)
    numbers = foreign.numbers()
    assert numbers["p"] == pytest.approx(foreign.mse / (1 + foreign.mse))
    assert numbers["p_255"] == pytest.approx(255**2 * foreign.mse / (1 + 255**2 * foreign.mse))


def test_total_variation_by_hand() -> None:
    """Steps down 1 and 0, across 0 and 1: means 0.5 and 0.5."""
    assert total_variation(torch.tensor([[[[0.0, 0.0], [1.0, 0.0]]]])).tolist() == [1.0]


def test_the_inversion_finds_an_image_with_the_features_of_another(tiny: dict) -> None:
    """What one image's mean is: its own features; the noise that the attack starts from is three times as far."""
    model = build_model(parse(tiny), [6])
    secret = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        targets = differentiable_features(model, secret)
    images, distances = invert(model, targets, (8, 8, 1), 60, torch_rng(0, "test"))
    _, start = invert(model, targets, (8, 8, 1), 1, torch_rng(0, "test"))
    assert images.shape == (2, 1, 8, 8)
    assert 0 <= images.min() < images.max() <= 1
    assert all(after < before / 3 for before, after in zip(start, distances, strict=True))
    assert all(p.grad is None for p in model.parameters())


def privacy(folder: str, *more: str) -> int:
    return cli.main(["privacy", folder, "--steps", "3", "--device", "cpu", *more])


@pytest.mark.parametrize("method", ["hgp", "afcl", "pip"])
def test_the_command_leaves_a_table_and_a_picture(method: str, tiny: dict, capsys: pytest.CaptureFixture) -> None:
    run(tiny | {"method": method})
    folder = f"{tiny['output-dir']}/run"
    assert privacy(folder, "--classes", "2") == 0
    said = capsys.readouterr().out
    assert "SSIM own" in said
    assert str(Path(folder) / "privacy.png") in said
    written = json.loads((Path(folder) / "privacy.json").read_text())
    assert len(written["classes"]) == 2
    assert written["classes"][0]["images"] <= written["classes"][1]["images"]
    found = attack(Path(folder), 0, "mean", 2, 3, "cpu")
    assert written["classes"] == [inversion.numbers() for inversion in found]
    for name in ("ssim", "mse", "p", "p_255"):
        assert written[name] == pytest.approx(np.mean([c[name] for c in written["classes"]]))
    assert 0 < written["p"] < 0.5 < written["p_255"] < 1
    assert (Path(folder) / "privacy.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.ci
def test_what_cannot_be_attacked_is_named(tiny: dict, capsys: pytest.CaptureFixture) -> None:
    run(tiny | {"method": "fppl", "run-name": "means"})
    run(tiny | {"method": "fedavg", "run-name": "nothing"})
    run(tiny | {"method": "ncm", "run-name": "sums", "secure-aggregation": "pairwise"})
    means, nothing, sums = (f"{tiny['output-dir']}/{name}" for name in ("means", "nothing", "sums"))
    for words, reason in (
        ((nothing,), "'fedavg' sends no statistics"),
        ((sums,), "had sums over clients alone"),
        ((means, "--client", "7"), "clients 0 to 2"),
        ((means, "--target", "sample"), "sends means alone"),
    ):
        assert privacy(*words) == 2
        assert reason in capsys.readouterr().err
    assert privacy(f"{tiny['output-dir']}/nowhere") == 1
    assert privacy(f"{means}/model.safetensors") == 2
    assert "name a run's folder" in capsys.readouterr().err


def test_a_sample_of_what_was_sent_may_be_the_target(tiny: dict) -> None:
    run(tiny | {"hgp-covariance": "low-rank"})
    assert privacy(f"{tiny['output-dir']}/run", "--target", "sample", "--classes", "1") == 0


def test_thresholds_hold_for_the_attack_too(
    tiny: dict, capsys: pytest.CaptureFixture, caplog: pytest.LogCaptureFixture
) -> None:
    run(tiny | {"min-class-count": 10**6})
    assert "so hgp gets no statistics at all" in caplog.text
    assert privacy(f"{tiny['output-dir']}/run") == 2
    assert "min-class-count" in capsys.readouterr().err
