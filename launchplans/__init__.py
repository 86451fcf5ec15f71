"""Named, fixed inputs and schedules; nothing else."""
