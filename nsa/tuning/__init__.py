"""Measures on a GPU what routing rests on, and writes it to `nsa/configs`: thresholds, schedules, tiles."""
