"""The parts of ``benchmarks/drafts.py``: arms, their run, figures, specialisation, and the price of domains."""
