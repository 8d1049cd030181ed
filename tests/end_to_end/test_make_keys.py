"""Keys of a deployment: what they are good for, who may read them, and that none is ever overwritten."""

import datetime
import os
import re
import shutil
import socket
import ssl
import stat
import subprocess
import threading
from itertools import product
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from flwr.cli.supernode.register import try_load_public_key

from tests.helpers.documents import blocks
from tests.helpers.proxy import make_keys

ROOT = Path(__file__).parents[2]
CERTIFICATES = ("ca.crt", "server.crt")


def by_hand(folder: Path, renewed: bool = False) -> None:
    """Run the README's commands that make keys without the script; ``renewed``: that of the server's certificate."""
    if missing := [tool for tool in ("openssl", "ssh-keygen") if shutil.which(tool) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed")
    folder.mkdir(exist_ok=renewed)
    [server, node] = [text for text in blocks("docker/README.md", "sh") if text.startswith("umask 077\n")]
    commands = server.replace("DNS:SERVER", "DNS:fleet.example.org,IP:192.0.2.7") + node
    if renewed:
        [commands] = re.findall(r"^openssl .*?-keyout server\.key (?:.*\\\n)*.*\n", server, re.MULTILINE)
    subprocess.run(["bash", "-euc", commands], cwd=folder, check=True, capture_output=True, text=True)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "superlink", "proxy", "fleet.example.org", "192.0.2.7"])
def test_certificates_made_by_hand_are_as_good(host, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "by-hand"
    if not folder.exists():
        by_hand(folder)
    assert handshake(folder, folder / "ca.crt", host) == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(folder, folder / "ca.crt", "elsewhere.example.org")


def test_keys_and_secrets_made_by_hand_are_as_good(tmp_path):
    by_hand(tmp_path / "keys")
    made = {path.name: path for path in (tmp_path / "keys").iterdir()}
    assert set(made) == {f"{of}.{kind}" for of, kind in product(("ca", "server"), ("crt", "key"))} | {
        *("server.secret", "node-0", "node-0.pub", "node-0.secret")
    }
    private = serialization.load_ssh_private_key(made["node-0"].read_bytes(), None)
    assert private.public_key() == serialization.load_ssh_public_key(made["node-0.pub"].read_bytes())
    assert try_load_public_key(made["node-0.pub"])
    assert len({made[name].read_text() for name in ("server.secret", "node-0.secret")}) == 2
    assert all(len(made[name].read_text()) == 43 for name in ("server.secret", "node-0.secret"))
    modes = {name: stat.S_IMODE(path.stat().st_mode) for name, path in made.items()}
    assert {name for name, mode in modes.items() if mode != 0o600} == {"ca.crt", "server.crt"}
    certificate = x509.load_pem_x509_certificate(made["server.crt"].read_bytes())
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_a_renewed_certificate_is_trusted_by_nodes_as_they_are(tmp_path):
    folder = tmp_path / "keys"
    by_hand(folder)
    before = {name: (folder / name).read_bytes() for name in ("ca.crt", "server.crt", "server.key")}
    by_hand(folder, renewed=True)
    assert (folder / "ca.crt").read_bytes() == before["ca.crt"]
    assert all((folder / name).read_bytes() != before[name] for name in ("server.crt", "server.key"))
    assert handshake(folder, folder / "ca.crt", "localhost") == "TLSv1.3"


def test_the_authority_outlives_ten_certificates_of_the_server(keys, tmp_path):
    by_hand(tmp_path / "keys")
    for folder in (keys, tmp_path / "keys"):
        end = {n: x509.load_pem_x509_certificate((folder / n).read_bytes()).not_valid_after_utc for n in CERTIFICATES}
        years = (end["ca.crt"] - end["server.crt"]) / datetime.timedelta(days=365)
        assert years == pytest.approx(9, abs=0.01)  # days, or seconds, may pass between the two


def test_two_authorities_in_one_file_are_both_trusted(tmp_path):
    """By which docs/guides/operations.md changes the authority."""
    for name in ("old", "new"):
        by_hand(tmp_path / name)
    both = tmp_path / "both.crt"
    both.write_bytes(b"".join((tmp_path / name / "ca.crt").read_bytes() for name in ("old", "new")))
    for name in ("old", "new"):
        assert handshake(tmp_path / name, both, "localhost") == "TLSv1.3"
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path / "old", tmp_path / "new" / "ca.crt", "localhost")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    make_keys.main([str(folder), "--host", "fleet.example.org", "--host", "192.0.2.7", "--nodes", "2"])
    return folder


def handshake(keys: Path, authority: Path, host: str) -> str:
    """TLS with the server's certificate over a local connection, as strict as Python can be."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(keys / "server.crt", keys / "server.key")
    asking = ssl.create_default_context(cafile=authority)
    asking.verify_flags |= ssl.VERIFY_X509_STRICT
    near, far = socket.socketpair()

    def serve() -> None:
        try:
            serving.wrap_socket(far, server_side=True).close()
        except (ssl.SSLError, OSError):
            far.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with asking.wrap_socket(near, server_hostname=host) as connection:
            return str(connection.version())
    finally:
        near.close()
        thread.join()


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "::1", "superlink", "proxy", "fleet.example.org", "192.0.2.7"]
)
def test_the_server_is_trusted_under_its_names(keys, host):
    assert handshake(keys, keys / "ca.crt", host) == "TLSv1.3"


def test_the_server_is_refused_under_any_other_name(keys):
    with pytest.raises(ssl.SSLCertVerificationError, match=r"not valid for 'elsewhere\.example\.org'"):
        handshake(keys, keys / "ca.crt", "elsewhere.example.org")


def test_another_authority_is_no_help(keys, tmp_path):
    make_keys.main([str(tmp_path)])
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(keys, tmp_path / "ca.crt", "localhost")


def test_the_server_cannot_sign(keys):
    certificate = x509.load_pem_x509_certificate((keys / "server.crt").read_bytes())
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert not certificate.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign


def test_nodes_have_keys_of_their_own_that_flower_reads(keys):
    public = {node: try_load_public_key(keys / f"{node}.pub") for node in ("node-0", "node-1")}
    assert public["node-0"] != public["node-1"]
    for node in public:
        private = serialization.load_ssh_private_key((keys / node).read_bytes(), None)
        written = serialization.load_ssh_public_key((keys / f"{node}.pub").read_bytes())
        assert private.public_key() == written
    secrets = {(keys / f"{name}.secret").read_text() for name in ("server", "node-0", "node-1")}
    assert len(secrets) == 3
    assert min(map(len, secrets)) >= 32


def test_only_the_owner_reads_what_is_private(keys):
    before = os.umask(0)
    try:
        make_keys.main([str(keys / "open"), "--nodes", "1"])
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (keys / "open").iterdir()}
    assert {name for name, mode in modes.items() if mode == 0o644} == {"ca.crt", "server.crt", "node-0.pub"}
    private = {"ca.key", "server.key", "server.secret", "node-0", "node-0.secret"}
    assert {name for name, mode in modes.items() if mode == 0o600} == private


@pytest.mark.parametrize("there", ["ca.key", "node-1.pub"])
def test_nothing_is_overwritten(tmp_path, there):
    (tmp_path / there).write_text("precious")
    with pytest.raises(SystemExit, match=f"{there} exists: nothing was written"):
        make_keys.main([str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "precious"


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match=r"file/keys cannot be written: Not a directory\. Give another folder\."):
        make_keys.main([str(tmp_path / "file" / "keys")])
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(make_keys.os, "open", lambda *_: full)
    with pytest.raises(SystemExit, match="keys cannot be written: No space left on device"):
        make_keys.main([str(tmp_path / "keys")])


def test_how_to_go_on_is_said(tmp_path, capsys):
    make_keys.main([str(tmp_path), "--nodes", "3"])
    said = capsys.readouterr().out.splitlines()
    assert f'root-certificates = "{tmp_path}/ca.crt"' in said
    assert said[-1] == f"flwr supernode register {tmp_path}/node-2.pub fcil --name node-2"


@pytest.mark.parametrize("wrong", [["--nodes", "-1"], ["--days", "0"]])
def test_nonsense_is_refused(tmp_path, wrong):
    with pytest.raises(SystemExit) as ended:
        make_keys.main([str(tmp_path / "keys"), *wrong])
    assert ended.value.code == 2
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("server.example.org", "server.example.org"),
        ("klinik-süd.de", "xn--klinik-sd-x9a.de"),
        ("192.168.0.7", "192.168.0.7"),
        ("::1", "::1"),
        ("node_1", "node_1"),
        ("server.example.com.", "server.example.com"),
    ],
)
def test_hosts_are_names_as_certificates_have_them(given, name):
    assert make_keys.host_name(given) == name


@pytest.mark.parametrize(
    "given", ["https://server:8443", "server:8443", "", "a..b", "two words", "10.0.0.256", "straße.de"]
)
def test_what_is_no_host_is_refused_before_anything_is_written(given, tmp_path, capsys):
    with pytest.raises(SystemExit):
        make_keys.main([str(tmp_path / "keys"), "--host", given])
    assert "is no host name or IP address" in capsys.readouterr().err
    assert not (tmp_path / "keys").exists()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no git checkout")
def test_git_ignores_keys_and_state_where_the_readme_puts_them() -> None:
    private = ["keys/ca.crt", "keys/server.key", "keys/node-0", "node-0", "docker/keys/node-0", "docker/data/cat/1.png"]
    private += ["state.db", "state.db-wal", "proxy.json", "runs/a/checkpoint/000001.ckpt", "docker/runs/a/results.json"]
    for path, ignored in [*((path, True) for path in private), ("docker/proxy.json", False), ("Makefile", False)]:
        check = subprocess.run(["git", "-C", ROOT, "check-ignore", "--no-index", "-q", path], check=False)
        assert check.returncode == (0 if ignored else 1), path
