"""hpkfs: a FUSE file system that shows an AI agent's saved checkpoint as a directory."""

__version__ = "0.1.0"
