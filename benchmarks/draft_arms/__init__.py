"""The parts of ``benchmarks/drafts.py``: arms, their run, figures, specialisation, the price of domains."""
