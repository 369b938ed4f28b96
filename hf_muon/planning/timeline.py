# SPDX-License-Identifier: Apache-2.0
"""One rank's step as events: a compute lane and communication lanes, each first in, first out.

Work is handed over in the order in which the host of a rank issues it, as on streams: a lane runs one piece at a time
in that order, a collective starts no earlier than the computation issued before it, and computation goes on meanwhile
until it is told to wait. The end of every event is therefore known when it is issued.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable


class Timeline:
    """Clock and lanes of one rank. Times in seconds.

    Args:
        overlaps: whether communication leaves the compute lane free. False where it runs on the cores that compute:
            every collective then takes its turn on the compute lane.

    Attributes:
        now: end of what the compute lane has been given.
        busy: seconds of computation by part.
        exposed: seconds that the compute lane waited for communication.
        on_links: seconds of communication, hidden or not.
        latency: the share of `on_links` that does not depend on bytes.
    """

    def __init__(self, *, overlaps: bool = True) -> None:
        self._overlaps = overlaps
        self.now = self.exposed = self.on_links = self.latency = 0.0
        self.busy: dict[str, float] = defaultdict(float)
        self._free: dict[str, float] = {}

    def compute(self, part: str, seconds: float) -> None:
        """Run computation after what was issued before."""
        self.now += seconds
        self.busy[part] += seconds

    def send(
        self, lane: str, latency: float, transfer: float, after: Iterable[float] = (), *, share: float = 1.0
    ) -> float:
        """Issue one collective and return when it ends.

        Args:
            lane: the group of ranks whose collectives run one after the other.
            latency: seconds that do not depend on bytes.
            transfer: seconds that do.
            after: ends of further events it has to wait for.
            share: of the ranks that stand for this one, how many take part; for `on_links` and `latency`.
        """
        seconds = latency + transfer
        self.on_links += share * seconds
        self.latency += share * latency
        if not self._overlaps:
            self.now += seconds
            self.exposed += seconds
            return self.now
        start = max(self.now, self._free.get(lane, 0.0), *after)
        self._free[lane] = start + seconds
        return start + seconds

    def wait(self, end: float) -> None:
        """Hold the compute lane until an event has ended."""
        if end > self.now:
            self.exposed += end - self.now
            self.now = end
