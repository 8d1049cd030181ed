"""Every method on a pretended GPU: nothing is left on the wrong device, and a stopped run goes on without the GPU."""

import copy
import pickle
from contextlib import nullcontext
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch

from benchmarks import gpu
from benchmarks.probe import probe
from task.config.parsing import parse
from task.methods import METHODS
from task.prompt_kinds import PROMPTS
from tests.helpers.pretended_gpu import OnGPU, pretended_gpu
from tests.helpers.runs import interrupt, run


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads know nothing of the pretended GPU."""
    monkeypatch.setattr("strategies.hepco.run_in_threads", lambda jobs, _: [job(Event()) for job in jobs])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a real GPU refuses for itself")
def test_the_pretended_gpu_refuses_what_a_real_one_refuses() -> None:
    with pretended_gpu():
        there, here = torch.arange(6.0, device="cuda").reshape(2, 3), torch.ones(3, 2)
        assert there.device == torch.device("cuda:0")
        with pytest.raises(RuntimeError, match="same device"):
            there @ here
        with pytest.raises(RuntimeError, match="numpy"):
            there.numpy()
        with pytest.raises(RuntimeError, match="generator"):
            torch.randn(2, generator=torch.Generator(), device="cuda")
        with pytest.raises(RuntimeError, match="generator"):
            torch.randn(2, generator=torch.Generator("cuda"))
        with pytest.raises(RuntimeError, match="same device"):
            here[there[:1, 0].long()]
        with pytest.raises(RuntimeError, match="same device"):
            torch.stack([there[0, 0], here[0, 0]])
        assert there[torch.tensor([1])].tolist() == [[3, 4, 5]]
        assert (there * here[0, 0]).device == torch.device("cuda:0")
        saved = pickle.dumps(there)
        assert pickle.loads(saved).tolist() == copy.deepcopy(there).tolist() == there.tolist()
        product = there @ here.to("cuda")
        assert isinstance(product, OnGPU)
        assert product.tolist() == [[3, 3], [12, 12]]
        layer = torch.nn.Linear(3, 1).to("cuda")
        layer(there).sum().backward()
        assert isinstance(layer.weight.grad, OnGPU)
        assert layer.weight.grad.cpu().numpy().tolist() == [[3, 5, 7]]
    assert not torch.cuda.is_available()
    with pytest.raises(RuntimeError, match="this machine has none"):
        pickle.loads(saved)


@pytest.mark.ci
@pytest.mark.parametrize("method", METHODS)
def test_a_run_on_a_gpu_is_that_on_the_cpu(method: str, tmp_path: Path) -> None:
    """With the same random numbers, but for rounding: as `python -m benchmarks.gpu` compares them."""
    with pretended_gpu():
        answer = gpu.same_on_both(method, gpu.Setting("cuda", True, None, None, tmp_path))
    assert answer["met"], answer


@pytest.mark.ci
@pytest.mark.parametrize("prompt", [name for name in PROMPTS if name != "shared"])  # which other tests here have
def test_every_prompt_trains_on_a_gpu(prompt: str, tmp_path: Path) -> None:
    small = gpu.Setting("cuda", True, None, None, tmp_path).small("fedavg") | {"prompt": prompt, "num-tasks": 1}
    with pretended_gpu():
        results = run(small | {"output-dir": str(tmp_path), "run-name": "run"})
    assert results["status"] == "finished"


@pytest.mark.ci
@pytest.mark.parametrize("method", METHODS)
def test_a_run_is_resumed_on_another_device(method: str, tmp_path: Path) -> None:
    """A node with a GPU is lost after the first task; the run goes on where there is none, and the other way round."""
    small = gpu.Setting("auto", True, None, None, tmp_path).small(method) | {"output-dir": str(tmp_path)}
    results = run(small | {"run-name": "whole"})
    whole, second_task = results["accuracy_matrix"], 1 + sum(r["task"] == 1 for r in results["rounds"])
    for first, second in ((nullcontext, pretended_gpu), (pretended_gpu, nullcontext)):
        with first():
            folder = interrupt(small | {"run-name": f"begun-on-{first.__name__}"}, second_task)
        with second():
            resumed = run({"resume": str(folder)})["accuracy_matrix"]
        assert np.array(resumed, float) == pytest.approx(np.array(whole, float), abs=0.05, nan_ok=True)


@pytest.mark.ci
def test_a_probe_of_features_on_a_gpu_is_that_on_the_cpu() -> None:
    config = parse({"method": "ncm", "dataset": "synthetic", "image-size": 16})
    expected = probe(config)
    with pretended_gpu():
        assert probe(config) == pytest.approx(expected, abs=0.02)
