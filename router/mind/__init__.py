"""The engine-independent mind: embedding, classification, reclustering and statistics."""
