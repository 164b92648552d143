"""Draft kinds, one file each."""
