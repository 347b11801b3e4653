"""Cut a first step into what each stage did when: the bars of the picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pp_free_warmup._cli._records import RankRecord, Span

FORWARD, BACKWARD, WAITING, CHANNELS, REAL = KINDS = (
    "compile forward",
    "compile backward",
    "waiting",
    "channels",
    "real step",
)


@dataclass(frozen=True)
class Segment:
    """One bar.

    Attributes:
        kind: One of `KINDS`.
        chunk: The model chunk of a first forward or backward, else None.
        began: By the clock of the records.
        ended: The same.
    """

    kind: str
    chunk: int | None
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.began


def segments(rank: RankRecord, shortest_wait: float = 0.0) -> list[Segment]:
    """Return the bars of one rank's first step: no gap, no overlap, from its begin to its end.

    Args:
        rank: What the rank wrote down.
        shortest_wait: Seconds below which a wait between two pieces of the real step counts as part of it.
    """
    step = rank.steps[0]
    bars: list[Segment] = []
    now = step.began
    for bar in _known(rank):
        gap = bar.began - now
        inside = bool(bars) and bars[-1].kind == bar.kind == REAL and gap < shortest_wait
        if gap > 0.0:
            bars.append(Segment(REAL if inside else WAITING, None, now, bar.began))
        bars.append(bar)
        now = bar.ended
    return _joined(bars)


def _known(rank: RankRecord) -> Iterator[Segment]:
    """Yield in order what the rank did; all that lies between is waiting."""
    step = rank.steps[0]
    for span in rank.spans:
        if span.warmup:
            yield _bar(span)
    if rank.warmup is not None:
        ended = step.began + rank.warmup["total_s"]
        yield Segment(CHANNELS, None, ended - rank.warmup["seconds"].get("channels", 0.0), ended)
    for span in rank.spans:
        if not span.warmup:
            yield _bar(span)
    yield Segment(REAL, None, step.met, step.ended)


def _bar(span: Span) -> Segment:
    if not span.first:
        return Segment(REAL, None, span.began, span.ended)
    return Segment(FORWARD if span.use == "forward" else BACKWARD, span.chunk, span.began, span.ended)


def _joined(bars: list[Segment]) -> list[Segment]:
    """Join neighbours of the same kind, except first uses, of which each is a bar of its own."""
    joined: list[Segment] = []
    for bar in bars:
        if joined and joined[-1].kind == bar.kind and bar.chunk is None:
            joined[-1] = Segment(bar.kind, None, joined[-1].began, bar.ended)
        else:
            joined.append(bar)
    return joined
