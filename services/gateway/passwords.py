"""Passwords: argon2id, off the event loop, few at once (each takes 19 MiB while it is worked out)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError
from argon2.low_level import Type

from schemas.errors import Ql3Error

MIN_CHARS = 12
MAX_CHARS = 256
WAIT_S = 5.0

T = TypeVar("T")

_hasher = PasswordHasher(time_cost=2, memory_cost=19_456, parallelism=1, type=Type.ID)


class Passwords:
    """Makes and checks hashes, at most `at_once` at a time; who waits longer than 5 s is told to come again."""

    def __init__(self, *, at_once: int = 2) -> None:
        self._free = asyncio.Semaphore(at_once)
        # Checked for names that do not exist, so that they take as long as names that do.
        self._decoy = _hasher.hash("no such account")

    async def hash(self, password: str) -> str:
        """The hash to keep."""
        return await self._work(_hasher.hash, password)

    async def matches(self, kept: str | None, password: str) -> bool:
        """Whether the password is the kept one; without one (None) it only takes as long."""
        same = await self._work(_verify, kept or self._decoy, password)
        return same and kept is not None

    async def _work(self, function: Callable[..., T], *arguments: str) -> T:
        try:
            async with asyncio.timeout(WAIT_S):
                await self._free.acquire()
        except TimeoutError:
            raise Ql3Error("capacity", "Many people sign in at once.") from None
        try:
            return await asyncio.to_thread(function, *arguments)
        finally:
            self._free.release()


def _verify(kept: str, password: str) -> bool:
    try:
        return _hasher.verify(kept, password)
    except (VerificationError, InvalidHashError):
        return False


def refuse_weak(password: str, user_name: str) -> None:
    """Raises `invalid` for a password that is short, mostly the name, or a few characters over and over."""
    if len(password) < MIN_CHARS:
        raise Ql3Error("invalid", f"A password has at least {MIN_CHARS} characters.", field="password")
    if len(password.lower().replace(user_name, "")) < MIN_CHARS:
        raise Ql3Error("invalid", f"Besides the name a password has {MIN_CHARS} characters.", field="password")
    if len(set(password)) < MIN_CHARS // 3:
        raise Ql3Error("invalid", "A password needs more different characters.", field="password")
