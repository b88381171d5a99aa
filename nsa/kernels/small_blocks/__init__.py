"""Small blocks: selections of many blocks of 1 to 16 keys, gathered many blocks at a time."""
