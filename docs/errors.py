"""Writes docs/errors.md from the registry: `python -m docs.errors`."""

from schemas.errors import REGISTRY

HEAD = """# Errors

Over HTTP an error is `application/problem+json` with `code`, `detail`, `field`, `mend` and `data`; the command prints
one line on stderr and ends with the exit code. Codes are stable.

| Code | HTTP | Exit | What it means | What to do |
|---|---|---|---|---|"""


def main() -> None:
    print(HEAD)
    for code, kind in sorted(REGISTRY.items()):
        print(f"| `{code}` | {kind.status} | {kind.exit_code} | {kind.title} | {kind.mend} |")


if __name__ == "__main__":
    main()
