"""Gain at equal accuracy: how much larger an attacker's error is under one defence than under another.

A method is a curve of points (accuracy, MSE), one a setting. Between its points log MSE is linear in
accuracy; only its front counts (a point that another beats in both is left out). For two curves a and b,
over the accuracies that both reach,

    gain(a, b) = exp( mean over accuracy of [log MSE_a − log MSE_b] )

as a Bjøntegaard delta compares two codecs. 1.3: at the same accuracy an attacker's error is 1.3 times as
large. A single point is compared with the other curve at its own accuracy. The interval comes from the seeds,
each with its own pair of curves: exp(mean g ± t·std g/√n), g the log of a seed's gain, 95 %, Student's t.
Seeds are averaged over the same settings: one that some of them did not run is left out.
"""

import math
import statistics

STUDENT_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
GRID_POINTS = 200


def front(points):
    """The points (accuracy, mse) that no other beats in both, by rising accuracy."""
    kept = []
    for accuracy, mse in sorted(set(points), reverse=True):
        if not kept or mse > kept[-1][1]:
            kept.append((accuracy, mse))
    return kept[::-1]


def interpolate(points, accuracy):
    """log MSE at `accuracy`, linear between the points of a front."""
    for (a0, m0), (a1, m1) in zip(points, points[1:]):
        if a0 <= accuracy <= a1:
            share = (accuracy - a0) / (a1 - a0)
            return (1 - share) * math.log(m0) + share * math.log(m1)
    return math.log(points[0][1])  # a front of one point


def gain(a, b):
    """exp of the mean of log MSE_a − log MSE_b over the accuracies of both fronts, or None."""
    a, b = front(a), front(b)
    if not a or not b:
        return None
    low, high = max(a[0][0], b[0][0]), min(a[-1][0], b[-1][0])
    if low > high or (low == high and len(a) > 1 and len(b) > 1):
        return None
    grid = [low + (high - low) * (i + 0.5) / GRID_POINTS for i in range(GRID_POINTS)]
    return math.exp(statistics.fmean(interpolate(a, x) - interpolate(b, x) for x in grid))


def same_settings(by_seed):
    """{seed: {setting: point}} with the settings that all seeds ran, in the order of the first."""
    shared = set.intersection(*map(set, by_seed.values())) if by_seed else ()
    return {seed: {s: points[s] for s in points if s in shared} for seed, points in by_seed.items()}


def mean_points(by_seed):
    """{point: its standard deviations} of each of those settings, mean over the seeds."""
    curves, found = list(same_settings(by_seed).values()), {}
    for setting in curves[0] if curves else ():
        columns = list(zip(*(c[setting] for c in curves)))
        deviations = tuple(statistics.stdev(v) if len(v) > 1 else 0.0 for v in columns)
        found[tuple(map(statistics.fmean, columns))] = deviations
    return found


def points_at(by_seed, accuracy):
    """{seed: {"": point}}: each seed's curve at its {seed: accuracy}, without the seeds that do not reach it."""
    found = {}
    for seed, points in same_settings(by_seed).items():
        curve, x = front(points.values()), accuracy.get(seed, math.nan)
        if curve and curve[0][0] <= x <= curve[-1][0]:
            found[seed] = {"": (x, math.exp(interpolate(curve, x)))}
    return found


def gain_interval(a_by_seed, b_by_seed, through=None):
    """{seed: {setting: point}} of both -> (geometric mean of the seeds' gains, low, high, n).

    `through`: a third curve, noise alone; then a seed's gain is gain(a, through) / gain(b, through), which
    exists even if a and b share no accuracy.
    """
    curves = [c for c in (a_by_seed, b_by_seed, through) if c is not None]
    seeds = sorted(set.intersection(*map(set, curves)))
    curves = [same_settings({seed: c[seed] for seed in seeds}) for c in curves]
    logs = []
    for seed in seeds:
        a, b, *noise = (c[seed].values() for c in curves)
        gains = [gain(a, *noise), gain(b, *noise)] if noise else [gain(a, b)]
        if None not in gains:
            logs.append(math.log(gains[0]) - sum(map(math.log, gains[1:])))
    if len(logs) < 2:
        return (math.exp(logs[0]) if logs else None), None, None, len(logs)
    mean, t = statistics.fmean(logs), STUDENT_95.get(len(logs) - 1, STUDENT_95[9])
    half = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs)
