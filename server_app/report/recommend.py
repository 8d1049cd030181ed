"""Recommends a method from a comparison, and says why."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from server_app.report.compare import FINAL, WALL, Group, mean_sd
from server_app.report.runs import SavedRun
from task.config.checks import doubt_backbone
from task.data.digests import describe_copies

DIGEST = "data-sha256"  # in a run's config.yaml
POINT = 0.01  # smaller differences in accuracy count as none
SMALL = "; differences below one point count as none"
CLOSE = 2.0  # differences below so many standard deviations may be chance
ROUNDING = 1e-9  # one image of a few is as large a difference as its noise
AS_IF = ", as if all had the same seeds"
SIMILAR = 1.25  # costs that differ by less than this factor count as equal


def recommend(groups: Sequence[Group], keys: Mapping[str, str] | None = None) -> list[str]:
    """Lines of text for one setting: the most accurate group, what is as accurate within noise, and its costs.

    Seeds differ in difficulty: groups are ranked as if all had the same ones (:func:`_adjusted`), and each is compared
    with the best on those that both have. Groups that are below the best by no more than the noise of that difference
    (:func:`noise`), or by no more than one point, are as accurate as it; of these the cheapest is recommended. Pooled
    images and results of other code are not ranked. ``keys`` are the run keys of a group by its label, in words: those
    of the recommended ones are told.
    """
    able = [group for group in groups if not (group.theirs or group.pooled)]
    known = [group for group in able if group.measured]
    if len(known) < 2:
        reason = "No recommendation: it needs two methods with a finished run whose accuracy is known."
        return [reason, *doubt_copies(known)]
    ranked = sorted(zip(_adjusted(known), known, strict=True), key=lambda pair: -pair[0])
    (level, best), less, unclear = ranked[0], list[str](), list[str]()
    how = AS_IF if _accuracy(best) < max(map(_accuracy, known)) - ROUNDING else ""
    equal, lines = [best], [f"Most accurate{how}: {_describe(best)}."]
    hidden = dict[str, float]()  # by how much groups that count as equal are below the best, if it is above one point
    for their_level, group in ranked[1:]:
        below, where, (sd, source) = _compare(best, group, level - their_level)
        limit = max(POINT, sd) + ROUNDING
        points = f"{100 * abs(below):.1f} points {'above' if below < 0 else 'below'}{where}"
        words = f"{_describe(group)}; {points}, noise {100 * sd:.1f}: {source}"
        if not less and below <= limit:
            equal.append(group)
            if below > POINT + ROUNDING:
                hidden[group.label] = below
            lines.append(f"Close to it: {words}{SMALL * (sd + ROUNDING < below)}.")
        else:
            close = "; about twice the noise at most, so that it may be chance" if below < CLOSE * sd - ROUNDING else ""
            less.append(f"Below it: {words}{close}.")
        if below < -limit:
            unclear.append(f"Not clear yet: {group.label} is {points}, though {best.label} is ranked first.")
    decision, chosen = _decide(best, equal)
    unclear += [
        f"{label} may be less accurate than {best.label}: {100 * hidden[label]:.1f} points are within the noise. More "
        f"{best.measured[0].evaluated} images or seeds would tell."
        for label in chosen
        if label in hidden
    ]
    told = [f"Run keys of {label}: {keys[label]}" for label in chosen if label in keys] if keys else []
    return [*lines, *less[:1], decision, *told, *unclear, *_doubts(able, [group for _, group in ranked])]


def noise(best: Group, other: Group) -> tuple[float, str]:
    """Standard deviation of the difference of two groups' accuracies, a fraction, and what it comes from in words.

    The larger of that over seeds and that of drawing the test images. If both groups have a seed, and say which images
    they classify correctly, the differences of single seeds and images count. Else the noise is that of ``best`` alone:
    its sample standard deviation, and that of a binomial distribution.
    """
    pairs = _pairs(best, other)
    over_seeds, seeds = mean_sd(run.metrics[FINAL] - their.metrics[FINAL] for run, their in pairs)[1], len(pairs)
    if seeds < 2:
        over_seeds, seeds = best.mean_sd(FINAL)[1], len(best.measured)
    of_images, by_images = _noise_of_images(best, pairs)
    if math.isnan(over_seeds) or of_images > over_seeds:
        return (0.0, "nothing that was recorded") if math.isnan(of_images) else (of_images, by_images)
    return over_seeds, f"standard deviation over {seeds} seeds"


def _pairs(best: Group, other: Group) -> list[tuple[SavedRun, SavedRun]]:
    """Runs of both groups with the same seed, and so the same class order and clients."""
    theirs = {run.results.get("seed"): run for run in other.measured}
    seeds_of_best = [(run, run.results.get("seed")) for run in best.measured]
    return [(run, theirs[seed]) for run, seed in seeds_of_best if seed is not None and seed in theirs]


def _adjusted(groups: Sequence[Group]) -> list[float]:
    """Accuracy of each group as if all had the same seeds.

    A run's accuracy is taken as a part of its group and a part of its seed, fitted by least squares. What the fit
    leaves open is how groups compare that share no seed, not even through others: the parts of the seeds of each such
    set have the mean 0, so that a group alone keeps its mean accuracy. A seed that is not known is one of its own.
    """
    runs = [(i, run) for i, group in enumerate(groups) for run in group.measured]
    keys = [n if (seed := run.results.get("seed")) is None else f"seed {seed}" for n, (_, run) in enumerate(runs)]
    seeds = list(dict.fromkeys(keys))
    of_group = np.eye(len(groups))[[i for i, _ in runs]]
    of_seed = np.eye(len(seeds))[[seeds.index(key) for key in keys]]
    accuracies = np.array([run.metrics[FINAL] for _, run in runs])
    fitted, *_ = np.linalg.lstsq(np.hstack([of_group, of_seed]), accuracies)
    level, difficulty = np.split(fitted, [len(groups)])
    has = of_group.T @ of_seed > 0
    return [round(float(level[i] + difficulty[row @ has].mean()), 9) for i, row in enumerate(_linked(groups))]


def _linked(groups: Sequence[Group]) -> np.ndarray:
    """Whether two groups have a seed in common, or are linked by groups that have: bool [G, G] of G groups."""
    linked = np.array([[a is b or bool(_pairs(a, b)) for a in groups] for b in groups])
    for _ in groups:
        linked = linked @ linked
    return linked


def _compare(best: Group, other: Group, gap: float) -> tuple[float, str, tuple[float, str]]:
    """How far ``other`` is below, on which seeds, and the noise of that: on those that both have.

    ``gap`` is the difference as if all had the same seeds, which is taken if they share none.
    """
    pairs = _pairs(best, other)
    if not pairs:
        plain = abs(_accuracy(best) - _accuracy(other) - gap) < 2 * ROUNDING  # both parts of the gap are rounded
        return gap, "" if plain else AS_IF, noise(best, other)
    ours, theirs = replace(best, runs=[run for run, _ in pairs]), replace(other, runs=[run for _, run in pairs])
    common = "the seed" if len(pairs) == 1 else f"the {len(pairs)} seeds"
    all_of_both = len(pairs) == len(best.measured) == len(other.measured)
    where = "" if all_of_both else f" on {common} that both have"
    return _accuracy(ours) - _accuracy(theirs), where, noise(ours, theirs)


def _shares_too_few(best: Group, other: Group) -> bool:
    """Whether two groups have fewer than two seeds in common, though each has two; or none, as far as is known."""
    known = all(run.results.get("seed") is not None for run in [*best.measured, *other.measured])
    return known and len(_pairs(best, other)) < (2 if len(best.measured) > 1 < len(other.measured) else 1)


def _noise_of_images(best: Group, pairs: Sequence[tuple[SavedRun, SavedRun]]) -> tuple[float, str]:
    """Standard deviation by the draw of the evaluated images, and its words; NaN without images.

    ``pairs`` are runs of both groups with the same seed, and so the same test images.
    """
    images, kind = sum(best.measured[0].results["samples_per_task"]), best.measured[0].evaluated
    if pairs and all(run.correct and _same_images(run, their) for run, their in pairs):
        variance = np.mean([_variance(run, their) for run, their in pairs])
        return math.sqrt(variance), f"by the draw of the {images:,} {kind} images, the same ones for both"
    # Laplace's rule: all of a few images right does not mean no noise
    likely = (_accuracy(best) * images + 1) / (images + 2)
    shared = ", roughly: it is not recorded which of the same images each classifies correctly" if pairs else ""
    variance = likely * (1 - likely) / best.measured[0].effective_images
    return math.sqrt(variance), f"by the draw of the {images:,} {kind} images{shared}"


def _same_images(run: SavedRun, their: SavedRun) -> bool:
    """Whether two runs have the same test images in the same order as far as was recorded: that of their classes."""
    known = {digest for r in (run, their) if (digest := r.settings.get(DIGEST))}
    same_sizes = list(map(len, run.correct)) == list(map(len, their.correct))
    return len(known) < 2 and same_sizes and run.tasks == their.tasks


def _variance(run: SavedRun, their: SavedRun) -> float:
    """Variance, by the draw of the test images of each task, of the difference of two mean accuracies over tasks.

    As in McNemar's test it is that of methods which are equally good: about a difference of 0. The variance about the
    mean would be 0 where all of a few images differ in the same direction.
    """
    differences = [a - b for a, b in zip(run.correct, their.correct, strict=True) if len(a)]
    return float(sum((d**2).sum() / len(d) ** 2 for d in differences)) / len(differences) ** 2


def _accuracy(group: Group) -> float:
    return group.mean_sd(FINAL)[0]


def _describe(group: Group) -> str:
    mean, sd = group.mean_sd(FINAL)
    spread = "" if math.isnan(sd) else f" ± {100 * sd:.1f}"
    return f"{group.label}, {100 * mean:.1f}{spread} % for {_traffic(group)} and {_time(group)}"


def _traffic(group: Group) -> str:
    return "traffic that was not recorded" if math.isnan(group.megabytes[0]) else f"{_short(group.megabytes[0])} MB"


def _time(group: Group) -> str:
    minutes = group.core_minutes[0]
    if math.isnan(minutes):
        return "a time that was not recorded"
    return f"{_short(minutes)} core-minutes{'' if group.has_core_time else WALL}"


def _short(value: float) -> str:
    """As 0.0351, 6.83 or 1,123."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def _decide(best: Group, equal: Sequence[Group]) -> tuple[str, list[str]]:
    """The recommendation among groups that are equally accurate, and the labels of what it recommends."""
    little_traffic, little_time = _cheapest(equal, "megabytes"), _cheapest(equal, "core_minutes")
    both = [group for group in little_traffic if group in little_time]
    if not both:
        by_traffic, by_time = _cheapest(little_traffic, "core_minutes")[0], _cheapest(little_time, "megabytes")[0]
        return (
            f"Recommended: {by_traffic.label} where traffic is dear ({_traffic(by_traffic)}), {by_time.label} where "
            f"computation is ({_time(by_time)}); their accuracies count as equal."
        ), [by_traffic.label, by_time.label]
    reason = (
        "the next one is below it by more than the noise"
        if len(equal) == 1
        else "about the cheapest of these in traffic and in computation"
    )
    if both[0] is best and len(equal) > 1:
        reason = f"the most accurate, and {reason}"
    return f"Recommended: {both[0].label}: {reason}.", [both[0].label]


def _cheapest(groups: Sequence[Group], cost: str) -> list[Group]:
    """The groups whose cost is about the least; one that was not recorded counts as infinite."""
    costs = [np.nan_to_num(getattr(group, cost)[0], nan=math.inf) for group in groups]
    return [group for group, value in zip(groups, costs, strict=True) if value <= SIMILAR * min(costs)]


def doubt_copies(groups: Sequence[Group]) -> list[str]:
    """A line on test images that are training images too; none where there are no copies, or nobody looked."""
    copies = max((run.copies for group in groups for run in group.measured), default=0)
    return [f"{describe_copies(copies)}."] if copies else []


def doubt_repeats(groups: Sequence[Group]) -> list[str]:
    """A line on each group that has several runs of one seed, which differ by less than seeds do."""
    seeds = [[s for run in group.finished if (s := run.results.get("seed")) is not None] for group in groups]
    return [
        f"{group.label}: its standard deviations are not over seeds, as there are several runs of a seed."
        for group, known in zip(groups, seeds, strict=True)
        if len(set(known)) < len(known)
    ]


def _doubts(able: Sequence[Group], ranked: Sequence[Group]) -> list[str]:
    """Reasons to doubt the recommendation: guesses, other images, single seeds, unfinished runs, times by the clock."""
    lines = []
    best, runs = ranked[0], [run for group in ranked for run in group.measured]
    classes = len(best.measured[0].results["class_names"])
    if classes and _accuracy(best) - 1 / classes < CLOSE * _noise_of_images(best, [])[0]:
        lines.append(f"No method can be told from guessing evenly, which has {100 / classes:.1f} %.")
    # the seed draws the validation images; without them all seeds have the same images
    images = {
        (run.results.get("seed") if run.settings.get("validation-share") else 0, run.settings[DIGEST])
        for run in runs
        if run.settings.get(DIGEST)
    }
    if len(images) > len({seed for seed, _ in images}):
        lines.append(
            f"Not all runs are of the same images ({DIGEST} in config.yaml): remove the old ones and run again."
        )
    lines += doubt_copies(ranked)
    lines += [f"{doubt}." for doubt in dict.fromkeys(doubt_backbone(run.settings) for run in runs) if doubt]
    if single := [group.label for group in ranked if len(group.measured) == 1]:
        which = "each method" if len(single) == len(ranked) else ", ".join(single)
        lines.append(f"One seed only: {which}; another seed may draw another class order and other clients.")
    apart = [group.label for group, linked in zip(ranked, _linked(ranked)[0], strict=True) if not linked]
    if apart and all(run.results.get("seed") is not None for run in runs):
        lines.append(
            f"No seed links {best.label} with {', '.join(apart)}: their seeds are taken to be equally hard on average."
        )
    if few := [group.label for group in ranked[1:] if _shares_too_few(best, group)]:
        lines.append(f"Compared with {best.label} on one common seed or none: {', '.join(few)}.")
    if missing := [group.label for group in able if not group.finished]:
        lines.append(f"Not ranked, as no run has finished: {', '.join(missing)}.")
    if unknown := [group.label for group in able if group.finished and not group.measured]:
        lines.append(f"Not ranked, as no accuracy is known: {', '.join(unknown)}.")
    if clocked := [group.label for group in ranked if not group.has_core_time]:
        which = "all" if len(clocked) == len(ranked) else ", ".join(clocked)
        lines.append(f"No processor time was recorded, so that the clock's was taken: {which}.")
    return lines
