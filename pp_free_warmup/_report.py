"""What a warmup did and how long each part took, on every stage."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

logger = logging.getLogger("pp_free_warmup")

# Just above WARNING: shown where nobody has set up logging, and by trainers that drop what is a WARNING exactly
# (Megatron-Bridge's `warning_filter`, on by default).
NOTICE = logging.WARNING + 5
logging.addLevelName(NOTICE, "NOTICE")


def say(line: str, level: int = NOTICE) -> None:
    """Log one line that the user is to see; it begins with ``pp_free_warmup:``.

    Args:
        line: The line, as it is to come out.
        level: ``logging.DEBUG`` for what was said once already.
    """
    logger.log(level, "%s", line)


class Stopwatch:
    """Seconds per phase, and per model chunk where a phase has chunks."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._began = time.perf_counter()

    @contextmanager
    def measure(self, phase: str, chunk: int | None = None) -> Iterator[None]:
        """Add the block's seconds to ``phase`` (or ``phase[chunk]``), work on the device included."""
        began = time.perf_counter()
        try:
            yield
        finally:
            synchronize_device()
            name = phase if chunk is None else f"{phase}[{chunk}]"
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began

    @property
    def total(self) -> float:
        """Seconds since this stopwatch was made."""
        return time.perf_counter() - self._began


def synchronize_device() -> None:
    """Wait for the current CUDA device, if CUDA is in use; do not initialise it."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class StageReport:
    """One stage of the pipeline: the smallest and largest seconds per phase over its ranks, and whose they are.

    Attributes:
        stage: Position in the pipeline, 0 first.
        ranks: How many ranks of the stage reported.
        least: Seconds per phase (``forward[0]`` is the first chunk's), the quickest rank's.
        most: The same, the slowest rank's.
        quickest: The global rank that `least` is of, per phase.
        slowest: The global rank that `most` is of, per phase.
    """

    stage: int
    ranks: int
    least: dict[str, float]
    most: dict[str, float]
    quickest: dict[str, int] = field(default_factory=dict)
    slowest: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class WarmupReport:
    """What one warmup did; ``str()`` is a table, `to_dict` is ready for JSON.

    Attributes:
        outcome: ``"warmed"``, ``"primed"`` (channels only), ``"skipped"``, ``"failed"`` or ``"not called"``.
        kind: ``"training"`` or ``"forward-only"``; empty when no schedule was called.
        reason: Why it was skipped, or the error as text; empty otherwise.
        seconds: Seconds per phase on this rank.
        total_s: Seconds that the whole warmup took on this rank.
        stages: Every stage's phases; empty when nothing ran.
        channels: Seconds per channel that was gone through after the pass, on this rank.
        opened: Those of them that this library had not opened before.
        transfers_in_pass: How often this rank sent to or received from a neighbouring stage during its local
            pass: never, so no stage waited there for another.
        passes: How many local passes ran: two where a stage had guessed the shape of its activation wrong.
        memory: Bytes that the warmup itself held during a pass on this rank, by what for; given back since.
    """

    outcome: str
    kind: str = ""
    reason: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    total_s: float = 0.0
    stages: tuple[StageReport, ...] = ()
    channels: dict[str, float] = field(default_factory=dict)
    opened: tuple[str, ...] = ()
    transfers_in_pass: int = 0
    passes: int = 0
    memory: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, strings and floats.

        Example:
            >>> WarmupReport("skipped", reason="one stage").to_dict()["reason"]
            'one stage'
        """
        return json.loads(json.dumps(asdict(self)))  # type: ignore[no-any-return]

    def write_to(self, path: Path) -> None:
        """Write the report as JSON, or say why not: a run does not end for want of a file."""
        try:
            path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            say(f"pp_free_warmup: the report was not written to {path}: {error}")

    def __str__(self) -> str:
        if not self.stages:
            return self.headline()
        text = io.StringIO()  # for the table alone: rich would take [ids] and [/paths] in the headline for markup
        Console(file=text, width=110, no_color=True, highlight=False).print(self._table())
        return "\n".join([self.headline(), *(line.rstrip() for line in text.getvalue().rstrip().splitlines())])

    def headline(self) -> str:
        """Return the report in one line."""
        if self.outcome in ("skipped", "failed", "not called"):
            return f"pp_free_warmup: {self.outcome}{': ' if self.reason else ''}{self.reason}"
        spread = [stage.most.get("pass", 0.0) for stage in self.stages]
        stages = f"; slowest stage {max(spread):.1f} s, quickest {min(spread):.1f} s" if spread else ""
        passes = "; 2 passes, the first with a wrong guess of what arrives" if self.passes > 1 else ""
        channels = f"; channels {self.seconds.get('channels', 0.0):.2f} s"
        return f"pp_free_warmup: {self.kind} {self.outcome} in {self.total_s:.1f} s{stages}{passes}{channels}"

    def _table(self) -> Table:
        phases = _in_order(self.stages)
        table = Table("stage", *phases, title=None)
        for stage in self.stages:
            table.add_row(str(stage.stage), *(_span(stage, phase) for phase in phases))
        return table


def _in_order(stages: Sequence[StageReport]) -> list[str]:
    return list(dict.fromkeys(phase for stage in stages for phase in stage.most))


def _span(stage: StageReport, phase: str) -> str:
    if phase not in stage.most:
        return "-"
    least, most = stage.least[phase], stage.most[phase]
    if most - least < 0.005:
        return f"{most:.2f}"
    return f"{least:.2f} rank {stage.quickest[phase]}\n{most:.2f} rank {stage.slowest[phase]}"
