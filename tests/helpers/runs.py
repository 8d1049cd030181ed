"""Runs in this process: whole, tampered with or interrupted, and what of their results two equal runs share."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from server_app.rounds.run import run_experiment
from server_app.run_files.resume import load_resumed_keys
from server_app.transport.base import Reply
from server_app.transport.in_process import InProcessTransport
from task.config.parsing import parse
from task.config.schema import Config
from task.message import Kind, Packet, Scalar, payload_bytes
from task.models.model import build_model, to_arrays
from task.scenario.scenario import build_scenario
from tests.conftest import TINY

Values = dict[str, Any]
Change = Callable[[Packet], object]  # of a client's answer, in place
TWO: Values = TINY | {"num-clients": 2}
# noise, the same in every run
PRIVATE: Values = {"privacy-clip": 1.0, "privacy-noise": 1.0, "privacy-feature-clip": 10.0, "privacy-seeded": True}


def settings(folder: Path, name: str) -> Values:
    """Run keys of a run of two clients whose results go below ``folder``."""
    return {**TWO, "output-dir": str(folder), "run-name": name}


def set_statistic(name: str, edit: Callable[[np.ndarray], np.ndarray]) -> Change:
    """A change of one array of an answer's statistics."""
    return lambda answer: answer.statistics.update({name: edit(answer.statistics[name].copy())})


class PowerCutError(BaseException):
    """Ends a run where it stands."""


def run(values: Values, transport: InProcessTransport | None = None, **faults: Any) -> dict[str, Any]:
    """Results of a whole run, or of the rest of one that is resumed; ``faults`` as FaultyTransport takes them."""
    config = parse(load_resumed_keys(values))
    transport = transport or FaultyTransport(config.num_clients or 4, **faults)
    return results_of(run_experiment(config, transport))


def folder_of(values: Values) -> Path:
    """Folder of a run that has a name."""
    return Path(values["output-dir"]) / values["run-name"]


def results_of(folder: Path) -> dict[str, Any]:
    """What results.json in a run's folder holds."""
    return json.loads((folder / "results.json").read_text())


def model_of(values: Values) -> dict[str, np.ndarray]:
    """Arrays of the model that a run has written."""
    return safetensors.numpy.load_file(folder_of(values) / "model.safetensors")


def without_times(results: dict[str, Any]) -> dict[str, Any]:
    """Results without what may differ between two equal runs."""
    rounds = [{k: v for k, v in r.items() if k != "seconds"} for r in results["rounds"]]
    return {k: v for k, v in results.items() if k != "seconds"} | {"rounds": rounds}


def comparable(folder: Path) -> dict[str, Any]:
    """results.json of a run without what the clock or the machine decides: equal through every transport."""
    results = without_times(results_of(folder))
    del results["environment"]
    return results


def hello_message(values: Values) -> Packet:
    """The server's first message, of a run with these run keys."""
    return Packet(config={"run-config": json.dumps(dict(values))})


def train_message(config: Config, task: int = 0) -> Packet:
    """The server's message of the first round of a task."""
    model = build_model(config, build_scenario(config).task_sizes(task))
    position = {"task": task + 1, "round": 1, "server-round": task + 1, "ends-task": True, "pool": "client-0000"}
    position |= {"backbone-sha256": model.backbone.sha256, "run-config": json.dumps(config.for_clients())}
    return Packet(arrays=to_arrays(model.message_state()), config=position)


class FaultyTransport(InProcessTransport):
    """Nodes in this process of which some do not answer, or answer something else.

    ``tamper`` gets node, kind and answer and returns the answer that arrives instead; ``broken`` gets node and kind and
    returns whether the node does not answer; ``node_settings`` are the node config of each, beside its partition-id.
    """

    def __init__(
        self,
        num_clients: int,
        node_settings: Sequence[Mapping[str, Scalar]] = (),
        tamper: Callable[[int, Kind, Packet], Packet] = lambda node, kind, answer: answer,
        broken: Callable[[int, Kind], bool] = lambda node, kind: False,
    ) -> None:
        super().__init__(num_clients)
        for i, settings in enumerate(node_settings):
            self._nodes[i] = replace(self._nodes[i], settings={**settings, **self._nodes[i].settings})
        self.tamper, self.broken = tamper, broken

    def exchange(
        self, kind: Kind, packets: Mapping[int, Packet], timeout: float, largest_answer: int = 0
    ) -> Iterator[Reply]:
        for node, packet in packets.items():
            if self.broken(node, kind):
                yield Reply(node, None, f"no answer within {timeout:g} s", payload_bytes(packet), 0)
            else:
                [reply] = super().exchange(kind, {node: packet}, timeout, largest_answer)
                answer = self.tamper(node, kind, reply.packet)
                yield Reply(node, answer, "", reply.bytes_down, payload_bytes(answer))
                del reply, answer


class PowerCut(InProcessTransport):
    """The power goes when the train messages of a server round are sent."""

    def __init__(self, config: Config, cut_in_round: int) -> None:
        super().__init__(config.num_clients or 4)
        self._cut_in_round = cut_in_round

    def exchange(
        self, kind: Kind, packets: Mapping[int, Packet], timeout: float, largest_answer: int = 0
    ) -> Iterable[Reply]:
        if kind == "train" and any(p.config["server-round"] == self._cut_in_round for p in packets.values()):
            raise PowerCutError
        return super().exchange(kind, packets, timeout, largest_answer)


def interrupt(values: Values, cut_in_round: int) -> Path:
    """Folder of a run that ended while clients were training in a server round."""
    config = parse(load_resumed_keys(values))
    with pytest.raises(PowerCutError):
        run_experiment(config, PowerCut(config, cut_in_round))
    return Path(config.output_dir) / config.run_name
