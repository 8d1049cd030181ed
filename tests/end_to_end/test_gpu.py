"""Every method on a pretended GPU: nothing is left on the wrong device, and a stopped run goes on without the GPU."""

import copy
import pickle
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from threading import Event
from unittest.mock import patch

import numpy as np
import pytest
import torch

from benchmarks import gpu
from server_app.rounds.run import run_experiment
from server_app.run_files.paths import read_results
from server_app.run_keys import complete_run_keys
from server_app.transport.base import Reply
from server_app.transport.in_process import InProcessTransport
from task.config.parsing import parse
from task.message import Kind, Packet, Scalar
from task.methods import METHODS
from task.prompt_kinds import PROMPTS
from tests.helpers.pretended_gpu import OnGPU, pretended_gpu


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
        start(small | {"output-dir": str(tmp_path), "run-name": "run"}, InProcessTransport)
    assert read_results(tmp_path / "run")["status"] == "finished"


class StoppedTransport(InProcessTransport):
    """Stops the run at the first training of the second task."""

    def exchange(
        self, kind: Kind, packets: Mapping[int, Packet], timeout: float, largest_answer: int = 0
    ) -> Iterable[Reply]:
        """As InProcessTransport."""
        if kind == "train" and any(packet.config.get("task") == 2 for packet in packets.values()):
            raise gpu.TimeOver
        yield from super().exchange(kind, packets, timeout, largest_answer)


@pytest.mark.ci
@pytest.mark.parametrize("first", ["cpu", "cuda"])
@pytest.mark.parametrize("method", METHODS)
def test_a_run_is_resumed_on_another_device(method: str, first: str, tmp_path: Path) -> None:
    """A node with a GPU is lost; the run goes on where there is none, and the other way round."""
    on: dict[str, AbstractContextManager[None]] = {"cpu": nullcontext(), "cuda": pretended_gpu()}
    second = "cpu" if first == "cuda" else "cuda"
    small = gpu.Setting("auto", True, None, None, tmp_path).small(method)
    keys: dict[str, Scalar] = small | {"output-dir": str(tmp_path), "run-name": "run"}
    with on[first], pytest.raises(gpu.TimeOver):
        start(keys, StoppedTransport)
    with on[second]:
        start({"resume": str(tmp_path / "run")}, InProcessTransport)
    start(keys | {"run-name": "whole"}, InProcessTransport)
    resumed, whole = (read_results(tmp_path / name)["accuracy_matrix"] for name in ("run", "whole"))
    assert np.array(resumed, float) == pytest.approx(np.array(whole, float), abs=0.05, nan_ok=True)


def start(keys: dict[str, Scalar], transport: type[InProcessTransport]) -> None:
    """Run with these keys in this thread: other threads know nothing of the pretended GPU."""
    config = parse(complete_run_keys(keys))
    with patch("strategies.hepco.run_in_threads", lambda jobs, _: [job(Event()) for job in jobs]):
        run_experiment(config, transport(config.flat(), config.num_clients))
