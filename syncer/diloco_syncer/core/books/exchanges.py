"""Exchanges: how many of them go on at once, as far as more of them make merges come faster.

Theory of operation (algorithm.md section 4.1). An exchange of a fragment lasts from the opening of its round until
K learners have the version. τ steps are allotted to it, so that τ·P/H exchanges go on at once. Where it takes longer
because the way is long, there is room for more of them on the links, and without them merges become rare. Where it
takes longer because a link or the syncer has no more room, more of them wait for each other: merges come no faster,
and what they merge is older.

Both look alike as long as the number stays what it is. So the limit is tried: it is doubled when it kept a round from
opening, and the doubled limit stays where the merges per second rise by ``LEAST_GAIN``. Merges per second follow from
what is measured: as many exchanges as the limit, by the mean time of one (Little's law). A limit that did not stay is
tried again after ``PATIENCE`` times as many exchanges as the time before, for links change. For the same reason half
of a raised limit is tried now and then, and stays where merges per second do not fall.

Example. P = H = 24, τ = 2; an exchange over a long way takes 16 s, a step 1 s. Two exchanges: 8 s a merge. Four take
16 s too: 4 s a merge, so four stay, then eight and sixteen. With sixteen a round opens at each step, the limit keeps
none from opening, and it rises no more. Over a link that carries one push in 8 s four exchanges take 32 s: the limit
goes back to two.
"""

from __future__ import annotations

LEAST_GAIN = 1.4  # of merges per second, for twice as many exchanges
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
        self._before: tuple[int, float] | None = None  # the limit that it is compared with, and its merges per second
        self._upward = True  # which way is tried next
        self._patience = 0  # exchanges until then
        self._next_patience = FIRST_PATIENCE

    def record(self, round: int, among: int, seconds: float, next_round: int) -> None:
        """The exchange that began with the round of this number is over, as one ``among`` so many. ``next_round``: the
        number of the next round that opens."""
        if round < self._first_round:
            return
        self._samples.append((among, seconds))
        self._patience -= 1
        if len(self._samples) >= max(2, self.value // 2):
            # As many exchanges as go on, by the time that one takes (Little's law).
            rate = sum(among for among, _ in self._samples) / max(sum(seconds for _, seconds in self._samples), 1e-9)
            self._judge(rate, next_round)
            self._samples.clear()
            self.hindered = False

    def _judge(self, rate: float, next_round: int) -> None:
        """Choose the next limit by the merges per second under this one, and under the one that it is compared with."""
        if self._before is not None:
            (limit, other), self._before = self._before, None
            gained = not self.hindered or rate >= LEAST_GAIN * other
            if not (gained if self._upward else other < LEAST_GAIN * rate):
                self._set(limit, next_round)
                self._upward = not self._upward
                self._patience, self._next_patience = self._next_patience, min(2 * self._next_patience, MOST_PATIENCE)
                return
            at_a_bound = self.value in (self.least, self.most)
            self._patience, self._next_patience = FIRST_PATIENCE if at_a_bound else 0, FIRST_PATIENCE
        if self._patience <= 0 and self.hindered:
            ways = {True: min(2 * self.value, self.most), False: max(self.value // 2, self.least)}
            self._upward = self._upward if ways[self._upward] != self.value else not self._upward
            if ways[self._upward] != self.value:
                self._before = self.value, rate
                self._set(ways[self._upward], next_round)

    def _set(self, limit: int, next_round: int) -> None:
        self.value, self._first_round = limit, next_round
