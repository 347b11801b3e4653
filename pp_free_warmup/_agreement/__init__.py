"""This call's ranks all go, or none: votes through the process groups' key-value store."""

from __future__ import annotations

from pp_free_warmup._agreement.ballot import Ballot
from pp_free_warmup._agreement.calls import Call
from pp_free_warmup._agreement.words import FAILURES, Decision, Reason, Spread, Tally, Word, decide

__all__ = ["FAILURES", "Ballot", "Call", "Decision", "Reason", "Spread", "Tally", "Word", "decide"]
