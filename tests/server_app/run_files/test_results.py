"""What results.json counts, by hand."""

import numpy as np
import pytest

from server_app.rounds.progress import summary
from server_app.run_files.results import Results, RoundReport
from server_app.run_files.writers import read_lines
from task.config.parsing import parse
from task.scenario.scenario import build_scenario


def test_a_task_all_of_whose_images_are_away_is_no_task_without_images(tiny, tmp_path) -> None:
    """5 images of each of 6 old classes are right; of 6 new ones 4 each are away. No final average is known then."""
    config = parse(tiny)
    results = Results(tmp_path, config, build_scenario(config))
    old, new = results.tasks
    confusion, away = np.zeros((12, 12), np.int64), np.zeros(12, np.int64)
    confusion[old, old], away[new] = 5, 4
    results.add_evaluation(0, confusion, 0 * away)
    results.add_evaluation(1, confusion, away)
    assert results.samples == [30, 24]
    assert results.matrix == [[1.0, None], [1.0, None]]
    assert results.seen == [1.0, None]
    assert results.as_dict()["metrics"] == {}


def test_seconds_and_means_of_a_rounds_clients(tiny, tmp_path) -> None:
    """Loss (1 x 1 + 3 x 5) / 4 = 4, accuracy (1 x 1 + 3 x 0.2) / 4 = 0.4; 2 + 3 s of training, 0.5 s of statistics."""
    config, report = parse(tiny), RoundReport(1, 1, ["a", "b"])
    results = Results(tmp_path, config, build_scenario(config))
    one = {"num-examples": 1, "loss": 1.0, "accuracy": 1.0, "seconds-train": 2.0, "seconds-statistics": 0.5}
    other = {"num-examples": 3, "loss": 5.0, "accuracy": 0.2, "seconds-train": 3.0}
    results.add_training([one, other], report)
    assert (report.train_loss, report.train_accuracy) == pytest.approx((4.0, 0.4))
    assert (results.seconds["client_train"], results.seconds["client_statistics"]) == (5.0, 0.5)


def test_traffic_and_time_of_a_round_by_hand(tiny, tmp_path) -> None:
    """Three answers in two rounds: 150 / 3 bytes up, 240 / 3 down; 6 s / 2 rounds."""
    config = parse(tiny)
    results = Results(tmp_path, config, build_scenario(config))
    results.rounds = [
        RoundReport(1, 1, ["a", "b"], bytes_up=100, bytes_down=200, seconds=2.0),
        RoundReport(1, 2, ["a"], bytes_up=50, bytes_down=40, seconds=4.0),
    ]
    content = results.as_dict()
    assert content["communication"] == {
        **{"bytes_up": 150, "bytes_down": 240, "bytes_up_per_client_round": 50, "bytes_down_per_client_round": 80}
    }
    assert content["seconds"]["per_round"] == 3.0


def test_each_tasks_marks_are_those_of_its_own_images(tiny, tmp_path) -> None:
    """Two images of the first task, right and wrong; three of the second: wrong, right, right."""
    config = parse(tiny)
    results = Results(tmp_path, config, build_scenario(config))
    old, new = (classes[0] for classes in results.tasks)
    results.note_correct(np.array([old, old]), np.array([True, False]))
    assert results.correct_images == ["10"]  # no later task is known yet
    results.samples = [2]
    results.note_correct(np.array([old, new, new, old, new]), np.array([True, False, True, False, True]))
    assert results.correct_images == ["10", "011"]


@pytest.mark.parametrize(("share", "said"), [(0.25, " on validation images"), (0.0, "")])
def test_accuracies_on_validation_images_are_called_so(share, said, tiny, tmp_path) -> None:
    config = parse(tiny | {"validation-share": share})
    results = Results(tmp_path, config, build_scenario(config))
    confusion = np.zeros((12, 12), np.int64)
    for task, classes in enumerate(results.tasks):
        confusion[classes, classes] = 5
        results.add_evaluation(task, confusion, np.zeros(12, np.int64))
    results.write()
    assert results.as_dict().get("validation_share", 0.0) == share
    assert summary(tmp_path)[0] == f"final average accuracy 100.0%, forgetting 0.0%{said}"


def test_rounds_of_adaptation_are_counted_in_each_rounds_line(tiny, tmp_path) -> None:
    """Two come first, and belong to the first of two tasks."""
    config = parse(tiny | {"method": "fedrda", "fedrda-adaptation-rounds": 2})
    results = Results(tmp_path, config, build_scenario(config))
    for task, round_ in ((1, 1), (1, 2), (1, 3), (2, 1)):
        results.rounds.append(RoundReport(task, round_, ["a"]))
        results.write_round()
    lines = read_lines(tmp_path / "rounds.jsonl")
    assert [(line["round"], line["rounds_per_task"], line["total_rounds"]) for line in lines] == [
        *((1, 3, 4), (2, 3, 4), (3, 3, 4), (1, 1, 4))
    ]
