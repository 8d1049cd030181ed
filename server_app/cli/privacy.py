"""fcil privacy: an attack on the class statistics that one client of a run sends."""

import argparse
from pathlib import Path

from server_app.cli.common import DEVICES, OK, positive
from task.keys import AUTO


def describe(parser: argparse.ArgumentParser) -> None:
    """Arguments of fcil privacy."""
    parser.description = (
        "Reconstruct images from the class statistics that one client of a run sends, as a curious server could, and "
        "compare them with its real images (SSIM). Writes privacy.json and privacy.png into the run's folder. Exit "
        "code 1 if there is no model, 2 if the run's method sends nothing to invert."
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="a run's folder; its data set must be here")
    parser.add_argument(
        "--client",
        type=int,
        default=0,
        metavar="N",
        help="client whose statistics to attack, counted from 0 (default: 0)",
    )
    parser.add_argument(
        "--target",
        choices=("mean", "sample"),
        default="mean",
        help="attack the class mean (default) or a draw from the class Gaussian",
    )
    parser.add_argument(
        "--classes",
        type=positive,
        default=8,
        metavar="K",
        help="classes to attack at most, those with fewest images first (default: 8)",
    )
    parser.add_argument("--steps", type=positive, default=300, metavar="N", help="steps of the attack (default: 300)")
    parser.add_argument("--device", default=AUTO, help=DEVICES)
    parser.set_defaults(command=_run_command)


def _run_command(args: argparse.Namespace) -> int:
    from server_app.privacy.inversion import attack
    from server_app.privacy.inversion_files import format_table, write_inversions

    inversions = attack(args.run, args.client, args.target, args.classes, args.steps, args.device)
    print(*format_table(inversions), sep="\n")
    print(*write_inversions(args.run, inversions, args.client, args.target), sep="\n")
    return OK
