"""Model folders, noise schedules, the denoise loop, adapters and the trainer. Only `geometry` may be imported without torch."""
