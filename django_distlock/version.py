"""The version of the package, where each of its modules may ask for it."""

VERSION = "0.1.0"
