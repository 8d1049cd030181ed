"""A Ray cluster that runs already: its resources, and whether each of its nodes can run a run's clients.

Ray's core ends a process that cannot go on, so a process of its own asks the cluster.
"""

import json
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from server_app.errors import LaunchError
from server_app.simulation.processes import POLL, end_processes, last_lines, start_process
from task.message import Scalar

ADDRESS = "RAY_ADDRESS"  # Ray's own variable
PATIENCE = 300.0  # seconds for every node of a cluster to answer: it imports torch and reads the data
CONNECT_TIMEOUT = 10.0  # seconds
ADVICE = {
    "code": "its code in {project} is not that of this machine: copy the folder there",
    "versions": "its versions are not those of this machine ({theirs} there; {ours} here): install the same",
    "weights": "its weights are not those of this machine: copy backbone-weights there, to the same path",
    "data": "its images or labels are not those of this machine: copy data-dir there, to the same path",
}


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster of which every node that has room for a client can run one."""

    address: str  # HOST:PORT
    nodes: int  # with room for a client
    cpus: float
    gpus: float
    workers: int  # clients that train at once
    client_cpus: int
    client_gpus: float

    def __str__(self) -> str:
        """The cluster in words: its address, nodes, CPUs and GPUs."""
        return f"the Ray cluster {self.address} ({self.nodes} nodes, {self.cpus:g} CPUs, {self.gpus:g} GPUs)"


def cluster_address() -> str:
    """HOST:PORT that RAY_ADDRESS names; empty where a run shall start a Ray of its own.

    Raises:
        LaunchError: it holds something else.
    """
    address = os.environ.get(ADDRESS, "").strip()
    if address in ("", "local"):
        return ""
    if not re.fullmatch(r"[^\s/:]+:\d{1,5}", address):
        raise LaunchError(
            f"{ADDRESS} = {address!r}: HOST:PORT of the cluster's head was expected, as ray start --head said it. "
            "Unset it to run on this machine alone."
        )
    return address


def examine_cluster(
    address: str, values: Mapping[str, Scalar], client: tuple[int, float], project: Path, check: Callable[[], None]
) -> Cluster:
    """The cluster at ``address``, after each of its nodes has shown the code, versions, weights and data of this one.

    ``values`` are all run keys, ``client`` the CPUs and GPUs that each client is given, ``project`` the folder of the
    code on every node. ``check`` is called while waiting; an exception that it raises ends the wait.

    Raises:
        LaunchError: no cluster there, no node with room for a client, or nodes that cannot run one, by name.
    """
    _require_answer(address)
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder, "cluster.json"), Path(folder, "cluster.log")
        request = json.dumps({"address": address, "values": dict(values), "client": client, "answer": str(answer)})
        process = start_process([sys.executable, "-m", __name__, request], project, os.environ, log)
        try:
            deadline = time.monotonic() + 2 * PATIENCE
            while process.poll() is None and time.monotonic() < deadline:
                check()
                time.sleep(POLL)
        finally:
            end_processes([process])
        if not answer.exists():
            raise LaunchError(
                f"{ADDRESS} = {address!r}: no cluster of this version of Ray answers there, or this machine is no node "
                f"of it: ray start --address={address} makes it one.\n{last_lines(log, 3)}"
            )
        said = json.loads(answer.read_text())
    if said["problems"]:
        raise LaunchError("\n  ".join(["the Ray cluster cannot run this:", *said["problems"]]))
    return Cluster(address, **said["cluster"], client_cpus=client[0], client_gpus=client[1])


def _require_answer(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT).close()
    except (OSError, OverflowError, UnicodeError) as error:  # Ray itself would try for minutes
        raise LaunchError(
            f"{ADDRESS} = {address!r}: nothing answers there ({error}). Start the cluster with ray start, or unset "
            f"{ADDRESS} to run on this machine alone."
        ) from error


def describe_node(values: dict[str, Scalar]) -> dict[str, str]:
    """Describe this node: its versions, and digests of code, weights and images; or ``problem``, a sentence."""
    try:
        from task.config.parsing import parse
        from task.data.digests import data_digest
        from task.keys import ConfigError
        from task.models.model import build_model
        from task.scenario.scenario import build_scenario
        from task.utils.versions import code_sha256, versions
    except ImportError as error:
        return {"problem": f"it lacks this project or its packages ({error})"}
    try:
        config = parse(values)
        code, weights = code_sha256(), build_model(config, []).backbone.sha256
        data = "" if config.own_data else data_digest(build_scenario(config).dataset, whole_files=False)
    except (ConfigError, OSError) as error:
        return {"problem": str(error)}
    named = ", ".join(f"{name} {version}" for name, version in versions().items())
    return {"code": code, "versions": named, "weights": weights, "data": data}


def compare(node: dict[str, str], here: Mapping[str, str], project: str) -> str:
    """Why a node cannot run the clients, in words; empty if it can.

    ``node`` and ``here`` are the descriptions of that node and of this machine, see :func:`describe_node`.
    """
    if problem := node.get("problem"):
        return problem
    for name, advice in ADVICE.items():
        if node[name] != here[name]:
            return advice.format(project=project, theirs=node[name], ours=here[name])
    return ""


def room(node: Mapping[str, Any], cpus: int, gpus: float) -> int:
    """Clients that fit on one of ``ray.nodes()`` at once, as Flower counts them."""
    resources = node["Resources"] if node["Alive"] else {}
    by_cpus = int(resources.get("CPU", 0) / cpus)
    return min(by_cpus, int(resources.get("GPU", 0) / gpus)) if gpus else by_cpus


def _ask_nodes(address: str, values: dict[str, Scalar], client: tuple[int, float]) -> dict[str, Any]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    environment = {"env_vars": {"PYTHONPATH": path}}
    ray.init(address=address, runtime_env=environment, log_to_driver=False, include_dashboard=False)
    nodes = {node["NodeID"]: node for node in ray.nodes() if room(node, *client)}
    if not nodes:
        need = f"{client[0]} CPUs and {client[1]:g} GPUs"
        return {"problems": [f"no node has the {need} of a client: lower threads or --gpus-per-client."]}
    here, problems = describe_node(values), []
    if "problem" in here:
        return {"problems": [f"this machine: {here['problem']}"]}
    describe, answers = ray.remote(num_cpus=client[0], num_gpus=client[1], max_retries=0)(describe_node), {}
    for node_id in nodes:
        there = NodeAffinitySchedulingStrategy(node_id, soft=False)
        answers[node_id] = describe.options(scheduling_strategy=there).remote(values)
    deadline = time.monotonic() + PATIENCE
    for node_id, reference in answers.items():
        try:
            problem = compare(ray.get(reference, timeout=max(0, deadline - time.monotonic())), here, os.getcwd())
        except ray.exceptions.GetTimeoutError:
            problem = f"no answer in {PATIENCE:g} s: another run has its CPUs or GPUs, or it is too busy"
        except ray.exceptions.RayError as error:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if problem:
            problems.append(f"node {nodes[node_id]['NodeManagerAddress']} ({node_id[:8]}): {problem}")
    cpus, gpus = (sum(node["Resources"].get(name, 0) for node in nodes.values()) for name in ("CPU", "GPU"))
    workers = sum(room(node, *client) for node in nodes.values())
    return {"problems": problems, "cluster": {"nodes": len(nodes), "cpus": cpus, "gpus": gpus, "workers": workers}}


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    outcome = _ask_nodes(asked["address"], asked["values"], tuple(asked["client"]))
    Path(asked["answer"]).write_text(json.dumps(outcome))
