"""Count what one vote asks of the key-value store: `python tests/benchmarks/store_traffic.py`.

Prints, for worlds of 2, 4 and 8 ranks, the questions and bytes of one rank in one vote, by its role, and
the milliseconds of a vote; then how many questions a second one store answers. The numbers are those of
docs/explanation/scale.md.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist
from forked import run_forked

VOTES = 40
STAGES = {2: 2, 4: 2, 8: 4}
SECONDS = {"pass": 1.0, "forward[0]": 0.5, "backward[0]": 0.5, "save": 0.1, "restore": 0.1}


def votes(stages: int, apart: float) -> tuple[str, Counter[str], int, list[float]]:
    """Vote often, at the same time or rank by rank *apart* seconds; return role, questions, bytes and times."""
    from pp_free_warmup._agreement import Ballot, Word
    from pp_free_warmup._agreement.mailbox import Mailbox

    rank, width = dist.get_rank(), dist.get_world_size() // stages
    rows = [dist.new_group(list(range(first, first + width))) for first in range(0, stages * width, width)]
    columns = [dist.new_group(list(range(column, stages * width, width))) for column in range(width)]
    asked, carried, times = Counter[str](), [0], []
    ask = Mailbox._ask

    def counting(question: Any, *arguments: Any) -> Any:
        answer = ask(question, *arguments)
        asked[question.__name__] += 1
        carried[0] += sum(len(str(each)) for each in arguments) + (len(answer) if isinstance(answer, bytes) else 8)
        return answer

    Mailbox._ask = staticmethod(counting)  # type: ignore[method-assign]
    ballot = Ballot(columns[rank % width], (rows[rank // width],), 600.0)
    asked.clear()
    carried[0] = 0
    with ballot.watching():
        for _ in range(VOTES):
            dist.barrier()
            time.sleep(apart * rank)
            began = time.perf_counter()
            ballot.vote(Word.GO, detail=SECONDS)
            times.append(time.perf_counter() - began)
    role = ["member", "stage's first rank", "pipeline's first rank"][(rank % width == 0) + (rank == 0)]
    return role, asked, carried[0], times


def questions(seconds: float) -> int:
    """Ask as often as possible for what is not there; return how often."""
    from pp_free_warmup._agreement.mailbox import Mailbox

    mailbox = Mailbox.of_world()
    dist.barrier()
    until, asked = time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        mailbox.peek("pp_free_warmup/nothing")
        asked += 1
    return asked


def _table(apart: float) -> None:
    print(f"\nranks come {1000 * apart:.0f} ms apart; medians of {VOTES} votes")
    print("| ranks | stages | role | questions | bytes | ms |\n|---|---|---|---|---|---|")
    for ranks, stages in STAGES.items():
        endings = run_forked(votes, ranks, stages, apart, deadline=300.0)
        assert all(ending.kind == "returned" for ending in endings), endings[0].text
        seen: set[str] = set()
        for role, asked, carried, times in (ending.value for ending in endings):
            if role not in seen:
                seen.add(role)
                numbers = f"{asked.total() / VOTES:.0f} | {carried / VOTES:.0f} | {1000 * statistics.median(times):.1f}"
                print(f"| {ranks} | {stages} | {role} | {numbers} |")


def _throughput() -> None:
    print("\n| clients | questions a second, together |\n|---|---|")
    for clients in (1, 2, 4):
        endings = run_forked(questions, clients, 2.0)
        print(f"| {clients} | {sum(ending.value for ending in endings) / 2:.0f} |")


if __name__ == "__main__":
    _table(0.0)
    _table(0.05)
    _throughput()
