"""Shell 1: real processes around the pure cores."""
