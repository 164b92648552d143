"""Who proposes: draft kinds, the experts of every domain, their mixture, versions and checkpoints."""
