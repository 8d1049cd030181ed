"""docker/systemd/ without systemd running: what systemd-analyze says, and what the commands mean to Flower."""

import argparse
import configparser
import re
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from flwr.common.config import parse_config_args

from tests.helpers.compose import PARSERS, PROGRAMS, parsed
from tests.helpers.documents import ROOT, blocks, section
from tests.helpers.proxy import free_port, make_keys, upstream

FOLDER = ROOT / "docker" / "systemd"
SERVER = ("fcil-superlink", "fcil-superexec", "fcil-proxy")
NODE = ("fcil-supernode", "fcil-trainer")
PLACES = {"/srv/fcil/venv/bin": str(PROGRAMS), "/srv/fcil": str(ROOT)}
NEWER = re.compile(r".*Unknown key '(RestartSteps|RestartMaxDelaySec)'.*\n")  # of systemd 254
ANALYZE = shutil.which("systemd-analyze")
analyzed = pytest.mark.skipif(not ANALYZE, reason="systemd-analyze is not here")


def read(name: str) -> dict[str, list[str]]:
    """Every setting of a unit with its values in their order."""
    settings: dict[str, list[str]] = {}
    for line in (FOLDER / "system" / name).read_text().replace("\\\n", "").splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            settings.setdefault(key, []).append(value)
    return settings


def command(unit: str) -> argparse.Namespace:
    """The command of a service as Flower's own parser reads it; an unknown flag is an error."""
    [line] = read(f"{unit}.service")["ExecStart"]
    program, *words = shlex.split(line.replace("${SUPERLINK}", "SERVER:8443").replace("${NODE_CONFIG}", "'name=\"n\"'"))
    module, parser = PARSERS[Path(program).name]
    return getattr(import_module(module), parser)().parse_args(words)


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """A copy in which the programs are where they are on this machine."""
    shutil.copytree(FOLDER / "system", tmp_path / "units")
    for path in (tmp_path / "units").glob("*.service"):
        text = path.read_text()
        for there, here in PLACES.items():
            text = text.replace(there, here)
        path.write_text(text)
    return tmp_path / "units"


def analyze(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(ANALYZE), *map(str, words)], capture_output=True, text=True, check=False)


@analyzed
def test_systemd_has_nothing_to_say(units: Path) -> None:
    checked = analyze("verify", *units.glob("*.service"), *units.glob("*.timer"))
    assert NEWER.sub("", checked.stdout + checked.stderr) == ""
    assert checked.returncode == 0


@analyzed
def test_a_mistake_would_be_noticed(units: Path) -> None:
    path = units / "fcil-.service.d" / "hardening.conf"
    path.write_text(path.read_text().replace("ProtectSystem=strict", "ProtectSytem=strict"))
    assert "ProtectSytem" in analyze("verify", units / "fcil-superlink.service").stderr


@analyzed
@pytest.mark.parametrize("unit", [*SERVER, *NODE, "fcil-health"])
def test_the_services_are_hardened(unit: str, units: Path) -> None:
    checked = analyze("security", "--offline=true", "--threshold=20", units / f"{unit}.service")  # 2.0 of 10
    if "unrecognized option" in checked.stderr:
        pytest.skip("this systemd-analyze reads no units of a folder")
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("unit", [*SERVER, *NODE])
def test_each_service_has_a_user_a_folder_and_a_limit_of_its_own(unit: str) -> None:
    settings, users = read(f"{unit}.service"), (FOLDER / "sysusers.conf").read_text()
    assert settings["User"] == settings["StateDirectory"] == [unit]
    assert re.search(rf'^u {unit} - ".+" /var/lib/{unit}$', users, re.MULTILINE)
    assert settings["WorkingDirectory"] == [f"/var/lib/{unit}"]
    assert settings["Restart"] == ["always"]
    assert "MemoryMax" in settings
    assert settings["WantedBy"] == ["multi-user.target"]


def test_services_wait_for_those_that_they_need() -> None:
    order = {unit: read(f"{unit}.service")["After"] for unit in (*SERVER, *NODE)}
    assert order == {
        "fcil-superlink": ["network-online.target"],
        "fcil-superexec": ["fcil-superlink.service"],
        "fcil-proxy": ["fcil-superlink.service"],
        "fcil-supernode": ["network-online.target"],
        "fcil-trainer": ["fcil-supernode.service"],
    }
    for unit, before in order.items():
        assert read(f"{unit}.service")["Wants"] == before
        assert "Requires" not in read(f"{unit}.service")  # a run outlives the SuperLink's restart


@pytest.mark.parametrize("unit", [*SERVER, *NODE, "fcil-health"])
def test_a_service_gets_the_keys_that_its_command_reads_and_no_others(unit: str) -> None:
    settings = read(f"{unit}.service")
    given = [value.split(":") for value in settings.get("LoadCredential", [])]
    assert all(path == f"/etc/fcil/keys/{name}" for name, path in given)
    text = " ".join(settings["ExecStart"])
    named = set(re.findall(r"\$\{CREDENTIALS_DIRECTORY\}/([\w.]+)", text))
    if unit == "fcil-proxy":
        named = set(re.findall(r"/run/credentials/fcil-proxy.service/([\w.]+)", proxy_json()))
    assert {name for name, _ in given} == named


def proxy_json() -> str:
    """The proxy's file as the README's command makes it."""
    [line] = re.findall(
        r"^sed (?:.*\\\n.*|.*) > /etc/fcil/proxy.json$", section("docker/README.md", "With systemd"), re.M
    )
    words = shlex.split(line.replace("\\\n", " "))[:-2]
    return subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_the_proxy_finds_the_superlink() -> None:
    assert '"dial": "127.0.0.1:8000"' in proxy_json()
    assert "/run/secrets" not in proxy_json()


@pytest.mark.parametrize(
    ("unit", "service"),
    [
        ("fcil-superlink", "superlink"),
        ("fcil-superexec", "superexec-server"),
        ("fcil-supernode", "supernode-0"),
        ("fcil-trainer", "superexec-0"),
    ],
)
def test_commands_are_those_of_the_containers_but_for_places(unit: str, service: str) -> None:
    here, there = vars(command(unit)), vars(parsed(service))
    places = {"host", "runtime_api_address", "superlink", "database", "root_certificates", "node_config"}
    places |= {name for name in here if name.startswith("ssl_") or name.endswith(("_file", "_private_key"))}
    assert {k: v for k, v in here.items() if k not in places} == {k: v for k, v in there.items() if k not in places}
    assert {k: bool(here[k]) for k in places & set(here)} == {k: bool(there[k]) for k in places & set(there)}


def test_only_the_proxy_is_reached_from_elsewhere() -> None:
    assert command("fcil-superlink").host == "127.0.0.1"
    assert command("fcil-superexec").runtime_api_address == "127.0.0.1:8000"
    assert command("fcil-trainer").runtime_api_address == f"127.0.0.1:{command('fcil-supernode').port}"
    for unit in ("fcil-superlink", "fcil-trainer"):
        assert read(f"{unit}.service")["IPAddressDeny"] == ["any"]
        assert read(f"{unit}.service")["IPAddressAllow"] == ["localhost"]


def test_the_readmes_file_of_a_node_has_what_its_service_reads() -> None:
    [text] = [t for t in blocks("docker/README.md", "text") if t.startswith("SUPERLINK=")]
    parser = configparser.ConfigParser()
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string("[node]\n" + text)
    assert set(parser["node"]) == set(
        re.findall(r"\$\{([A-Z_]+)\}", read("fcil-supernode.service")["ExecStart"][0])
    ) - {"CREDENTIALS_DIRECTORY"}
    settings = parse_config_args([parser["node"]["NODE_CONFIG"].strip("'")])
    assert set(settings) == {"name", "data-dir", "state-dir"}
    assert str(settings["state-dir"]).startswith(f"/var/lib/{read('fcil-trainer.service')['StateDirectory'][0]}/")


def test_files_that_the_readme_installs_exist() -> None:
    text = section("docker/README.md", "With systemd")
    for name in re.findall(r"docker/systemd/[\w.]+\.conf", text):
        assert (ROOT / name).exists(), name
    enabled = set(re.findall(r"fcil-\w+", " ".join(re.findall(r"^systemctl enable --now (.*)$", text, re.MULTILINE))))
    assert enabled == {*SERVER, *NODE, "fcil-health"}
    assert "docker/systemd/health.py" in read("fcil-superlink.service")["ExecStartPost"][0]


@pytest.mark.parametrize("unit", [*SERVER, *NODE, "fcil-health"])
def test_only_the_main_command_reads_credentials(unit: str) -> None:
    """Systemd 252 hides them from all others: there the SuperLink answered and its service never counted as started."""
    for key, commands in read(f"{unit}.service").items():
        assert key == "ExecStart" or not any("CREDENTIALS_DIRECTORY" in command for command in commands)


def health(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, FOLDER / "health.py", *map(str, words)], capture_output=True, text=True, check=False
    )


def test_the_health_check_tells_who_answers(tmp_path: Path) -> None:
    make_keys.main([str(tmp_path / "keys"), "--nodes", "0"])
    make_keys.main([str(tmp_path / "other"), "--nodes", "0"])
    with upstream(tmp_path / "keys") as (port, reached):
        assert health(tmp_path / "keys" / "ca.crt", "--port", port).returncode == 0
        assert reached == ["/health"]
        assert health(tmp_path / "other" / "ca.crt", "--port", port).returncode == 1
    silent = health(tmp_path / "keys" / "ca.crt", "--port", free_port(), "--wait", 1)
    assert silent.returncode == 1
    assert "the SuperLink does not answer: " in silent.stderr
    assert len(silent.stderr.splitlines()) == 1
