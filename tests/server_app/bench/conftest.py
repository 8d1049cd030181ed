"""A suite in a file of its own."""

import pytest
import yaml

from tests.helpers.suites import HEAD, KEYS, NCM


@pytest.fixture
def write(tmp_path):
    """Writes a suite of two runs, with changes, and returns its path."""

    def suite(**changes):
        path = tmp_path / "suite.yaml"
        entries = {
            "title": "Two <methods>",
            "output-dir": str(tmp_path / "out"),
            "seeds": [0],
            "common": KEYS,
            "variants": [NCM, HEAD],
        }
        path.write_text(yaml.safe_dump({name: v for name, v in (entries | changes).items() if v is not None}))
        return path

    return suite
