"""What config.yaml of a run says."""

import subprocess

import pytest
import yaml

from server_app.run_files.paths import project_folder
from tests.helpers.runs import Values, folder_of, run


@pytest.mark.skipif(not (project_folder() / ".git").exists(), reason="no checkout")
def test_a_run_names_the_commit_of_its_code(tiny: Values) -> None:
    run(tiny | {"method": "ncm", "num-tasks": 1})
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=project_folder(), capture_output=True, text=True, check=True)
    assert len(commit := git.stdout.strip()) >= 40
    assert yaml.safe_load((folder_of(tiny) / "config.yaml").read_text())["git-revision"] == commit
