"""Command line of the runtime."""
