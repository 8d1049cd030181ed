"""docker/ without a Docker engine: the compose files, what their commands mean to Flower, what the proxy lets by."""

import http.client
import json
import re
import socket
import sqlite3
import ssl
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
import yaml
from flwr.app import Message
from flwr.common.config import parse_config_args
from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.supercore.retry.http_retry import _RETRYABLE_STATUS_CODES

from client_app.flower_records import to_records
from task.config.schema import OF_THE_NODE, keys_affecting
from task.message import Packet
from tests.helpers.compose import COMPOSE, PROGRAMS, SERVICES, filled, parsed
from tests.helpers.documents import commands, section
from tests.helpers.flower import LoopbackGrid, N, echo
from tests.helpers.proxy import DOCKER, Comparing, Upstream, free_port, make_keys, proxy, upstream

GPU = yaml.safe_load((DOCKER / "compose.gpu.yml").read_text())["services"]
PROXY = json.loads((DOCKER / "proxy.json").read_text())
# Flower's own table of paths; registration over the fleet is off where nodes are authenticated
PATHS = [path for _, path in PROTOBUF_REQUEST_TYPES]
FLEET = {p for p in PATHS if p.startswith("/v1/fleet/") and not p.endswith("register-node")}


def running(program: str) -> list[str]:
    return [name for name, service in SERVICES.items() if service["command"][0] == program]


NODES = running("flower-supernode")


# compose files


@pytest.mark.parametrize("name", ["compose.yml", "compose.gpu.yml"])
def test_compose_files_keep_to_the_specification(name):
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(DOCKER / name)]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_only_the_proxy_is_published_beyond_this_machine():
    published = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
    assert published == {"superlink": ["127.0.0.1:8000:8000"], "proxy": ["${FLEET_PORT:-8443}:8443"]}


def test_nodes_cannot_reach_the_superlink_but_through_the_proxy():
    joined = {name: set(service["networks"]) for name, service in SERVICES.items()}
    assert {name for name in joined if "control" in joined[name]} == {"superlink", "superexec-server", "proxy"}
    for node in NODES:
        place = node.replace("supernode", "node")
        assert joined[node] == {"fleet", place}
        assert {name for name in joined if place in joined[name]} == {node, node.replace("supernode", "superexec")}
        assert joined[node.replace("supernode", "superexec")] == {place}
        assert COMPOSE["networks"][place] == {"internal": True}
        assert parsed(node).superlink == "proxy:8443"


def test_no_container_fills_the_disk_with_its_log():
    assert {service["logging"]["options"]["max-size"] for service in SERVICES.values()} == {"20m"}
    assert all("max-file" in service["logging"]["options"] for service in SERVICES.values())


def test_images_have_versions():
    images = {service["image"] for service in SERVICES.values()}
    (base,) = re.findall(r"^FROM (\S+)", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    for image in {*images, base}:
        assert re.fullmatch(r"[\w./-]+:(?!latest)[\w.${}:-]+", image), image


def test_tls_and_node_authentication_are_on():
    server = parsed("superlink")
    assert server.enable_supernode_auth
    assert not server.insecure
    assert all((server.ssl_certfile, server.ssl_keyfile, server.ssl_ca_certfile))
    for name in (*NODES, "superexec-server"):
        assert not parsed(name).insecure
        assert parsed(name).root_certificates == "/run/secrets/ca.crt"


def test_the_server_is_started_before_the_nodes_are_registered():
    """In the README, as a node that is not registered ends."""
    lines = [words[:3] + words[5:] for words in commands("docker/README.md") if words[:2] == ["docker", "compose"]]
    (_, *first), (_, *then) = lines
    started = [word for word in first if word in SERVICES]
    assert set(started) == {name for name in SERVICES if not re.search(r"-\d$", name)}
    assert not set(then) & set(SERVICES)  # all
    text = section("docker/README.md", "With Docker, on one machine")
    order = [text.index(words) for words in (" ".join(started), "supernode register", "up --detach\n", "flwr run")]
    assert order == sorted(order)


def test_training_runs_in_processes_of_their_own():
    assert parsed("superlink").isolation == "process"
    assert parsed("superexec-server").runtime_api_address == "superlink:8000"
    for node in NODES:
        of_node, of_worker = parsed(node), parsed(node.replace("supernode", "superexec"))
        assert of_node.isolation == "process"
        assert of_worker.runtime_api_address == f"{node}:{of_node.port}"
        assert of_worker.superexec_auth_secret_file == of_node.superexec_auth_secret_file
    secrets = [parsed(name).superexec_auth_secret_file for name in ("superlink", *NODES)]
    assert len(set(secrets)) == len(secrets) == len(running("flower-superexec"))


def test_every_node_has_a_key_and_a_partition():
    assert len(NODES) >= 2
    assert len({parsed(node).auth_supernode_private_key for node in NODES}) == len(NODES)
    settings = [parse_config_args([parsed(node).node_config]) for node in NODES]
    assert settings == [{"partition-id": i, "num-partitions": len(NODES)} for i in range(len(NODES))]


def test_a_node_may_have_images_and_a_memory_of_its_own():
    """As the README's exports fill the compose file, and no node sees what another one has."""
    exports = dict(re.findall(r"(\w+_\d)=('[^']+'|\S+)", (DOCKER / "README.md").read_text()))
    environment = {name: value.strip("'") for name, value in exports.items()}
    seen = []
    for i, node in enumerate(NODES):
        command = [filled(word, **environment) for word in SERVICES[node]["command"]]
        settings = parse_config_args([command[-1].removeprefix("--node-config=")])
        assert settings == {"name": ("north", "south")[i], "data-dir": "/data", "state-dir": "/app/state"}
        volumes = [filled(v, **environment) for v in SERVICES[f"superexec-{i}"]["volumes"]]
        assert volumes == [f"/scans/{settings['name']}:/data:ro", f"node-{i}:/app/state"]
        assert f"node-{i}" in COMPOSE["volumes"]
        seen += [filled(v) for v in SERVICES[f"superexec-{i}"]["volumes"][:1]]
    assert seen == ["./data:/data:ro"] * len(NODES)
    assert "install -d -m 1777 /app/state" in (DOCKER / "Dockerfile").read_text()


def test_the_keys_of_a_node_are_those_that_the_readme_explains():
    text = (DOCKER / "README.md").read_text()
    section = text[text.index("## Without Docker") : text.index("## When something fails")]
    [own] = re.findall(r"--node-config '(name=[^']+)'", section)
    rows = re.findall(r"^\| (`.+`) \|", section, re.MULTILINE)
    explained = set(re.findall(r"`([\w-]+)`", " ".join(rows)))
    assert set(parse_config_args([own])) < explained == {"name", "state-dir", *keys_affecting(*OF_THE_NODE)}


def test_a_service_has_the_secrets_that_its_command_reads_and_no_others():
    for name, service in SERVICES.items():
        text = (
            (DOCKER / "proxy.json").read_text()
            if name == "proxy"
            else json.dumps([service["command"], service.get("environment")])
        )
        assert set(re.findall(r"/run/secrets/([\w.-]+)", text)) == set(service["secrets"]), name


def test_the_secrets_are_what_make_keys_makes(tmp_path):
    make_keys.main([str(tmp_path), "--nodes", str(len(NODES))])
    named = {name: Path(secret["file"]).name for name, secret in COMPOSE["secrets"].items()}
    assert all(name == file for name, file in named.items())
    assert set(named) == {path.name for path in tmp_path.iterdir() if path.suffix != ".pub"} - {"ca.key"}


def test_each_training_process_has_a_gpu_of_its_own_and_the_server_has_one():
    nodes = {node.replace("supernode", "superexec") for node in NODES}
    assert set(GPU) == nodes | {"superexec-server"}
    (devices,) = zip(
        *(service["deploy"]["resources"]["reservations"]["devices"] for service in GPU.values()), strict=True
    )
    assert [d["capabilities"] for d in devices] == [["gpu"]] * len(GPU)
    ids = {name: d["device_ids"] for name, d in zip(GPU, devices, strict=True)}
    assert ids["superexec-server"] == ["${GPU_SERVER:-0}"]
    assert [ids[name] for name in sorted(nodes)] == [["${GPU_0:-0}"], ["${GPU_1:-1}"]]


def test_the_dockerfile_passes_its_linter():
    linted = subprocess.run([PROGRAMS / "hadolint", DOCKER / "Dockerfile"], capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout


# the proxy: first its configuration read, then itself running where there is one


def test_what_the_containers_write_is_their_owners_alone():
    [line] = re.findall(r"^ENTRYPOINT (.*)$", (DOCKER / "Dockerfile").read_text(), re.MULTILINE)
    command = [*json.loads(line), "sh", "-c", 'umask; echo "$@"', "sh", "two words", "$HOME"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "0077\ntwo words $HOME\n"


def test_the_backup_of_a_database_in_use_is_whole(tmp_path):
    [code] = [c[-1] for c in commands("docs/guides/operations.md") if ".backup(" in c[-1]]
    code = code.replace("/app/state", str(tmp_path))
    with closing(sqlite3.connect(tmp_path / "state.db")) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE node (id)")
        database.execute("INSERT INTO node VALUES (7)")
        database.commit()
        subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "backup.db").stat().st_mode & 0o777 == 0o600
    with closing(sqlite3.connect(tmp_path / "backup.db")) as backup:
        assert backup.execute("SELECT id FROM node").fetchall() == [(7,)]


def test_the_proxy_forwards_fleet_paths_only_as_configured():
    assert PROXY["admin"]["disabled"]
    assert set(PROXY["apps"]) == {"tls", "http"}
    (server,) = PROXY["apps"]["http"]["servers"].values()
    assert server["tls_connection_policies"] == [{"default_sni": "localhost"}]  # who comes by address names none
    assert server["listen"] == [":8443"]
    assert server["protocols"] == ["h1"]  # HTTP/3 comes over UDP, which compose.yml does not publish
    *limits, fleet, rest = server["routes"]
    assert {handler["handler"] for route in limits for handler in route["handle"]} == {"request_body"}
    assert [handler["handler"] for handler in fleet["handle"]] == ["rewrite", "reverse_proxy"]
    assert [handler["handler"] for handler in rest["handle"]] == ["static_response"]
    assert "match" not in rest
    (match,) = fleet["match"]
    assert set(match) == {"method", "path_regexp"}
    assert match["method"] == ["POST"]
    # as Go's regular expressions have it, $ is the very end
    pattern = re.sub(r"\$$", r"\\Z", match["path_regexp"]["pattern"])
    assert {path for path in PATHS if re.search(pattern, path)} == FLEET
    assert len(FLEET) == 10
    assert any(path.startswith("/v1/control/") for path in PATHS)
    assert not [
        path for path in FLEET for wrong in (path + "\n", path + "/x", "/x" + path) if re.search(pattern, wrong)
    ]
    assert fleet["handle"][0]["uri"] == "/v1/fleet/{http.regexp.fleet.1}?"
    assert match["path_regexp"]["name"] == "fleet"
    assert fleet["handle"][1]["transport"]["tls"]["root_ca_pem_files"] == ["/run/secrets/ca.crt"]


def test_the_proxy_takes_what_nodes_send():
    """An answer of 300 arrays and 100 MB, in pieces of the size that Flower has."""
    LoopbackGrid(echo)
    arrays = {f"blocks.{i}.attention.weight": np.full(84_000, i, np.float32) for i in range(300)}
    answer = Message(to_records(Packet(arrays=arrays | {"large": np.arange(4_000_000.0)})), N[0], "train")
    contents = [part.deflate() for part in get_all_nested_objects(answer).values()]
    pushed = PushObjectRequest(node=Node(node_id=N[0]), run_id=N[0], object_id="x" * 64, session_id="x" * 36)
    listed = PushMessagesRequest(node=Node(node_id=N[0]), message_object_trees=[get_object_tree(answer)])
    limits = body_limits()
    assert pushed.ByteSize() + FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE < max(map(len, contents)) + 400
    assert pushed.ByteSize() + max(map(len, contents)) < limits["/v1/fleet/push-object"]
    # docker/README.md: 70 bytes an object, 5 MiB an object at most
    assert 60 < listed.ByteSize() / len(contents) < 75
    assert 10 * listed.ByteSize() < limits["/v1/fleet/push-messages"]
    assert limits["others"] >= 65536


def body_limits() -> dict[str, int]:
    """The proxy's limits by path."""
    (server,) = PROXY["apps"]["http"]["servers"].values()
    routes = server["routes"][:-2]
    return {r["match"][0].get("path", ["others"])[0]: r["handle"][0]["max_size"] for r in routes}


def answer_to_body(port: int, keys: Path, path: str, size: int, chunked: bool) -> int:
    """The answer to a body of so many bytes, sent until the proxy has had enough."""
    context = ssl.create_default_context(cafile=keys / "ca.crt")
    connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=60)
    pieces = (bytes(min(65536, size - start)) for start in range(0, size, 65536))
    headers = {} if chunked else {"content-length": str(size)}
    with closing(connection):
        with suppress(OSError):  # the proxy closes the connection before all is sent
            connection.request("POST", path, pieces, headers, encode_chunked=chunked)
        return connection.getresponse().status


@pytest.mark.ci
@pytest.mark.parametrize("chunked", [True, False])
def test_the_running_proxy_bounds_what_reaches_the_superlink(chunked, tmp_path):
    keys = tmp_path / "keys"
    make_keys.main([str(keys), "--nodes", "0"])
    limits = body_limits()
    limits |= dict.fromkeys(FLEET - set(limits), limits.pop("others"))
    assert set(limits) == FLEET
    with upstream(keys) as (superlink, reached), proxy(tmp_path, keys, superlink) as port:
        for path, limit in limits.items():
            assert answer_to_body(port, keys, path, limit, chunked) == 200
            assert answer_to_body(port, keys, path, limit + 1, chunked) == 413
        assert set(reached) == FLEET


@pytest.mark.ci
def test_requests_that_wait_for_the_superlink_reach_it_as_they_were_sent(tmp_path):
    """While it is started again, and after: Caddy 2.10 lost bodies, or gave one request that of another."""
    keys, superlink, sizes = tmp_path / "keys", free_port(), range(1, 31)
    make_keys.main([str(keys), "--nodes", "0"])
    context = ssl.create_default_context(cafile=keys / "ca.crt")

    def send(size: int) -> int:
        body = "x" * size
        with closing(http.client.HTTPSConnection("localhost", port, context=context, timeout=60)) as connection:
            connection.request("POST", "/v1/fleet/push-object", body, {"x-body": body})
            return connection.getresponse().status

    with ThreadPoolExecutor(len(sizes)) as pool, proxy(tmp_path, keys, superlink) as port:
        waiting = [pool.submit(send, size) for size in sizes]
        time.sleep(2)
        with upstream(keys, superlink, Comparing):
            assert Counter(answer.result() for answer in waiting) == {200: 30}
            assert Counter(pool.map(send, sizes)) == {200: 30}


def test_a_superlink_that_fails_is_asked_again_by_nodes(tmp_path, monkeypatch):
    """Flower's nodes try again after 503 and not after 500, which is what a locked database gives."""
    keys = tmp_path / "keys"
    make_keys.main([str(keys), "--nodes", "0"])
    assert {503} <= _RETRYABLE_STATUS_CODES
    assert 500 not in _RETRYABLE_STATUS_CODES
    with upstream(keys) as (superlink, _), proxy(tmp_path, keys, superlink) as port:
        for ours, theirs in {500: 503, 401: 401, 403: 403, 200: 200}.items():
            monkeypatch.setattr(Upstream, "answer", ours)
            assert status(port, keys, "POST", "/v1/fleet/push-object") == theirs


def status(port: int, keys: Path, method: str, path: str) -> int:
    """The answer to one request whose path goes out exactly as it is written."""
    return int(answer(port, keys, method, path)[0].split()[1])


def headers(port: int, keys: Path) -> set[str]:
    """Names of the headers that every answer has."""
    return {line.partition(":")[0].lower() for line in answer(port, keys, "POST", "/")[1:]}


def answer(port: int, keys: Path, method: str, path: str) -> list[str]:
    """Status line and headers."""
    context = ssl.create_default_context(cafile=keys / "ca.crt")
    near = socket.create_connection(("127.0.0.1", port), timeout=30)
    with context.wrap_socket(near, server_hostname="localhost") as connection:
        connection.sendall(
            f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )
        return connection.makefile("rb").read().decode().partition("\r\n\r\n")[0].splitlines()


REFUSED = [
    *sorted(set(PATHS) - FLEET),
    "/",
    "/health",
    "/docs",
    "//v1/control/start-run",
    "/V1/CONTROL/start-run",
    "/v1/fleet/../control/start-run",
    "/v1/fleet/get-run/../../control/start-run",
    "/v1/fleet/%2e%2e/control/start-run",
    "/v1/fleet/get-run/%2e%2e/%2e%2e/control/start-run",
    "/v1/fleet/get-run%2f..%2f..%2fcontrol%2fstart-run",
    "/v1/fleet/get-run%0a",
    "/v1/fleet/get-run;/v1/control/start-run",
]


@pytest.mark.ci
def test_the_running_proxy_refuses_all_but_the_fleet(tmp_path):
    keys = tmp_path / "keys"
    make_keys.main([str(keys), "--nodes", "0"])
    with upstream(keys) as (superlink, reached), proxy(tmp_path, keys, superlink) as port:
        assert {status(port, keys, "POST", path) for path in FLEET} == {200}
        assert set(reached) == FLEET
        reached.clear()
        assert {path: status(port, keys, "POST", path) for path in REFUSED} == dict.fromkeys(REFUSED, 403)
        assert {status(port, keys, method, path) for method in ("GET", "PUT") for path in FLEET} == {403}
        assert reached == []
        assert "alt-svc" not in headers(port, keys)
        with socket.socket(type=socket.SOCK_DGRAM) as probe:
            probe.bind(("127.0.0.1", port))  # nothing listens there
        # what is let by arrives as the plain path, whatever it was dressed in
        assert status(port, keys, "POST", "/v1/control/start-run/../../fleet/get-run?x=/v1/control") == 200
        assert reached == ["/v1/fleet/get-run"]
