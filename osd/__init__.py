"""Was it right, and what do we learn: exact verification, serving, and online distillation."""
