"""Bodies that run the target under the mind: the embedded engine."""
