"""Pure core: what one machine does with its slots: groups, in-flight requests, drain."""
