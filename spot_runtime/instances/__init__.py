"""Pure core: which nodes exist, their capacity over time and what it costs."""
