"""Which domain, and who is asking: configuration, routing, engine bodies and applications."""
