"""The version, said once: pyproject.toml reads it here, and a checkout knows it uninstalled."""

VERSION = "0.1.0"
