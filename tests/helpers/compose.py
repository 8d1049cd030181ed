"""docker/compose.yml without a Docker engine: its services, and their commands as Flower's parsers read them."""

import argparse
import re
import sys
from importlib import import_module
from pathlib import Path

import yaml

from tests.helpers.proxy import DOCKER

COMPOSE = yaml.safe_load((DOCKER / "compose.yml").read_text())
SERVICES = COMPOSE["services"]
PROGRAMS = Path(sys.executable).parent  # where pip puts them
PARSERS = {
    "flower-superlink": ("flwr.superlink.cli.flower_superlink", "_parse_args_run_superlink"),
    "flower-supernode": ("flwr.supernode.cli.flower_supernode", "_parse_args_run_supernode"),
    "flower-superexec": ("flwr.supercore.cli.flower_superexec", "_parse_args"),
}


def filled(text: str, **environment: str) -> str:
    """A text of the compose file with its ${NAME:-default} filled in."""
    while reference := re.search(r"\$\{(\w+):-([^${}]*)\}", text):
        text = text.replace(reference[0], environment.get(reference[1], reference[2]))
    return text


def parsed(service: str) -> argparse.Namespace:
    """A service's command as Flower's own parser of 1.41 reads it; an unknown flag is an error."""
    program, *words = map(filled, SERVICES[service]["command"])
    module, parser = PARSERS[program]
    return getattr(import_module(module), parser)().parse_args(words)
