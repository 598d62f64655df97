"""The version of this program, which pyproject.toml has too: reading the metadata of a package takes as long as a whole parser."""

VERSION = "0.1.0"
