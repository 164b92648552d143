"""Learning while serving: distillation buffers, losses, learners, the publishing guard, the budget."""
