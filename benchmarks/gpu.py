"""What one GPU can say within an hour: does it compute what the CPU does, how fast, and whole runs with DeiT-Ti.

python -m benchmarks.slice_npz cifar100.npz slice.npz --classes 100 --train 100 --test 40
python -m benchmarks.gpu --data slice.npz --weights deit_tiny.safetensors --minutes 9
python -m benchmarks.gpu --piece correct-hgp --piece speed-vit-b-224      some pieces; these need no files
python -m benchmarks.gpu --quick                                          every line on the CPU, on tiny problems

The work is cut into pieces, the one of most worth first; ``--list`` names them with the minutes that each may take.
Each piece leaves one JSON file in the output folder, and a later call goes on with those that are missing. After
``--minutes`` no piece is started, and a paper's run stops between two clients; the next call resumes it. On an H100
correct-* took 3.3 minutes and bf16-* 0.8, beside other pieces, and two of speed-* 1.0; the minutes of paper-* are
estimates. The two longest, FedProK's and FPPL's, come last. At the end all results of the chosen pieces are printed as
a section of the ledger, with the names of what was not run. Peak memory has the process's caches in it. The two files
have 55 MB. An output folder is for one device, one data file and one file of weights.

correct-METHOD  the same small run in fp32 on the CPU and on the GPU. Random numbers that a server draws on its device
                differ from device to device, so here they are drawn on the CPU in both runs. What remains is rounding.
speed-*         images per second of a client's training with the shared prompt: from stored images to the optimiser's
                step. ViT-B/16 has random weights, which changes no time.
bf16-METHOD     bf16 beside fp32: accuracy of a small run, and how far the features of frozen images move.
paper-METHOD    the preset's rounds, epochs, clients and step sizes with DeiT-Ti at 160 pixels on the images of --data;
                FedProK keeps its ResNet-18, which learns from scratch. FedRDA has no paper: its run is that of
                suites/cifar100-cpu.yaml.
"""

import argparse
import hashlib
import json
import platform
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import patch

import numpy as np
import safetensors.numpy
import timm
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from client_app.objectives.base import LocalData, Objective
from client_app.training import train_locally
from server_app.rounds.run import run_experiment
from server_app.run_files.status import read_results
from server_app.run_keys import complete_run_keys, read_file
from server_app.tables import markdown_table
from server_app.transport.base import Reply
from server_app.transport.in_process import InProcessTransport
from task.config.parsing import parse
from task.data.load import load_dataset
from task.keys import ConfigError
from task.message import Kind, Packet, Scalar
from task.methods import METHODS
from task.models.device import resolve_device
from task.models.metadata import MODEL
from task.models.model import build_model
from task.models.preprocessing import prepare
from task.utils.atomic import write_atomically, write_json
from task.utils.seeding import numpy_rng, torch_rng

Keys = dict[str, Scalar]
ROOT = Path(__file__).parents[1]
SYSTEMS = ("fedrda", "hgp", "pip", "hepco", "fedprok", "fppl")  # the one whose run takes longest last
ACCURACY_TOLERANCE = 1.0  # points, in any cell of the accuracy matrix
ARRAY_TOLERANCE = 0.005  # |CPU - GPU| / |CPU| of any array of the model
SMALL: Keys = {"num-tasks": 2, "rounds-per-task": 2, "local-epochs": 1, "num-clients": 3, "partition": "iid"}
TINY: Keys = {"dataset": "synthetic", "image-size": 16, "rounds-per-task": 1}
TINY_HEPCO: Keys = {"hepco-generator-steps": 2, "hepco-prompt-steps": 2, "hepco-head-steps": 2, "prompt-pool": 10}
# a student that equals its teacher has a gradient of rounding alone, which Adam would make as large as any other
BY_METHOD: dict[str, Keys] = {"fedlwf": {"optimizer": "sgd"}}
FEDRDA: Keys = {  # which has no preset, as it has no paper
    "method": "fedrda",
    "fedrda-adaptation-rounds": 5,
    "prompt": "lora",
    "num-tasks": 10,
    "num-clients": 10,
    "partition": "dirichlet",
    "dirichlet-beta": 0.5,
    "rounds-per-task": 1,
    "local-epochs": 2,
    "batch-size": 16,
    "learning-rate": 0.005,
}
TINY_PAPER: Keys = SMALL | TINY | {"clients-per-round": 2, "batch-size": 16}
BATCHES, STEPS = [16, 64, 256], 12
IMAGES = 256  # whose features in bf16 are compared with those in fp32
BACKBONES = {  # name and side in pixels
    "deit-ti-160": ("deit_tiny_patch16_224", 160),
    "deit-ti-224": ("deit_tiny_patch16_224", 224),
    "vit-b-224": ("vit_base_patch16_224", 224),
}
MINUTES = {"fedrda": 1, "hgp": 4, "pip": 3, "hepco": 8, "fedprok": 8, "fppl": 15}  # of a paper's run: estimates


class TimeOver(Exception):
    """A run was stopped because its time was over; a later call resumes it."""


@dataclass(frozen=True)
class Setting:
    """What all pieces share; ``deadline`` is in seconds of the monotonic clock."""

    device: str
    quick: bool
    data: Path | None
    weights: Path | None
    output: Path
    deadline: float = float("inf")

    def small(self, method: str) -> Keys:
        """Run keys of a small run of a method on this device."""
        tiny = TINY | (TINY_HEPCO if method == "hepco" else {}) if self.quick else {}
        rounds: Keys = {"rounds-per-task": 1} if METHODS[method].defaults.get("rounds-per-task") == 1 else {}
        return SMALL | {"method": method, "device": self.device} | tiny | rounds | BY_METHOD.get(method, {})


@dataclass(frozen=True)
class Piece:
    """A part of the work: its name, the minutes that it may take, what it does, and whether it needs the files."""

    name: str
    minutes: float
    measure: Callable[[Setting], dict[str, Any]]
    needs_files: bool = False


class TimedTransport(InProcessTransport):
    """Stops the run between two clients when the time is over."""

    deadline = float("inf")

    def exchange(
        self, kind: Kind, packets: Mapping[int, Packet], timeout: float, largest_answer: int = 0
    ) -> Iterable[Reply]:
        """As :class:`InProcessTransport`, but for a TimeOver after the deadline."""
        for node, packet in packets.items():
            if time.monotonic() > self.deadline:
                raise TimeOver
            yield from super().exchange(kind, {node: packet}, timeout, largest_answer)


DRAWS = (torch.multinomial, torch.randn, torch.randperm, torch.Tensor.normal_)  # what servers draw on their device


class DrawsOnCPU(TorchFunctionMode):
    """Random numbers of a generator on ``device`` come from a CPU generator of the same seed."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device).type
        self.generators: dict[
            int, tuple[torch.Generator, torch.Generator]
        ] = {}  # with the replaced one, to keep its id

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Draw on the CPU and move what was drawn."""
        kwargs = kwargs or {}
        rng = kwargs.get("generator")
        if func not in DRAWS or rng is None or rng.device.type != self.device:
            return func(*args, **kwargs)
        fresh = torch.Generator().manual_seed(rng.initial_seed())
        _, generator = self.generators.setdefault(id(rng), (rng, fresh))
        on_cpu = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), args)
        drawn = func(*on_cpu, **kwargs | {"generator": generator} | ({"device": "cpu"} if "device" in kwargs else {}))
        return args[0].copy_(drawn) if func is torch.Tensor.normal_ else drawn.to(rng.device)


def run(keys: Keys, folder: Path, deadline: float = float("inf")) -> dict[str, Any]:
    """results.json of a run in this process; one that was stopped is resumed.

    Raises:
        TimeOver: the deadline came first.
    """
    keys = keys | {"output-dir": str(folder.parent), "run-name": folder.name}
    if any((folder / "checkpoint").glob("*.ckpt")):
        keys = {"resume": str(folder)}
    elif folder.exists():
        shutil.rmtree(folder)  # it was stopped in its first round
    config = parse(complete_run_keys(keys))
    transport = TimedTransport(config.num_clients)
    transport.deadline = deadline
    with patch("server_app.rounds.report_drawer.write_report", lambda folders: []):  # pictures take seconds
        run_experiment(config, transport)
    return read_results(folder)


@contextmanager
def measured(device: str) -> Iterator[dict[str, Any]]:
    """Seconds, and on a GPU the peak of its allocated memory in MB (10^6 bytes), of what is done inside."""
    cuda, costs = torch.device(device).type == "cuda", dict[str, Any]()
    if cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    started = time.perf_counter()
    yield costs
    if cuda:
        torch.cuda.synchronize(device)
    costs["seconds"] = time.perf_counter() - started
    costs["peak_mb"] = torch.cuda.max_memory_allocated(device) / 1e6 if cuda else None


def same_on_both(method: str, setting: Setting) -> dict[str, Any]:
    """How far the CPU's and the GPU's small run of a method are apart: accuracy matrices and model arrays."""
    runs = []
    for device in ("cpu", setting.device):
        sequential = patch("strategies.hepco.run_in_threads", lambda jobs, _: [job(Event()) for job in jobs])
        with tempfile.TemporaryDirectory() as folder, DrawsOnCPU(setting.device), sequential, measured(device) as costs:
            results = run(setting.small(method) | {"device": device}, Path(folder) / "run")
            arrays = safetensors.numpy.load_file(Path(folder) / "run" / MODEL)
            runs.append((np.array(results["accuracy_matrix"], np.float64), determined(arrays)))
    (cpu, cpu_arrays), (gpu, gpu_arrays) = runs
    apart = {name: relative_distance(array, gpu_arrays[name]) for name, array in cpu_arrays.items()}
    points, worst = 100 * float(np.nanmax(np.abs(cpu - gpu))), max(apart, key=lambda name: apart[name])
    return {
        "cpu": 100 * float(np.mean(cpu[-1])),
        "gpu": 100 * float(np.mean(gpu[-1])),
        "points": points,
        "array": worst,
        "relative": apart[worst],
        "met": points <= ACCURACY_TOLERANCE and apart[worst] <= ARRAY_TOLERANCE,
        **costs,
    }


def determined(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """A model's arrays, with A^T A and A^T b [K, D, D + 1] in place of directions A and offsets b of a quadratic head.

    A [K, q, D] comes from eigenvectors, whose signs are arbitrary, as is their rotation where eigenvalues are equal.
    """
    if "head.directions" not in arrays:
        return arrays
    rest, directions = dict(arrays), arrays["head.directions"].astype(np.float64)
    both = np.concatenate([rest.pop("head.directions"), rest.pop("head.offsets")[:, :, None]], axis=2)
    return rest | {"head.directions^T head.directions": directions.transpose(0, 2, 1) @ both}


def relative_distance(expected: np.ndarray, other: np.ndarray) -> float:
    """|expected - other| / |expected|, of the largest numbers only where a few are huge; 0 where both are zero."""
    wide = expected.astype(np.float64)
    return float(np.linalg.norm(wide - other) / (np.linalg.norm(wide) or 1.0))


def precisions(method: str, setting: Setting) -> dict[str, Any]:
    """Final average accuracy of a small run in fp32 and bf16, and the relative distance of their frozen features."""
    answer, features = dict[str, Any](), []
    for precision in ("fp32", "bf16"):
        keys = setting.small(method) | {"precision": precision}
        with tempfile.TemporaryDirectory() as folder:
            results = run(keys, Path(folder) / "run")
        answer |= {precision: 100 * results["metrics"]["final_average_accuracy"]}
        config = parse(keys)
        model = build_model(config, [2])
        images = load_dataset(config.dataset, "", model.backbone.image_size, 0.0, 0).test_images
        inputs = prepare(images[np.arange(min(IMAGES, len(images)))], model.backbone)
        features.append(model.query(inputs, [model.backbone.last]).cpu().numpy())
    return answer | {"features": relative_distance(*features)}


def speeds(label: str, setting: Setting) -> dict[str, Any]:
    """Images per second and peak memory of a local training, for each precision, augmentation and batch size."""
    backbone, side = ("vit_glyphs", 16) if setting.quick else BACKBONES[label]
    batches, steps = ([2], 1) if setting.quick else (BATCHES, STEPS)
    rows = []
    for precision, augmentation, batch in (
        (p, a, b) for p in ("fp32", "bf16") for a in ("none", "crop-flip") for b in batches
    ):
        keys: Keys = {"method": "hgp", "backbone": backbone, "backbone-weights": "random", "image-size": side}
        config = parse(
            keys | {"precision": precision, "batch-size": batch, "local-epochs": 1, "device": setting.device}
        )
        model = build_model(config, [10])
        images = numpy_rng(0, "speed").integers(0, 256, (batch * steps, side, side, 3), dtype=np.uint8)
        positions = np.arange(len(images))
        data = LocalData(images, positions, positions % 10, augmentation)
        train = partial(train_locally, model, Objective(config, Packet()), data, config)
        try:
            train(torch_rng(0, "speed"))
            with measured(setting.device) as costs:
                train(torch_rng(0, "speed"))
        except torch.OutOfMemoryError:
            costs = {"seconds": float("inf"), "peak_mb": None}
        speed = len(images) / costs["seconds"]
        rows.append({"precision": precision, "augmentation": augmentation, "batch": batch, "images": speed, **costs})
    return {"rows": rows}


def paper(method: str, setting: Setting) -> dict[str, Any]:
    """The preset's run, or FedRDA's, on the images of --data."""
    keys = dict(FEDRDA) if method == "fedrda" else read_file(ROOT / "presets" / f"{method}-cifar100.toml")
    keys |= {"dataset": "npz", "data-dir": str(setting.data), "device": setting.device, "seed": 0}
    if method != "fedprok":
        keys |= {"backbone": "deit_tiny_patch16_224", "backbone-weights": str(setting.weights), "image-size": 160}
    if setting.quick:
        keys |= {"data-dir": ""} | TINY_PAPER | (TINY_HEPCO if method == "hepco" else {})
        keys |= {} if method == "fedprok" else {"backbone": "vit_glyphs", "backbone-weights": "auto"}
        keys = {name: value for name, value in keys.items() if name not in QUICK_UNREAD}
    with measured(setting.device) as costs:
        results = run(keys, setting.output / f"paper-{method}-run", setting.deadline)
    traffic = results["communication"]
    return {
        "final": 100 * results["metrics"]["final_average_accuracy"],
        "incremental": 100 * results["metrics"]["average_incremental_accuracy"],
        "forgetting": 100 * results["metrics"]["forgetting"],
        "rounds": len(results["rounds"]),
        "megabytes": (traffic["bytes_up"] + traffic["bytes_down"]) / 1e6,
        "seconds": results["seconds"]["total"],  # of all calls together
        "parts": results["seconds"],
        "peak_mb": costs["peak_mb"],
    }


# of the presets' partitions, which the tiny run does not have
QUICK_UNREAD = {"dirichlet-beta", "class-share", "split-ratio", "category-ratio", "imbalance-ratio"}

PIECES = (
    *(Piece(f"correct-{name}", 0.3, partial(same_on_both, name)) for name in METHODS),
    *(Piece(f"speed-{label}", 0.7, partial(speeds, label)) for label in BACKBONES),
    *(Piece(f"bf16-{name}", 0.3, partial(precisions, name)) for name in SYSTEMS),
    *(Piece(f"paper-{name}", MINUTES[name], partial(paper, name), needs_files=True) for name in SYSTEMS),
)


def environment(device: str) -> dict[str, str]:
    """Device and versions, for people."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else f"CPU ({platform.machine()})"
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    versions = f"python {platform.python_version()}, torch {torch.__version__}{cuda}, timm {timm.__version__}"
    return {"device": name, "versions": f"{versions}, numpy {np.__version__}"}


def require_same(setting: Setting) -> None:
    """Note in the output folder what its results come from.

    Raises:
        ConfigError: a file is missing, or the folder has results of another device, of other files or of ``--quick``.
    """
    path, files = setting.output / "setting.txt", {"data": setting.data, "weights": setting.weights}
    if missing := [str(file) for file in files.values() if file and not file.is_file()]:
        raise ConfigError(f"{missing[0]} is not a file.")
    now: dict[str, Any] = {"quick": setting.quick, "device": environment(setting.device)["device"]}
    now |= {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items() if file}
    if not path.exists() and any(setting.output.glob("*.json")):
        raise ConfigError(f"{setting.output} has results of which {path.name} is missing: name another --output.")
    before = json.loads(path.read_text()) if path.exists() else {}
    if other := [name for name in now if before.get(name, now[name]) != now[name]]:
        raise ConfigError(f"{setting.output} has results of another {other[0]}: name another --output.")
    setting.output.mkdir(parents=True, exist_ok=True)
    write_json(path, before | now)


def measure_pieces(pieces: Sequence[Piece], setting: Setting) -> bool:
    """Do the pieces whose file is missing, until the time is over; returns whether none of them failed."""
    sound = True
    for piece in pieces:
        path = setting.output / f"{piece.name}.json"
        if path.exists() or time.monotonic() > setting.deadline:
            continue
        if piece.needs_files and not setting.quick and not (setting.data and setting.weights):
            print(f"{piece.name}: left out, it needs --data and --weights", flush=True)
            continue
        print(f"{piece.name}: may take {piece.minutes:g} min", flush=True)
        started = time.perf_counter()
        try:
            answer = piece.measure(setting)
        except TimeOver:
            print(f"{piece.name}: the time is over; the next call resumes it", flush=True)
            return sound
        except Exception:  # the other pieces are still worth their time
            traceback.print_exc()
            print(f"{piece.name}: FAILED; the next call tries it again", flush=True)
            sound = False
            continue
        took = {"took": time.perf_counter() - started, "quick": setting.quick, **environment(setting.device)}
        write_atomically(path, (json.dumps(answer | took, indent=1) + "\n").encode())
        print(f"{piece.name}: {took['took']:.0f} s", flush=True)
    return sound


def markdown(output: Path, pieces: Sequence[Piece]) -> str:
    """A section of the ledger with all that lies in the output folder."""
    measured = {path.stem: json.loads(path.read_text()) for path in sorted(output.glob("*.json"))}
    answers = {piece.name: measured[piece.name] for piece in pieces if piece.name in measured}
    machines = sorted({f"{answer['device']}; {answer['versions']}" for answer in answers.values()})
    title = "## One GPU" + (
        " (--quick: the CPU stands for the GPU)" if any(a["quick"] for a in answers.values()) else ""
    )
    lines = [title, "", "`python -m benchmarks.gpu`, seed 0. " + "; ".join(machines) + "."]
    tables = (("correct", correct_table), ("speed", speed_table), ("bf16", bf16_table), ("paper", paper_table))
    for kind, table in tables:
        chosen = {name.removeprefix(f"{kind}-"): a for name, a in answers.items() if name.startswith(f"{kind}-")}
        if chosen:
            lines += ["", *table(chosen)]
    missing = [piece.name for piece in pieces if piece.name not in measured]
    return "\n".join([*lines, "", f"Not run: {', '.join(missing)}." if missing else "All pieces were run."])


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table."""
    return markdown_table(head, rows, text=range(len(head))).splitlines()


def decimal(value: float | None, digits: int = 1) -> str:
    """A number as text; a dash where nothing was measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def correct_table(answers: Mapping[str, Any]) -> list[str]:
    """Of each method: accuracy on both devices and how far they are apart."""
    head = ["method", "CPU, %", "GPU, %", "apart at most, points", "array furthest apart", "relative", "met", "peak MB"]
    rows = [
        [
            name,
            *(decimal(a[key]) for key in ("cpu", "gpu")),
            decimal(a["points"], 2),
            a["array"],
            f"{a['relative']:.1e}",
            "yes" if a["met"] else "NO",
            decimal(a["peak_mb"], 0),
        ]
        for name, a in answers.items()
    ]
    tolerance = f"{ACCURACY_TOLERANCE:g} points in any cell of the matrix, {ARRAY_TOLERANCE:g} of any array's norm"
    return [f"The same run on CPU and GPU, fp32. Tolerance: {tolerance}.", "", *table(head, rows)]


def speed_table(answers: Mapping[str, Any]) -> list[str]:
    """Images per second by backbone, precision, augmentation and batch size."""
    head = ["backbone", "precision", "augmentation", "batch", "images a second", "peak MB"]
    rows = [
        [name, r["precision"], r["augmentation"], str(r["batch"]), decimal(r["images"], 0), decimal(r["peak_mb"], 0)]
        for name, a in answers.items()
        for r in a["rows"]
    ]
    note = "Local training with the shared prompt, random weights, stored images of that side; 0 = out of memory."
    return [note, "", *table(head, rows)]


def bf16_table(answers: Mapping[str, Any]) -> list[str]:
    """Of each system: accuracy in both precisions, distance of the features."""
    head = ["method", "fp32, %", "bf16, %", "features, relative distance"]
    rows = [[name, decimal(a["fp32"]), decimal(a["bf16"]), f"{a['features']:.1e}"] for name, a in answers.items()]
    return ["A small run in both precisions on the GPU.", "", *table(head, rows)]


def paper_table(answers: Mapping[str, Any]) -> list[str]:
    """Of each system: accuracy, forgetting, rounds, traffic and time of the whole run."""
    head = ["method", "final, %", "incremental, %", "forgetting, points", "rounds", "traffic, MB", "minutes", "peak MB"]
    rows = [
        [
            name,
            *(decimal(a[column]) for column in ("final", "incremental", "forgetting")),
            str(a["rounds"]),
            decimal(a["megabytes"]),
            decimal(a["seconds"] / 60),
            decimal(a["peak_mb"], 0),
        ]
        for name, a in answers.items()
    ]
    return ["The presets' runs, and FedRDA's, on the images of --data.", "", *table(head, rows)]


def _main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="images of 100 classes, by benchmarks.slice_npz")
    parser.add_argument("--weights", type=Path, help="weights of DeiT-Ti, a .safetensors file")
    parser.add_argument("--output", type=Path, help="folder of the results (default: runs/gpu or runs/gpu-quick)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which nothing new is started")
    parser.add_argument("--piece", action="append", choices=[p.name for p in PIECES], help="only this one, or several")
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N (default: cuda)")
    parser.add_argument("--quick", action="store_true", help="on the CPU, with tiny problems: nothing is measured")
    parser.add_argument("--list", action="store_true", help="name the pieces and their minutes")
    args = parser.parse_args(arguments)
    pieces = [piece for piece in PIECES if not args.piece or piece.name in args.piece]
    if args.list:
        print(*(f"{piece.name:<24} {piece.minutes:g} min" for piece in pieces), sep="\n")
        print(f"{'all':<24} {sum(piece.minutes for piece in pieces):.3g} min")
        return 0
    device = "cpu" if args.quick else args.device
    deadline = time.monotonic() + 60 * args.minutes
    output = (args.output or Path("runs/gpu-quick" if args.quick else "runs/gpu")).resolve()
    setting = Setting(device, args.quick, args.data and args.data.resolve(), args.weights, output, deadline)
    try:
        resolve_device(device)
        require_same(setting)
    except ConfigError as error:
        parser.error(str(error))
    sound = measure_pieces(pieces, setting)
    section = markdown(output, pieces)
    write_atomically(output / "section.md", (section + "\n").encode())
    print(f"\n{section}")
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(_main())
