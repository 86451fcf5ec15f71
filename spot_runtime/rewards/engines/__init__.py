"""Engines that load models or call others. Each imports what it needs when it is made, so that nothing else pays for it."""
