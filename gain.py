"""Gain at equal accuracy: how much larger an attacker's error is under one defence than under another.

A method is a curve of points (accuracy, MSE), one a setting. Between its points log MSE is linear
in accuracy; only its front counts (a point that another beats in both is left out). For two curves a and b, over
the accuracies that both reach,

    gain(a, b) = exp( mean over accuracy of [log MSE_a − log MSE_b] )

as a Bjøntegaard delta compares two codecs. 1.3 means: at the same accuracy an attacker's error is 1.3 times as large. A
single point is compared with the other curve at its own accuracy.
The interval comes from the seeds, g the log of the gain of each seed's own pair of curves: exp(mean g ± t·std g/√n), 95 %, Student's t.
In the log, a gain and its inverse are equally far from 1, and no interval reaches below 0.

    gain([(0.50, 0.030), (0.60, 0.020)], [(0.48, 0.025), (0.62, 0.015)])
    gain_interval({0: points, 1: points, 2: points}, {0: ..., 1: ..., 2: ...})        # {seed: points} of both
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
    """exp of the mean of log MSE_a − log MSE_b over the accuracies both fronts reach; None where they share none."""
    a, b = front(a), front(b)
    low, high = max(a[0][0], b[0][0]), min(a[-1][0], b[-1][0])
    if low > high or (low == high and len(a) > 1 and len(b) > 1):
        return None
    grid = [low + (high - low) * (i + 0.5) / GRID_POINTS for i in range(GRID_POINTS)]
    return math.exp(statistics.fmean(interpolate(a, x) - interpolate(b, x) for x in grid))


def gains_by_seed(a_by_seed, b_by_seed):
    """{seed: gain of its own pair of curves}, for the seeds that both have and whose curves share an accuracy."""
    gains = {s: gain(a_by_seed[s], b_by_seed[s]) for s in sorted(set(a_by_seed) & set(b_by_seed))}
    return {s: g for s, g in gains.items() if g is not None}


def gain_interval(a_by_seed, b_by_seed):
    """-> (geometric mean of the gains, low, high, n) over those seeds; low and high are None for one seed."""
    logs = [math.log(g) for g in gains_by_seed(a_by_seed, b_by_seed).values()]
    if not logs:
        return None, None, None, 0
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return math.exp(mean), None, None, 1
    half = STUDENT_95[len(logs) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs)


def whole_curves(by_seed):
    """The seeds that ran every setting."""
    most = max(map(len, by_seed.values()))
    return {seed: points for seed, points in by_seed.items() if len(points) == most}


def mean_points(by_seed):
    """Each setting's point, the mean over those seeds."""
    return [tuple(map(statistics.fmean, zip(*points))) for points in zip(*whole_curves(by_seed).values())]
