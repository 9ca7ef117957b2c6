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

    __slots__ = ("began_s", "bin", "lasting")

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.bin = 0  # that of its age, when cohorts were looked through the last time
        self.lasting: dict[int, float] = {}  # by class


class ReuseTimes:
    """Learns from idle times that end, and from those that do not.

    An idle time counts in every bin that it outlasts and in the one where it ends.
    Weights are in blocks. What an idle time outlasted follows from where it ended, or
    from how old it is when rates are made anew, so that nothing is counted twice and
    the passing of time costs nothing.
    """

    def __init__(self) -> None:
        # By class, in the bin where they ended; the last entry: past all bins.
        self._ended: dict[int, list[float]] = {}
        self._rates: dict[int, list[float]] = {}
        self._prior_rates = _rates(
            [_FIRST_PRIOR_HAZARD] + [_PRIOR_HAZARD] * (_NUM_BINS - 1)
        )
        self._fit_at = _FIT_RUNS
        self._weight = 0.0  # of all idle times that ended within the bins
        self._square = 0.0  # of these weights
        self._cohorts: list[Cohort] = []
        self._num_gone = 0  # cohorts that have left the list
        self._most_cohorts = _MIN_COHORTS  # more are looked through for old ones
        # By bin: the first cohort that was not seen to have outlasted it.
        self._next = [0] * _NUM_BINS
        # By bin, class: idle times that last and were seen there; not kept of the first.
        self._lasting: list[dict[int, float]] = [{} for _ in range(_NUM_BINS)]

    def begin(self, kind: int, weight: float, now: float) -> Cohort:
        """Count an idle time of class `kind`; give the cohort back to `end`."""
        cohorts = self._cohorts
        if cohorts and now - cohorts[-1].began_s < _COHORT_S:
            cohort = cohorts[-1]
        else:
            if len(cohorts) >= self._most_cohorts:
                self._age(now)
                self._most_cohorts = max(_MIN_COHORTS, 2 * len(cohorts))
            cohort = Cohort(now)
            cohorts.append(cohort)
        lasting = cohort.lasting
        if kind in lasting:
            lasting[kind] += weight
        else:
            lasting[kind] = weight
        return cohort

    def end(self, cohort: Cohort, kind: int, weight: float, now: float) -> None:
        """Count that an idle time of class `kind` ended in a use."""
        seen = cohort.bin
        if seen == _NUM_BINS:
            return  # it was counted as past all bins
        cohort.lasting[kind] -= weight
        if seen:
            self._lasting[seen][kind] -= weight
        at = bisect_right(AGE_EDGES, now - cohort.began_s) - 1
        bins = self._ended.get(kind)
        if bins is None:
            bins = self._ended[kind] = [0.0] * (_NUM_BINS + 1)
        bins[at] += weight
        if at == _NUM_BINS:
            return
        self._weight = total = self._weight + weight
        self._square = square = self._square + weight * weight
        # Blocks of one run are used again together: they are one observation. How many
        # blocks that is, is the mean length of the run that a block is in.
        run = square / total
        if total >= self._fit_at * run:
            self._age(now)
            self._fit(run)

    def rate(self, kind: int, age_s: float) -> float:
        """Return uses per block and second kept, at best, from this age on."""
        at = bisect_right(AGE_EDGES, age_s) - 1
        if at > _LAST_BIN:
            return _BEYOND / (1.0 + age_s)
        return self._rates.get(kind, self._prior_rates)[at]

    def _age(self, now: float) -> None:
        """Find out which bins cohorts are in now; O(bins), and each bin once."""
        cohorts, gone = self._cohorts, self._num_gone
        for at in range(_NUM_BINS):
            edge = AGE_EDGES[at + 1]
            index = self._next[at] - gone
            while index < len(cohorts) and now - cohorts[index].began_s >= edge:
                self._outlast(cohorts[index], at)
                index += 1
            self._next[at] = index + gone
        del cohorts[: self._next[_LAST_BIN] - gone]
        self._num_gone = self._next[_LAST_BIN]

    def _outlast(self, cohort: Cohort, at: int) -> None:
        """Move a cohort from bin `at` to the next, or past all of them for good."""
        here = self._lasting[at]
        for kind, weight in cohort.lasting.items():
            if at:
                here[kind] -= weight
            if at < _LAST_BIN:
                there = self._lasting[at + 1]
                there[kind] = there.get(kind, 0) + weight
            else:
                bins = self._ended.setdefault(kind, [0.0] * (_NUM_BINS + 1))
                bins[_NUM_BINS] += weight
        cohort.bin = at + 1

    def _counts(self) -> dict[int, tuple[list[float], list[float]]]:
        """Return by class and bin what was used in it, and what outlasted it."""
        none = [0.0] * (_NUM_BINS + 1)
        kinds = {*self._ended}.union(*self._lasting)
        counts = {}
        for kind in sorted(kinds):
            ended = self._ended.get(kind, none)
            lasted = [0.0] * _NUM_BINS
            longer = ended[_NUM_BINS]
            for at in range(_LAST_BIN, -1, -1):
                lasted[at] = longer
                longer += ended[at]
                if at:
                    longer += self._lasting[at].get(kind, 0)
            counts[kind] = (ended[:_NUM_BINS], lasted)
        return counts

    def _fit(self, run: float) -> None:
        """Make the rates anew from all counts, O(classes · bins)."""
        counts = self._counts()
        prior, prior_ratio = _PRIOR_RUNS * run, _PRIOR_RATIO_RUNS * run
        hazards = []  # of all classes together
        before = _PRIOR_HAZARD
        for at in range(_NUM_BINS):
            reused = sum(reuses[at] for reuses, _ in counts.values())
            lasted = sum(lasts[at] for _, lasts in counts.values())
            hazard = (reused + prior * before) / (reused + lasted + prior)
            hazards.append(hazard)
            if reused + lasted > prior:
                before = hazard
        for kind, (reuses, lasts) in counts.items():
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
        if self._weight >= _MAX_RUNS * run:
            for bins in self._ended.values():
                bins[:] = [each / 2 for each in bins]
            self._weight /= 2
            self._square /= 2
        self._fit_at = self._weight / run * _FIT_GROWTH + _FIT_RUNS


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
