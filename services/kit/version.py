"""The version of the distribution, as every service tells it."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

VERSION: Final = version("ql3")
