"""Reading what a process counts about itself."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from services.kit import metrics

Numbers = dict[tuple[str, ...], float]
"""By name, then the values of labels in the order of the labels' names."""


def read(text: str) -> Numbers:
    """All numbers of an answer."""
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def now() -> Numbers:
    """The numbers of this process."""
    return read((await metrics.exposition()).decode())


def grown(before: Numbers, after: Numbers, *key: str) -> float:
    """By how much a number has grown; nothing counts from zero."""
    return after.get(key, 0) - before.get(key, 0)
