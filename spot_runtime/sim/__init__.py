"""Shell 2: the same pure cores on a virtual clock."""
