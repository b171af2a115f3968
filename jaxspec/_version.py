"""The version of the installed package."""

from importlib import metadata

try:
    __version__ = metadata.version("jaxspec-decoding")
except metadata.PackageNotFoundError:  # a checkout on the path that nobody installed
    __version__ = "0+unknown"
