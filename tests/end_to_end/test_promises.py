"""What the README promises about memory and about the bundled weights."""

import gc
import json
from subprocess import CompletedProcess
from unittest.mock import patch

import pytest
import torch

from benchmarks.memory import measure_run
from benchmarks.probe import probe
from server_app.rounds.run import run_experiment
from server_app.transport.in_process import InProcessTransport
from task.config.parsing import parse
from task.data.images import Dataset
from task.models.bundled import BUNDLED
from task.models.model import build_model
from task.models.vit import ViT
from task.models.weights import build_vit


def test_one_backbone_and_one_copy_of_the_data_serve_all_clients(tiny: dict) -> None:
    gc.collect()

    def count() -> tuple[int, int]:
        alive = [o for o in gc.get_objects() if type(o) in (ViT, Dataset)]
        return sum(type(o) is ViT for o in alive), sum(type(o) is Dataset for o in alive)

    config = parse(tiny | {"num-clients": 3})
    build_model(config, [])
    few = count()
    config = parse(tiny | {"num-clients": 12, "run-name": "many"})
    run_experiment(config, InProcessTransport(12))
    gc.collect()
    backbones, data_sets = count()
    assert backbones == few[0]
    assert data_sets <= few[1] + 1


@pytest.mark.ci
def test_a_run_whose_memory_cannot_be_measured_says_why() -> None:
    with pytest.raises(SystemExit, match=r"run key 'hgp-epoch' does not exist\. Did you mean 'hgp-epochs'"):
        measure_run({"hgp-epoch": "1"})
    killed = CompletedProcess([], -9, "", "")
    with patch("subprocess.run", return_value=killed), pytest.raises(SystemExit, match="the run ended with -9"):
        measure_run({})


def saved_bytes(module: torch.nn.Module, weights: torch.nn.Module, images: torch.Tensor) -> int:
    """Bytes that autograd keeps for the backward pass, each storage once, the ``weights`` themselves left out."""
    own = {p.untyped_storage().data_ptr() for p in weights.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        output = module(images)
    assert output.requires_grad
    return sum(kept.values())


def test_a_prompted_pass_keeps_less_than_full_training_would() -> None:
    """Frozen weights need no input activations: what is kept stays below a plain ViT that trains everything."""
    model = build_model(parse({"device": "cpu"}), [10])
    images = torch.randn(8, 3, 32, 32)
    prompted = saved_bytes(model, model.backbone, images)
    plain, _, _ = build_vit("vit_glyphs", "auto")
    assert prompted < 0.8 * saved_bytes(plain.train(), plain, images)
    twice = saved_bytes(model, model.backbone, torch.cat([images, images]))
    assert twice == pytest.approx(2 * prompted, rel=0.02)
    model(images).sum().backward()
    assert all(p.grad is None for p in model.backbone.parameters())


@pytest.mark.ci
def test_bundled_weights_reach_their_recorded_figures() -> None:
    """At least 97.8 % by linear probe and 89 % by nearest class mean; random weights far below."""
    metadata = json.loads(BUNDLED["vit_glyphs"].read_text())
    parts = [BUNDLED["vit_glyphs"].parent / part for part in metadata["parts"]]
    assert sum(path.stat().st_size for path in [BUNDLED["vit_glyphs"], *parts]) <= 3_000_000
    accuracies = probe(parse({"method": "ncm", "device": "cpu"}))
    assert accuracies == pytest.approx(metadata["probe"]["digits test split, frozen features"], abs=0.006)
    assert accuracies["linear_probe"] >= 0.978
    assert accuracies["nearest_class_mean"] >= 0.89
    assert probe(parse({"method": "ncm", "backbone-weights": "random"}))["nearest_class_mean"] < 0.6
