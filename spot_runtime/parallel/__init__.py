"""Process groups and sharded attention."""
