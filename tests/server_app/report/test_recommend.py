"""The recommendation of a comparison, against cases worked out by hand."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from server_app.report.compare import Group, comparison_table
from server_app.report.recommend import _adjusted, noise, recommend
from server_app.report.runs import build_run


def group(
    label: str, accuracies: Sequence[float | None], megabytes: float, minutes: float | None, **given: Any
) -> Group:
    """A run for each accuracy, the same on each task; ``minutes`` of all cores, None if only the clock was recorded."""
    images, theirs, method = given.get("images", 400), given.get("theirs", False), given.get("method", "hgp")
    samples = given.get("samples", [images])
    each = [given.get(name, [None] * len(accuracies)) for name in ("seeds", "correct", "digests")]
    runs = [
        build_run(
            Path("run"),
            {
                "status": "finished",
                "method": method,
                "dataset": "digits",
                "num_tasks": len(samples),
                "seed": seed,
                "class_names": given.get("class_names", []),
                "tasks": given.get("tasks", []),
                "correct_images": correct,
                "accuracy_matrix": [[accuracy] * len(samples)] * len(samples),
                "samples_per_task": [0 if accuracy is None else n for n in samples],
                "communication": {"bytes_up": 1e6 * megabytes, "bytes_down": 0},
                "seconds": {"total": 300.0, "cpu_total": None if minutes is None else 60 * minutes},
            },
            {"data-sha256": digest, **given.get("settings", {})},
        )
        for accuracy, seed, correct, digest in zip(accuracies, *each, strict=True)
    ]
    return Group("digits", label, runs, theirs=theirs)


def test_the_only_accurate_one_is_recommended() -> None:
    # sd of 0.88, 0.90, 0.92 is 2 points; of 400 images at 0.9 it is sqrt(0.09 / 400) = 1.5: the seeds' counts
    lines = recommend([group("cheap", [0.80, 0.82], 1, 1), group("good", [0.88, 0.90, 0.92], 10, 10)])
    assert lines == [
        "Most accurate: good, 90.0 ± 2.0 % for 10 MB and 10 core-minutes.",
        "Below it: cheap, 81.0 ± 1.4 % for 1 MB and 1 core-minutes; 9.0 points below, noise 2.0: standard "
        "deviation over 3 seeds.",
        "Recommended: good: the next one is below it by more than the noise.",
    ]


@pytest.mark.parametrize(
    ("cost", "words"), [(0.03512, "0.0351"), (6.826, "6.83"), (999.4, "999"), (999.6, "1,000"), (1123.4, "1,123")]
)
def test_costs_have_three_digits_and_no_exponent(cost: float, words: str) -> None:
    first, *_ = recommend([group("good", [0.9], cost, cost), group("worse", [0.5], 1, 1)])
    assert first == f"Most accurate: good, 90.0 % for {words} MB and {words} core-minutes."


def test_the_cheapest_within_the_noise_is_recommended() -> None:
    lines = recommend(
        [
            group("best", [0.88, 0.90, 0.92], 10, 10),
            group("near", [0.885, 0.885], 1, 2),
            group("far", [0.875, 0.875], 0.1, 0.1),
        ]
    )
    assert lines[1:] == [
        "Close to it: near, 88.5 ± 0.0 % for 1 MB and 2 core-minutes; 1.5 points below, noise 2.0: "
        "standard deviation over 3 seeds.",
        "Below it: far, 87.5 ± 0.0 % for 0.1 MB and 0.1 core-minutes; 2.5 points below, noise 2.0: standard "
        "deviation over 3 seeds; about twice the noise at most, so that it may be chance.",
        "Recommended: near: about the cheapest of these in traffic and in computation.",
        "near may be less accurate than best: 1.5 points are within the noise. More test images or seeds would tell.",
    ]


def test_on_validation_images_more_of_those_would_tell() -> None:
    groups = [group("best", [0.88, 0.90, 0.92], 10, 10), group("near", [0.885, 0.885], 1, 2)]
    for run in [*groups[0].runs, *groups[1].runs]:
        run.settings["validation-share"] = 0.2
    assert any(line.endswith("More validation images or seeds would tell.") for line in recommend(groups))


def test_costs_that_disagree_leave_the_choice_to_the_reader() -> None:
    lines = recommend([group("a", [0.88, 0.90, 0.92], 10, 1), group("b", [0.89, 0.89], 1, 10)])
    assert lines[-1] == (
        "Recommended: b where traffic is dear (1 MB), a where computation is (1 core-minutes); their accuracies count "
        "as equal."
    )


def test_costs_of_about_the_same_size_are_equal() -> None:
    """The same messages, and processor times that differ by what else the machine did: the more accurate one."""
    equal = [group("a", [0.9, 0.9], 5.21, 1.2), group("b", [0.899, 0.899], 5.2, 1.0)]
    assert recommend(equal)[-1].startswith("Recommended: a: the most accurate, and about the cheapest")
    assert recommend([equal[0], group("b", [0.899, 0.899], 5.2, 0.95)])[-1].startswith("Recommended: b: about the")


def test_one_that_is_about_the_cheapest_in_both_is_recommended_alone() -> None:
    """A is not in computation (1.5 times the least), b not in traffic (1.3 times), c in both."""
    costs = {"a": (1.15, 1.62), "b": (1.54, 1.32), "c": (1.28, 1.08)}
    lines = recommend([group(label, [0.9, 0.9], *cost) for label, cost in costs.items()])
    assert lines[-1] == "Recommended: c: about the cheapest of these in traffic and in computation."


def test_a_cost_that_was_not_recorded_is_no_low_one() -> None:
    unknown = group("unknown", [0.9, 0.9], math.nan, 1)
    assert "Recommended: b:" in recommend([unknown, group("b", [0.899, 0.899], 1, 1)])[-1]


def test_the_best_may_be_the_cheapest_too() -> None:
    lines = recommend([group("a", [0.9, 0.9], 1, 1), group("b", [0.899, 0.899], 2, 2)])
    reason = "the most accurate, and about the cheapest of these in traffic and in computation"
    assert lines[-1] == f"Recommended: a: {reason}."


@pytest.mark.parametrize(
    ("accuracies", "images", "expected"),
    [
        ([0.9], 98, 0.0303),  # Laplace: (88.2 + 1) / 100 = 0.892; sqrt(0.892 * 0.108 / 98) = 0.03135
        ([1.0], 98, 0.01005),  # (98 + 1) / 100 = 0.99; sqrt(0.99 * 0.01 / 98)
        ([0.9, 0.9], 98, 0.0314),  # seeds agree, but on the same few images
        ([0.8, 1.0], 98, 0.1414),  # sample deviation over seeds
    ],
)
def test_noise_of_runs_that_have_nothing_in_common(accuracies: list[float], images: int, expected: float) -> None:
    best, other = group("x", accuracies, 1, 1, images=images), group("y", [0.5], 1, 1)
    assert noise(best, other)[0] == pytest.approx(expected, rel=0.04)


def test_differences_of_single_seeds_count() -> None:
    """Accuracies of seeds differ by 20 points, of two methods with one seed by 2, 3 and 4: their deviation is one."""
    best = group("best", [0.62, 0.73, 0.84], 1, 1, seeds=[0, 1, 2], images=10**6)
    other = group("other", [0.80, 0.60, 0.70], 1, 1, seeds=[2, 0, 1], images=10**6)
    assert noise(best, other) == (pytest.approx(0.01), "standard deviation over 3 seeds")
    assert "Recommended: best: the next one is below it by more than the noise." in recommend([best, other])
    assert noise(best, group("one", [0.6], 1, 1, seeds=[0], images=10**6))[0] == pytest.approx(0.11)  # of best alone


def test_only_seeds_that_both_have_are_compared() -> None:
    """Seed 1 is easy. On seed 0 both have 60 and 57; by their means 70 and 57 they would be 13 apart."""
    best = group("best", [0.60, 0.80], 1, 1, seeds=[0, 1], images=10**6)
    other = group("other", [0.57], 2, 2, seeds=[0], images=10**6)
    lines = recommend([best, other])
    assert "; 3.0 points below on the seed that both have, noise 0.0: by the draw of the 1,000,000 test" in lines[1]
    assert lines[2] == "Recommended: best: the next one is below it by more than the noise."
    late = group("best", [0.60, 0.80, 0.99], 1, 1, seeds=[0, 1, 3], images=10**6)
    both = group("other", [0.5, 0.6], 2, 2, seeds=[0, 1], images=10**6)
    assert "; 15.0 points below on the 2 seeds that both have, noise" in recommend([late, both])[1]


def test_seeds_of_one_method_only_do_not_decide_who_is_most_accurate() -> None:
    """Good is 10 points above lucky on both seeds that they share, though lucky's mean of three seeds is higher."""
    good = group("good", [0.60, 0.61], 2, 2, seeds=[0, 1], images=10**6)
    lucky = group("lucky", [0.50, 0.51, 0.90], 1, 1, seeds=[0, 1, 2], images=10**6)
    lines = recommend([lucky, good])
    assert lines[0].startswith("Most accurate, as if all had the same seeds: good, 60.5")
    assert "lucky, 63.7 ± 22.8 %" in lines[1]
    assert "; 10.0 points below on the 2 seeds that both have" in lines[1]
    assert lines[2].startswith("Recommended: good:")


def test_a_seed_that_only_some_have_connects_methods() -> None:
    """Of the mean accuracies 70.3, 65 and 60.5 the second would be next; on seed 2 it is 25 points below the best."""
    best = group("best", [0.60, 0.61, 0.90], 9, 9, seeds=[0, 1, 2], images=10**6)
    bad = group("bad", [0.65], 1, 1, seeds=[2], images=10**6)
    good = group("good", [0.60, 0.61], 2, 2, seeds=[0, 1], images=10**6)
    assert recommend([best, bad, good])[-2].startswith("Recommended: good:")


def test_one_more_seed_does_not_turn_the_recommendation() -> None:
    """A suite that is not over: a second seed, which is easy, of the most accurate method has come in."""
    seeds = {"seeds": [0, 1], "images": 320}
    groups = [group("best", [0.572, 0.797], 9, 9, **seeds), group("frozen", [0.491, 0.494], 2, 2, **seeds)]
    groups += [group("cheap", [0.534], 1, 1, seeds=[0], images=320), group("ncm", [0.338, 0.338], 1, 1, **seeds)]
    lines = recommend(groups)
    assert lines[0].startswith("Most accurate: best")
    assert "cheap, 53.4 %" in lines[1]
    assert "3.8 points below on the seed that both have, noise 2.8" in lines[1]
    assert lines[2].startswith("Recommended: best:")


def test_seeds_that_no_two_methods_share_leave_the_means() -> None:
    groups = [group(label, [a], 1, 1, seeds=[s], images=10**6) for s, (label, a) in enumerate((("a", 0.5), ("b", 0.7)))]
    assert recommend(groups)[0].startswith("Most accurate: b")
    pair = [group(label, [a], 1, 1, seeds=[0]) for label, a in (("a", 0.5), ("c", 0.4))]
    assert recommend([*pair, group("b", [0.45], 1, 1, seeds=[1])])[0].startswith("Most accurate: a")


def test_one_that_is_better_on_the_common_seed_is_named() -> None:
    """C, which has both seeds, makes seed 1 no easier; on seed 0 a is 3 points above the best."""
    best = group("best", [0.50, 0.70], 1, 1, seeds=[0, 1], images=10**6)
    groups = [best, group("c", [0.3, 0.3], 1, 1, seeds=[0, 1]), group("a", [0.53], 1, 1, seeds=[0], images=10**6)]
    lines = recommend(groups)
    assert "Recommended: best" in lines[3]
    assert "Not clear yet: a is 3.0 points above on the seed that both have, though best is ranked first." in lines
    assert lines[-1].startswith("One seed only: a;")


def test_run_keys_of_what_is_recommended_follow_it() -> None:
    """Of two that are recommended, each for one cost, those of both; of a label without keys none."""
    dear, slow = group("dear", [0.9, 0.9], 5, 1), group("slow", [0.9, 0.9], 1, 5)
    keys = {"dear": "method=hgp", "slow": "method=ncm", "bad": "method=pip"}
    lines = recommend([dear, slow, group("bad", [0.1, 0.1], 1, 1)], keys)
    assert lines[3].startswith("Recommended: slow where traffic is dear (1 MB), dear where")
    assert lines[4:6] == ["Run keys of slow: method=ncm", "Run keys of dear: method=hgp"]
    assert "Run keys" not in "".join(recommend([dear, slow], {"bad": "method=pip"}) + recommend([dear, slow]))


@pytest.mark.parametrize(
    ("accuracy", "images"),
    [
        (0.50 + 0.015, 100),  # 1.5 points above, but within the noise of 100 images
        (0.50 + 0.008, 10**6),  # above by more than the noise, but less than a point
        (0.50 - 0.03, 10**6),
    ],
)
def test_one_that_is_not_above_by_much_is_not_named(accuracy: float, images: int) -> None:
    best = group("best", [0.50, 0.70], 1, 1, seeds=[0, 1], images=images)
    groups = [best, group("c", [0.3, 0.3], 1, 1, seeds=[0, 1]), group("a", [accuracy], 1, 1, seeds=[0], images=images)]
    assert "Not clear yet" not in "".join(recommend(groups))


def test_one_common_seed_is_told_and_none_too() -> None:
    groups = [group(n, [0.6, a], 1, 1, seeds=[0, s], images=10**6) for n, a, s in (("a", 0.62, 1), ("b", 0.5, 2))]
    groups += [group("c", [0.3, 0.3, 0.3], 1, 1, seeds=[0, 1, 2]), group("d", [0.2, 0.2], 1, 1, seeds=[7, 8])]
    assert recommend(groups)[-2:] == [
        "No seed links a with d: their seeds are taken to be equally hard on average.",
        "Compared with a on one common seed or none: b, d.",
    ]
    groups.append(group("e", [0.1], 1, 1, seeds=[None]))
    assert "No seed links" not in "".join(recommend(groups))  # e may have any
    lines = recommend([group("best", [0.8], 1, 1, seeds=[0]), groups[2], group("d", [0.2], 1, 1, seeds=[1])])
    assert lines[-2].startswith("One seed only: best, d;")  # c has three
    assert lines[-1] == "Compared with best on one common seed or none: d."  # that of c is the only one of best


def test_a_method_without_common_seeds_does_not_turn_the_ranking() -> None:
    """Good is 10 points above lucky on both seeds that they share; other has a seed of its own."""
    good = group("good", [0.60, 0.61], 2, 2, seeds=[0, 1], images=10**6)
    lucky = group("lucky", [0.50, 0.51, 0.95], 1, 1, seeds=[0, 1, 2], images=10**6)
    lines = recommend([good, lucky, group("other", [0.3], 1, 1, seeds=[3], images=10**6)])
    assert lines[0].startswith("Most accurate, as if all had the same seeds: good, 60.5")
    assert "Recommended: good: the next one is below it by more than the noise." in lines


def test_two_that_share_no_seed_are_compared_through_a_third() -> None:
    """C is 10 points better on seeds 2 and 3, so b, which has only these, is as if 5 points below a."""
    a, b = (group(n, values, 1, 1, seeds=s, images=10**6) for n, values, s in (
        ("a", [0.60, 0.61], [0, 1]), ("b", [0.65, 0.66], [2, 3])
    ))  # fmt: skip
    lines = recommend([a, b, group("c", [0.3, 0.31, 0.4, 0.41], 1, 1, seeds=[0, 1, 2, 3], images=10**6)])
    assert lines[0].startswith("Most accurate, as if all had the same seeds: a, 60.5")
    assert lines[1].startswith("Below it: b, 65.5 ± 0.7 % for 1 MB and 1 core-minutes; 5.0 points below, as if all had")
    assert lines[2].startswith("Recommended: a:")
    assert lines[-1] == "Compared with a on one common seed or none: b."


def test_methods_are_linked_through_two_others() -> None:
    """Seed 1 is 0.2 easier than seed 0 by b's runs, and seed 2 by 0.1 harder than seed 1 by c's: -0.1, 0.1 and 0."""
    accuracies = {"a": {0: 0.5}, "b": {0: 0.4, 1: 0.6}, "c": {1: 0.55, 2: 0.45}, "d": {2: 0.52}}
    groups = [group(n, list(of.values()), 1, 1, seeds=list(of)) for n, of in accuracies.items()]
    assert _adjusted(groups) == pytest.approx([0.6, 0.5, 0.45, 0.52])
    assert "No seed links" not in "".join(recommend(groups))


def test_a_long_chain_of_methods_links_its_ends() -> None:
    """Nine methods, each with a seed of the one before: the first and the last are linked through seven others."""
    groups = [group(str(i), [0.5, 0.5], 1, 1, seeds=[i, i + 1], images=10**6) for i in range(9)]
    assert "No seed links" not in "".join(recommend(groups))


@pytest.mark.parametrize("seeds", [[7, 8, 9], [None] * 3])
def test_one_that_shares_no_seed_keeps_its_mean(seeds: list[int | None]) -> None:
    a, c = (group(n, v, 1, 1, seeds=[0, 1, 2]) for n, v in (("a", [0.70, 0.76, 0.73]), ("c", [0.52, 0.50, 0.55])))
    b = group("b", [0.60, 0.58, 0.66], 1, 1, seeds=seeds)
    lines = recommend([c, b, a])
    assert lines[0].startswith("Most accurate: a, 73.0")
    assert "; 11.7 points below, noise" in lines[1]  # 73.0 - 61.3


def test_equal_means_of_other_seeds_stay_in_order() -> None:
    x, z = (group(n, v, 1, 1, seeds=[0, 1, 2]) for n, v in (("x", [0.6, 0.7, 0.8]), ("z", [0.5, 0.3, 0.1])))
    y = group("y", [0.7, 0.7, 0.7], 1, 1, seeds=[5, 6, 7])
    lines = recommend([x, y, z])
    assert lines[0].startswith("Most accurate: x, 70.0")
    assert "as if" not in "".join(lines)


def test_equal_means_are_not_ranked_by_rounding() -> None:
    """Their three accuracies are the same in another order, and their mean differs in the last bit."""
    groups = [group(n, values, 1, 1, seeds=[0, 1, 2]) for n, values in (
        ("a", [0.0375, 0.5, 0.555]), ("b", [0.5, 0.555, 0.0375])
    )]  # fmt: skip
    assert recommend(groups)[0].startswith("Most accurate: ")


def test_equal_methods_stay_in_order() -> None:
    """The fit of the second one is larger by its last bit."""
    first, second = (group(n, [0.16, 0.54, 0.43], 1, 1, seeds=[0, 1, 2]) for n in ("first", "second"))
    third = group("third", [0.2, 0.11, 0.85], 1, 1, seeds=[0, 1, 3])
    assert recommend([first, second, third])[0].startswith("Most accurate, as if all had the same seeds: first,")


def test_differences_of_single_images_count() -> None:
    """Of 100 images two are correct with one method only, a difference of 2 points: its noise is sqrt(2) points.

    Unpaired it would be sqrt(0.9 * 0.1 / 100) = 0.03.
    """
    best = group("best", [0.92], 1, 1, images=100, seeds=[7], correct=[["1" * 92 + "0" * 8]])
    other = group("other", [0.90], 1, 1, seeds=[7], correct=[["1" * 90 + "0" * 10]])
    expected = "by the draw of the 100 test images, the same ones for both"
    assert noise(best, other) == (pytest.approx(0.01414, abs=1e-5), expected)
    assert "Recommended: best: the next one is below it by more than the noise." in recommend([best, other])
    others = [
        group("other", [0.90], 1, 1, correct=[c], seeds=[s]) for c, s in ((None, 7), (["1" * 90], 7), (["1" * 100], 8))
    ]
    drawn = "by the draw of the 100 test images"
    roughly = f"{drawn}, roughly: it is not recorded which of the same images each classifies correctly"
    assert [noise(best, other)[1] for other in others] == [roughly, roughly, drawn]


def test_images_of_other_class_orders_are_not_taken_for_the_same() -> None:
    """The one that was wrong is the last image of other classes, though each task has ten images in both runs."""
    best, other = (
        group(name, [accuracy], 1, 1, seeds=[0], samples=[10, 10], correct=[["1" * 9 + "0"] * 2], tasks=tasks)
        for name, accuracy, tasks in (("given", 0.92, [[0], [1]]), ("shuffled", 0.9, [[1], [0]]))
    )
    assert noise(best, other)[0] == pytest.approx((19.4 * 2.6 / 22**2 / 20) ** 0.5)


def test_images_of_a_small_task_count_more_where_it_is_not_recorded_which_are_right() -> None:
    """0.9 of 96 images, by Laplace (86.4 + 1) / 98 = 0.892; of them 3^2 / (1 / 48 + 1 / 40 + 1 / 8) = 52.7 count."""
    best = group("x", [0.9], 1, 1, samples=[48, 40, 8])
    assert noise(best, group("y", [0.5], 1, 1))[0] == pytest.approx((0.892 * 0.108 / 52.7) ** 0.5, rel=1e-3)


def test_images_of_a_small_task_count_more() -> None:
    """Of 48, 40 and 8 test images one of the last eight differs: 0.125 / 3 = 4.2 points, and as large a noise.

    One of eight images is worth 1 / 8 of its task, and the noise of one image is that image: (1 / 8) / 3.
    """
    best, other = (
        group("x", [accuracy], 1, 1, seeds=[0], samples=[48, 40, 8], correct=[["1" * 48, "1" * 40, "1" * 7 + last]])
        for accuracy, last in ((0.9, "1"), (0.9 - 0.125 / 3, "0"))
    )
    assert noise(best, other)[0] == pytest.approx(0.125 / 3)


def test_images_that_differ_in_both_directions_all_count() -> None:
    """Of 100 images 30 are correct with the one alone and 20 with the other: sqrt(50) / 100, not 10 / 100."""
    best = group("a", [0.8], 1, 1, images=100, seeds=[0], correct=[["1" * 80 + "0" * 20]])
    other = group("b", [0.7], 1, 1, seeds=[0], correct=[["0" * 30 + "1" * 70]])
    assert noise(best, other)[0] == pytest.approx(50**0.5 / 100)


@pytest.mark.parametrize("images", range(4, 30))
@pytest.mark.parametrize("differ", [(1, 0), (3, 1)])
def test_a_difference_of_just_the_noise_is_close(images: int, differ: tuple[int, int]) -> None:
    """sqrt(3 + 1) images are two of noise, and 3 - 1 are two of difference; rounding must not decide."""
    more, less = differ
    rest = images - more - less
    marks = ["1" * more + "0" * less + "1" * rest], ["0" * more + "1" * less + "1" * rest]
    best, other = (
        group(label, [correct[0].count("1") / images], 1, 1, samples=[images], seeds=[0], correct=[correct])
        for label, correct in zip("ab", marks, strict=True)
    )
    line = recommend([best, other])[1]
    assert line.startswith("Close to it: b")
    assert "one point" not in line


@pytest.mark.parametrize("images", range(5, 30))
def test_twice_the_noise_is_no_chance(images: int) -> None:
    """Four images that all differ in one direction: a difference of 4 and a noise of 2."""
    marks = ["1" * images], ["0" * 4 + "1" * (images - 4)]
    best, other = (
        group(label, [correct[0].count("1") / images], 1, 1, samples=[images], seeds=[0], correct=[correct])
        for label, correct in zip("ab", marks, strict=True)
    )
    assert "may be chance" not in recommend([best, other])[1]


def test_a_few_images_that_all_differ_in_one_direction_have_noise() -> None:
    """Both images of the last task: 1 / 5 of the accuracy, and sqrt(2) / 2 / 5 = 14 points of noise, not none."""
    correct = ["1111", "11", "11", "11"]
    best = group("a", [1.0] * 3, 1, 1, seeds=[0, 1, 2], samples=[4, 2, 2, 2, 2], correct=[[*correct, "11"]] * 3)
    other = group("b", [0.8] * 3, 1, 1, seeds=[0, 1, 2], samples=[4, 2, 2, 2, 2], correct=[[*correct, "00"]] * 3)
    assert noise(best, other)[0] == pytest.approx(0.5**0.5 / 5)
    assert recommend([best, other])[1].endswith("about twice the noise at most, so that it may be chance.")


def test_what_no_better_than_guessing_is_said() -> None:
    """Of 100 images 13 / 102 by Laplace: a noise of 3.3 points, so that 12 % of ten classes may be chance, 18 % not."""
    names = [str(c) for c in range(10)]
    worse = group("worse", [0.05] * 2, 1, 1)
    lucky, able = (group("x", [a] * 2, 1, 1, images=100, class_names=names) for a in (0.12, 0.18))
    line = "No method can be told from guessing evenly, which has 10.0 %."
    assert line in recommend([lucky, worse])
    assert line not in recommend([able, worse])


def test_runs_on_other_images_are_not_compared_image_by_image() -> None:
    old, new = (group(d, [0.9], 1, 1, seeds=[0], correct=[["1" * 400]], digests=[d]) for d in ("old", "new"))
    assert noise(old, new)[1].endswith("roughly: it is not recorded which of the same images each classifies correctly")
    line = "Not all runs are of the same images (data-sha256 in config.yaml): remove the old ones and run again."
    assert line in recommend([old, new])
    later = group("later", [0.8], 1, 1, seeds=[1], digests=["new"])
    assert line in recommend([old, later])  # without validation images all seeds have the same
    assert line not in recommend([old, group("early", [0.8], 1, 1, seeds=[0])])  # of which it was not recorded
    for run in (old.runs[0], later.runs[0]):
        run.settings["validation-share"] = 0.2
    assert line not in recommend([old, later])  # as each seed holds out its own


def test_none_below_a_less_accurate_one_is_as_accurate() -> None:
    best, steady = (group(label, [a] * 3, 10, 10, seeds=[0, 1, 2]) for label, a in (("best", 0.9), ("steady", 0.86)))
    shaky = group("shaky", [0.76, 0.90, 0.89], 1, 1, seeds=[0, 1, 2])
    assert "Recommended: best: the next one is below it by more than the noise." in recommend([best, steady, shaky])


def test_one_seed_has_the_noise_of_its_images_and_says_so() -> None:
    lines = recommend([group("a", [0.90], 10, 10, images=100), group("b", [0.88], 1, 1, images=100)])
    assert lines[1].endswith("; 2.0 points below, noise 3.1: by the draw of the 100 test images.")
    assert lines[2] == "Recommended: b: about the cheapest of these in traffic and in computation."
    assert lines[3].startswith("b may be less accurate than a: 2.0 points are within the noise. ")
    assert lines[4].startswith("One seed only: each method;")


def test_less_than_a_point_is_no_difference() -> None:
    lines = recommend([group("a", [0.9, 0.9], 10, 10, images=10**6), group("b", [0.891, 0.891], 1, 1, images=10**6)])
    assert lines[1].endswith(" test images; differences below one point count as none.")
    assert lines[-1].startswith("Recommended: b:")


def test_who_is_not_ranked() -> None:
    none = group("unfinished", [], 1, 1)
    ranked = [group("a", [0.5, 0.5], 1, 1), group("b", [0.3, 0.3], 1, None)]
    lines = recommend(
        [group("joint", [0.99], 1, 1, method="joint"), group("x", [0.98], 1, 1, theirs=True), none, *ranked]
    )
    assert lines[0].startswith("Most accurate: a,")
    assert lines[-2:] == [
        "Not ranked, as no run has finished: unfinished.",
        "No processor time was recorded, so that the clock's was taken: b.",
    ]
    assert recommend([ranked[0], none]) == [
        "No recommendation: it needs two methods with a finished run whose accuracy is known."
    ]


def test_runs_without_a_known_accuracy_count_for_nothing() -> None:
    """As where nodes have no test images, or those that have some were away."""
    best, unknown = group("best", [None, 0.9], 1, 1, images=98), group("unknown", [None, None], 1, 1)
    assert noise(best, unknown) == (pytest.approx(0.0312, rel=0.04), "by the draw of the 98 test images")
    lines = recommend([best, unknown, group("other", [0.5, 0.5], 1, 1)])
    assert lines[-2] == "One seed only: best; another seed may draw another class order and other clients."
    assert lines[-1] == "Not ranked, as no accuracy is known: unknown."
    assert comparison_table([unknown])[1][0][2].endswith("(2 with accuracies missing)")


def test_the_noise_of_images_is_a_mean_over_seeds() -> None:
    """Seed 0: no image differs. Seed 1: 10 of 100 do, 10 / 100^2: root of 0.001 / 2 = 0.0224."""
    every, some = ["1" * 100], ["1" * 90 + "0" * 10]
    best = group("best", [1.0, 1.0], 1, 1, images=100, seeds=[0, 1], correct=[every, every])
    other = group("other", [1.0, 1.0], 1, 1, seeds=[0, 1], correct=[every, some])
    assert noise(best, other)[0] == pytest.approx(0.02236, abs=1e-5)


def test_the_cheapest_of_three_that_count_as_equal_is_recommended() -> None:
    lines = recommend([group("a", [0.9] * 2, 30, 30), group("b", [0.899] * 2, 1, 1), group("c", [0.898] * 2, 9, 9)])
    assert lines[-1] == "Recommended: b: about the cheapest of these in traffic and in computation."


def test_where_one_seed_has_no_processor_time_the_clock_counts_for_all() -> None:
    runs = [run for minutes in (1.0, None) for run in group("x", [0.5], 1, minutes).runs]
    mixed = Group("digits", "x", runs)
    assert not mixed.has_core_time
    assert mixed.core_minutes == (5.0, 0.0)  # 300 s of the clock in both


def test_images_of_unequal_tasks_are_worth_less() -> None:
    """Of 40 and 4 images in two tasks 2^2 / (1 / 40 + 1 / 4) = 14.5 count."""
    run = group("x", [0.5], 1, 1, samples=[40, 4]).runs[0]
    assert run.effective_images == pytest.approx(160 / 11)
    run.results["samples_per_task"] = [40, 0, 4]  # a task without test images
    assert run.effective_images == pytest.approx(160 / 11)


def test_copied_test_images_are_a_reason_to_doubt_even_one_method() -> None:
    line = "35 of the images to evaluate are training images too, byte by byte, so that accuracies are too high: keep "
    line += "one copy of each image."
    one, other = group("a", [0.9], 1, 1), group("b", [0.8], 1, 1)
    assert not any(text.startswith("35 of") for text in recommend([one, other]))
    one.runs[0].results["copied_test_images"] = 35
    assert recommend([other, one]).count(line) == recommend([one]).count(line) == 1


def test_the_backbone_for_digits_on_other_images_is_a_reason_to_doubt() -> None:
    own, digits = ({"backbone": "vit_glyphs", "dataset": name} for name in ("folder", "digits"))
    line = "backbone = 'vit_glyphs' is for digits and sees 32 x 32 pixels: name another for other images."
    for settings, doubted in ((own, 1), (digits, 0), ({}, 0)):
        lines = recommend([group(label, [0.9], 1, 1, settings=settings) for label in "ab"])
        assert lines.count(line) == doubted
