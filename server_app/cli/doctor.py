"""fcil doctor: whether this machine can do a run, and how fast."""

import argparse
from itertools import chain

from server_app.cli.common import FAILED, OK
from server_app.run_keys import complete_run_keys, read_words
from task.config.parsing import parse


def describe(parser: argparse.ArgumentParser) -> None:
    """Arguments of fcil doctor."""
    parser.description = (
        "Check versions, device, memory, disk, weights and data, and time a training step of a run with these keys. "
        "Nothing is written but weights that a run would download. Exit code 1 if something is a problem, 2 if a key "
        "was mistyped."
    )
    parser.add_argument("words", nargs="*", default=[], metavar="KEY=VALUE", help="run keys, as for fcil run")
    parser.add_argument(
        "--certificate",
        action="append",
        metavar="FILE",
        help="a PEM file, may be repeated: warns 30 days before a certificate expires (default: $FCIL_CERTIFICATES)",
    )
    parser.set_defaults(command=_run_command)


def _run_command(args: argparse.Namespace) -> int:
    from server_app.doctor.certificates import check_certificates, watched_certificates
    from server_app.doctor.machine import examine

    code, config = OK, parse(complete_run_keys(read_words(args.words)))
    certificates = check_certificates(args.certificate or watched_certificates())
    for finding in chain(certificates, examine(config)):
        print(finding, flush=True)
        code = FAILED if finding.level == "problem" else code
    return code
