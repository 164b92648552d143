"""Serving: the target model, its slot cache, exact verification, and the step loop."""
