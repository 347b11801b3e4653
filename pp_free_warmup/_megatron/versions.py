"""The supported releases of megatron-core; imports nothing, so that noxfile.py and the docs can read it too."""

from __future__ import annotations

from typing import NamedTuple


class Release(NamedTuple):
    """One supported release, and what its test environment is made of.

    Attributes:
        megatron: The version of megatron-core that the tests install.
        pythons: The Python versions that it is tested on, the preferred one first.
        torch: The version of torch in its test environment.
        every_time: True for the releases that the default test command runs.
    """

    megatron: str
    pythons: tuple[str, ...]
    torch: str
    every_time: bool = False

    @property
    def series(self) -> str:
        """The release without its last number, as in "0.16"."""
        return self.megatron.rpartition(".")[0]


SUPPORTED_MEGATRON = (
    Release("0.14.0", ("3.11",), "2.13.0"),
    Release("0.15.3", ("3.11",), "2.13.0"),
    Release("0.16.1", ("3.11",), "2.13.0", every_time=True),
    Release("0.17.1", ("3.12", "3.13"), "2.11.0"),
    Release("0.18.2", ("3.12", "3.13"), "2.11.0"),
    Release("0.19.2", ("3.12", "3.13"), "2.11.0", every_time=True),
)


def is_tested(version: str) -> bool:
    """Tell whether a version is of a series that the tests run with.

    Example:
        >>> is_tested("0.16.3"), is_tested("0.20.0")
        (True, False)
    """
    series = version.partition("+")[0].split(".")[:2]
    return ".".join(series) in {release.series for release in SUPPORTED_MEGATRON}
