"""The parts of ``benchmarks/numerics.py``: strict numerics beside fast ones, and what passes of both cost."""
