"""One case per guard, or several: what it keeps, and what a pass would do to that."""

from __future__ import annotations

from cases_of_features import CASES as FEATURES
from cases_of_training import CASES as TRAINING

CASES = (*TRAINING, *FEATURES)
