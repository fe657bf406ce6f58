"""How a version reaches the learners: announced over each session, then downloaded over each link."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from diloco_protocol.wire.records import Announcement
from diloco_syncer.core import events as ev
from diloco_syncer.core.core import Core
from lab.world.learner import LearnerProcess
from lab.world.parts import Versions
from lab.world.timeline import Timeline

Deliver = Callable[[LearnerProcess, Callable[[], None], float | None], None]


@dataclass
class Broadcasts:
    """Announcements and downloads. ``deliver``: has a call made at the learner, at a time or (None) a latency from now,
    unless its session ends before. ``sent``: called when a learner has all bytes of a version of a fragment."""

    timeline: Timeline
    core: Core
    versions: Versions
    epoch: int
    deliver: Deliver
    sent: Callable[[LearnerProcess, int, int], None]
    bytes_down: int = 0

    def announce(
        self, fragment: int, merged: Mapping[int, ev.MergedPush], told: Iterable[tuple[int, LearnerProcess]]
    ) -> None:
        """Tell these (connection, learner) of the fragment's newest version, each with its own newest merged push."""
        news = Announcement(
            fragment,
            self.epoch,
            self.core.versions[fragment],
            self.versions.payload(fragment),
            job_tokens=self.core.trained_tokens,
            settled=self.core.newest_settled_epoch,
            progress=self.core.stop_progress(self.timeline.now),
        )
        for connection, learner in list(told):
            own = merged.get(connection, ev.MergedPush())
            of_one = replace(news, merged_sequence=own.sequence, merged_version=own.version)
            self.deliver(learner, partial(self._take_news, learner, of_one), None)

    def _take_news(self, learner: LearnerProcess, news: Announcement) -> None:
        learner.announced[news.fragment] = news
        learner.heard = max(learner.heard, news.progress)
        if news.fragment not in learner.fetching:
            self._fetch(learner, news.fragment)

    def _fetch(self, learner: LearnerProcess, fragment: int) -> None:
        """Download the newest announced version of a fragment, and again if there is a newer one by then."""
        news = learner.announced[fragment]
        if self.core.versions[fragment] != news.version:
            return  # a newer one is announced already, and on its way
        size, values = self.versions.download(fragment, learner.fetched.get(fragment))
        learner.fetching.add(fragment)
        tenure = learner.tenure

        def arrive() -> None:
            learner.fetching.discard(fragment)
            self.sent(learner, fragment, news.version)
            if learner.tenure != tenure:  # another tenure began, and what was on its way is not of it
                if fragment in learner.announced:
                    self._fetch(learner, fragment)
                return
            learner.downloaded[fragment] = (news, values)
            learner.fetched[fragment] = news.version
            if learner.announced[fragment] is not news:
                self._fetch(learner, fragment)

        self.bytes_down += size
        self.deliver(learner, arrive, learner.link.send_down(self.timeline.now, size))
