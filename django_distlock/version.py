"""The version of the package, in a module that every other module may import."""

VERSION = "0.1.0"
