"""Exchanges: how many of them go on at once, as far as more of them make merges come faster.

Theory of operation (algorithm.md section 4.1). An exchange of a fragment lasts from the opening of its round until
K learners have the version. τ steps are allotted to it, so that τ·P/H exchanges go on at once. Where it takes longer
because the way is long, there is room for more of them on the links, and without them merges become rare. Where it
takes longer because a link or the syncer has no more room, more of them wait for each other: merges come no faster,
and what they merge is older.

The two look alike as long as the number stays what it is. So the limit is tried: it is raised when it kept a round
from opening. By how much the exchanges say themselves: two that go on together end as far apart as the narrowest part
of their way needs for one. As many as fit into the time of an exchange so far apart keep that part busy, and more would
wait. Where two happen to begin far apart nothing of that is seen, and twice as many are tried at least. The trial is
over when the raised limit has kept a round from opening, too. It stays if an exchange takes ``AS_LONG`` as before at
most, or if merges per second have risen by ``LEAST_GAIN`` for each doubling. They follow from what is measured: the
exchanges that went on, by the mean time of one (Little's law). A limit that did not stay is tried again after
``FIRST_PATIENCE`` exchanges, and after twice as many each time, for links change. For the same reason half of a raised
limit is tried now and then, and stays where merges per second do not fall.

Example. P = H = 24, τ = 2; an exchange over a long way takes 16 s, a step 1 s. The first two rounds open a second
apart and end a second apart: 16 fit, and 16 may be open. Then a round opens at each step, the limit keeps none from
opening, and it rises no more. Over a link that carries one push in 8 s the first two end 8 s apart: two fit. Four are
tried and take 32 s: the limit goes back to two.
"""

from __future__ import annotations

import math

LEAST_GAIN = 1.4  # of merges per second, for twice as many exchanges
AS_LONG = 1.1  # times what an exchange took before: none waits for another
FIRST_PATIENCE = 32  # exchanges until another limit is tried after one that did not stay
MOST_PATIENCE = 4096  # it doubles each time


class ExchangeLimit:
    """The limit of open rounds, between ``least`` and ``most``. ``hindered``: it kept a round that was
    due from opening, since the limit was last judged."""

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, max(least, most)
        self.value = least
        self.hindered = False
        self._first_round = 0  # the first that opened under this limit
        self._samples: list[tuple[int, float]] = []  # under this limit: how many went on then, and how long one took
        self._spacing = math.inf  # the least time between the ends of two of them
        self._last = (-math.inf, -math.inf)  # beginning and end of the exchange that ended last
        self._before: tuple[int, float, float] | None = (
            None  # as ``_judge`` has it, of the limit before; None: no trial
        )
        self._upward = True  # which way is tried next
        self._patience = 0  # exchanges until then
        self._next_patience = FIRST_PATIENCE

    def record(self, round: int, among: int, began: float, ended: float, next_round: int) -> None:
        """The exchange that began with the round of this number is over, as one ``among`` so many; seconds.
        ``next_round``: the number of the next round that opens."""
        (began_before, ended_before), self._last = self._last, (began, ended)
        if round < self._first_round:
            return
        # What begins so far apart ends so far apart on any way.
        self._spacing = min(self._spacing, max(ended - ended_before, abs(began - began_before), 1e-9))
        self._samples.append((among, ended - began))
        self._patience -= 1
        if len(self._samples) >= max(2, self.value // 2):
            if self.hindered:
                times = max(sum(seconds for _, seconds in self._samples), 1e-9)
                # As many exchanges as go on, by the time that one takes (Little's law).
                self._judge(sum(among for among, _ in self._samples) / times, times / len(self._samples), next_round)
            self._samples.clear()
            self._spacing = math.inf
            self.hindered = False

    def _judge(self, rate: float, seconds: float, next_round: int) -> None:
        """Choose the next limit by the merges per second under this one and the time of an exchange, and by those under
        the limit that it is compared with."""
        if self._before is not None:
            (limit, rate_before, seconds_before), self._before = self._before, None
            gain = LEAST_GAIN ** abs(math.log2(self.value / limit))
            if self._upward:
                stays = seconds <= AS_LONG * seconds_before or rate >= gain * rate_before
            else:
                stays = rate_before < gain * rate
            if not stays:
                self._set(limit, next_round)
                self._upward = not self._upward
                self._patience, self._next_patience = self._next_patience, min(2 * self._next_patience, MOST_PATIENCE)
                return
            at_a_bound = self.value in (self.least, self.most)
            self._patience, self._next_patience = FIRST_PATIENCE if at_a_bound else 0, FIRST_PATIENCE
        if self._patience <= 0:
            more = max(2 * self.value, math.ceil(min(seconds / self._spacing, self.most)))
            ways = {True: min(more, self.most), False: max(self.value // 2, self.least)}
            self._upward = self._upward if ways[self._upward] != self.value else not self._upward
            if ways[self._upward] != self.value:
                self._before = self.value, rate, seconds
                self._set(ways[self._upward], next_round)

    def _set(self, limit: int, next_round: int) -> None:
        self.value, self._first_round = limit, next_round
