"""Pure core: request queue, leases and jobs. Time comes in as `now_s`; never a clock, socket or store."""
