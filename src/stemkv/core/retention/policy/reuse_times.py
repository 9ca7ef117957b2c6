"""How long until what was released is used again, learnt class by class.

Owns the distribution of idle times (`ReuseTimes`) and the rate at which keeping a block
of a class and age pays (`rate`). Knows no nodes, no leaves and no costs.

An idle time lasts from the release of a block to its next use, resident or not. The
rate of a class `c` at age `a` is the best that any limit `t > a` gives:

    max over t of  P(used again in (a, t]) / E[time kept in (a, t]]

which is the index of Gittins (J. Royal Stat. Soc. B 41(2), 1979) for a job that pays 1
when it is used again, and hit density (Beckmann, Chen and Cidon, LHD, NSDI 2018) without
its dependence on one cache's size.
"""

from __future__ import annotations

import math
from bisect import bisect_right

__all__ = ["AGE_EDGES", "Cohort", "ReuseTimes"]

# Seconds. 22 bins, from 0 to 83 minutes; each edge 1.5 times the one before.
AGE_EDGES = (0.0, *(1.5**i for i in range(22)))
_NUM_BINS = len(AGE_EDGES) - 1
_WIDTHS = tuple(AGE_EDGES[i + 1] - AGE_EDGES[i] for i in range(_NUM_BINS))
_LAST_BIN = _NUM_BINS - 1

_MIN_COHORTS = 1024
_COHORT_S = 0.5  # idle times that begin this close together are counted as one
_PRIOR_RUNS = 20.0  # observations that the prior of one bin is worth
_PRIOR_HAZARD = 0.05  # of every bin, so that the rate falls with age, which is LRU
_FIRST_PRIOR_HAZARD = 0.1  # of the first one, which is twice as wide as the second
_PRIOR_RATIO_RUNS = 2.0  # observations that the prior of one class is worth
_MAX_SHARE = 0.9
_FIT_GROWTH = 1.05
_FIT_RUNS = 20.0  # new observations, at least, before rates are made anew
_MAX_RUNS = 10_000.0  # then all counts are halved, so that the old is forgotten
_BEYOND = 1e-12  # rate past the last edge, over the age


class Cohort:
    """Idle times that began together: how many of each class still last."""

    __slots__ = ("began_s", "lasting", "number")

    def __init__(self, number: int, began_s: float) -> None:
        self.number = number  # of all cohorts, in order
        self.began_s = began_s
        self.lasting: dict[int, float] = {}  # by class


class ReuseTimes:
    """Learns from idle times that end, and from those that do not.

    An idle time counts in every bin that it outlasts and in the one where it ends.
    Weights are in blocks. What cohorts outlast is counted when rates are made anew, so
    that the passing of time costs nothing.
    """

    def __init__(self) -> None:
        self._reused: dict[int, list[float]] = {}  # class → by bin
        self._lasted: dict[int, list[float]] = {}
        self._rates: dict[int, list[float]] = {}
        self._prior_rates = _rates(
            [_FIRST_PRIOR_HAZARD] + [_PRIOR_HAZARD] * (_NUM_BINS - 1)
        )
        self._num_events = 0.0
        self._weights: dict[int, float] = {}  # by class, of idle times that ended
        self._squares: dict[int, float] = {}  # of these weights
        self._fit_at = _FIT_RUNS
        self._weight = 0.0  # of all idle times that ended
        self._square = 0.0  # of these weights
        self._cohorts: list[Cohort] = []
        self._num_gone = 0  # cohorts that have left the list
        self._most_cohorts = _MIN_COHORTS  # more are looked through for old ones
        # By bin: the first cohort that is not counted as having outlasted it.
        self._next = [0] * _NUM_BINS

    def begin(self, kind: int, weight: float, now: float) -> Cohort:
        """Count an idle time of class `kind`; give the cohort back to `end`."""
        cohorts = self._cohorts
        if cohorts and now - cohorts[-1].began_s < _COHORT_S:
            cohort = cohorts[-1]
        else:
            if len(cohorts) >= self._most_cohorts:
                self._count_lasting(now)
                self._most_cohorts = max(_MIN_COHORTS, 2 * len(cohorts))
            cohort = Cohort(self._num_gone + len(cohorts), now)
            cohorts.append(cohort)
        lasting = cohort.lasting
        lasting[kind] = lasting.get(kind, 0.0) + weight
        return cohort

    def end(self, cohort: Cohort, kind: int, weight: float, now: float) -> None:
        """Count that an idle time of class `kind` ended in a use."""
        cohort.lasting[kind] -= weight
        at = bisect_right(AGE_EDGES, now - cohort.began_s) - 1
        counted, number = self._next, cohort.number
        for outlasted in range(min(at, _NUM_BINS) - 1, -1, -1):
            if number < counted[outlasted]:
                break  # this bin is counted, and so are those before
            _bins_of(self._lasted, kind)[outlasted] += weight
        if at >= _NUM_BINS:
            return
        _bins_of(self._reused, kind)[at] += weight
        self._weights[kind] = self._weights.get(kind, 0.0) + weight
        self._squares[kind] = self._squares.get(kind, 0.0) + weight * weight
        self._num_events += weight
        self._weight += weight
        self._square += weight * weight
        # Blocks of one run are used again together: they are one observation. How many
        # blocks that is, is the mean length of the run that a block is in.
        run = self._square / self._weight
        if self._num_events >= self._fit_at * run:
            self._count_lasting(now)
            self._fit(run)

    def rate(self, kind: int, age_s: float) -> float:
        """Return uses per block and second kept, at best, from this age on."""
        at = bisect_right(AGE_EDGES, age_s) - 1
        if at > _LAST_BIN:
            return _BEYOND / (1.0 + age_s)
        return self._rates.get(kind, self._prior_rates)[at]

    @property
    def run(self) -> float:
        """Blocks that one observation is: of the run that a block is in, on average."""
        return self._square / self._weight if self._weight else 0.0

    def error(self, kind: int) -> float:
        """Return the relative standard error of what is known of a class.

        Blocks of one node are used again together, so they are one observation.
        """
        weight = self._weights.get(kind, 0.0)
        if not weight:
            return float("inf")
        return math.sqrt(self._squares[kind]) / weight

    def _count_lasting(self, now: float) -> None:
        """Count what cohorts have outlasted by now; O(bins), and each bin once."""
        cohorts, gone = self._cohorts, self._num_gone
        for at in range(_NUM_BINS):
            edge = AGE_EDGES[at + 1]
            index = self._next[at] - gone
            while index < len(cohorts) and now - cohorts[index].began_s >= edge:
                for kind, weight in cohorts[index].lasting.items():
                    _bins_of(self._lasted, kind)[at] += weight
                index += 1
            self._next[at] = index + gone
        del cohorts[: self._next[_LAST_BIN] - gone]
        self._num_gone = self._next[_LAST_BIN]

    def _fit(self, run: float) -> None:
        """Make the rates anew from all counts, O(classes · bins)."""
        none = [0.0] * _NUM_BINS
        kinds = sorted({*self._reused, *self._lasted})
        prior, prior_ratio = _PRIOR_RUNS * run, _PRIOR_RATIO_RUNS * run
        hazards = []  # of all classes together
        before = _PRIOR_HAZARD
        for at in range(_NUM_BINS):
            reused = sum(self._reused.get(kind, none)[at] for kind in kinds)
            lasted = sum(self._lasted.get(kind, none)[at] for kind in kinds)
            hazard = (reused + prior * before) / (reused + lasted + prior)
            hazards.append(hazard)
            if reused + lasted > prior:
                before = hazard
        for kind in kinds:
            reuses = self._reused.get(kind, none)
            lasts = self._lasted.get(kind, none)
            expected = sum(
                hazard * (reused + lasted)
                for hazard, reused, lasted in zip(hazards, reuses, lasts, strict=True)
            )
            ratio = (sum(reuses) + prior_ratio) / (expected + prior_ratio)
            self._rates[kind] = _rates(
                [
                    (reused + prior * min(_MAX_SHARE, ratio * hazard))
                    / (reused + lasted + prior)
                    for hazard, reused, lasted in zip(
                        hazards, reuses, lasts, strict=True
                    )
                ]
            )
        if self._num_events >= _MAX_RUNS * run:
            for counts in (self._reused, self._lasted):
                for bins in counts.values():
                    bins[:] = [each / 2 for each in bins]
            for sums in (self._weights, self._squares):
                for kind in sums:
                    sums[kind] /= 2
            self._num_events /= 2
            self._weight /= 2
            self._square /= 2
        self._fit_at = self._num_events / run * _FIT_GROWTH + _FIT_RUNS


def _bins_of(counts: dict[int, list[float]], kind: int) -> list[float]:
    bins = counts.get(kind)
    if bins is None:
        bins = counts[kind] = [0.0] * _NUM_BINS
    return bins


def _rates(hazards: list[float]) -> list[float]:
    """Return the index at the beginning of each bin, from its probability of reuse.

    The best average rate from a bin on ends where the next stretch would lower it. So
    from the last bin to the first, a stretch takes over its successors as long as those
    are better than it is: O(bins).
    """
    rates = [0.0] * _NUM_BINS
    # (uses, seconds, share that outlasts it), each for what lasts at its beginning
    stretches: list[tuple[float, float, float]] = []
    for at in range(_LAST_BIN, -1, -1):
        hazard = hazards[at]
        uses, seconds = hazard, _WIDTHS[at] * (1.0 - hazard / 2)
        lasting = 1.0 - hazard
        while stretches and stretches[-1][0] * seconds > uses * stretches[-1][1]:
            more_uses, more_seconds, share = stretches.pop()
            uses += lasting * more_uses
            seconds += lasting * more_seconds
            lasting *= share
        stretches.append((uses, seconds, lasting))
        rates[at] = uses / seconds
    return rates
