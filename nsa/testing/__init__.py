"""The suite: cases, implementations, comparison, timing, and the pytest plugin that drives them."""
