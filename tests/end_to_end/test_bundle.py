"""The bundle that flwr build makes of the project, and what Flower Hub takes: checked with Flower's own functions."""

import base64
import hashlib
import io
import json
import tomllib
import zipfile

import pytest
from flwr.cli.app_cmd.publish import _collect_file_paths, _validate_files
from flwr.cli.build import build_fab_from_files
from flwr.cli.utils import collect_files
from flwr.common.constant import FAB_MAX_SIZE

from tests.helpers.documents import ROOT

pytestmark = pytest.mark.ci  # Flower reads every file of the tree
MIB = 1024 * 1024
SHA256 = "dbc99276025edd592b7bdf2bab90022ba8c383c6503432bc9d0a7f613cfb7d08"  # of the weights, whatever files hold them
FOLDERS = ("task", "client_app", "strategies", "server_app")


@pytest.fixture(scope="module")
def bundle() -> zipfile.ZipFile:
    content, metadata = build_fab_from_files(collect_files(ROOT))
    assert len(content) <= FAB_MAX_SIZE
    assert (metadata.fab_format_version, metadata.flwr_version_min) == (1, "1.41.0")
    assert metadata.flwr_version_target == "1.41.0"
    return zipfile.ZipFile(io.BytesIO(content))


def test_the_bundle_holds_code_and_assets_within_the_limits(bundle: zipfile.ZipFile) -> None:
    sizes = {entry.filename: entry.file_size for entry in bundle.infolist()}
    code = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    files = {path.relative_to(ROOT).as_posix() for path in [*code, *(ROOT / "task/assets").rglob("*.json")]}
    assert set(sizes) == files | {"pyproject.toml", "LICENSE", "README.md", ".info/CONTENT"}
    assert len(sizes) <= 1000
    assert max(sizes.values()) <= MIB
    assert sum(sizes.values()) <= 10 * MIB


def test_the_bundled_backbone_comes_through_whole(bundle: zipfile.ZipFile) -> None:
    metadata = json.loads(bundle.read("task/assets/vit_glyphs.json"))
    parts = [base64.b64decode(json.loads(bundle.read(f"task/assets/{part}"))) for part in metadata["parts"]]
    assert hashlib.sha256(b"".join(parts)).hexdigest() == metadata["sha256"] == SHA256


def test_flower_hub_would_take_the_project(capsys: pytest.CaptureFixture[str]) -> None:
    """All files that git does not ignore are sent, also tests and docs; Flower counts them, weighs and decodes them."""
    _validate_files(_collect_file_paths(ROOT))
    assert "Validation passed" in capsys.readouterr().out
    description = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["description"]
    assert 0 < len(description) <= 200  # Flower asks back where it is longer
