"""Where the files that come with the code are: the digits and the bundled backbone."""

from pathlib import Path

ASSETS = Path(__file__).parents[1] / "assets"
