# Recipes of the project; `just` alone lists them.
set positional-arguments

default:
    @just --list

# Lint, format check, strict types and import contracts.
check:
    uv run ruff check .
    uv run ruff format --check .
    uv run pyright
    uv run lint-imports

# The whole test suite; it starts the servers that it needs.
test *ARGS:
    uv run pytest "$@"

# One benchmark, for example `just bench throughput --quick`; the last line printed is one JSON object.
bench NAME *ARGS:
    uv run python -m benchmarks."$@"

# A randomised fault run with a checker, for example `just chaos --seed 7 --quick`.
chaos *ARGS:
    uv run python -m benchmarks.chaos "$@"

# Exact versions with hashes, from the ranges in pyproject.toml.
lock:
    uv export --quiet --format requirements-txt --no-emit-project --no-header --output-file requirements.lock

# Write the generated parts of the documentation again.
docs:
    uv run python -m docs.errors > docs/errors.md
    uv run python -m docs.cli > docs/cli.md
