"""The DAGs, a few calls each."""
