"""fcil cache: the features that are kept on disk for all runs."""

import argparse
import time
from collections.abc import Mapping

from server_app.cli.common import OK


def describe(parser: argparse.ArgumentParser) -> None:
    """Arguments of fcil cache."""
    parser.description = (
        "List the frozen features that are kept on disk, the longest unused first, or delete them: a run computes anew "
        "what it needs. They lie in the folder that the environment variable FCIL_CACHE names, else in fcil in "
        "XDG_CACHE_HOME, else in ~/.cache/fcil, and take at most FCIL_CACHE_GB gigabytes (10 if it is not set)."
    )
    parser.add_argument(
        "action",
        nargs="?",
        choices=("list", "clear"),
        default="list",
        help="list what is kept, or delete it (default: list)",
    )
    parser.set_defaults(command=_run_command)


def _run_command(args: argparse.Namespace) -> int:
    from task.models.feature_store import GB, clear_store, list_stored, size_limit, store_folder

    files = clear_store() if args.action == "clear" else list_stored()
    for file in files:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(file.used))
        print(f"{file.size / 1e6:>9.1f} MB  last used {used}  {_describe(file.about)}")
    outcome = "deleted" if args.action == "clear" else f"of at most {size_limit() / GB:g} GB"
    print(f"{len(files)} files, {sum(file.size for file in files) / GB:.2g} GB {outcome} in {store_folder()}")
    return OK


def _describe(about: Mapping[str, str]) -> str:
    """Images and backbone of stored features, in words; a damaged file does not say them."""
    if "belongs-to" not in about:
        return "damaged, or being written"
    form = f"{about['image-size']} pixels, {about['precision']}, {about['processor']}, blocks {about['blocks']}"
    return f"{about['number']} images of {about['belongs-to']} {about['backbone-sha256'][:12]}, {form}"
