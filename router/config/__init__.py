"""The config of a whole deployment: its models, and how a file of it is read and checked."""

from router.config.error import ConfigError
from router.config.load import config_schema, load_config
from router.config.models import (
    BirthConfig,
    DomainConfig,
    PolydraftConfig,
    RouterConfig,
    ServerConfig,
    StateConfig,
)

__all__ = [
    "BirthConfig",
    "ConfigError",
    "DomainConfig",
    "PolydraftConfig",
    "RouterConfig",
    "ServerConfig",
    "StateConfig",
    "config_schema",
    "load_config",
]
