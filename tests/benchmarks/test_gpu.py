"""`python -m benchmarks.gpu`: pieces are resumed, draws are the CPU's, and every line runs without a GPU."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import gpu
from server_app.bench.suite import read_suite
from task.config.parsing import parse
from task.methods import METHODS
from task.models.load import build_backbone
from task.scenario.adaptation import choose_adaptation_rounds


def test_pieces_are_kept_and_only_missing_ones_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = list[str]()
    monkeypatch.setattr(gpu, "speeds", None)
    rows = [{"precision": "fp32", "augmentation": "none", "batch": 4, "images": 1234.4, "peak_mb": 56.6}]
    pieces = [gpu.Piece(f"speed-{n}", 1, lambda s, n=n: calls.append(n) or {"rows": rows}) for n in ("one", "two")]
    monkeypatch.setattr(gpu, "PIECES", pieces)
    assert gpu._main(["--quick", "--output", str(tmp_path), "--minutes", "0"]) == 0
    assert "Not run: speed-one, speed-two." in capsys.readouterr().out
    assert gpu._main(["--quick", "--output", str(tmp_path), "--piece", "speed-two"]) == 0
    assert gpu._main(["--quick", "--output", str(tmp_path)]) == 0
    assert calls == ["two", "one"]
    section = (tmp_path / "section.md").read_text()
    assert "| one | fp32 | none | 4 | 1234 | 57 |\n| two |" in section
    assert "the CPU stands for the GPU" in section
    assert section.endswith("All pieces were run.\n")


def test_a_folder_is_for_one_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What --quick left is no result of a paper's run, and other images are another problem."""
    monkeypatch.setattr(gpu, "PIECES", [gpu.Piece("speed-one", 1, lambda _: {"rows": []})])
    monkeypatch.setattr(gpu, "resolve_device", lambda device: None)
    files = [tmp_path / name for name in ("a.npz", "b.npz")]
    for file in files:
        file.write_text(file.name)
    quick, real, old = [str(tmp_path / name) for name in ("quick", "real", "old")]
    Path(old).mkdir()
    (tmp_path / "old" / "speed-one.json").write_text("{}")
    for arguments in (["--quick", "--output", quick], ["--device", "cpu", "--output", real]):
        assert gpu._main(arguments) == 0
    assert gpu._main(["--device", "cpu", "--output", real, "--data", str(files[0])]) == 0
    for wrong, message in (
        (["--output", quick], f"{quick} has results of another quick"),
        (["--output", real, "--data", str(files[1])], f"{real} has results of another data"),
        (["--output", real, "--data", str(tmp_path / "c.npz")], f"{tmp_path / 'c.npz'} is not a file"),
        (["--output", str(old)], f"{old} has results of which setting.txt is missing"),
    ):
        with pytest.raises(SystemExit):
            gpu._main(["--device", "cpu", *wrong])
        assert message in capsys.readouterr().err


def test_a_piece_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(setting: gpu.Setting) -> dict[str, object]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    pieces = [gpu.Piece("speed-one", 1, fail), gpu.Piece("speed-two", 1, lambda _: {"rows": []})]
    monkeypatch.setattr(gpu, "PIECES", pieces)
    assert gpu._main(["--quick", "--output", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "speed-one: FAILED" in printed.out
    assert "CUDA out of memory" in printed.err
    assert "Not run: speed-one." in (tmp_path / "section.md").read_text()
    assert (tmp_path / "speed-two.json").exists()


def test_a_papers_run_stops_when_the_time_is_over_and_is_resumed(tmp_path: Path) -> None:
    clock = iter(range(1000))
    stopping = gpu.Setting("cpu", True, None, None, tmp_path, deadline=6.5)  # in the second round
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gpu.time, "monotonic", lambda: next(clock))
        with pytest.raises(gpu.TimeOver):
            gpu.paper("pip", stopping)
    run = tmp_path / "paper-pip-run"
    assert json.loads((run / "results.json").read_text())["status"] == "failed"
    assert len(list((run / "checkpoint").glob("*.ckpt"))) >= 1
    resumed = gpu.paper("pip", gpu.Setting("cpu", True, None, None, tmp_path))
    whole = gpu.paper("pip", gpu.Setting("cpu", True, None, None, tmp_path / "whole"))
    times = ("seconds", "parts")
    assert {n: v for n, v in resumed.items() if n not in times} == {n: v for n, v in whole.items() if n not in times}
    assert resumed["rounds"] == 2


def test_both_devices_draw_the_same_numbers_and_those_of_a_cpu_run() -> None:
    """A generator on the device is replaced by one on the CPU that goes on from draw to draw."""
    expected = torch.Generator().manual_seed(3)
    numbers = [torch.randn(4, generator=expected), torch.empty(5).normal_(generator=expected)]
    numbers += [torch.randperm(6, generator=expected), torch.multinomial(torch.ones(7), 2, generator=expected)]
    rng, target = torch.Generator().manual_seed(3), torch.zeros(5)
    with gpu.DrawsOnCPU("cpu"):
        drawn = [torch.randn(4, generator=rng, device=rng.device), target.normal_(generator=rng)]
        drawn += [torch.randperm(6, generator=rng), torch.multinomial(torch.ones(7), 2, generator=rng)]
    assert all(torch.equal(a, b) for a, b in zip(numbers, drawn, strict=True))
    assert drawn[1] is target
    assert torch.equal(torch.rand(1, generator=rng), torch.rand(1, generator=torch.Generator().manual_seed(3)))


def test_what_differs_is_not_met(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second run learns with another step size."""
    run, rates = gpu.run, iter((1e-3, 1e-2))
    monkeypatch.setattr(gpu, "run", lambda keys, folder: run(keys | {"learning-rate": next(rates)}, folder))
    answer = gpu.same_on_both("head-only", gpu.Setting("cpu", True, None, None, tmp_path))
    assert not answer["met"]
    assert answer["relative"] > gpu.ARRAY_TOLERANCE


def test_fp32_means_fp32_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    torch.backends.cuda.matmul.allow_tf32 = True  # monkeypatch cannot set it
    build_backbone("vit_glyphs", "random", 16, "cpu")
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.ci
def test_a_tiny_piece_of_each_kind_fills_its_table(tmp_path: Path) -> None:
    names = ["correct-ncm", "speed-vit-b-224", "bf16-pip", "paper-hgp", "paper-fedrda"]
    arguments = [word for name in names for word in ("--piece", name)]
    assert gpu._main(["--quick", "--output", str(tmp_path), *arguments]) == 0
    section = (tmp_path / "section.md").read_text()
    assert section.endswith("All pieces were run.\n")
    for row in (
        "| ncm | 100.0 | 100.0 | 0.00 |",
        "| vit-b-224 | bf16 | crop-flip | 2 |",
        "| pip | ",
        "| hgp | ",
        "| fedrda | ",
    ):
        assert row in section


def test_pieces_are_listed_with_their_minutes(capsys: pytest.CaptureFixture) -> None:
    """All at the end; the two longest runs come last."""
    assert gpu._main(["--list"]) == 0
    *pieces, total = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [name for name, *_ in pieces[-2:]] == ["paper-fedprok", "paper-fppl"]
    assert total == ["all", f"{sum(float(minutes) for _, minutes, _ in pieces):.3g}", "min"]


def test_the_run_of_fedrda_is_that_of_the_suite() -> None:
    """It states the 5 rounds of adaptation that auto chooses there: a client has 100 images, 7 steps an epoch."""
    suite = read_suite(gpu.ROOT / "suites" / "cifar100-cpu.yaml", {})
    (planned,) = (r for r in suite.runs if (r.variant, r.partition, r.seed) == ("fedrda", "beta-0.5", 0))
    keys, expected = parse(gpu.FEDRDA).flat(), planned.config.flat()
    rounds = choose_adaptation_rounds([100] * 10, planned.config)
    assert keys["fedrda-adaptation-rounds"] == rounds == 5
    apart = {name for name, value in keys.items() if value != (expected | {"fedrda-adaptation-rounds": rounds})[name]}
    assert apart == {"dataset", "data-dir", "backbone", "image-size", "output-dir", "run-name"}


def test_relative_distance_by_hand() -> None:
    """|(3, 4) - (3, 4.5)| / |(3, 4)| = 0.5 / 5."""
    assert gpu.relative_distance(np.array([3.0, 4.0]), np.array([3.0, 4.5])) == pytest.approx(0.1)
    assert gpu.relative_distance(np.zeros(2), np.zeros(2)) == 0


def test_directions_with_other_signs_are_the_same_head() -> None:
    directions, offsets = np.array([[[1.0, 2.0], [3.0, 4.0]]]), np.array([[5.0, 6.0]])
    turned = {"head.directions": -directions[:, ::-1], "head.offsets": -offsets[:, ::-1], "head.bias": np.ones(1)}
    arrays = gpu.determined({"head.directions": directions, "head.offsets": offsets, "head.bias": np.ones(1)})
    assert arrays["head.directions^T head.directions"].tolist() == [[[10, 14, 23], [14, 20, 34]]]
    assert {name: array.tolist() for name, array in gpu.determined(turned).items()} == {
        name: array.tolist() for name, array in arrays.items()
    }


@pytest.mark.slow
def test_quick_does_every_piece(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu._main(["--quick", "--output", str(tmp_path)]) == 0
    section = (tmp_path / "section.md").read_text()
    assert all(f"| {name} |" in section for name in METHODS)
    assert section.endswith("All pieces were run.\n")
    assert "| NO |" not in section
    assert {path.stem for path in tmp_path.glob("*.json")} == {piece.name for piece in gpu.PIECES}
    assert section.strip() in capsys.readouterr().out
