"""Packaged configs and traffic, for applications; see :mod:`router.config.packaged`."""

from router.config.packaged import find_config, find_traffic

__all__ = ["find_config", "find_traffic"]
