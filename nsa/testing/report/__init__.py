"""Reports of a run or a recording: `recording` reads facts, `tables` says what is shown of them, the others write."""
