"""The version of forge, for what writes it down."""

VERSION = "0.1.0"
