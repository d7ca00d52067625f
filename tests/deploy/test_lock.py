"""The lock holds exact versions with hashes, inside the ranges that the project declares."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements.lock").read_text()
PINNED = {
    canonicalize_name(name): Version(version) for name, version in re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", LOCK, re.M)
}


def declared() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return [Requirement(text) for text in project["project"]["dependencies"] + project["dependency-groups"]["dev"]]


def test_every_declared_dependency_is_locked_within_its_range() -> None:
    for requirement in declared():
        version = PINNED.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement.name} is not in requirements.lock; run `just lock`"
        assert requirement.specifier.contains(version), (
            f"{requirement.name} {version} is outside {requirement.specifier}"
        )


def test_every_locked_package_has_hashes() -> None:
    for block in re.split(r"^(?=[A-Za-z0-9_.-]+==)", LOCK, flags=re.M)[1:]:
        assert "--hash=sha256:" in block, block.splitlines()[0]


def test_no_download_address_is_recorded() -> None:
    assert not re.search(r"https?://", LOCK)
    tracked = subprocess.run(["git", "ls-files", "uv.lock"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert tracked.stdout == ""
