"""What must hold for every method: a new one joins by its row in the table."""

import json
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.numpy
import torch

from client_app.client import Node, handle
from server_app.rounds.run import Run
from server_app.run_files.results import RoundReport
from server_app.transport.base import Kind, Reply
from server_app.transport.in_process import InProcessTransport
from strategies.base import RoundContext, Strategy
from task.config.parsing import parse
from task.message import Packet, Scalar
from task.methods import METHODS, load_class
from task.models.evaluation import extract_features
from task.models.load import load_backbone
from task.models.model import build_model
from task.models.vit import digest
from task.scenario.scenario import build_scenario
from tests.conftest import TINY
from tests.helpers.runs import run, train_message, without_times

# made once: methods that a test of another module registers are not the project's
# every prompt with fedavg, every method with its first: the cost of all pairs would buy little
PAIRS = [(m.name, prompt) for m in METHODS.values() for prompt in m.prompts[: None if m.name == "fedavg" else 1]]


def every_pair(methods: Container[str] = METHODS, among: Container[str] = METHODS) -> pytest.MarkDecorator:
    """A test of all pairs whose method is ``among`` some; the default tests have one prompt of each of ``methods``."""
    default = [(m, METHODS[m].prompts[0]) for m in METHODS if m in methods]
    pairs = [pair for pair in PAIRS if pair[0] in among]
    rows = [pytest.param(*pair, marks=() if pair in default else pytest.mark.ci, id="-".join(pair)) for pair in pairs]
    return pytest.mark.parametrize(("method", "prompt"), rows)


EVERY = every_pair()
TRAINING = every_pair(among=[m for m in METHODS if parse({"method": m}).trains_locally])
TRAINING_THE_HEAD = every_pair(
    among=[m for m in METHODS if parse({"method": m}).trains_locally and not METHODS[m].adapts]
)
MAIN = every_pair(["hgp", "pip", "fppl", "hepco", "fedprok", "fedrda", "afcl", "fedavg"])  # where two runs take long
SOME = every_pair(["hgp", "fedrda", "ncm"])  # for what no strategy does itself
# other prompts of the methods whose server does more than average while clients train
REFINED = [
    (m.name, prompt)
    for m in METHODS.values()
    if load_class(m.strategy).refine is not Strategy.refine and not m.adapts
    for prompt in m.prompts[1:]
]
# no bias in a ridge regression; one step of Adam moves one number by the step size, whatever the gradient
SAME_WITH_ANOTHER_SEED = {"afcl": {"head.bias"}, "fused": {"prompt.scale"}}
LEARNS_OLD = {"joint", "fedlwf", "fedprok"}  # from images of all tasks, a teacher, pseudo features
NOISED = [  # what trains and may have noise
    m.name for m in METHODS.values() if m.objective and not m.adapts and not m.pooled and m.name != "fedewc"
]
# of each prompt, what the first task trains
PROMPT_ARRAYS: dict[str, set[str]] = {
    "none": set(),
    "shared": {"prompt.prefix"},
    "l2p": {"prompt.pool", "prompt.keys"},
    "dualprompt": {"prompt.general", "prompt.experts.0", "prompt.keys.0"},
    "fused": {"prompt.prompts.0"},
    "decomposed": {"prompt.keys", "prompt.pool"},
    "coda": {"prompt.keys.0", "prompt.attention.0", "prompt.prompts.0"},
    "lora": {"prompt.down", "prompt.up"},
}

FOUR_OF_TWELVE: dict[str, Scalar] = {
    "partition": "dirichlet",
    "dirichlet-beta": 0.05,
    "num-clients": 12,
    "clients-per-round": 4,
    "rounds-per-task": 2,
}


class Finished(NamedTuple):
    """What tests look at of a run.

    ``before`` and ``after`` are digests of the frozen backbone; ``moved`` are arrays that a round has changed though it
    neither trained nor computed them; ``message`` is the last one that asked a client to train.
    """

    folder: Path
    before: str
    after: str
    moved: set[str]
    message: Packet


def watch(patch: pytest.MonkeyPatch, moved: set[str], messages: list[Packet]) -> None:
    """Note, of each round of a run, what :class:`Finished` names."""
    train_round, exchange = Run.train_round, InProcessTransport.exchange

    def watched_round(self: Run, context: RoundContext) -> RoundReport:
        model = self.model
        trains = self.config.trains_in(context.server_round)
        before, free = model.export(), set(model.trained_state()) if trains else set[str]()
        report = train_round(self, context)
        computed = () if model.head.trained else ("head.",)
        kept = [name for name in before if name not in free and not name.startswith(computed)]
        moved.update(name for name in kept if (model.export()[name] != before[name]).any())
        return report

    def watched_exchange(
        self: InProcessTransport, kind: Kind, packets: Mapping[int, Packet], timeout: float, largest_answer: int = 0
    ) -> Iterable[Reply]:
        messages.extend(packets.values() if kind == "train" else ())
        return exchange(self, kind, packets, timeout, largest_answer)

    patch.setattr(Run, "train_round", watched_round)
    patch.setattr(InProcessTransport, "exchange", watched_exchange)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Scalar], str, str], Finished]:
    """A run of a method and prompt, which all tests that only look at one share."""
    folder, runs = tmp_path_factory.mktemp("finished"), dict[tuple[str, str], Finished]()

    def find(tiny: dict[str, Scalar], method: str, prompt: str) -> Finished:
        if (method, prompt) not in runs:
            values = tiny | {"method": method, "prompt": prompt, "output-dir": str(folder)}
            config = parse(values)
            backbone = load_backbone(config.backbone, config.backbone_weights, config.image_size, "cpu")
            before, moved, messages = digest(backbone.vit), set[str](), list[Packet]()
            with pytest.MonkeyPatch.context() as patch:
                watch(patch, moved, messages)
                run(values | {"run-name": f"{method}-{prompt}"})
            after = digest(backbone.vit)
            runs[method, prompt] = Finished(folder / f"{method}-{prompt}", before, after, moved, messages[-1])
        return runs[method, prompt]

    return find


@MAIN
def test_same_seed_same_results_and_another_seed_others(
    method: str, prompt: str, tiny: dict, tmp_path: Path, finished: Callable
) -> None:
    folder = finished(tiny, method, prompt).folder
    one = json.loads((folder / "results.json").read_text())
    again = run(tiny | {"method": method, "prompt": prompt, "run-name": "again"})
    assert without_times(again) == without_times(one)
    models = (folder / "model.safetensors", tmp_path / "runs" / "again" / "model.safetensors")
    first, second = (safetensors.numpy.load_file(m) for m in models)
    assert all((first[n] == second[n]).all() for n in first)
    other = run(tiny | {"method": method, "prompt": prompt, "run-name": "other", "seed": 1})
    assert other["class_order"] != one["class_order"]
    same = SAME_WITH_ANOTHER_SEED.get(method, set()) | SAME_WITH_ANOTHER_SEED.get(prompt, set())
    drawn = safetensors.numpy.load_file(tmp_path / "runs" / "other" / "model.safetensors")
    assert {n for n in first if (first[n] == drawn[n]).all()} == same


@EVERY
def test_another_seed_gives_another_start_of_all_but_constant_arrays(method: str, prompt: str, tiny: dict) -> None:
    keys = tiny | {"method": method, "prompt": prompt}
    first, other = (build_model(parse(keys | {"seed": seed}), [6]).export() for seed in (0, 1))
    same = {n for n in first if n != "backbone" and (first[n] == other[n]).all()}
    assert all(np.ptp(first[n]) == 0 for n in same), same


@EVERY
def test_backbone_is_unchanged_bit_for_bit(method: str, prompt: str, tiny: dict, finished: Callable) -> None:
    """That which all clients of a process share; a method that trains one trains a copy."""
    run_of_it = finished(tiny, method, prompt)
    assert run_of_it.before == run_of_it.after
    config = parse(tiny | {"method": method, "prompt": prompt})
    backbone = load_backbone(config.backbone, config.backbone_weights, config.image_size, "cpu")
    assert all(p.grad is None and not p.requires_grad for p in backbone.parameters())


@EVERY
def test_a_round_moves_only_what_it_trains(method: str, prompt: str, tiny: dict, finished: Callable) -> None:
    assert finished(tiny, method, prompt).moved == set()


@pytest.mark.ci
@pytest.mark.parametrize(("method", "prompt"), REFINED)
def test_what_refines_a_model_moves_no_prompt_of_an_ended_task(
    method: str, prompt: str, tiny: dict, finished: Callable
) -> None:
    assert finished(tiny, method, prompt).moved == set()


@EVERY
def test_exactly_the_expected_arrays_travel(method: str, prompt: str, tiny: dict) -> None:
    config = parse(tiny | {"method": method, "prompt": prompt})
    answer = handle("train", train_message(config), Node({"partition-id": 0}))
    head = "local_head" if METHODS[method].adapts else "head"
    trained = {f"{head}.weight", f"{head}.bias"} | PROMPT_ARRAYS[prompt]
    trained |= {"backbone"} if METHODS[method].backbone == "trained" else set()
    assert set(answer.arrays) == (trained if config.trains_locally else set())
    means = {"class_ids", "counts", "means"}
    statistics = {"hgp": means | {"variances"}, "ncm": means, "pip": means | {"variances"}}
    statistics |= {"fppl": means, "fedprok": means, "ccvr": means | {"covariances"}}
    statistics |= {"hepco": {"class_ids", "counts"}, "fedslca": means | {"covariances"}}
    statistics |= {"fedewc": {"class_ids", "counts", "fisher"}, "afcl": means | {"scatter"}}
    assert set(answer.statistics) == statistics.get(method, set())
    assert all(a.dtype == np.float32 for a in answer.arrays.values())


@TRAINING
def test_training_changes_every_travelling_array(method: str, prompt: str, tiny: dict) -> None:
    """Two epochs, as the first step cannot change one half of a product whose other half starts at zero (lora)."""
    config = parse(tiny | {"method": method, "prompt": prompt, "local-epochs": 2})
    sent = train_message(config)
    answer = handle("train", sent, Node({"partition-id": 0}))
    assert answer.arrays
    assert all((answer.arrays[name] != sent.arrays[name]).any() for name in answer.arrays)


@TRAINING_THE_HEAD
def test_old_rows_stay_as_they_are_on_a_client_unless_it_learns_old_classes_too(
    method: str, prompt: str, tiny: dict, finished: Callable
) -> None:
    """The message is that of a run's second task, with all that the strategy broadcasts."""
    config = parse(tiny | {"method": method, "prompt": prompt})
    sent = finished(tiny, method, prompt).message
    answer = handle("train", sent, Node({"partition-id": 0}))
    old = build_scenario(config).task_sizes(0)[0]
    for name in ("head.weight", "head.bias"):
        assert (answer.arrays[name][:old] == sent.arrays[name][:old]).all() == (method not in LEARNS_OLD)
        assert (answer.arrays[name][old:] != sent.arrays[name][old:]).any()


@pytest.mark.parametrize(("method", "own"), [*((method, {}) for method in NOISED), ("pip", {"pip-logits": "seen"})])
def test_noise_is_in_the_head_rows_that_training_can_move_and_in_no_others(
    method: str, own: dict[str, Scalar], tiny: dict, finished: Callable
) -> None:
    """Noise in other rows would protect nothing, and wash the old classes out in round after round."""
    prompt = METHODS[method].prompts[0]
    needs_features = load_class(METHODS[method].statistics).needs_features
    noise: dict[str, Scalar] = {"privacy-clip": 1.0, "privacy-noise": 1.0}
    noise |= {"privacy-feature-clip": 10.0} if needs_features else {}
    config = parse(tiny | {"method": method, "prompt": prompt} | noise | own)
    message = finished(tiny, method, prompt).message
    sent = replace(message, config=message.config | {"run-config": json.dumps(config.for_clients())})
    answer = handle("train", sent, Node({"partition-id": 0}))
    old = build_scenario(config).task_sizes(0)[0]
    weight, before = answer.arrays["head.weight"], sent.arrays["head.weight"]
    assert (weight[:old] == before[:old]).all() == (method not in LEARNS_OLD and not own)
    assert (weight[old:] != before[old:]).all()


@EVERY
def test_prediction_of_an_image_does_not_depend_on_its_batch(method: str, prompt: str, tiny: dict) -> None:
    config = parse(tiny | {"method": method, "prompt": prompt})
    model = build_model(config, [6, 6])
    torch.manual_seed(0)
    images = torch.randn(7, 3, model.backbone.image_size, model.backbone.image_size)
    shuffled = torch.randperm(7)
    with torch.inference_mode():
        together, alone = model(images), torch.cat([model(image[None]) for image in images])
        permuted = model(images[shuffled])
    assert torch.allclose(together, alone, atol=1e-5)
    assert torch.allclose(together[shuffled], permuted, atol=1e-5)


@EVERY
def test_save_and_load_gives_the_same_model(method: str, prompt: str, tiny: dict, finished: Callable) -> None:
    config = parse(tiny | {"method": method, "prompt": prompt})
    folder = finished(tiny, method, prompt).folder
    results = json.loads((folder / "results.json").read_text())
    path = folder / "model.safetensors"
    scenario = build_scenario(config)
    model = build_model(config, scenario.task_sizes(1))
    model.load(safetensors.numpy.load_file(path))
    features = extract_features(model, scenario.dataset.test_images, np.arange(len(scenario.dataset.test_labels)))
    order = np.array(results["class_order"])
    with torch.inference_mode():
        predicted = order[model.head(features).argmax(1).numpy()]
    assert results["metrics"]["last_accuracy"] == pytest.approx((predicted == scenario.dataset.test_labels).mean())


@MAIN
def test_clearly_above_chance_after_one_round(method: str, prompt: str, tiny: dict) -> None:
    results = run(tiny | {"method": method, "prompt": prompt, "num-tasks": 1, "local-epochs": 3})
    assert results["per_task_seen_accuracy"][0] > 0.2  # 12 classes: chance is 0.083


@SOME
def test_evaluation_by_the_clients_gives_the_same_matrix(
    method: str, prompt: str, tiny: dict, finished: Callable
) -> None:
    own = json.loads((finished(tiny, method, prompt).folder / "results.json").read_text())
    theirs = run(tiny | {"method": method, "prompt": prompt, "run-name": "clients", "evaluate": "clients"})
    assert own["accuracy_matrix"] == theirs["accuracy_matrix"]
    assert own["per_class_accuracy"] == theirs["per_class_accuracy"]
    assert own["confusion"] == theirs["confusion"]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], dict[str, Any]]:
    """Results of a run of averaging in which four of twelve take part."""
    folder = {"output-dir": str(tmp_path_factory.mktemp("drawn"))}
    return cache(lambda: run(TINY | FOUR_OF_TWELVE | folder | {"method": "fedavg"}))


@SOME
def test_partial_participation_and_uneven_data(method: str, prompt: str, tiny: dict, drawn: Callable) -> None:
    """Clients and classes are drawn alike for all methods."""
    values = tiny | FOUR_OF_TWELVE | {"method": method, "prompt": prompt}
    results, rounds = run(values), 4 + parse(values).adaptation_rounds
    assert results["class_order"] == drawn()["class_order"]
    assert [r["participants"] for r in results["rounds"][:4]] == [r["participants"] for r in drawn()["rounds"]]
    assert results["status"] == "finished"
    assert [len(r["participants"]) for r in results["rounds"]] == [4] * rounds
    assert not any(r["failures"] for r in results["rounds"])
    assert len({tuple(r["participants"]) for r in results["rounds"]}) > 1
