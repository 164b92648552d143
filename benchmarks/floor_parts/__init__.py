"""What ``benchmarks/floor.py`` measures: the machine, the target's passes, and the engine's steps."""
