"""The process host: one small process per box that spawns, pumps, reaps, stops and receipts other people's processes.

It outlives the worker, so that a crash, restart or upgrade of the worker ends nobody's job. Therefore it uses the
standard library only, imports nothing else of ours, and is started with `python -I -S` (about 12 MiB). The worker
talks to it over a private Unix socket (`wire.py`) and finds it again after a restart.

Modules: `main` (start, lock, socket), `loop` (the one selector loop), `attempts` (one attempt's life), `spawn` (two
ways to start a process), `pump` (output to file), `mask` (secret values), `tree` (who belongs to whom, signals),
`receipts` (durable ends), `identity` (which process is that), `wire` (frames).
"""
