"""The ways of answering that ``benchmarks/peers.py`` compares, and what it makes of their measurements."""
