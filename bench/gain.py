"""Gain at equal accuracy: how much larger an attacker's error is under one defence than under another.

A method is a curve of points (accuracy, MSE), one a setting. Between its points log MSE is linear in
accuracy; only its front counts (a point that another beats in both is left out). For two curves a and b,
over the accuracies that both reach,

    gain(a, b) = exp( mean over accuracy of [log MSE_a − log MSE_b] )

as a Bjøntegaard delta compares two codecs. 1.3: at the same accuracy an attacker's error is 1.3 times as
large. A single point is compared with the other curve at its own accuracy. The interval comes from the seeds,
each with its own pair of curves: exp(mean g ± t·std g/√n), g the log of a seed's gain, 95 %, Student's t.
Seeds are averaged only where they ran the same settings: one that lacks any is left out.
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


def whole_curves(by_seed):
    """{seed: {setting: point}} of the seeds that ran every setting."""
    settings = {setting for points in by_seed.values() for setting in points}
    return {seed: points for seed, points in by_seed.items() if set(points) == settings}


def mean_points(by_seed):
    """Each setting's point, the mean over those seeds."""
    curves = list(whole_curves(by_seed).values())
    return [tuple(map(statistics.fmean, zip(*(c[s] for c in curves)))) for s in (curves[0] if curves else ())]


def gain_interval(a_by_seed, b_by_seed):
    """{seed: {setting: point}} of both -> (geometric mean of the seeds' gains, low, high, n)"""
    a, b = whole_curves(a_by_seed), whole_curves(b_by_seed)
    gains = [gain(a[seed].values(), b[seed].values()) for seed in sorted(set(a) & set(b))]
    logs = [math.log(g) for g in gains if g is not None]
    if len(logs) < 2:
        return (math.exp(logs[0]) if logs else None), None, None, len(logs)
    mean, t = statistics.fmean(logs), STUDENT_95.get(len(logs) - 1, STUDENT_95[9])
    half = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half), len(logs)
