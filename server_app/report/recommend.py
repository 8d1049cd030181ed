"""Recommends a method from a comparison, and says why."""

import math
from collections.abc import Sequence

import numpy as np

from server_app.report.compare import WALL, Group

POINT = 0.01  # smaller differences in accuracy count as none
ACCURACY = "final_average_accuracy"


def recommend(groups: Sequence[Group]) -> list[str]:
    """Lines of text for one setting: the most accurate group, what is as accurate within noise, and its costs.

    The noise of a group is the larger of its standard deviation over seeds and that of drawing its test images
    (binomial, all it has with one seed). Groups within one noise of the best, at least one point, are as accurate as
    it; of these the cheapest is recommended. Pooled images and results of other code are not ranked.
    """
    able = [group for group in groups if not (group.theirs or group.pooled)]
    known = [group for group in able if not math.isnan(group.mean_sd(ACCURACY)[0])]
    ranked = sorted(known, key=lambda group: -group.mean_sd(ACCURACY)[0])
    if len(ranked) < 2:
        return ["No recommendation: it needs two methods with a finished run."]
    best = ranked[0]
    sd, source = noise(best)
    margin = max(POINT, sd)
    equal = [group for group in ranked if best.mean_sd(ACCURACY)[0] - group.mean_sd(ACCURACY)[0] <= margin]
    lines = [f"Most accurate: {_describe(best)}."]
    lines.append(
        f"Differences below {100 * margin:.1f} points mean nothing here: the standard deviation of {best.label} is "
        f"{100 * sd:.1f} points, {source}{'' if sd > POINT else ', and less than one point is no reason to choose'}."
    )
    lines += [f"As accurate within that: {_describe(group)}." for group in equal[1:]]
    return [*lines, _decide(best, equal), *_doubts(able, ranked)]


def noise(group: Group) -> tuple[float, str]:
    """Standard deviation of a group's accuracy, a fraction, and what it comes from in words."""
    mean, over_seeds = group.mean_sd(ACCURACY)
    images = sum(group.finished[0].results["samples_per_task"])
    likely = (mean * images + 1) / (images + 2)  # Laplace's rule: all of a few images right does not mean no noise
    of_images = math.sqrt(likely * (1 - likely) / images) if images else math.nan
    by_images = f"that of drawing the {images:,} images it is measured on"
    if math.isnan(over_seeds) or of_images > over_seeds:
        return (of_images, by_images) if images else (0.0, "nothing that was recorded")
    return over_seeds, f"that over {len(group.finished)} seeds"


def _describe(group: Group) -> str:
    mean, sd = group.mean_sd(ACCURACY)
    spread = "" if math.isnan(sd) else f" ± {100 * sd:.1f}"
    return f"{group.label}, {100 * mean:.1f}{spread} % for {_traffic(group)} and {_time(group)}"


def _traffic(group: Group) -> str:
    return "traffic that was not recorded" if math.isnan(group.megabytes[0]) else f"{group.megabytes[0]:.3g} MB"


def _time(group: Group) -> str:
    minutes = group.core_minutes[0]
    if math.isnan(minutes):
        return "a time that was not recorded"
    return f"{minutes:.3g} core-minutes{'' if group.has_core_time else WALL}"


def _decide(best: Group, equal: Sequence[Group]) -> str:
    """The recommendation among groups that are equally accurate."""
    # a cost that was not recorded counts as infinite
    by_traffic = min(equal, key=lambda group: np.nan_to_num(group.megabytes[0], nan=math.inf))
    by_time = min(equal, key=lambda group: np.nan_to_num(group.core_minutes[0], nan=math.inf))
    if by_traffic is not by_time:
        return (
            f"Recommended: {by_traffic.label} where traffic is dear ({_traffic(by_traffic)}), {by_time.label} where "
            f"computation is ({_time(by_time)}); their accuracies cannot be told apart."
        )
    reason = "nothing else is as accurate" if len(equal) == 1 else "the cheapest in traffic and in computation of these"
    if by_traffic is best and len(equal) > 1:
        reason = f"the most accurate, and {reason}"
    return f"Recommended: {by_traffic.label}: {reason}."


def _doubts(able: Sequence[Group], ranked: Sequence[Group]) -> list[str]:
    """Reasons to doubt the recommendation: single seeds, unfinished runs, times by the clock."""
    lines = []
    if single := [group.label for group in ranked if len(group.finished) == 1]:
        which = "each method" if len(single) == len(ranked) else ", ".join(single)
        lines.append(f"One seed only: {which}; another seed may draw another class order and other clients.")
    if missing := [group.label for group in able if not group.finished]:
        lines.append(f"Not ranked, as no run has finished: {', '.join(missing)}.")
    if clocked := [group.label for group in ranked if not group.has_core_time]:
        which = "all" if len(clocked) == len(ranked) else ", ".join(clocked)
        lines.append(f"No processor time was recorded, so that the clock's was taken: {which}.")
    return lines
