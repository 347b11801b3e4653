"""What this library is tested with, for users to test their own models and guards with."""

from __future__ import annotations
